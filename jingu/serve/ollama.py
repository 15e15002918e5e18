"""Ollama's API: chat, generate, and the list of models. Streams are lines of JSON."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import AliasChoices, Field
from pydantic_core import from_json

from jingu.chat.tool_calls import ToolCall, ToolCallParser
from jingu.infer.request import FinishReason
from jingu.serve import protocol
from jingu.serve.async_engine import RequestHandle
from jingu.serve.chat_run import ChatAnswer, ChatDelta, ChatRun, start_chat
from jingu.serve.http_errors import ApiError, bad_request
from jingu.serve.openai import FINISH_REASONS, build_engine_request
from jingu.serve.openai_chat import format_logprobs
from jingu.serve.responses import EventStream, JsonResponse, dump_json, respond_once
from jingu.serve.service import Service, ServiceDependency
from jingu.version import __version__

router = APIRouter(prefix="/api", tags=["ollama"], route_class=protocol.StrictRoute)
_LINES = "application/x-ndjson"
_STREAMING_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "one JSON value, or one in each line", "content": {_LINES: {}}}
}


class OllamaOptions(protocol.RequestBody):
    """Sampling parameters. Options of the machine, such as `num_thread`, are accepted and ignored."""

    FIELDS = ("ollama options",)

    frequency_penalty: protocol.Penalty | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    num_predict: Annotated[int, Field(lt=2**31)] | None = None
    presence_penalty: protocol.Penalty | None = None
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    repeat_penalty: protocol.RepetitionPenalty | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: protocol.StopStrings | None = None
    temperature: protocol.Temperature | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top_p: protocol.Fraction | None = None

    def chat_fields(self) -> dict[str, Any]:
        """Return the corresponding fields of a chat completion."""
        has_penalty = self.frequency_penalty or self.presence_penalty or self.repeat_penalty not in (None, 1.0)
        if has_penalty and self.repeat_last_n not in (None, -1):
            raise bad_request("`repeat_last_n` is only supported as -1: penalties count all tokens", "options")
        names = ("frequency_penalty", "min_p", "presence_penalty", "seed", "stop", "temperature", "top_k", "top_p")
        fields = {name: getattr(self, name) for name in names}
        fields["repetition_penalty"] = self.repeat_penalty
        # A negative number means no limit.
        fields["max_tokens"] = self.num_predict if self.num_predict is not None and self.num_predict > 0 else None
        return fields


class OllamaMessage(protocol.ChatMessage):
    """A message of a conversation, in which some fields have other names than in a chat completion."""

    FIELDS = ("ollama message",)

    content: str | None = None
    name: Annotated[str | None, Field(alias="tool_name")] = None
    reasoning_content: Annotated[str | None, Field(alias="thinking")] = None


class OllamaRequest(protocol.RequestBody):
    """The fields that chat and generate share."""

    FIELDS = ("ollama",)

    model: str
    format: Literal["", "json"] | dict[str, Any] | None = None
    logprobs: bool | None = None
    options: OllamaOptions | None = None
    stream: bool | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def to_chat_request(
        self, messages: Sequence[protocol.ChatMessage], tools: list[protocol.ToolDefinition] | None = None
    ) -> protocol.ChatRequest:
        """Return a chat completion with the format and the options of this request."""
        response_format = None
        if self.format == "json":
            response_format = protocol.ResponseFormat(type="json_object")
        elif isinstance(self.format, dict):
            schema = protocol.JsonSchema.model_validate({"schema": self.format})
            response_format = protocol.ResponseFormat(type="json_schema", json_schema=schema)
        return protocol.ChatRequest(
            model=self.model,
            messages=list(messages),
            tools=tools,
            response_format=response_format,
            enable_thinking=self.think if isinstance(self.think, bool) else None,
            reasoning_effort=self.think if isinstance(self.think, str) else None,
            logprobs=self.logprobs or None,
            top_logprobs=self.top_logprobs if self.logprobs else None,
            **(self.options or OllamaOptions()).chat_fields(),
        )


class OllamaChatRequest(OllamaRequest):
    """A conversation to answer. Without messages, the request only loads the model."""

    FIELDS = ("ollama chat",)

    messages: list[OllamaMessage] | None = None
    tools: list[protocol.ToolDefinition] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """A prompt to answer, or with `raw` to continue. Without a prompt, the request only loads the model."""

    FIELDS = ("ollama generate",)

    prompt: str | None = None
    raw: bool | None = None
    system: str | None = None


class OllamaEmbedRequest(protocol.RequestBody):
    """Texts to embed."""

    FIELDS = ("ollama",)

    model: str
    input: str | Annotated[list[str], Field(max_length=protocol.MAX_TEXTS)]
    dimensions: protocol.PositiveInt | None = None
    options: OllamaOptions | None = None
    # Whether texts that are too long are truncated.
    truncate: bool | None = None


class OllamaEmbeddingsRequest(protocol.RequestBody):
    """A text to embed, in the form of older clients."""

    FIELDS = ("ollama",)

    model: str
    prompt: str
    options: OllamaOptions | None = None


class OllamaModelRequest(protocol.RequestBody):
    """The name of a model."""

    model: Annotated[str, Field(validation_alias=AliasChoices("model", "name"))]
    verbose: bool | None = None


@router.get("/version")
async def version() -> Response:
    """Return the version of the server."""
    return JsonResponse({"version": __version__})


@router.get("/tags")
async def tags(service: ServiceDependency) -> Response:
    """List the base model and its adapters."""
    return JsonResponse({"models": [_describe(name, service) for name in (service.name, *service.adapters)]})


@router.get("/ps")
async def loaded_models(service: ServiceDependency) -> Response:
    """List the models in memory, which are all that are served."""
    forever = "9999-12-31T23:59:59Z"
    more = {"expires_at": forever, "size_vram": 0, "context_length": service.context_length}
    return JsonResponse({"models": [_describe(name, service) | more for name in (service.name, *service.adapters)]})


@router.post("/show")
async def show(body: OllamaModelRequest, service: ServiceDependency) -> Response:
    """Describe a model."""
    name = service.find_adapter(body.model) or service.name
    spec = service.model.spec
    template = service.chat_format.template.source if service.chat_format else ""
    capabilities = ["completion"]
    if service.chat_format is not None:
        capabilities += ["tools"]
        capabilities += ["thinking"] * ("<think>" in template or "enable_thinking" in template)
    description = _describe(name, service)
    return JsonResponse(
        {
            "modelfile": f"FROM {name}\n",
            "parameters": "",
            "template": template,
            "license": "",
            "modified_at": description["modified_at"],
            "details": description["details"],
            "model_info": {
                "general.architecture": spec.family,
                f"{spec.family}.context_length": service.context_length,
                f"{spec.family}.embedding_length": spec.hidden_size,
                f"{spec.family}.block_count": spec.num_layers,
            },
            "capabilities": capabilities,
        }
    )


def _describe(name: str, service: Service) -> dict[str, Any]:
    modified_at = datetime.fromtimestamp(service.created, UTC).isoformat()
    family = service.model.spec.family
    details = {
        "parent_model": "",
        "format": "",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }
    return {"name": name, "model": name, "modified_at": modified_at, "size": 0, "digest": "", "details": details}


@router.post("/embed")
async def embed(body: OllamaEmbedRequest, request: HttpRequest, service: ServiceDependency) -> Response:
    """Embed texts."""
    if body.dimensions not in (None, service.model.spec.hidden_size):
        raise bad_request(f"`dimensions` can only be {service.model.spec.hidden_size}", "dimensions")
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not texts:
        return JsonResponse({"model": body.model, "embeddings": []})
    handle = await _submit_texts(texts, body.model, body.truncate is not False, request, service)

    async def collect() -> Any:
        vectors = [completion.embedding for (completion,) in await handle.collect()]
        fields = _final_fields(handle, "end")
        names = ("total_duration", "load_duration", "prompt_eval_count")
        return {"model": body.model, "embeddings": vectors, **{name: fields[name] for name in names}}

    return await respond_once(request, handle, collect())


@router.post("/embeddings")
async def embed_one(body: OllamaEmbeddingsRequest, request: HttpRequest, service: ServiceDependency) -> Response:
    """Embed a text."""
    handle = await _submit_texts([body.prompt], body.model, True, request, service)

    async def collect() -> Any:
        ((completion,),) = await handle.collect()
        return {"embedding": completion.embedding}

    return await respond_once(request, handle, collect())


async def _submit_texts(
    texts: Sequence[str], model: str, truncate: bool, request: HttpRequest, service: Service
) -> RequestHandle:
    """Submit texts to embed. Texts that are too long are truncated if `truncate`, and refused otherwise."""
    limit = service.context_length - 1
    prompts = [await service.encode(text, is_truncated=truncate) for text in texts]
    if truncate:
        prompts = [prompt[:limit] for prompt in prompts]
    return await service.submit_pooling(request, prompts, model, service.settings.pooling)


def _format_part(part: ChatDelta | ChatAnswer, body: OllamaRequest, service: Service) -> dict[str, Any]:
    """Return the log-probabilities of a part of an answer, if they were requested."""
    if not body.logprobs:
        return {}
    tokens = part.tokens if isinstance(part, ChatAnswer) else [part.token]
    return {"logprobs": format_logprobs(tokens, service)}


@router.post("/chat", responses=_STREAMING_RESPONSES)
async def chat(body: OllamaChatRequest, request: HttpRequest, service: ServiceDependency) -> Response:
    """Answer a conversation."""
    if not body.messages:
        return _respond_loaded(body, {"message": {"role": "assistant", "content": ""}}, service)
    run = await start_chat(body.to_chat_request(body.messages, body.tools), request, service)
    calls: dict[int, list[str]] = {}

    def format_message(text: str, reasoning: str, tool_calls: Sequence[ToolCall]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning:
            message["thinking"] = reasoning
        if tool_calls:
            message["tool_calls"] = [
                {"function": {"index": index, "name": call.name, "arguments": _parse_arguments(call.arguments)}}
                for index, call in enumerate(tool_calls)
            ]
        return {"message": message}

    async def parts() -> AsyncIterator[tuple[dict[str, Any], FinishReason | None]]:
        async for deltas in run.deltas():
            for delta in deltas:
                # The arguments of a call are an object, so calls are sent whole.
                for fragment in delta.calls:
                    calls.setdefault(fragment.index, [fragment.name, ""])[1] += fragment.arguments
                complete = [ToolCall(*call) for call in calls.values()] if delta.finish_reason is not None else []
                fields = format_message(delta.text, delta.reasoning, complete)
                yield fields | _format_part(delta, body, service), delta.finish_reason

    if body.stream is not False:
        return _stream(body, run.handle, parts(), {"message": {"role": "assistant", "content": ""}})

    async def collect() -> Any:
        (answer,) = await run.collect()
        fields = format_message(answer.text, answer.reasoning, answer.calls) | _format_part(answer, body, service)
        return {**_head(body), **fields, **_final_fields(run.handle, answer.finish_reason)}

    return await respond_once(request, run.handle, collect())


def _parse_arguments(text: str) -> Any:
    """Return the arguments of a call as an object, as far as a call that was cut off has them."""
    return from_json(text, allow_partial=True)


def _respond_loaded(body: OllamaRequest, fields: dict[str, Any], service: Service) -> Response:
    """Answer a request that only loads the model, which is loaded already."""
    service.find_adapter(body.model)
    value = {**_head(body), **fields, "done": True, "done_reason": "load"}
    if body.stream is False:
        return JsonResponse(value)
    return Response(dump_json(value) + b"\n", media_type=_LINES)


@router.post("/generate", responses=_STREAMING_RESPONSES)
async def generate(body: OllamaGenerateRequest, request: HttpRequest, service: ServiceDependency) -> Response:
    """Answer a prompt with the chat template; with `raw`, or without a template, continue it."""
    if not body.prompt:
        return _respond_loaded(body, {"response": ""}, service)
    messages = [protocol.ChatMessage(role="system", content=body.system)] if body.system else []
    chat_request = body.to_chat_request([*messages, protocol.ChatMessage(role="user", content=body.prompt)])
    if body.raw or service.chat_format is None:
        if body.system:
            raise bad_request("`system` requires a chat template", "system")
        prompt = await service.encode(body.prompt)
        engine_request = build_engine_request(
            chat_request,
            prompt,
            service,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            max_tokens=chat_request.max_tokens or service.max_new_tokens(prompt),
            constraint=chat_request.response_format.constraint() if chat_request.response_format else None,
        )
        # A text that is continued has neither reasoning nor calls.
        run = ChatRun(await service.submit(request, [engine_request]), [(None, ToolCallParser(set()))])
    else:
        run = await start_chat(chat_request, request, service)

    def format_response(part: ChatDelta | ChatAnswer) -> dict[str, Any]:
        thinking = {"thinking": part.reasoning} if part.reasoning else {}
        return {"response": part.text, **thinking, **_format_part(part, body, service)}

    async def parts() -> AsyncIterator[tuple[dict[str, Any], FinishReason | None]]:
        async for deltas in run.deltas():
            for delta in deltas:
                yield format_response(delta), delta.finish_reason

    if body.stream is not False:
        return _stream(body, run.handle, parts(), {"response": ""})

    async def collect() -> Any:
        (answer,) = await run.collect()
        return {**_head(body), **format_response(answer), **_final_fields(run.handle, answer.finish_reason)}

    return await respond_once(request, run.handle, collect())


@router.post("/{command:path}", include_in_schema=False)
async def other_command(command: str) -> Response:
    """Refuse commands that change the models."""
    if command in ("pull", "push", "create", "copy", "blobs"):
        raise ApiError(403, "the models of this server are chosen when it starts")
    raise ApiError(404, "no such path")


def _stream(
    body: OllamaRequest,
    handle: RequestHandle,
    parts: AsyncIterator[tuple[dict[str, Any], FinishReason | None]],
    empty: dict[str, Any],
) -> EventStream:
    """Return a response that sends each part as a line of JSON; `empty` is a part without text, as a keep-alive."""

    async def lines() -> AsyncIterator[bytes]:
        async for fields, reason in parts:
            final = {"done": False} if reason is None else _final_fields(handle, reason)
            yield dump_json({**_head(body), **fields, **final}) + b"\n"

    keep_alive = dump_json({**_head(body), **empty, "done": False}) + b"\n"
    return EventStream(handle, lines(), media_type=_LINES, keep_alive=keep_alive)


def _head(body: OllamaRequest) -> dict[str, Any]:
    return {"model": body.model, "created_at": datetime.now(UTC).isoformat()}


def _final_fields(handle: RequestHandle, reason: FinishReason) -> dict[str, Any]:
    """Return the fields of the last line: the finish reason, token counts, and durations in nanoseconds."""
    stats = handle.stats
    now = time.perf_counter()
    start = stats.start_time or now
    first_token = stats.first_token_time or now
    return {
        "done": True,
        "done_reason": FINISH_REASONS[reason],
        "total_duration": _nanoseconds(now - stats.arrival_time),
        "load_duration": 0,
        "prompt_eval_count": stats.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(first_token - start),
        "eval_count": stats.generated_tokens,
        "eval_duration": _nanoseconds(now - first_token),
    }


def _nanoseconds(seconds: float) -> int:
    return max(int(seconds * 1e9), 0)
