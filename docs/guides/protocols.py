"""Generate protocols.md from the requests' models: `python docs/guides/protocols.py > docs/guides/protocols.md`."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterable, Iterator

from pydantic import AliasChoices
from pydantic.fields import FieldInfo

from jingu.serve import anthropic_messages, ollama, openai_responses, protocol
from jingu.serve.protocol import RequestBody

OPENING = """\
# Fields of each protocol

What `jingu serve` does with each published field of a request. *Carried*: it reaches the one request that all protocols
share, and changes the answer as documented. *No effect*: it cannot change the answer, so any value is accepted. *Only*:
it is accepted with this value, at which it changes nothing. *Refused*: any value except null and empty ones gets an
error with this reason. Any other unknown field that is not empty is refused as well.

`python docs/guides/protocols.py > docs/guides/protocols.md` generates this page from `jingu/serve/`; a test checks that
it is up to date. The [serving guide](serving.md) has the endpoints.
"""
PROTOCOLS: dict[str, tuple[str, type[RequestBody]]] = {
    "Completions": ("`POST /v1/completions`", protocol.CompletionRequest),
    "Chat completions": ("`POST /v1/chat/completions`", protocol.ChatRequest),
    "Responses": ("`POST /v1/responses`", openai_responses.ResponsesRequest),
    "Messages": (
        "`POST /v1/messages`; `/v1/messages/count_tokens` takes those that change the prompt",
        anthropic_messages.MessagesRequest,
    ),
    "Ollama's chat": ("`POST /api/chat`", ollama.OllamaChatRequest),
    "Ollama's generate": ("`POST /api/generate`", ollama.OllamaGenerateRequest),
    "Ollama's embed": ("`POST /api/embed`", ollama.OllamaEmbedRequest),
    "text-generation-inference": ("`POST /generate`, `/generate_stream`, `/`", protocol.GenerateRequest),
    "Embeddings": ("`POST /v1/embeddings`", protocol.EmbeddingRequest),
    "Scores": ("`POST /v1/score`", protocol.ScoreRequest),
    "Reranking": ("`POST /v1/rerank`", protocol.RerankRequest),
}


def guide() -> str:
    """Return the whole page: the requests, then the objects within them."""
    lines = [OPENING]
    bodies: list[type[RequestBody]] = []
    for title, (paths, body) in PROTOCOLS.items():
        lines += [f"## {title}", "", paths, "", *table(body), ""]
        bodies += inner_classes(body)
    lines += ["## Objects within requests", ""]
    for body in dict.fromkeys(bodies):
        fields = ", ".join(f"`{name}`" for name in names_of_objects(body))
        lines += [f"In {fields}: {first_letter_small(body.__doc__ or '')}", "", *table(body), ""]
    return "\n".join(lines).rstrip() + "\n"


def table(body: type[RequestBody]) -> Iterator[str]:
    """Yield the lines of a table of the fields of a class."""
    yield "| field | |"
    yield "|---|---|"
    carried = sorted(name for field in body.model_fields.items() for name in names_of_field(*field))
    yield row(carried, "carried")
    hints = body.read_fields("hints")
    neutral = body.read_fields("neutral")
    refused = body.read_fields("refused")
    names_by_text: dict[str, list[str]] = {}
    for name in sorted({*hints, *neutral, *refused} - set(carried)):
        parts = [f"only `{json.dumps(neutral[name])}`"] if name in neutral else []
        parts += [f"refused: {refused[name]}"] if name in refused else []
        text = f"no effect: {hints[name]}" if name in hints else "; otherwise ".join(parts)
        names_by_text.setdefault(text, []).append(name)
    for text, names in names_by_text.items():
        yield row(names, text)


def row(names: Iterable[str], text: str) -> str:
    """Return a row of a table."""
    return f"| {', '.join(f'`{name}`' for name in names)} | {text} |"


def names_of_field(name: str, field: FieldInfo) -> list[str]:
    """Return the names of a field in requests."""
    if isinstance(field.validation_alias, AliasChoices):
        return [str(choice) for choice in field.validation_alias.choices]
    return [field.alias or name]


def inner_classes(body: type[RequestBody]) -> list[type[RequestBody]]:
    """Return the classes of the objects within a request, each after the first one that contains it."""
    classes = [body]
    for outer in classes:
        for field in outer.model_fields.values():
            classes += [part for part in classes_of_type(field.annotation) if part not in classes]
    return classes[1:]


def classes_of_type(annotation: object) -> list[type[RequestBody]]:
    """Return the classes of the objects that a field of a type can contain."""
    if isinstance(annotation, type) and issubclass(annotation, RequestBody):
        return [annotation]
    return list(dict.fromkeys(body for part in typing.get_args(annotation) for body in classes_of_type(part)))


def names_of_objects(body: type[RequestBody]) -> list[str]:
    """Return the names of the fields, in any protocol, whose objects have a class."""
    outers = [outer for _, request in PROTOCOLS.values() for outer in (request, *inner_classes(request))]
    return sorted(
        {
            name
            for outer in outers
            for field in outer.model_fields.items()
            if body in classes_of_type(field[1].annotation)
            for name in names_of_field(*field)
        }
    )


def first_letter_small(text: str) -> str:
    """Return the first line of a docstring, to follow a colon."""
    line = text.strip().splitlines()[0]
    return line[:1].lower() + line[1:]


if __name__ == "__main__":
    print(guide(), end="")
