"""The protocol of text-generation-inference."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from jingu import __version__
from jingu.infer.request import Constraint, Finish, Request, Token
from jingu.serve.answers import MAY_STREAM, EventStream, Json, event, whole
from jingu.serve.driver import Ticket
from jingu.serve.errors import ServeError, invalid
from jingu.serve.schema import GenerateParameters, GenerateRequest, Grammar, StrictRoute, TokenizeRequest
from jingu.serve.service import Choice, Served, Service, constraint, gathered, off_loop, sampling

router = APIRouter(tags=["text-generation-inference"], route_class=StrictRoute)
_REASONS: dict[Finish, str] = {"end": "eos_token", "stop": "stop_sequence", "length": "length"}
_MOST_STOPS = 16


@router.post("/", responses=MAY_STREAM)
async def compatible(body: GenerateRequest, request: HttpRequest, service: Served) -> Response:
    """Generate; as a stream where the body says `stream`."""
    return await _answer(body, request, service, stream=bool(body.stream), listed=True)


@router.post("/generate")
async def generate(body: GenerateRequest, request: HttpRequest, service: Served) -> Response:
    """Generate a text."""
    return await _answer(body, request, service)


@router.post("/generate_stream", responses=MAY_STREAM)
async def generate_stream(body: GenerateRequest, request: HttpRequest, service: Served) -> Response:
    """Generate a text, an event a token."""
    return await _answer(body, request, service, stream=True)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, service: Served) -> Response:
    """Tokens of a text, with the characters that each is of."""
    ids, places = await off_loop(
        lambda: service.loaded.tokenizer.encode_places(body.inputs, special=True), len(body.inputs)
    )
    shown = [
        {"id": token, "text": body.inputs[start:stop], "start": start, "stop": stop}
        for token, (start, stop) in zip(ids, places, strict=True)
    ]
    begin = service.loaded.beginning if body.add_special_tokens and ids[:1] != [*service.loaded.beginning[:1]] else ()
    return Json([{"id": token, "text": service.token_text(token), "start": 0, "stop": 0} for token in begin] + shown)


@router.get("/info")
async def info(service: Served) -> Response:
    """What is served, and its limits."""
    spec, settings = service.loaded.spec, service.settings
    return Json(
        {
            "model_id": service.name,
            "model_sha": None,
            "model_pipeline_tag": "text-generation" if spec.encoder_layers is None else "text2text-generation",
            "max_concurrent_requests": settings.queue,
            "max_best_of": 16,
            "max_stop_sequences": _MOST_STOPS,
            "max_input_tokens": spec.context - 1,
            "max_total_tokens": spec.context,
            "validation_workers": 1,
            "max_client_batch_size": 1,
            "router": "jingu",
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }
    )


@router.head("/health", include_in_schema=False)
@router.get("/health", response_class=Response)
async def health(service: Served) -> Response:
    """200 while the server can take requests."""
    driver = service.driver
    if driver.broken is not None or driver.stopping:
        raise ServeError(503, "the engine has failed" if driver.broken else "the server is stopping")
    return Response()


async def _answer(
    body: GenerateRequest, http: HttpRequest, service: Service, *, stream: bool = False, listed: bool = False
) -> Response:
    parameters = body.parameters or GenerateParameters()
    request = await _request(body.inputs, parameters, service, stream)
    prefix = body.inputs if parameters.return_full_text else ""
    ticket = await service.submit(http, [request])
    if stream:
        return EventStream(ticket, _stream(ticket, service, prefix))

    async def made() -> Any:
        (made,) = await gathered(ticket)
        choices = sorted(made, key=lambda choice: choice.logprob / len(choice.tokens), reverse=True)
        answer: dict[str, Any] = {"generated_text": prefix + choices[0].text}
        if parameters.details or parameters.decoder_input_details:
            answer["details"] = _details(choices[0], request, service)
            if len(choices) > 1:
                answer["details"]["best_of_sequences"] = [
                    {"generated_text": prefix + other.text, **_details(other, request, service)}
                    for other in choices[1:]
                ]
        return [answer] if listed else answer

    return await whole(http, ticket, made())


async def _request(inputs: str, wanted: GenerateParameters, service: Service, stream: bool) -> Request:
    """What the engine is asked."""
    if wanted.watermark:
        raise invalid("`watermark` is not supported: texts are not marked", "watermark")
    if wanted.typical_p is not None and wanted.typical_p < 1:
        raise invalid("`typical_p` below 1 is not supported; `top_p` is", "typical_p")
    best_of = wanted.best_of or 1
    chosen = (wanted.temperature not in (None, 1.0), wanted.top_k is not None, (wanted.top_p or 1) < 1)
    samples = bool(wanted.do_sample) or any(chosen)
    if best_of > 1 and not samples:
        raise invalid("you must use sampling when `best_of` is > 1: set `do_sample`", "best_of")
    if best_of > 1 and stream:
        raise invalid("`best_of` is not supported for streams", "best_of")
    if wanted.decoder_input_details and stream:
        raise invalid("`decoder_input_details` is not supported for streams", "decoder_input_details")
    if wanted.return_full_text and service.loaded.spec.encoder_layers is not None:
        raise invalid("`return_full_text` has no meaning where the prompt is what an encoder reads", "return_full_text")
    if not inputs:
        raise invalid("`inputs` cannot be empty", "inputs")
    prompt = await service.encode(inputs)
    prompt = prompt[-wanted.truncate :] if wanted.truncate else prompt
    return Request(
        prompt,
        sampling(wanted, (1.0 if wanted.temperature is None else wanted.temperature) * samples, top_k=wanted.top_k),
        service.room(prompt) if wanted.max_new_tokens is None else wanted.max_new_tokens,
        stop=tuple(wanted.stop or ()),
        logprobs=wanted.top_n_tokens or 0,
        prompt_logprobs=bool(wanted.decoder_input_details),
        n=best_of,
        constraint=_constraint(wanted.grammar),
        adapter=service.adapter(wanted.adapter_id),
    )


def _constraint(grammar: Grammar | None) -> Constraint | None:
    if grammar is None:
        return None
    named = grammar.value.get("schema") if grammar.type == "json_schema" and isinstance(grammar.value, dict) else None
    return constraint(grammar.type, grammar.value if named is None else named, "grammar")


def _token(token: Token, service: Service) -> dict[str, Any]:
    special = token.id in service.loaded.tokenizer.special_tokens.values()
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": special}


def _tops(token: Token, service: Service) -> list[dict[str, Any]]:
    return [_token(Token(id_, service.token_text(id_), logprob), service) for id_, logprob in token.top]


def _details(choice: Choice, request: Request, service: Service) -> dict[str, Any]:
    shown = _end(choice, request)
    shown["prefill"] = [{"id": each.id, "text": each.text, "logprob": each.logprob} for each in choice.prompt]
    shown["tokens"] = [_token(token, service) for token in choice.tokens]
    if request.logprobs:
        shown["top_tokens"] = [_tops(token, service) for token in choice.tokens]
    return shown


def _end(choice: Choice, request: Request) -> dict[str, Any]:
    return {
        "finish_reason": _REASONS[choice.finish],
        "generated_tokens": len(choice.tokens),
        "seed": request.sampling.seed if request.sampling.temperature > 0 else None,
    }


async def _stream(ticket: Ticket, service: Service, prefix: str) -> AsyncIterator[bytes]:
    (request,) = ticket.requests
    choice = Choice()
    async for lot in ticket.batches():
        parts = []
        for _, each in lot:
            choice.take(each)
            if each.token is None:
                continue
            shown: dict[str, Any] = {"index": len(choice.tokens), "token": _token(each.token, service)}
            if request.logprobs:
                shown["top_tokens"] = _tops(each.token, service)
            shown |= {"generated_text": None, "details": None}
            if each.finish is not None:
                shown["generated_text"] = prefix + choice.text
                shown["details"] = {**_end(choice, request), "input_length": each.prompt_tokens}
            parts.append(event(shown))
        yield b"".join(parts)
