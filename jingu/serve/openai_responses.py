"""OpenAI's Responses API, without state on the server: clients send the whole conversation with each request."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import BaseModel, Field, field_validator, model_validator

from jingu.chat.tool_calls import ToolCall
from jingu.infer.request import FinishReason
from jingu.serve import protocol
from jingu.serve.chat_run import ChatRun, start_chat
from jingu.serve.http_errors import bad_request
from jingu.serve.openai_chat import format_logprobs
from jingu.serve.responses import STREAMING_RESPONSES, EventStream, format_event, respond_once
from jingu.serve.service import Service, ServiceDependency

router = APIRouter(prefix="/v1", tags=["openai"], route_class=protocol.StrictRoute)


class InputPart(protocol.ContentPart):
    """A part of a message in the input, which may be a part of an earlier output."""

    FIELDS = ("responses part",)


class InputItem(protocol.RequestBody):
    """A message, reasoning, a function call or a function's result in the input."""

    FIELDS = ("responses item",)

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class FunctionTool(protocol.FunctionDefinition):
    """A function that the model may call."""

    FIELDS = ("responses tool",)

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        return protocol.check_function_type(value)


class FunctionChoice(protocol.FunctionName):
    """The function that the model must call."""

    type: Literal["function"]


class AllowedFunctions(protocol.RequestBody):
    """The functions that the model may call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1)]


class TextFormat(protocol.JsonSchema):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(protocol.RequestBody):
    """Options of the answer's text."""

    FIELDS = ("responses text",)

    format: TextFormat | None = None


class Reasoning(protocol.RequestBody):
    """How much the model reasons."""

    FIELDS = ("responses reasoning",)

    effort: str | None = None


class ResponsesRequest(protocol.VllmChatFields):
    """A request of OpenAI's Responses API, with vLLM's further fields."""

    FIELDS = ("responses",)

    model: str
    input: str | list[InputItem]
    include: list[str] | None = None
    instructions: str | None = None
    max_output_tokens: protocol.PositiveInt | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    stop: protocol.StopString | protocol.StopStrings | None = None
    stream: bool | None = None
    temperature: protocol.Temperature | None = None
    text: TextOptions | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedFunctions | None = None
    tools: list[FunctionTool] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    top_p: protocol.Fraction | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    @field_validator("metadata", "tools", mode="before")
    @classmethod
    def _check_numbers(cls, value: Any) -> Any:
        """Refuse numbers that are read as infinity, such as 1e999: the response repeats these fields, as JSON."""
        json.dumps(value, allow_nan=False)
        return value

    def to_chat_request(self) -> protocol.ChatRequest:
        """Return the conversation as a chat completion."""
        response_format = None
        if self.text is not None and self.text.format is not None:
            response_format = protocol.ResponseFormat(type=self.text.format.type, json_schema=self.text.format)
        return protocol.ChatRequest(
            model=self.model,
            messages=self._messages(),
            logprobs=self.has_logprobs or None,
            top_logprobs=self.top_logprobs,
            max_tokens=self.max_output_tokens,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            stop=self.stop,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=response_format,
            temperature=self.temperature,
            tool_choice=self._tool_choice(),
            tools=[protocol.ToolDefinition(type="function", function=tool) for tool in self.tools or []] or None,
            top_p=self.top_p,
            **self.chat_fields(),
        )

    def _tool_choice(self) -> Any:
        """Return the choice of tools in the form of chat completions."""
        choice = self.tool_choice
        if isinstance(choice, FunctionChoice):
            return protocol.ToolChoice(function=protocol.FunctionName(name=choice.name))
        if isinstance(choice, AllowedFunctions):
            tools = [protocol.ToolChoice(function=protocol.FunctionName(name=tool.name)) for tool in choice.tools]
            return protocol.AllowedToolsChoice(
                type="allowed_tools", allowed_tools=protocol.AllowedTools(mode=choice.mode, tools=tools)
            )
        return choice

    def _messages(self) -> list[protocol.ChatMessage]:
        """Return the input as messages; calls that follow each other or a text of the assistant join one message."""
        messages = [protocol.ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, protocol.ChatMessage(role="user", content=self.input)]
        reasoning: str | None = None
        for index, item in enumerate(self.input):
            if item.type == "reasoning":
                parts = item.content if isinstance(item.content, list) else []
                reasoning = "".join(part.text or "" for part in parts) or None
                continue
            if item.type == "message" and item.role is not None:
                content = _plain_parts(item.content)
                if item.role != "assistant":
                    reasoning = None
                messages.append(protocol.ChatMessage(role=item.role, content=content, reasoning_content=reasoning))
            elif item.type == "function_call" and item.name is not None:
                call = protocol.MessageToolCall(
                    id=item.call_id, function=protocol.FunctionCall(name=item.name, arguments=item.arguments or "{}")
                )
                if not messages or messages[-1].role != "assistant":
                    messages.append(protocol.ChatMessage(role="assistant", reasoning_content=reasoning))
                messages[-1].tool_calls = [*(messages[-1].tool_calls or []), call]
            elif item.type == "function_call_output":
                content = _plain_parts(item.output)
                messages.append(protocol.ChatMessage(role="tool", content=content, tool_call_id=item.call_id))
            else:
                raise bad_request(f"`input[{index}]` is of type {item.type[:40]!r}, which is not supported", "input")
            reasoning = None
        if not messages:
            raise bad_request("`input` has no message", "input")
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
    chat_request = body.to_chat_request()
    run = await start_chat(chat_request, request, service)
    sampling = run.handle.requests[0].sampling
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
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "temperature": sampling.temperature,
        "text": {"format": _echo(body.text.format) if body.text and body.text.format else {"type": "text"}},
        "tool_choice": body.tool_choice if isinstance(body.tool_choice, str | None) else _echo(body.tool_choice),
        "tools": [_echo(tool) for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
    }
    if body.stream:
        return EventStream(run.handle, _stream(run, head, service, body.has_logprobs), named=True)

    async def collect() -> Any:
        (answer,) = await run.collect()
        output = [_format_reasoning(_new_id("rs"), answer.reasoning)] if answer.reasoning else []
        if answer.text.strip() or not (answer.calls or answer.reasoning):
            logprobs = format_logprobs(answer.tokens, service) if body.has_logprobs else []
            output.append(_format_message(_new_id("msg"), answer.text, logprobs))
        output += [_format_call(_new_id("fc"), call) for call in answer.calls]
        return {**head, **_final_fields(run, output, answer.finish_reason)}

    return await respond_once(request, run.handle, collect())


