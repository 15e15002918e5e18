"""OpenAI's Responses API, without state on the server: clients send the whole conversation with each request."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, field_validator

from jingu.chat.tool_calls import ToolCall
from jingu.infer.request import FinishReason
from jingu.serve import protocol
from jingu.serve.chat_run import ChatRun, start_chat
from jingu.serve.http_errors import bad_request
from jingu.serve.responses import STREAMING_RESPONSES, EventStream, format_event, respond_once
from jingu.serve.service import ServiceDependency

router = APIRouter(prefix="/v1", tags=["openai"], route_class=protocol.StrictRoute)


class InputPart(protocol.ContentPart):
    """A part of a message in the input, which may be a part of an earlier output."""

    HINTS = frozenset({"annotations", "logprobs"})


class InputItem(BaseModel):
    """A message, a function call or a function's result in the input. Fields that do not matter are ignored."""

    model_config = ConfigDict(strict=True)

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class FunctionTool(protocol.FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]


class FunctionChoice(protocol.FunctionName):
    """The function that the model must call."""

    type: Literal["function"]


class TextFormat(protocol.JsonSchema):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(protocol.RequestBody):
    """Options of the answer's text."""

    HINTS = frozenset({"verbosity"})

    format: TextFormat | None = None


class ResponsesRequest(protocol.RequestBody):
    """A request of OpenAI's Responses API."""

    HINTS = frozenset(
        {"include", "prompt_cache_key", "reasoning", "safety_identifier", "service_tier", "store", "stream_options"}
        | {"user"}
    )

    model: str
    input: str | list[InputItem]
    background: Literal[False] | None = None
    instructions: str | None = None
    max_output_tokens: protocol.PositiveInt | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: None = None
    stream: bool | None = None
    temperature: protocol.Temperature | None = None
    text: TextOptions | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    tools: list[FunctionTool] | None = None
    top_p: protocol.Fraction | None = None
    truncation: Literal["disabled"] | None = None

    @field_validator("metadata", "tools", mode="before")
    @classmethod
    def _check_numbers(cls, value: Any) -> Any:
        """Refuse numbers that are read as infinity, such as 1e999: the response repeats these fields, as JSON."""
        json.dumps(value, allow_nan=False)
        return value

    def to_chat_request(self) -> protocol.ChatRequest:
        """Return the conversation as a chat completion."""
        choice = self.tool_choice
        response_format = None
        if self.text is not None and self.text.format is not None:
            response_format = protocol.ResponseFormat(type=self.text.format.type, json_schema=self.text.format)
        return protocol.ChatRequest(
            model=self.model,
            messages=self._messages(),
            max_tokens=self.max_output_tokens,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=response_format,
            temperature=self.temperature,
            tool_choice=protocol.ToolChoice(function=choice) if isinstance(choice, FunctionChoice) else choice,
            tools=[protocol.ToolDefinition(type="function", function=tool) for tool in self.tools or []] or None,
            top_p=self.top_p,
        )

    def _messages(self) -> list[protocol.ChatMessage]:
        """Return the input as messages; calls that follow each other or a text of the assistant join one message."""
        messages = [protocol.ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, protocol.ChatMessage(role="user", content=self.input)]
        for index, item in enumerate(self.input):
            if item.type == "message" and item.role is not None:
                messages.append(protocol.ChatMessage(role=item.role, content=_plain_parts(item.content)))
            elif item.type == "function_call" and item.name is not None:
                call = protocol.MessageToolCall(
                    id=item.call_id, function=protocol.FunctionCall(name=item.name, arguments=item.arguments or "{}")
                )
                if not messages or messages[-1].role != "assistant":
                    messages.append(protocol.ChatMessage(role="assistant"))
                messages[-1].tool_calls = [*(messages[-1].tool_calls or []), call]
            elif item.type == "function_call_output":
                content = _plain_parts(item.output)
                messages.append(protocol.ChatMessage(role="tool", content=content, tool_call_id=item.call_id))
            elif item.type != "reasoning":
                raise bad_request(f"`input[{index}]` is of type {item.type[:40]!r}, which is not supported", "input")
        if not messages:
            raise bad_request("`input` is an empty list", "input")
        return messages


