"""OpenAI's protocol: models, completions and embeddings. Chat completions are in `jingu.serve.openai_chat`."""

from __future__ import annotations

import base64
import secrets
import struct
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from jingu import __version__
from jingu.infer.request import Event, FinishReason, Request, Token
from jingu.serve.async_engine import Completion, RequestHandle, RequestStats, best_first
from jingu.serve.http_errors import ApiError, bad_request
from jingu.serve.protocol import CompletionRequest, EmbeddingRequest, Prompts, SamplingFields, StrictRoute
from jingu.serve.responses import STREAMING_RESPONSES, EventStream, JsonResponse, format_event, respond_once
from jingu.serve.service import Service, ServiceDependency

router = APIRouter(prefix="/v1", tags=["openai"], route_class=StrictRoute)
SYSTEM_FINGERPRINT = f"jingu-{__version__}"
FINISH_REASONS: dict[FinishReason, str] = {"end": "stop", "stop": "stop", "length": "length"}
# Prompts in one request; each of them is an engine request.
_MAX_PROMPTS = 256


@router.get("/models")
async def list_models(service: ServiceDependency) -> Response:
    """List the base model and its adapters."""
    models = [_format_model(name, service) for name in (service.name, *service.adapters)]
    return JsonResponse({"object": "list", "data": models})


@router.get("/models/{model:path}")
async def get_model(model: str, service: ServiceDependency) -> Response:
    """Describe the base model or an adapter."""
    return JsonResponse(_format_model(service.find_adapter(model) or service.name, service))


@router.post("/completions", responses=STREAMING_RESPONSES)
async def completions(body: CompletionRequest, request: HttpRequest, service: ServiceDependency) -> Response:
    """Continue prompts."""
    if body.suffix:
        raise bad_request("`suffix` is not supported", "suffix")
    n = body.n or 1
    best_of = body.best_of
    if best_of is not None and (body.stream or best_of < n):
        raise bad_request("`best_of` must be at least `n`, and cannot be streamed", "best_of")
    if body.max_tokens == 0 and (body.stream or not body.echo):
        raise bad_request("`max_tokens` of 0 requires `echo`, and cannot be streamed", "max_tokens")
    if body.echo and body.stream and body.logprobs is not None:
        raise bad_request("`echo` with `logprobs` cannot be streamed", "echo")
    prompts = await _encode_prompts(body.prompt, service, "prompt")
    requests = [
        build_engine_request(
            body,
            prompt,
            service,
            n=best_of or n,
            # Candidates are compared by their log-probabilities.
            logprobs=0 if best_of and body.logprobs is None else body.logprobs,
            prompt_logprobs=bool(body.echo) and body.logprobs is not None,
            # With 0 the engine generates one token, which the answer leaves out.
            max_tokens=16 if body.max_tokens is None else max(body.max_tokens, 1),
            constraint=body.guided_constraint(),
        )
        for prompt in prompts
    ]
    handle = await service.submit(request, requests)
    head = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
        "system_fingerprint": SYSTEM_FINGERPRINT,
    }
    echoes = [service.model.tokenizer.decode(list(prompt)) if body.echo else "" for prompt in prompts]
    if body.stream:
        return EventStream(handle, stream_chunks(handle, body, head, _stream(handle, body, echoes, service)))

    async def collect() -> Any:
        choices: list[dict[str, Any]] = []
        # Choices are numbered through all prompts.
        for echo, answers in zip(echoes, await handle.collect(), strict=True):
            for answer in best_first(answers)[:n] if best_of else answers:
                if body.max_tokens == 0:
                    handle.stats.generated_tokens = 0
                    answer.tokens.clear()
                    answer.finish_reason = "length"
                logprobs = None
                if body.logprobs is not None:
                    # The engine returns the prompt's log-probabilities with the first answer.
                    logprobs = _format_logprobs([*answers[0].prompt_logprobs, *_text_tokens(answer)], service)
                choices.append(_format_choice(len(choices), echo + answer.text, logprobs, answer.finish_reason))
        return {**head, "choices": choices, "usage": format_usage(handle.stats)}

    return await respond_once(request, handle, collect())


@router.post("/embeddings")
async def embeddings(body: EmbeddingRequest, request: HttpRequest, service: ServiceDependency) -> Response:
    """Embed texts: pooled hidden states of the last layer, normalized to length 1."""
    spec = service.model.spec
    if spec.num_encoder_layers is not None:
        raise bad_request("embeddings are not supported for encoder-decoder models", "model")
    if service.model.world_size > 1:
        raise bad_request("embeddings are not supported when several processes share the model", "model")
    if service.find_adapter(body.model) is not None or any(spec.prompts):
        raise bad_request("embeddings are not supported for adapters and prompt tuning", "model")
    if body.dimensions not in (None, spec.hidden_size):
        raise bad_request(f"`dimensions` can only be the model's hidden size, {spec.hidden_size}", "dimensions")
    prompts = await _encode_prompts(body.input, service, "input")
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= spec.max_position_embeddings or max(prompt) >= spec.vocab_size:
            raise bad_request(
                f"input {index} has {len(prompt)} tokens; 1 to {spec.max_position_embeddings} are possible, with ids "
                f"below {spec.vocab_size}",
                "input",
            )

    async def collect() -> Any:
        data: list[dict[str, Any]] = []
        async with service.engine.occupy():
            # One text between two steps of the engine, so that other requests continue.
            for index, prompt in enumerate(prompts):
                vector: Any = await service.engine.call(partial(_embed, prompt, service))
                if body.encoding_format == "base64":
                    vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
                data.append({"object": "embedding", "index": index, "embedding": vector})
        tokens = sum(map(len, prompts))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": body.model, "usage": usage}

    return await respond_once(request, None, collect())


