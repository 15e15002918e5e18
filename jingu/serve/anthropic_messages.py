"""Anthropic's Messages API."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field, model_validator

from jingu.chat.tool_calls import ToolCall
from jingu.infer.request import FinishReason
from jingu.serve import protocol
from jingu.serve.chat_run import ChatRun, encode_conversation, start_chat
from jingu.serve.http_errors import bad_request
from jingu.serve.responses import STREAMING_RESPONSES, EventStream, JsonResponse, format_event, respond_once
from jingu.serve.service import ServiceDependency

router = APIRouter(prefix="/v1", tags=["anthropic"], route_class=protocol.StrictRoute)


class ContentBlock(protocol.RequestBody):
    """A block of a message: text, reasoning, a tool call or a tool's result. Others are refused by their type."""

    FIELDS = ("messages block",)

    type: str
    content: str | list[ContentBlock] | None = None
    id: str | None = None
    input: dict[str, Any] | None = None
    name: str | None = None
    text: str | None = None
    thinking: str | None = None
    tool_use_id: str | None = None


class AnthropicMessage(protocol.RequestBody):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(protocol.RequestBody):
    """A tool that the model may call."""

    FIELDS = ("messages tool",)

    name: Annotated[str, Field(min_length=1, max_length=128)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        """Refuse tools that Anthropic's servers run, such as web_search, by their type."""
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in (None, "custom"):
            raise bad_request(f"a tool of type {str(kind)[:40]!r} would run on the server, which runs none", "tools")
        return value


class AnthropicToolChoice(protocol.RequestBody):
    """Whether the model must call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    disable_parallel_tool_use: bool | None = None
    name: str | None = None


class Thinking(protocol.RequestBody):
    """Whether the model reasons before it answers."""

    FIELDS = ("messages thinking",)

    type: Literal["disabled", "enabled", "adaptive"]

    @property
    def is_enabled(self) -> bool | None:
        """Whether the model reasons; None: it decides, as its template has it."""
        return {"disabled": False, "enabled": True, "adaptive": None}[self.type]


class OutputFormat(protocol.RequestBody):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(protocol.RequestBody):
    """How much the model reasons, and the form of the answer."""

    FIELDS = ("messages output",)

    effort: str | None = None
    format: OutputFormat | None = None


class ContextEdit(protocol.RequestBody):
    """A change of the conversation. Templates leave out earlier reasoning on their own; other changes are refused."""

    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class ContextManagement(protocol.RequestBody):
    """Changes of the conversation before the model sees it."""

    edits: list[ContextEdit] | None = None


class TokenCountRequest(protocol.RequestBody):
    """A conversation whose tokens are counted."""

    FIELDS = ("messages",)

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    context_management: ContextManagement | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    system: str | list[ContentBlock] | None = None
    thinking: Thinking | None = None
    tool_choice: AnthropicToolChoice | None = None
    tools: list[AnthropicTool] | None = None

    def to_chat_request(self, **fields: Any) -> protocol.ChatRequest:
        """Return the conversation as a chat completion, with further fields of it.

        A text of the assistant at the end is the beginning of the answer.
        """
        messages = []
        if self.system:
            messages.append(protocol.ChatMessage(role="system", content=_join_text(self.system)))
        for message in self.messages:
            messages += _convert_message(message)
        if not messages:
            raise bad_request("`messages` have no content", "messages")
        tools = [
            protocol.FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.input_schema)
            for tool in self.tools or []
        ]
        last = messages[-1]
        config = self.output_config or OutputConfig()
        form = config.format or self.output_format
        if form is not None:
            schema = protocol.JsonSchema.model_validate({"schema": form.schema_})
            fields["response_format"] = protocol.ResponseFormat(type="json_schema", json_schema=schema)
        return protocol.ChatRequest(
            model=self.model,
            messages=messages,
            continue_final_message=last.role == "assistant" and not last.tool_calls,
            enable_thinking=self.thinking.is_enabled if self.thinking else None,
            reasoning_effort=config.effort,
            tools=[protocol.ToolDefinition(type="function", function=tool) for tool in tools] or None,
            tool_choice=_convert_tool_choice(self.tool_choice),
            parallel_tool_calls=not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            **fields,
        )


class MessagesRequest(TokenCountRequest, protocol.VllmChatFields):
    """A request of Anthropic's Messages API, with vLLM's further fields."""

    max_tokens: protocol.PositiveInt
    stop_sequences: protocol.StopStrings | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: protocol.Fraction | None = None


def _join_text(content: str | list[ContentBlock] | None) -> str:
    """Return the text of content. Raise ApiError if a block is not text."""
    if isinstance(content, list):
        for block in content:
            if block.type != "text" or block.text is None:
                raise bad_request(f"a block of type {block.type[:40]!r} is not supported", "messages")
        return "".join(block.text or "" for block in content)
    return content or ""


def _convert_message(message: AnthropicMessage) -> list[protocol.ChatMessage]:
    """Convert a message to the form of chat completions, in which each tool result is a message of its own."""
    if isinstance(message.content, str):
        return [protocol.ChatMessage(role=message.role, content=message.content)]
    new_messages = []
    texts = []
    calls = []
    reasoning = []
    for block in message.content:
        if block.type == "tool_use" and block.name is not None:
            call = protocol.FunctionCall(name=block.name, arguments=block.input or {})
            calls.append(protocol.MessageToolCall(id=block.id, function=call))
        elif block.type == "tool_result":
            content = _join_text(block.content)
            new_messages.append(protocol.ChatMessage(role="tool", content=content, tool_call_id=block.tool_use_id))
        elif block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            texts.append(block)
    if texts or calls:
        new_messages.append(
            protocol.ChatMessage(
                role=message.role,
                content=_join_text(texts) if texts else None,
                reasoning_content="\n".join(filter(None, reasoning)) or None,
                tool_calls=calls or None,
            )
        )
    return new_messages


def _convert_tool_choice(choice: AnthropicToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type == "tool":
        return protocol.ToolChoice(function=protocol.FunctionName(name=choice.name or ""))
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


@router.post("/messages", responses=STREAMING_RESPONSES)
async def messages(body: MessagesRequest, request: HttpRequest, service: ServiceDependency) -> Response:
    """Answer a conversation."""
    chat_request = body.to_chat_request(
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        **body.chat_fields(),
    )
    run = await start_chat(chat_request, request, service)
    head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": body.model}
    if body.stream:
        keep_alive = format_event({"type": "ping"}, "ping")
        return EventStream(run.handle, _stream(run, body, head), named=True, keep_alive=keep_alive)

    async def collect() -> Any:
        (answer,) = await run.collect()
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.text.strip() or not (answer.calls or answer.reasoning):
            content.append({"type": "text", "text": answer.text})
        content += [{**_tool_use(call), "input": json.loads(call.arguments)} for call in answer.calls]
        stop = _stop_fields(body, answer.finish_reason, bool(answer.calls))
        return {**head, "content": content, **stop, "usage": _format_usage(run)}

    return await respond_once(request, run.handle, collect())


@router.post("/messages/count_tokens")
async def count_tokens(body: TokenCountRequest, service: ServiceDependency) -> Response:
    """Count the tokens of a conversation."""
    return JsonResponse({"input_tokens": len(await encode_conversation(body.to_chat_request(), service))})


async def _stream(run: ChatRun, body: MessagesRequest, head: dict[str, Any]) -> AsyncIterator[bytes]:
    """Yield the server-sent events of an answer. Its blocks (reasoning, text, tool calls) follow each other."""

    def event(kind: str, **fields: Any) -> bytes:
        return format_event({"type": kind, **fields}, kind)

    empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _format_usage(run)}
    yield event("message_start", message={**head, **empty})
    blocks = _Blocks()
    async for deltas in run.deltas():
        for delta in deltas:
            parts = [("thinking", "", delta.reasoning), ("text", "", delta.text)] if delta.reasoning else []
            parts = parts or [("text", "", delta.text)]
            parts += [("tool_use", call.name, call.arguments) for call in delta.calls]
            events = [entry for kind, name, text in parts for entry in blocks.add(kind, name, text)]
            if delta.finish_reason is not None:
                events += blocks.finish()
            for fields in events:
                yield event(**fields)
            if delta.finish_reason is not None:
                stop = _stop_fields(body, delta.finish_reason, blocks.has_calls)
                yield event("message_delta", delta=stop, usage=_format_usage(run))
    yield event("message_stop")


class _Blocks:
    """The content blocks of a streamed answer.

    Attributes:
        has_calls: whether any block is a tool call.
    """

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""
        self.has_calls = False

    def add(self, kind: str, name: str, text: str) -> list[dict[str, Any]]:
        """Return the events of a new piece of the answer.

        Args:
            kind: thinking, text or tool_use.
            name: the called tool at the beginning of a call; empty otherwise.
        """
        events = []
        # White space between calls is no text of its own.
        if not text or (kind == "text" and self.has_calls and not text.strip()):
            return []
        if kind != self._kind or name:
            events += self._start(kind, name)
        delta = {
            "thinking": {"type": "thinking_delta", "thinking": text},
            "text": {"type": "text_delta", "text": text},
            "tool_use": {"type": "input_json_delta", "partial_json": text},
        }[kind]
        return [*events, {"kind": "content_block_delta", "index": self._index, "delta": delta}]

    def finish(self) -> list[dict[str, Any]]:
        """Return the events at the end of an answer. One without any content has an empty text."""
        start = self._start("text", "") if self._index < 0 else []
        return [*start, *self._stop()]

    def _start(self, kind: str, name: str) -> list[dict[str, Any]]:
        stop = self._stop()
        self._index += 1
        self._kind = kind
        self.has_calls = self.has_calls or kind == "tool_use"
        block = {
            "thinking": {"type": "thinking", "thinking": "", "signature": ""},
            "text": {"type": "text", "text": ""},
            "tool_use": {"type": "tool_use", "id": _new_tool_id(), "name": name, "input": {}},
        }[kind]
        return [*stop, {"kind": "content_block_start", "index": self._index, "content_block": block}]

    def _stop(self) -> list[dict[str, Any]]:
        if self._index < 0:
            return []
        events: list[dict[str, Any]] = [{"kind": "content_block_stop", "index": self._index}]
        if self._kind == "thinking":
            signature = {"type": "signature_delta", "signature": ""}
            events.insert(0, {"kind": "content_block_delta", "index": self._index, "delta": signature})
        return events


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": _new_tool_id(), "name": call.name}


def _new_tool_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"


def _stop_fields(body: MessagesRequest, reason: FinishReason, has_calls: bool) -> dict[str, Any]:
    """Return why an answer ended. The engine does not report which of several stop sequences ended it."""
    sequences = body.stop_sequences or []
    if reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if has_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if reason == "stop" and sequences:
        return {"stop_reason": "stop_sequence", "stop_sequence": sequences[0] if len(sequences) == 1 else None}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _format_usage(run: ChatRun) -> dict[str, Any]:
    stats = run.handle.stats
    return {
        "input_tokens": stats.prompt_tokens - stats.cached_tokens,
        "cache_read_input_tokens": stats.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": stats.generated_tokens,
    }
