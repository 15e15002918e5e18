"""The protocol of text-generation-inference."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from jingu.infer.request import FinishReason, Request, Token
from jingu.serve.async_engine import Completion, RequestHandle, best_first
from jingu.serve.http_errors import ApiError, bad_request
from jingu.serve.protocol import DetokenizeRequest, GenerateParameters, GenerateRequest, StrictRoute, TokenizeRequest
from jingu.serve.responses import (
    STREAMING_RESPONSES,
    EventStream,
    JsonResponse,
    dump_json,
    format_event,
    respond_once,
)
from jingu.serve.service import Service, ServiceDependency, run_off_loop
from jingu.version import __version__

router = APIRouter(tags=["text-generation-inference"], route_class=StrictRoute)
_FINISH_REASONS: dict[FinishReason, str] = {"end": "eos_token", "stop": "stop_sequence", "length": "length"}
# The limit of `protocol.StopStrings`; /info reports it.
_MAX_STOP_STRINGS = 16


@router.post("/", responses=STREAMING_RESPONSES)
async def generate_compat(body: GenerateRequest, request: HttpRequest, service: ServiceDependency) -> Response:
    """Generate text, streamed if the body says `stream`."""
    return await _generate(body, request, service, stream=bool(body.stream), as_list=True)


@router.post("/generate", responses=STREAMING_RESPONSES)
async def generate(body: GenerateRequest, request: HttpRequest, service: ServiceDependency) -> Response:
    """Generate text, streamed if the body says `stream`."""
    return await _generate(body, request, service, stream=bool(body.stream))


@router.post("/generate_stream", responses=STREAMING_RESPONSES)
async def generate_stream(body: GenerateRequest, request: HttpRequest, service: ServiceDependency) -> Response:
    """Generate text, with an event for each token."""
    return await _generate(body, request, service, stream=True)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, service: ServiceDependency) -> Response:
    """Tokenize a text; tell which characters each token covers."""

    def respond() -> Response:
        ids, positions = service.model.tokenizer.encode_with_offsets(body.inputs, parse_special_tokens=True)
        tokens = [
            {"id": token, "text": body.inputs[start:stop], "start": start, "stop": stop}
            for token, (start, stop) in zip(ids, positions, strict=True)
        ]
        prefix = service.model.prompt_prefix_ids
        if body.add_special_tokens and ids[:1] != list(prefix[:1]):
            heads = [{"id": token, "text": service.token_text(token), "start": 0, "stop": 0} for token in prefix]
            tokens = heads + tokens
        # JSON parts of bounded size: the encoder holds the interpreter until it has written its whole value.
        parts = [dump_json(tokens[first : first + 1000])[1:-1] for first in range(0, len(tokens), 1000)]
        return Response(b"[" + b",".join(parts) + b"]", media_type="application/json")

    return await run_off_loop(respond, len(body.inputs))


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, service: ServiceDependency) -> Response:
    """Decode token ids, as vLLM does; special tokens are part of the text."""
    vocab_size = service.model.tokenizer.vocab_size
    if any(token >= vocab_size for token in body.tokens):
        raise bad_request(f"`tokens` has ids of {vocab_size} and more, which are not in the vocabulary", "tokens")
    text = await run_off_loop(
        lambda: service.model.tokenizer.decode(body.tokens, keep_special_tokens=True), len(body.tokens)
    )
    return JsonResponse({"prompt": text})


@router.get("/info")
async def info(service: ServiceDependency) -> Response:
    """Describe the model and the limits of the server."""
    spec = service.model.spec
    return JsonResponse(
        {
            "model_id": service.name,
            "model_sha": None,
            "model_pipeline_tag": "text-generation" if spec.num_encoder_layers is None else "text2text-generation",
            "max_concurrent_requests": service.settings.max_concurrent_requests,
            "max_best_of": 16,
            "max_stop_sequences": _MAX_STOP_STRINGS,
            "max_input_tokens": service.context_length - 1,
            "max_total_tokens": service.context_length,
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
async def health(service: ServiceDependency) -> Response:
    """Return 200 while the server accepts requests."""
    if service.engine.failure is not None:
        raise ApiError(503, "the engine has failed")
    if service.engine.is_stopping:
        raise ApiError(503, "the server is shutting down")
    return Response()


async def _generate(
    body: GenerateRequest,
    http_request: HttpRequest,
    service: Service,
    *,
    stream: bool = False,
    as_list: bool = False,
) -> Response:
    parameters = body.parameters or GenerateParameters()
    request = await _build_request(body.inputs, parameters, service, stream)
    # `return_full_text` puts the prompt in front of the answer.
    prefix = body.inputs if parameters.return_full_text else ""
    handle = await service.submit(http_request, [request])
    if stream:
        return EventStream(handle, _stream(handle, service, prefix))

    async def collect() -> Any:
        (completions,) = await handle.collect()
        best, *other_completions = best_first(completions)
        answer: dict[str, Any] = {"generated_text": prefix + best.text}
        if parameters.details or parameters.decoder_input_details:
            answer["details"] = _format_details(best, request, service)
            if other_completions:
                answer["details"]["best_of_sequences"] = [
                    {"generated_text": prefix + completion.text, **_format_details(completion, request, service)}
                    for completion in other_completions
                ]
        return [answer] if as_list else answer

    return await respond_once(http_request, handle, collect())


async def _build_request(inputs: str, parameters: GenerateParameters, service: Service, stream: bool) -> Request:
    """Validate the parameters, and return the engine request."""
    # 1. Refuse parameters that are not supported.
    if parameters.watermark:
        raise bad_request("`watermark` is not supported", "watermark")
    if parameters.typical_p is not None and parameters.typical_p < 1:
        raise bad_request("`typical_p` below 1 is not supported; use `top_p`", "typical_p")
    best_of = parameters.best_of or 1
    sampling = parameters.sampling_params(service.model)
    if best_of > 1 and sampling.temperature == 0:
        raise bad_request("you must use sampling when `best_of` is > 1: set `do_sample`", "best_of")
    if best_of > 1 and stream:
        raise bad_request("`best_of` is not supported for streams", "best_of")
    if parameters.decoder_input_details and stream:
        raise bad_request("`decoder_input_details` is not supported for streams", "decoder_input_details")
    if parameters.return_full_text and service.model.spec.num_encoder_layers is not None:
        raise bad_request("`return_full_text` is not supported for encoder-decoder models", "return_full_text")
    if not inputs:
        raise bad_request("`inputs` cannot be empty", "inputs")
    # 2. Encode the prompt. Truncation keeps its end, which matters more than its beginning.
    prompt = await service.encode(inputs, is_truncated=parameters.truncate is not None)
    if parameters.truncate:
        prompt = prompt[-parameters.truncate :]
    max_tokens = parameters.max_new_tokens
    if max_tokens is None:
        max_tokens = service.max_new_tokens(prompt)
    elif "max_new_tokens" not in parameters.model_fields_set:
        # The client did not choose the default, so it must fit.
        max_tokens = min(max_tokens, service.max_new_tokens(prompt))
    return Request(
        prompt,
        sampling,
        max_tokens,
        stop=tuple(parameters.stop or ()),
        logprobs=parameters.top_n_tokens or 0,
        prompt_logprobs=bool(parameters.decoder_input_details),
        n=best_of,
        constraint=parameters.grammar.constraint() if parameters.grammar else None,
        adapter=service.find_adapter(parameters.adapter_id),
    )


def _format_token(token: Token, service: Service) -> dict[str, Any]:
    special = token.id in service.model.tokenizer.special_tokens.values()
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": special}


def _format_top_tokens(token: Token, service: Service) -> list[dict[str, Any]]:
    # The engine's alternatives have only ids and log-probabilities, so decode their texts here.
    alternatives = [Token(token_id, service.token_text(token_id), logprob) for token_id, logprob in token.top]
    return [_format_token(alternative, service) for alternative in alternatives]


def _format_details(completion: Completion, request: Request, service: Service) -> dict[str, Any]:
    details = _format_end(completion, request)
    details["prefill"] = [
        {"id": token.id, "text": token.text, "logprob": token.logprob} for token in completion.prompt_logprobs
    ]
    details["tokens"] = [_format_token(token, service) for token in completion.tokens]
    if request.logprobs:
        details["top_tokens"] = [_format_top_tokens(token, service) for token in completion.tokens]
    return details


def _format_end(completion: Completion, request: Request) -> dict[str, Any]:
    return {
        "finish_reason": _FINISH_REASONS[completion.finish_reason],
        "generated_tokens": len(completion.tokens),
        "seed": request.sampling.seed if request.sampling.temperature > 0 else None,
    }


async def _stream(handle: RequestHandle, service: Service, prefix: str) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a generation; the last event has the whole text."""
    (request,) = handle.requests
    completion = Completion()
    async for batch in handle.batches():
        events = []
        for _, event in batch:
            completion.add(event)
            # An event without a token only reports the end of the request.
            if event.token is None:
                continue
            chunk: dict[str, Any] = {"index": len(completion.tokens), "token": _format_token(event.token, service)}
            if request.logprobs:
                chunk["top_tokens"] = _format_top_tokens(event.token, service)
            chunk |= {"generated_text": None, "details": None}
            if event.finish_reason is not None:
                chunk["generated_text"] = prefix + completion.text
                chunk["details"] = {**_format_end(completion, request), "input_length": event.prompt_tokens}
            events.append(format_event(chunk))
        yield b"".join(events)
