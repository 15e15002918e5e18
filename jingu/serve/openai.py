"""OpenAI's protocol: models, completions and embeddings. Conversations are in `jingu.serve.chat`."""

from __future__ import annotations

import base64
import secrets
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from jingu.infer.request import Event, Finish, Request, Token
from jingu.runtime.device import eager
from jingu.serve.answers import MAY_STREAM, EventStream, Json, event, whole
from jingu.serve.driver import Account, Ticket
from jingu.serve.errors import ServeError, invalid
from jingu.serve.schema import CompletionRequest, EmbeddingRequest, Sampled, StrictRoute
from jingu.serve.service import Choice, Served, Service, gathered, sampling

router = APIRouter(prefix="/v1", tags=["openai"], route_class=StrictRoute)
REASONS: dict[Finish, str] = {"end": "stop", "stop": "stop", "length": "length"}
_MOST_INPUTS = 256


@router.get("/models")
async def models(service: Served) -> Response:
    """The base and its adapters."""
    return Json({"object": "list", "data": [_model(name, service) for name in (service.name, *service.adapters)]})


@router.get("/models/{model:path}")
async def model(model: str, service: Served) -> Response:
    """One of them."""
    adapter = service.adapter(model)
    return Json(_model(adapter or service.name, service))


@router.post("/completions", responses=MAY_STREAM)
async def completions(body: CompletionRequest, request: HttpRequest, service: Served) -> Response:
    """Continue prompts."""
    if body.suffix:
        raise invalid("`suffix` is not supported: the model only continues texts", "suffix")
    if body.best_of is not None and (body.stream or body.best_of < (body.n or 1)):
        raise invalid("`best_of` must be at least `n`, and cannot be streamed", "best_of")
    if body.echo and body.stream and body.logprobs is not None:
        raise invalid("`echo` with `logprobs` cannot be streamed", "echo")
    prompts = await _inputs(body.prompt, service, "prompt")
    ticket = await service.submit(
        request,
        [
            engine_request(
                body,
                prompt,
                service,
                best_of=body.best_of,
                logprobs=body.logprobs,
                prompt_logprobs=bool(body.echo) and body.logprobs is not None,
                max_tokens=body.max_tokens or 16,
            )
            for prompt in prompts
        ],
    )
    head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}
    head["model"] = body.model
    echoes = [service.loaded.tokenizer.decode(list(prompt)) if body.echo else "" for prompt in prompts]
    if body.stream:
        return EventStream(ticket, _stream(ticket, body, head, echoes, service))

    async def made() -> Any:
        answers = await gathered(ticket)
        shown = [
            {
                "index": index,
                "text": echo + choice.text,
                "logprobs": None if body.logprobs is None else _logprobs([*prompt, *_spoken(choice)], service),
                "finish_reason": REASONS[choice.finish],
            }
            for index, (echo, prompt, choice) in enumerate(
                (echo, choices[0].prompt, choice)
                for echo, choices in zip(echoes, answers, strict=True)
                for choice in choices
            )
        ]
        return {**head, "choices": shown, "usage": usage(ticket.account)}

    return await whole(request, ticket, made())


@router.post("/embeddings")
async def embeddings(body: EmbeddingRequest, request: HttpRequest, service: Served) -> Response:
    """Vectors of texts: states of the last layer, pooled, of length 1."""
    spec = service.loaded.spec
    if spec.encoder_layers is not None:
        raise invalid("embeddings are those of decoders; this model has an encoder", "model")
    if service.loaded.ranks > 1:
        raise invalid("embeddings are not made by a model that several processes share", "model")
    if service.adapter(body.model) is not None or any(spec.prompts):
        raise invalid("embeddings are those of a base; adapters and trained prompts have none", "model")
    if body.dimensions not in (None, spec.width):
        raise invalid(f"`dimensions` can only be the model's width, {spec.width}", "dimensions")
    prompts = await _inputs(body.input, service, "input")
    for place, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= spec.context or max(prompt) >= spec.vocabulary:
            raise invalid(
                f"input {place} has {len(prompt)} tokens; there must be 1 to {spec.context}, each below "
                f"{spec.vocabulary}",
                "input",
            )

    async def made() -> Any:
        data: list[dict[str, Any]] = []
        async with service.driver.counted():
            for place, prompt in enumerate(prompts):  # one between two steps, so that others are answered meanwhile
                vector = await service.driver.call(partial(_embedded, prompt, service))
                packed = struct.pack(f"<{len(vector)}f", *vector)
                shown = base64.b64encode(packed).decode() if body.encoding_format == "base64" else vector
                data.append({"object": "embedding", "index": place, "embedding": shown})
        tokens = sum(map(len, prompts))
        counted = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": body.model, "usage": counted}

    return await whole(request, None, made())


