"""Anthropic's Messages API."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field

from jingu.chat.tool_calls import ToolCall
from jingu.infer.request import FinishReason
from jingu.serve import protocol
from jingu.serve.chat_run import ChatRun, encode_conversation, start_chat
from jingu.serve.http_errors import bad_request
from jingu.serve.responses import STREAMING_RESPONSES, EventStream, JsonResponse, format_event, respond_once
from jingu.serve.service import ServiceDependency

router = APIRouter(prefix="/v1", tags=["anthropic"], route_class=protocol.StrictRoute)


class ContentBlock(protocol.RequestBody):
    """A block of a message: text, a tool call or a tool's result. Others are refused by their type."""

    HINTS = frozenset({"cache_control", "citations", "is_error", "signature", "source", "thinking"})

    type: str
    content: str | list[ContentBlock] | None = None
    id: str | None = None
    input: dict[str, Any] | None = None
    name: str | None = None
    text: str | None = None
    tool_use_id: str | None = None


class AnthropicMessage(protocol.RequestBody):
    """A message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | list[ContentBlock]


class AnthropicTool(protocol.RequestBody):
    """A tool that the model may call."""

    HINTS = frozenset({"cache_control", "strict"})

    name: Annotated[str, Field(min_length=1, max_length=128)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class AnthropicToolChoice(protocol.RequestBody):
    """Whether the model must call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    disable_parallel_tool_use: bool | None = None
    name: str | None = None


class Thinking(protocol.RequestBody):
    """Extended thinking, which is not supported."""

    type: Literal["disabled"]


class TokenCountRequest(protocol.RequestBody):
    """A conversation whose tokens are counted."""

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
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
        return protocol.ChatRequest(
            model=self.model,
            messages=messages,
            continue_final_message=last.role == "assistant" and not last.tool_calls,
            tools=[protocol.ToolDefinition(type="function", function=tool) for tool in tools] or None,
            tool_choice=_convert_tool_choice(self.tool_choice),
            parallel_tool_calls=not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            **fields,
        )


class MessagesRequest(TokenCountRequest):
    """A request of Anthropic's Messages API."""

    HINTS = frozenset({"metadata", "service_tier"})

    max_tokens: protocol.PositiveInt
    stop_sequences: protocol.StopStrings | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: protocol.PositiveInt | None = None
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
    converted = []
    texts = []
    calls = []
    for block in message.content:
        if block.type == "tool_use" and block.name is not None:
            call = protocol.FunctionCall(name=block.name, arguments=block.input or {})
            calls.append(protocol.MessageToolCall(id=block.id, function=call))
        elif block.type == "tool_result":
            content = _join_text(block.content)
            converted.append(protocol.ChatMessage(role="tool", content=content, tool_call_id=block.tool_use_id))
        elif block.type != "thinking":
            texts.append(block)
    if texts or calls:
        text = _join_text(texts)
        converted.append(
            protocol.ChatMessage(role=message.role, content=text if texts else None, tool_calls=calls or None)
        )
    return converted


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
        top_k=body.top_k,
        top_p=body.top_p,
    )
    run = await start_chat(chat_request, request, service)
    head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": body.model}
    if body.stream:
        keep_alive = format_event({"type": "ping"}, "ping")
        return EventStream(run.handle, _stream(run, body, head), named=True, keep_alive=keep_alive)

    async def collect() -> Any:
        (answer,) = await run.collect()
        content: list[dict[str, Any]] = []
        if answer.text.strip() or not answer.calls:
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
    """Yield the server-sent events of an answer: first those of its text, then those of each tool call."""

    def event(kind: str, **fields: Any) -> bytes:
        return format_event({"type": kind, **fields}, kind)

    empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _format_usage(run)}
    yield event("message_start", message={**head, **empty})
    # Number of content blocks so far. The text, if there is any, is the first block.
    num_blocks = 0
    async for deltas in run.deltas():
        for delta in deltas:
            # 1. Start the text block with the first text; an answer without tool calls has one, even if it is empty.
            if num_blocks == 0 and (delta.text or (delta.finish_reason and not delta.calls)):
                num_blocks = 1
                yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
            if delta.text:
                yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": delta.text})
            if delta.finish_reason is None:
                continue
            # 2. At the end, close the text block, send each tool call as a block, and report why the answer ended.
            if num_blocks:
                yield event("content_block_stop", index=0)
            for index, call in enumerate(delta.calls, num_blocks):
                yield event("content_block_start", index=index, content_block={**_tool_use(call), "input": {}})
                arguments = {"type": "input_json_delta", "partial_json": call.arguments}
                yield event("content_block_delta", index=index, delta=arguments)
                yield event("content_block_stop", index=index)
            stop = _stop_fields(body, delta.finish_reason, bool(delta.calls))
            yield event("message_delta", delta=stop, usage=_format_usage(run))
    yield event("message_stop")


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": call.name}


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