async def _stream(run: ChatRun, head: dict[str, Any], service: Service, has_logprobs: bool) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a response. Its items (reasoning, message, function calls) follow each other."""
    number = -1

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return format_event({"type": kind, "sequence_number": number, **fields}, kind)

    response = {**head, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("response.created", response=response) + event("response.in_progress", response=response)
    items = _Items()
    reason: FinishReason = "length"
    async for deltas in run.deltas():
        for delta in deltas:
            logprobs = format_logprobs([delta.token], service) if has_logprobs else []
            events = items.add("reasoning", "", delta.reasoning)
            events += items.add("message", "", delta.text, logprobs if delta.text or not delta.reasoning else [])
            events += [entry for call in delta.calls for entry in items.add("call", call.name, call.arguments)]
            if delta.finish_reason is not None:
                reason = delta.finish_reason
                events += items.finish()
            for kind, fields in events:
                yield event(f"response.{kind}", **fields)
    final = {**head, **_final_fields(run, items.output, reason)}
    yield event(f"response.{final['status']}", response=final)


class _Items:
    """The items of a streamed response.

    Attributes:
        output: the items that are complete.
    """

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._kind = ""
        self._id = ""
        self._call: ToolCall | None = None
        self._call_id = ""
        self._text = ""
        self._logprobs: list[Any] = []

    def add(self, kind: str, name: str, text: str, logprobs: Sequence[Any] = ()) -> list[tuple[str, dict[str, Any]]]:
        """Return the events of a new piece of the answer, each with its fields.

        Args:
            kind: reasoning, message or call.
            name: the called function at the beginning of a call; empty otherwise.
        """
        self._logprobs += logprobs
        # White space between calls is no message of its own.
        if not text or (kind == "message" and self._call is not None and not text.strip()):
            return []
        events = self._start(kind, name) if kind != self._kind or name else []
        self._text += text
        deltas = {
            "reasoning": ("reasoning_text.delta", {**self._place(), "delta": text}),
            "message": ("output_text.delta", {**self._place(), "delta": text, "logprobs": list(logprobs)}),
            "call": ("function_call_arguments.delta", {**self._item_place(), "delta": text}),
        }
        return [*events, deltas[kind]]

    def finish(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the events at the end of an answer. One without any content has an empty message."""
        start = [] if self._kind else self._start("message", "")
        return [*start, *self._stop()]

    def _item_place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self.output)}

    def _place(self) -> dict[str, Any]:
        return {**self._item_place(), "content_index": 0}

    def _start(self, kind: str, name: str) -> list[tuple[str, dict[str, Any]]]:
        events = self._stop()
        self._kind = kind
        self._text = ""
        self._id = _new_id({"reasoning": "rs", "message": "msg", "call": "fc"}[kind])
        if kind == "call":
            self._call = ToolCall(name, "")
            self._call_id = _new_id("call")
        item = {**self._format(), "status": "in_progress"}
        if kind != "call":
            item["content"] = []
        events.append(("output_item.added", {"output_index": len(self.output), "item": item}))
        if kind != "call":
            part = _format_text("") if kind == "message" else {"type": "reasoning_text", "text": ""}
            events.append(("content_part.added", {**self._place(), "part": part}))
        return events

    def _stop(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the events that complete the current item, and add it to the output."""
        if not self._kind:
            return []
        item = self._format()
        events: list[tuple[str, dict[str, Any]]] = []
        if self._kind == "call":
            payload = {**self._item_place(), "name": item["name"], "arguments": self._text}
            events.append(("function_call_arguments.done", payload))
        else:
            (part,) = item["content"]
            kind = "output_text.done" if self._kind == "message" else "reasoning_text.done"
            more = {"logprobs": part["logprobs"]} if self._kind == "message" else {}
            events.append((kind, {**self._place(), "text": self._text, **more}))
            events.append(("content_part.done", {**self._place(), "part": part}))
        events.append(("output_item.done", {"output_index": len(self.output), "item": item}))
        self.output.append(item)
        self._kind = ""
        return events

    def _format(self) -> dict[str, Any]:
        """Return the current item."""
        if self._kind == "reasoning":
            return _format_reasoning(self._id, self._text)
        if self._kind == "message":
            return _format_message(self._id, self._text, self._logprobs)
        assert self._call is not None
        call = ToolCall(self._call.name, self._text)
        return {**_format_call(self._id, call), "call_id": self._call_id}


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
            "output_tokens_details": {"reasoning_tokens": stats.reasoning_tokens},
            "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        },
    }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def _echo(value: BaseModel) -> dict[str, Any]:
    """Return a part of the request as the response repeats it."""
    return value.model_dump(exclude_none=True, by_alias=True)


def _format_text(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _format_reasoning(item_id: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": item_id, "summary": [], "content": content, "status": "completed"}


def _format_message(item_id: str, text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {
        "type": "message",
        "id": item_id,
        "status": "completed",
        "role": "assistant",
        "content": [_format_text(text, logprobs)],
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
