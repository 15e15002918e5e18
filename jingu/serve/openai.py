"""OpenAI's protocol: models, completions and embeddings. Chat completions are in `jingu.serve.openai_chat`."""

from __future__ import annotations

import asyncio
import base64
import codecs
import secrets
import struct
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import PlainTextResponse, Response

from jingu.infer.request import Event, FinishReason, Request, Token
from jingu.runtime.device import run_in_thread
from jingu.serve import protocol
from jingu.serve.async_engine import Completion, RequestHandle, RequestStats, best_first
from jingu.serve.http_errors import ApiError, bad_request
from jingu.serve.responses import STREAMING_RESPONSES, EventStream, JsonResponse, format_event, respond_once
from jingu.serve.service import PLACEHOLDER_MODELS, Service, ServiceDependency
from jingu.version import __version__

router = APIRouter(prefix="/v1", tags=["openai"], route_class=protocol.StrictRoute)
SYSTEM_FINGERPRINT = f"jingu-{__version__}"
FINISH_REASONS: dict[FinishReason, str] = {"end": "stop", "stop": "stop", "length": "length"}
_NO_RUNTIME_ADAPTERS = "the adapters of this server are fixed; start it with --runtime-adapters to load others"
# Maximum number of prompts to continue in one request.
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


@router.post("/load_lora_adapter", response_class=PlainTextResponse)
async def load_lora_adapter(body: protocol.LoadAdapterRequest, service: ServiceDependency) -> Response:
    """Load an adapter beside the model, as vLLM does."""
    read = service.model.read_adapter
    if read is None:
        raise ApiError(403, _NO_RUNTIME_ADAPTERS)
    name = body.lora_name
    if not name or not body.lora_path:
        raise bad_request("Both 'lora_name' and 'lora_path' must be provided.", "lora_name")
    if name in (service.name, *PLACEHOLDER_MODELS, *service.adapters):
        raise bad_request(f"The lora adapter '{name}' has already been loaded.", "lora_name")
    try:
        path = Path(body.lora_path)
        if not path.exists():
            raise ApiError(404, f"No adapter found for {body.lora_path}", field="lora_path")
        # Read on another thread: it takes longer than a step of the engine.
        weights = await asyncio.to_thread(run_in_thread, partial(read, path))
    except OSError as error:
        raise bad_request(f"{body.lora_path} cannot be read ({error.strerror})", "lora_path") from error
    await service.engine.call(partial(service.model.adapters.attach, name, weights))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post("/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_lora_adapter(body: protocol.UnloadAdapterRequest, service: ServiceDependency) -> Response:
    """Unload an adapter, as vLLM does. Requests in progress finish with it."""
    name = body.lora_name
    if service.model.read_adapter is None:
        raise ApiError(403, _NO_RUNTIME_ADAPTERS)
    if not name:
        raise bad_request("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
    if name not in service.adapters:
        raise ApiError(404, f"The lora adapter '{name}' cannot be found.", field="lora_name")
    await service.engine.call(partial(service.model.adapters.detach, name))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


@router.post("/completions", responses=STREAMING_RESPONSES)
async def completions(body: protocol.CompletionRequest, request: HttpRequest, service: ServiceDependency) -> Response:
    """Continue prompts."""
    n = body.n or 1
    best_of = body.best_of
    if best_of is not None and best_of > 1 and (body.stream or best_of < n):
        raise bad_request("`best_of` must be at least `n`, and cannot be streamed", "best_of")
    if body.max_tokens == 0 and (body.stream or not body.echo):
        raise bad_request("`max_tokens` of 0 requires `echo`, and cannot be streamed", "max_tokens")
    if body.echo and body.stream and body.logprobs is not None:
        raise bad_request("`echo` with `logprobs` cannot be streamed", "echo")
    if body.return_token_ids and (body.stream or body.echo):
        raise bad_request("`return_token_ids` cannot be streamed, nor combined with `echo`", "return_token_ids")
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
            # For 0 the engine generates one token, which is removed from the answer.
            max_tokens=min(16, service.max_new_tokens(prompt)) if body.max_tokens is None else max(body.max_tokens, 1),
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
        # Indices of choices continue over all prompts.
        for prompt, echo, answers in zip(prompts, echoes, await handle.collect(), strict=True):
            for answer in best_first(answers)[:n] if best_of else answers:
                if body.max_tokens == 0:
                    handle.stats.generated_tokens = 0
                    answer.tokens.clear()
                    answer.finish_reason = "length"
                logprobs = None
                if body.logprobs is not None:
                    # The engine returns the prompt's log-probabilities with the first answer.
                    # With `echo`, each generated token has an entry, also an end token: clients that score the prompt
                    # generate one token and remove the last entry, whatever it is.
                    has_end_token = body.echo or body.return_token_ids
                    tokens = answer.tokens if has_end_token else _text_tokens(answer)
                    positions = TextPositions(service, body)
                    logprobs = _format_logprobs([*answers[0].prompt_logprobs, *tokens], service, positions)
                choice = _format_choice(len(choices), echo + answer.text, logprobs, answer.finish_reason)
                if body.return_token_ids:
                    # Like vLLM, include the end token, whose log-probability is then included, too.
                    choice |= {"token_ids": [token.id for token in answer.tokens], "prompt_token_ids": prompt}
                choices.append(choice)
        return {**head, "choices": choices, "usage": format_usage(handle.stats)}

    return await respond_once(request, handle, collect())


@router.post("/embeddings")
async def embeddings(body: protocol.EmbeddingRequest, request: HttpRequest, service: ServiceDependency) -> Response:
    """Embed texts: pooled hidden states of the last layer, normalized to length 1."""
    hidden_size = service.model.spec.hidden_size
    if body.dimensions not in (None, hidden_size):
        raise bad_request(f"`dimensions` can only be the model's hidden size, {hidden_size}", "dimensions")
    prompts = await _encode_prompts(body.input, service, "input", protocol.MAX_TEXTS)
    handle = await service.submit_pooling(request, prompts, body.model, service.settings.pooling)

    async def collect() -> Any:
        data: list[dict[str, Any]] = []
        for index, (completion,) in enumerate(await handle.collect()):
            vector: Any = completion.embedding
            if body.encoding_format == "base64":
                vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
            data.append({"object": "embedding", "index": index, "embedding": vector})
        tokens = handle.stats.prompt_tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": body.model, "usage": usage}

    return await respond_once(request, handle, collect())


def build_engine_request(
    body: protocol.SamplingFields,
    prompt: tuple[int, ...],
    service: Service,
    *,
    stop: tuple[str, ...] = (),
    **fields: Any,
) -> Request:
    """Return the engine's request for a prompt.

    Args:
        stop: stop strings in addition to those of the body.
        fields: other fields of the engine's request.
    """
    stop_strings = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Request(
        prompt,
        body.sampling_params(service.model),
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
    details = {}
    if stats.reasoning_tokens is not None:
        details["completion_tokens_details"] = {"reasoning_tokens": stats.reasoning_tokens}
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
        **details,
    }


def _format_model(name: str, service: Service) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "jingu",
        "root": service.name,
        "parent": None if name == service.name else service.name,
        "max_model_len": service.context_length,
    }


async def _encode_prompts(
    prompts: protocol.Prompts, service: Service, field: str, limit: int = _MAX_PROMPTS
) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt. A single prompt is a text or a list of ids; several are a list of those.

    Args:
        limit: the most prompts.
    """
    if isinstance(prompts, str):
        return [await service.encode(prompts)]
    if not prompts:
        raise bad_request(f"`{field}` is an empty list", field)
    if isinstance(prompts[0], int):
        return [tuple(prompts)]
    if len(prompts) > limit:
        raise bad_request(f"`{field}` has {len(prompts)} entries; at most {limit} are allowed", field)
    return [await service.encode(prompt) if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]


def _text_tokens(completion: Completion) -> list[Token]:
    """Return the tokens of an answer without its end token."""
    return completion.tokens[:-1] if completion.finish_reason == "end" else completion.tokens


def _format_choice(index: int, text: str, logprobs: Any = None, finish: FinishReason | None = None) -> dict[str, Any]:
    reason = None if finish is None else FINISH_REASONS[finish]
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class TextPositions:
    """Counts the characters of a text from its tokens.

    Each byte of a character has the position of that character. Special tokens that the text leaves out have no length.
    """

    def __init__(self, service: Service, body: protocol.CompletionRequest) -> None:
        self._tokenizer = service.model.tokenizer
        # Replaces invalid bytes as tokenizers do.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0
        self._is_start = True
        self._hidden = frozenset() if body.skip_special_tokens is False else self._tokenizer.special_tokens.values()

    def add(self, token_id: int) -> int:
        """Add the next token; return the position of its first character."""
        position = self._length
        if token_id in self._hidden:
            return position
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        # Decoders of sentencepiece tokenizers leave out the space that the first token begins with.
        if self._is_start and self._tokenizer.spelling == "metaspace":
            text = text.removeprefix(" ")
        self._is_start = False
        self._length += len(text)
        return position


def _format_logprobs(tokens: Sequence[Token], service: Service, positions: TextPositions) -> dict[str, Any]:
    """Format log-probabilities for completions. `positions` has the tokens before these."""
    names = [service.token_name(token.id) for token in tokens]
    offsets = [positions.add(token.id) for token in tokens]
    alternatives = [{service.token_name(token_id): logprob for token_id, logprob in token.top} for token in tokens]
    return {
        "tokens": names,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [top if top else None for top in alternatives],
        "text_offset": offsets,
    }


async def _stream(
    handle: RequestHandle, body: protocol.CompletionRequest, echoes: Sequence[str], service: Service
) -> AsyncIterator[list[dict[str, Any]]]:
    """Yield the choices of each engine step, one for each chunk."""
    n = body.n or 1
    positions: defaultdict[int, TextPositions] = defaultdict(lambda: TextPositions(service, body))

    def format_chunk(index: int, event: Event, token: Token) -> dict[str, Any]:
        logprobs = None
        if body.logprobs is not None and event.finish_reason != "end":
            logprobs = _format_logprobs([token], service, positions[index])
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
    handle: RequestHandle,
    body: protocol.SamplingFields,
    head: dict[str, Any],
    batches: AsyncIterator[list[dict[str, Any]]],
) -> AsyncIterator[bytes]:
    """Yield server-sent events with one choice each, and finally one with the usage, if it was requested.

    Args:
        head: the common fields of all chunks.
        batches: the choices of each engine step. Their events are joined, which saves writes to the socket.
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
