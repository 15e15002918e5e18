"""Ollama's API: chat, generate, and the list of models. Streams are lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field

from jingu import __version__
from jingu.infer.request import FinishReason
from jingu.serve import protocol
from jingu.serve.async_engine import RequestHandle
from jingu.serve.chat_run import ChatAnswer, ChatDelta, start_chat
from jingu.serve.http_errors import bad_request
from jingu.serve.openai import FINISH_REASONS, build_engine_request
from jingu.serve.responses import EventStream, JsonResponse, dump_json, respond_once
from jingu.serve.service import ServiceDependency

router = APIRouter(prefix="/api", tags=["ollama"], route_class=protocol.StrictRoute)
_LINES = "application/x-ndjson"
_STREAMING_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "one JSON value, or one in each line", "content": {_LINES: {}}}
}


class OllamaOptions(protocol.RequestBody):
    """Sampling parameters. Options of the machine, such as `num_thread`, are accepted and ignored."""

    HINTS = frozenset(
        {"low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread"}
        | {"numa", "use_mlock", "use_mmap"}
    )

    frequency_penalty: protocol.Penalty | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    num_predict: Annotated[int, Field(lt=2**31)] | None = None
    presence_penalty: protocol.Penalty | None = None
    repeat_penalty: protocol.RepetitionPenalty | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: protocol.StopStrings | None = None
    temperature: protocol.Temperature | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top_p: protocol.Fraction | None = None

    def chat_fields(self) -> dict[str, Any]:
        """Return the corresponding fields of a chat completion."""
        names = ("frequency_penalty", "min_p", "presence_penalty", "seed", "stop", "temperature", "top_k", "top_p")
        fields = {name: getattr(self, name) for name in names}
        fields["repetition_penalty"] = self.repeat_penalty
        # A negative number means no limit.
        fields["max_tokens"] = self.num_predict if self.num_predict is not None and self.num_predict > 0 else None
        return fields


class OllamaMessage(protocol.ChatMessage):
    """A message of a conversation, in which some fields have other names than in a chat completion."""

    content: str | None = None
    images: None = None
    name: Annotated[str | None, Field(alias="tool_name")] = None
    reasoning_content: Annotated[str | None, Field(alias="thinking")] = None


class OllamaRequest(protocol.RequestBody):
    """The fields that chat and generate share."""

    HINTS = frozenset({"keep_alive"})

    model: str
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    stream: bool | None = None
    think: Literal[False] | None = None

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
        fields = (self.options or OllamaOptions()).chat_fields()
        return protocol.ChatRequest(
            model=self.model, messages=list(messages), tools=tools, response_format=response_format, **fields
        )


class OllamaChatRequest(OllamaRequest):
    """A conversation to answer."""

    messages: Annotated[list[OllamaMessage], Field(min_length=1)]
    tools: list[protocol.ToolDefinition] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """A prompt to answer, or with `raw` to continue."""

    prompt: str
    images: None = None
    raw: bool | None = None
    suffix: Literal[""] | None = None
    system: str | None = None


@router.get("/version")
async def version() -> Response:
    """Return the version of the server."""
    return JsonResponse({"version": __version__})


@router.get("/tags")
async def tags(service: ServiceDependency) -> Response:
    """List the base model and its adapters."""
    modified = datetime.fromtimestamp(service.created, UTC).isoformat()
    details = {"format": "", "family": service.model.spec.family, "parameter_size": "", "quantization_level": ""}
    models = [
        {"name": name, "model": name, "modified_at": modified, "size": 0, "digest": "", "details": details}
        for name in (service.name, *service.adapters)
    ]
    return JsonResponse({"models": models})


@router.post("/chat", responses=_STREAMING_RESPONSES)
async def chat(body: OllamaChatRequest, request: HttpRequest, service: ServiceDependency) -> Response:
    """Answer a conversation."""
    run = await start_chat(body.to_chat_request(body.messages, body.tools), request, service)

    def format_part(part: ChatDelta | ChatAnswer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": part.text}
        if part.reasoning:
            message["thinking"] = part.reasoning
        if part.calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": json.loads(call.arguments)}} for call in part.calls
            ]
        return {"message": message}

    async def parts() -> AsyncIterator[tuple[dict[str, Any], FinishReason | None]]:
        async for deltas in run.deltas():
            for delta in deltas:
                yield format_part(delta), delta.finish_reason

    if body.stream is not False:
        return _stream(body, run.handle, parts(), {"message": {"role": "assistant", "content": ""}})

    async def collect() -> Any:
        (answer,) = await run.collect()
        fields = format_part(answer)
        return {**_head(body), **fields, **_final_fields(run.handle, answer.finish_reason)}

    return await respond_once(request, run.handle, collect())


@router.post("/generate", responses=_STREAMING_RESPONSES)
async def generate(body: OllamaGenerateRequest, request: HttpRequest, service: ServiceDependency) -> Response:
    """Answer a prompt with the chat template; with `raw`, or without a template, continue it."""
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
            max_tokens=chat_request.max_tokens or service.max_new_tokens(prompt),
            constraint=chat_request.response_format.constraint() if chat_request.response_format else None,
        )
        handle = await service.submit(request, [engine_request])
    else:
        handle = (await start_chat(chat_request, request, service)).handle

    async def parts() -> AsyncIterator[tuple[dict[str, Any], FinishReason | None]]:
        async for batch in handle.batches():
            for _, event in batch:
                if event.token is not None:
                    yield {"response": event.token.text}, event.finish_reason

    if body.stream is not False:
        return _stream(body, handle, parts(), {"response": ""})

    async def collect() -> Any:
        ((completion,),) = await handle.collect()
        fields = {"response": completion.text}
        return {**_head(body), **fields, **_final_fields(handle, completion.finish_reason)}

    return await respond_once(request, handle, collect())


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
    return int(seconds * 1e9)