def _plain_parts(content: str | list[InputPart] | None) -> str | list[protocol.ContentPart] | None:
    """Convert the types of text parts to the one of chat completions."""
    if not isinstance(content, list):
        return content
    types = {"input_text": "text", "output_text": "text"}
    return [protocol.ContentPart(type=types.get(part.type, part.type), text=part.text) for part in content]


@router.post("/responses", responses=STREAMING_RESPONSES)
async def responses(body: ResponsesRequest, request: HttpRequest, service: ServiceDependency) -> Response:
    """Answer a conversation."""
    run = await start_chat(body.to_chat_request(), request, service)
    head = {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else "auto",
        "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or []],
        "top_p": body.top_p,
        "truncation": "disabled",
    }
    if body.stream:
        return EventStream(run.handle, _stream(run, head), named=True)

    async def collect() -> Any:
        (answer,) = await run.collect()
        output = [_format_message(_new_id("msg"), answer.text)] if answer.text.strip() or not answer.calls else []
        output += [_format_call(_new_id("fc"), call) for call in answer.calls]
        return {**head, **_final_fields(run, output, answer.finish_reason)}

    return await respond_once(request, run.handle, collect())


async def _stream(run: ChatRun, head: dict[str, Any]) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a response: first those of its text, then those of each function call."""
    number = -1

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return format_event({"type": kind, "sequence_number": number, **fields}, kind)

    started = {**head, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("response.created", response=started) + event("response.in_progress", response=started)
    output: list[dict[str, Any]] = []
    message_id = _new_id("msg")
    place = {"item_id": message_id, "output_index": 0, "content_index": 0}
    text = ""
    has_message = False
    reason: FinishReason = "length"
    async for deltas in run.deltas():
        for delta in deltas:
            # 1. Start the message with its first text. An answer without calls has a message, even an empty one.
            if not has_message and (delta.text or (delta.finish_reason and not delta.calls)):
                has_message = True
                item = {**_format_message(message_id, ""), "status": "in_progress", "content": []}
                yield event("response.output_item.added", output_index=0, item=item)
                yield event("response.content_part.added", **place, part=_format_text(""))
            if delta.text:
                text += delta.text
                yield event("response.output_text.delta", **place, delta=delta.text, logprobs=[])
            if delta.finish_reason is None:
                continue
            # 2. At the end, complete the message and send the function calls.
            reason = delta.finish_reason
            if has_message:
                output.append(_format_message(message_id, text))
                yield event("response.output_text.done", **place, text=text, logprobs=[])
                yield event("response.content_part.done", **place, part=_format_text(text))
                yield event("response.output_item.done", output_index=0, item=output[0])
            for call in delta.calls:
                item = _format_call(_new_id("fc"), call)
                call_place = {"item_id": item["id"], "output_index": len(output)}
                output.append(item)
                pending = {**item, "arguments": "", "status": "in_progress"}
                yield event("response.output_item.added", output_index=len(output) - 1, item=pending)
                yield event("response.function_call_arguments.delta", **call_place, delta=call.arguments)
                yield event(
                    "response.function_call_arguments.done", **call_place, name=call.name, arguments=call.arguments
                )
                yield event("response.output_item.done", output_index=len(output) - 1, item=item)
    final = {**head, **_final_fields(run, output, reason)}
    yield event(f"response.{final['status']}", response=final)


def _final_fields(run: ChatRun, output: list[dict[str, Any]], reason: FinishReason) -> dict[str, Any]:
    """Return the last fields of a response, whose status is incomplete if it reached the limit of tokens."""
    stats = run.handle.stats
    is_cut = reason == "length"
    return {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output,
        "usage": {
            "input_tokens": stats.prompt_tokens,
            "input_tokens_details": {"cached_tokens": stats.cached_tokens},
            "output_tokens": stats.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        },
    }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def _format_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _format_message(item_id: str, text: str) -> dict[str, Any]:
    return {
        "type": "message",
        "id": item_id,
        "status": "completed",
        "role": "assistant",
        "content": [_format_text(text)],
    }


def _format_call(item_id: str, call: ToolCall) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": item_id,
        "call_id": _new_id("call"),
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }
