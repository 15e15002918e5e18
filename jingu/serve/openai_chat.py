"""OpenAI's chat completions: the chat template, tools, and the form of the answer."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from jingu.chat.messages import ConversationError, JsonObject, Message
from jingu.chat.tool_calls import ToolCall, ToolCallParser
from jingu.errors import JinguError
from jingu.infer.request import Constraint, Event, FinishReason, Token
from jingu.serve.async_engine import Completion, RequestHandle
from jingu.serve.http_errors import bad_request
from jingu.serve.openai import FINISH_REASONS, build_engine_request, format_usage, stream_chunks
from jingu.serve.protocol import ChatMessage, ChatRequest, FunctionDefinition, StrictRoute, ToolChoice
from jingu.serve.responses import STREAMING_RESPONSES, EventStream, respond_once
from jingu.serve.service import Service, ServiceDependency, run_off_loop

router = APIRouter(prefix="/v1", tags=["openai"], route_class=StrictRoute)


@router.post("/chat/completions", responses=STREAMING_RESPONSES)
async def chat_completions(body: ChatRequest, request: HttpRequest, service: ServiceDependency) -> Response:
    """Answer a conversation."""
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise bad_request("`max_tokens` and `max_completion_tokens` mean the same; send only one", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("`top_logprobs` requires `logprobs`: true", "top_logprobs")
    # Tools restrict the answer by a constraint, and so does a response format.
    names = {function.name for function in allowed_functions(body)}
    forced_name, tool_constraint = forced_function(body)
    format_constraint = body.response_format.constraint() if body.response_format else None
    if format_constraint is not None and names:
        raise bad_request("`response_format` and `tools` cannot be combined", "response_format")
    prompt = await _encode_prompt(body, service)
    engine_request = build_engine_request(
        body,
        prompt,
        service,
        n=body.n or 1,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        max_tokens=body.max_tokens or body.max_completion_tokens or service.max_new_tokens(prompt),
        constraint=tool_constraint or format_constraint,
        stop=service.chat_format.stop if service.chat_format else (),
    )
    try:
        handle = await service.submit(request, [engine_request])
    except JinguError as error:
        # The constraint is made of the tools' parameters, so these are at fault.
        if tool_constraint is not None and error.where == "constraint":
            raise JinguError(error.what, where="tools", fix=error.fix) from error
        raise
    # Each choice has a parser of its own, since choices are streamed in turns.
    parsers = [
        ToolCallParser(names, forced_name, tool_constraint is not None, body.parallel_tool_calls is not False)
        for _ in range(body.n or 1)
    ]
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": body.model}
    if body.stream:
        head["object"] = "chat.completion.chunk"
        return EventStream(handle, _stream(handle, body, head, parsers, service))

    async def collect() -> Any:
        (answers,) = await handle.collect()
        choices = [_format_choice(index, answer, parsers[index], body, service) for index, answer in enumerate(answers)]
        return {**head, "object": "chat.completion", "choices": choices, "usage": format_usage(handle.stats)}

    return await respond_once(request, handle, collect())


async def _encode_prompt(body: ChatRequest, service: Service) -> tuple[int, ...]:
    """Return the token ids of a conversation."""
    chat_format = service.chat_format
    if chat_format is None:
        raise bad_request(
            "the model has no chat template: use /v1/completions, or start the server with --template", "messages"
        )
    if body.tool_prompt:
        raise bad_request("`tool_prompt` is not supported: the chat template describes the tools", "tool_prompt")
    messages = tuple(_parse_message(message, index) for index, message in enumerate(body.messages))
    tools: tuple[JsonObject, ...] = ()
    if allowed_functions(body):
        tools = tuple(tool.model_dump(exclude_none=True) for tool in body.tools or [])
    length = sum(len(message.content) for message in messages)
    try:
        return await run_off_loop(lambda: chat_format.encode_prompt(messages, tools), length)
    except ConversationError as error:
        raise bad_request(str(error), "messages") from error


def _parse_message(message: ChatMessage, index: int) -> Message:
    """Return a message as chat templates use it."""
    label = f"messages[{index}]"
    content = message.content
    # A list of parts, of which only text can be rendered.
    if isinstance(content, list):
        for part in content:
            if part.type not in ("text", "refusal") or part.text is None:
                raise bad_request(
                    f"`{label}.content` has a part of type {part.type[:40]!r}; only text is supported", "messages"
                )
        content = "".join(part.text or "" for part in content)
    calls: list[JsonObject] = []
    for call in message.tool_calls or []:
        arguments: Any = call.function.arguments
        if isinstance(arguments, str):
            # OpenAI's form is JSON text, but templates expect an object.
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, dict):
            raise bad_request(f"`{label}.tool_calls` has arguments that are not a JSON object", "messages")
        calls.append({"name": call.function.name, "arguments": arguments, **({"id": call.id} if call.id else {})})
    if content is None and not calls:
        raise bad_request(f"`{label}` has no content", "messages")
    role = "system" if message.role == "developer" else message.role
    return Message(
        role,
        content or "",
        tuple(calls),
        reasoning_content=message.reasoning_content or "",
        name=message.name or "",
        tool_call_id=message.tool_call_id or "",
    )


def _finish_reason(reason: FinishReason, has_calls: bool) -> str:
    return "tool_calls" if has_calls and reason != "length" else FINISH_REASONS[reason]


def _format_choice(
    index: int, answer: Completion, parser: ToolCallParser, body: ChatRequest, service: Service
) -> dict[str, Any]:
    text = parser.push(answer.text)
    rest, calls = parser.finish()
    text += rest
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        message["content"] = text.strip() or None
        message["tool_calls"] = [format_tool_call(call) for call in calls]
    return {
        "index": index,
        "message": message,
        "logprobs": _format_logprobs(answer.tokens, service) if body.logprobs else None,
        "finish_reason": _finish_reason(answer.finish_reason, bool(calls)),
    }


def _format_logprobs(tokens: list[Token], service: Service) -> dict[str, Any]:
    def format_token(token_id: int, logprob: float | None) -> dict[str, Any]:
        content = service.model.tokenizer.token_bytes(token_id)
        return {"token": service.token_name(token_id), "logprob": logprob, "bytes": list(content)}

    return {
        "content": [
            {
                **format_token(token.id, token.logprob),
                "top_logprobs": [format_token(token_id, logprob) for token_id, logprob in token.top],
            }
            for token in tokens
        ]
    }


def _stream(
    handle: RequestHandle,
    body: ChatRequest,
    head: dict[str, Any],
    parsers: list[ToolCallParser],
    service: Service,
) -> AsyncIterator[bytes]:
    """Return the server-sent events of a chat completion."""

    def format_chunk(index: int, delta: JsonObject, logprobs: Any = None, finish: str | None = None) -> JsonObject:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def format_chunks(_: int, event: Event, token: Token) -> Iterator[JsonObject]:
        index = event.choice
        text = parsers[index].push(token.text)
        calls: list[ToolCall] = []
        if event.finish_reason is not None:
            rest, calls = parsers[index].finish()
            text += rest
        logprobs = _format_logprobs([token], service) if body.logprobs else None
        if text or logprobs:
            yield format_chunk(index, {"content": text}, logprobs)
        if calls:
            deltas = [{"index": place, **format_tool_call(call)} for place, call in enumerate(calls)]
            yield format_chunk(index, {"tool_calls": deltas})
        if event.finish_reason is not None:
            yield format_chunk(index, {}, finish=_finish_reason(event.finish_reason, bool(calls)))

    first = [format_chunk(index, {"role": "assistant", "content": ""}) for index in range(len(parsers))]
    return stream_chunks(handle, body, head, first, format_chunks)


# Tools: which functions the model may call, and constraints that make it call one.


def allowed_functions(body: ChatRequest) -> list[FunctionDefinition]:
    """Return the functions that the model may call."""
    if body.tool_choice == "none":
        return []
    return [tool.function for tool in body.tools or []]


def forced_function(body: ChatRequest) -> tuple[str | None, Constraint | None]:
    """Return the constraint that makes the model call a function, and that function's name.

    If a single function is possible, the answer is its arguments. Otherwise the name is None, and the answer is an
    object with `name` and `arguments`. If no call is required, both are None.
    """
    functions = allowed_functions(body)
    choice = body.tool_choice
    if isinstance(choice, ToolChoice):
        functions = [function for function in functions if function.name == choice.function.name]
        if not functions:
            raise bad_request(f"`tool_choice` names {choice.function.name!r}, which is not in `tools`", "tool_choice")
    elif choice != "required":
        return None, None
    if not functions:
        raise bad_request("`tool_choice` requires a tool, but there are no `tools`", "tool_choice")
    # With a single candidate the model has no name to choose, so it writes only the arguments.
    if len(functions) == 1:
        return functions[0].name, Constraint("json_schema", json.dumps(_parameters(functions[0])))
    # One alternative per function: its name is a constant, and its arguments follow its schema.
    variants = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                "arguments": _relocate(_parameters(function), f"#/anyOf/{index}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, function in enumerate(functions)
    ]
    return None, Constraint("json_schema", json.dumps({"anyOf": variants}))


def _parameters(function: FunctionDefinition) -> dict[str, Any]:
    return function.parameters or function.arguments or {"type": "object", "additionalProperties": False}


def _relocate(schema: Any, root: str) -> Any:
    """Return a schema to embed in another at `root`, with its references adjusted."""
    if isinstance(schema, list):
        return [_relocate(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:] if key == "$ref" and str(value).startswith("#") else _relocate(value, root)
        for key, value in schema.items()
    }


def format_tool_call(call: ToolCall) -> dict[str, Any]:
    """Return a tool call in OpenAI's form."""
    # Clients send the id back with the tool's result.
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