def engine_request(
    body: Sampled, prompt: tuple[int, ...], service: Service, *, stop: tuple[str, ...] = (), **more: Any
) -> Request:
    """What the engine is asked, with `more` of it; `stop` ends a text as the request's own stop strings do."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Request(
        prompt,
        sampling(
            body,
            1.0 if body.temperature is None else body.temperature,
            top_k=body.top_k if body.top_k is not None and body.top_k > 0 else None,
            logit_bias=_bias(body.logit_bias or {}, service.loaded.spec.vocabulary),
        ),
        stop=(*stops, *stop),
        n=body.n or 1,
        adapter=service.adapter(body.model),
        ignore_end=bool(body.ignore_eos),
        **more,
    )


def usage(account: Account) -> dict[str, Any]:
    """Tokens that a request has cost."""
    return {
        "prompt_tokens": account.prompt_tokens,
        "completion_tokens": account.generated_tokens,
        "total_tokens": account.prompt_tokens + account.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": account.cached_tokens},
    }


def _model(name: str, service: Service) -> dict[str, Any]:
    shown = {"id": name, "object": "model", "created": service.started, "owned_by": "jingu"}
    return {**shown, "root": service.name, "parent": None if name == service.name else service.name,
            "max_model_len": service.loaded.spec.context}  # fmt: skip


async def _inputs(
    given: str | list[int] | list[str] | list[list[int]], service: Service, field: str
) -> list[tuple[int, ...]]:
    """Prompts as ids: of a text, of ids, or of a list of either."""
    if isinstance(given, str):
        return [await service.encode(given)]
    if not given:
        raise invalid(f"`{field}` is an empty list", field)
    if isinstance(given[0], int):
        return [tuple(given)]
    if len(given) > _MOST_INPUTS:
        raise invalid(f"`{field}` has {len(given)} entries; at most {_MOST_INPUTS} are taken at once", field)
    return [await service.encode(each) if isinstance(each, str) else tuple(each) for each in given]


def _bias(given: dict[str, float], vocabulary: int) -> dict[int, float]:
    found = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10 and int(token) < vocabulary):
            raise invalid(f"`logit_bias` has {token[:40]!r}, which is no token of {vocabulary}", "logit_bias")
        found[int(token)] = bias
    return found


def _spoken(choice: Choice) -> list[Token]:
    """The tokens of the answer, without the one that ended it."""
    return choice.tokens[:-1] if choice.finish == "end" else choice.tokens


def _logprobs(tokens: Sequence[Token], service: Service, begun: int = 0) -> dict[str, Any]:
    """Log-probabilities as completions tell them; `begun`: characters of the text before."""
    names = [service.token_name(token.id) for token in tokens]
    offsets = [begun]
    for name in names:
        offsets.append(offsets[-1] + len(name))
    return {
        "tokens": names,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            {service.token_name(id_): logprob for id_, logprob in token.top} if token.top else None for token in tokens
        ],
        "text_offset": offsets[:-1],
    }


def _stream(
    ticket: Ticket, body: CompletionRequest, head: dict[str, Any], echoes: Sequence[str], service: Service
) -> AsyncIterator[bytes]:
    n, lengths = body.n or 1, dict[int, int]()

    def chunk(index: int, text: str, logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def chunks(place: int, each: Event, token: Token) -> Iterator[dict[str, Any]]:
        if not token.text and each.finish is None and body.logprobs is None:
            return
        index, logprobs = place * n + each.choice, None
        if body.logprobs is not None and each.finish != "end":
            begun = lengths.get(index, 0)
            logprobs = _logprobs([token], service, begun)
            lengths[index] = begun + len(logprobs["tokens"][0])
        yield chunk(index, token.text, logprobs, REASONS[each.finish] if each.finish else None)

    first = [chunk(place * n + each, echo) for place, echo in enumerate(echoes) if echo for each in range(n)]
    return streamed(ticket, body, head, first, chunks)


async def streamed(
    ticket: Ticket,
    body: Sampled,
    head: dict[str, Any],
    first: list[dict[str, Any]],
    chunks: Callable[[int, Event, Token], Iterator[dict[str, Any]]],
) -> AsyncIterator[bytes]:
    """A stream of chunks with a choice each.

    Args:
        first: what comes before there is a token.
        chunks: what becomes of an event, which has the place of its request, and of its token.
    """
    counted = body.stream_options is not None and bool(body.stream_options.include_usage)
    extra = {"usage": None} if counted else {}

    def shown(choices: Iterable[dict[str, Any]]) -> bytes:
        return b"".join(event({**head, "choices": [choice], **extra}) for choice in choices)

    yield shown(first)
    async for lot in ticket.batches():
        yield shown(made for place, each in lot if each.token is not None for made in chunks(place, each, each.token))
    yield (event({**head, "choices": [], "usage": usage(ticket.account)}) if counted else b"") + b"data: [DONE]\n\n"


def _embedded(prompt: Sequence[int], service: Service) -> list[float]:
    """The vector of one text; on the engine's thread. Blocks that are compiled for steps with a cache go as they are
    written: others would wait while they are compiled again."""
    model = service.loaded.model
    device = next(model.parameters()).device
    with torch.inference_mode(), eager():
        tokens_BT = torch.tensor([prompt], device=device)
        reach_BT = torch.full_like(tokens_BT, len(prompt)) if service.loaded.reads_whole else None
        states_TD = model(tokens_BT, reach_BT=reach_BT)[0].float()
        pooled_D = states_TD.mean(0) if service.settings.pooling == "mean" else states_TD[-1]
        vector: list[float] = torch.nn.functional.normalize(pooled_D, dim=0).tolist()
    if not all(abs(value) <= 1.001 for value in vector):
        raise ServeError(500, "the model's states are not finite", kind="generation")
    return vector