def build_engine_request(
    body: SamplingFields, prompt: tuple[int, ...], service: Service, *, stop: tuple[str, ...] = (), **fields: Any
) -> Request:
    """Return the engine's request for a prompt.

    Args:
        stop: stop strings in addition to those of the body.
        fields: further fields of the engine's request.
    """
    stop_strings = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Request(
        prompt,
        body.sampling_params(service.model.spec.vocab_size, service.model.default_sampling),
        stop=(*stop_strings, *stop),
        adapter=service.find_adapter(body.model),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        keep_special_tokens=body.skip_special_tokens is False,
        **fields,
    )


def format_usage(stats: RequestStats) -> dict[str, Any]:
    """Return the token counts of a request."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
    }


def _format_model(name: str, service: Service) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "jingu",
        "root": service.name,
        "parent": None if name == service.name else service.name,
        "max_model_len": service.model.spec.max_position_embeddings,
    }


async def _encode_prompts(prompts: Prompts, service: Service, field: str) -> list[tuple[int, ...]]:
    """Return the token ids of a text, of ids, or of a list of either."""
    if isinstance(prompts, str):
        return [await service.encode(prompts)]
    if not prompts:
        raise bad_request(f"`{field}` is an empty list", field)
    if isinstance(prompts[0], int):
        return [tuple(prompts)]
    if len(prompts) > _MAX_PROMPTS:
        raise bad_request(f"`{field}` has {len(prompts)} entries; at most {_MAX_PROMPTS} are allowed", field)
    return [await service.encode(prompt) if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]


def _text_tokens(completion: Completion) -> list[Token]:
    """Return the tokens of an answer without its end token."""
    return completion.tokens[:-1] if completion.finish_reason == "end" else completion.tokens


def _format_choice(index: int, text: str, logprobs: Any = None, finish: FinishReason | None = None) -> dict[str, Any]:
    reason = None if finish is None else FINISH_REASONS[finish]
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _format_logprobs(tokens: Sequence[Token], service: Service, offset: int = 0) -> dict[str, Any]:
    """Return log-probabilities in the form of completions; the first token is at character `offset` of the text."""
    names = [service.token_name(token.id) for token in tokens]
    offsets = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    alternatives = [{service.token_name(token_id): logprob for token_id, logprob in token.top} for token in tokens]
    return {
        "tokens": names,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [top if top else None for top in alternatives],
        "text_offset": offsets,
    }


async def _stream(
    handle: RequestHandle, body: CompletionRequest, echoes: Sequence[str], service: Service
) -> AsyncIterator[list[dict[str, Any]]]:
    """Yield the choices of the chunks of each engine step."""
    n = body.n or 1
    # Characters of each choice so far.
    lengths: dict[int, int] = {}

    def format_chunk(index: int, event: Event, token: Token) -> dict[str, Any]:
        logprobs = None
        if body.logprobs is not None and event.finish_reason != "end":
            offset = lengths.get(index, 0)
            logprobs = _format_logprobs([token], service, offset)
            lengths[index] = offset + len(logprobs["tokens"][0])
        return _format_choice(index, token.text, logprobs, event.finish_reason)

    yield [
        _format_choice(request_index * n + choice, echo)
        for request_index, echo in enumerate(echoes)
        if echo
        for choice in range(n)
    ]
    async for batch in handle.batches():
        yield [
            format_chunk(index * n + event.choice, event, event.token)
            for index, event in batch
            if event.token is not None
            and (event.token.text or event.finish_reason is not None or body.logprobs is not None)
        ]


async def stream_chunks(
    handle: RequestHandle, body: SamplingFields, head: dict[str, Any], batches: AsyncIterator[list[dict[str, Any]]]
) -> AsyncIterator[bytes]:
    """Yield server-sent events with one choice each, and at the end the usage if it is requested.

    Args:
        head: the fields that all chunks share.
        batches: the choices of each engine step. They are sent together, which saves writes to the socket.
    """
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    async for choices in batches:
        usage: dict[str, Any] = {"usage": None} if include_usage else {}
        if include_usage and body.stream_options and body.stream_options.continuous_usage_stats:
            usage = {"usage": format_usage(handle.stats)}
        yield b"".join(format_event({**head, "choices": [choice], **usage}) for choice in choices)
    if include_usage:
        yield format_event({**head, "choices": [], "usage": format_usage(handle.stats)})
    yield b"data: [DONE]\n\n"


def _embed(prompt: Sequence[int], service: Service) -> list[float]:
    """Return the embedding of one text. Runs on the engine's thread."""
    vector = service.engine.engine.embed(prompt, service.settings.pooling)
    if not all(abs(value) <= 1.001 for value in vector):
        raise ApiError(500, "the model's hidden states are not finite", kind="generation")
    return vector
