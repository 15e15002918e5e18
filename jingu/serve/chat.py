"""Conversations in OpenAI's protocol: the chat template, tools, the form of the answer."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from jingu.errors import JinguError
from jingu.infer.request import Constraint, Event, Finish, Token
from jingu.serve.answers import MAY_STREAM, EventStream, whole
from jingu.serve.driver import Ticket
from jingu.serve.errors import invalid
from jingu.serve.openai import REASONS, engine_request, streamed, usage
from jingu.serve.schema import ChatMessage, ChatRequest, ResponseFormat, StrictRoute
from jingu.serve.service import Choice, Served, Service, constraint, gathered, off_loop
from jingu.serve.tools import Calls, forced, offered
from jingu.tune.rows import Fields, Message, RowError

router = APIRouter(prefix="/v1", tags=["openai"], route_class=StrictRoute)


@router.post("/chat/completions", responses=MAY_STREAM)
async def chat_completions(body: ChatRequest, request: HttpRequest, service: Served) -> Response:
    """Answer a conversation."""
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise invalid("`max_tokens` and `max_completion_tokens` say the same; send one", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("`top_logprobs` needs `logprobs`: true", "top_logprobs")
    functions = offered(body)
    name, call = forced(body)
    asked = _constraint(body.response_format)
    if asked is not None and functions:
        raise invalid("`response_format` and `tools` together are not supported", "response_format")
    prompt = await _prompt(body, service)
    wanted = engine_request(
        body,
        prompt,
        service,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        max_tokens=body.max_tokens or body.max_completion_tokens or service.room(prompt),
        constraint=call or asked,
        stop=service.speech.stop if service.speech else (),
    )
    try:
        ticket = await service.submit(request, [wanted])
    except JinguError as error:
        if call is not None and error.where == "constraint":  # which was made of the tools' parameters
            raise JinguError(error.what, where="tools", fix=error.fix) from error
        raise
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": body.model}
    names = {each.name for each in functions}
    must, many = call is not None, body.parallel_tool_calls is not False
    calls = [Calls(names, name, must, many) for _ in range(body.n or 1)]
    if body.stream:
        return EventStream(ticket, _stream(ticket, body, {**head, "object": "chat.completion.chunk"}, calls, service))

    async def made() -> Any:
        (choices,) = await gathered(ticket)
        shown = [_shown(index, choice, calls[index], body, service) for index, choice in enumerate(choices)]
        return {**head, "object": "chat.completion", "choices": shown, "usage": usage(ticket.account)}

    return await whole(request, ticket, made())


async def _prompt(body: ChatRequest, service: Service) -> tuple[int, ...]:
    """Ids of a conversation. Special tokens written in it are only mentioned."""
    speech = service.speech
    if speech is None:
        raise invalid(
            "the model has no chat template: use /v1/completions, or start the server with --template", "messages"
        )
    if body.tool_prompt:
        raise invalid("`tool_prompt` is not supported: the model's template says how tools are told", "tool_prompt")
    messages = tuple(_message(each, place) for place, each in enumerate(body.messages))
    tools: tuple[Fields, ...] = ()
    if offered(body):
        tools = tuple(tool.model_dump(exclude_none=True) for tool in body.tools or [])
    size = sum(len(message.content) for message in messages)
    try:
        return await off_loop(lambda: speech.prompt(messages, tools), size)
    except RowError as error:
        raise invalid(str(error), "messages") from error


def _message(given: ChatMessage, place: int) -> Message:
    """A turn as templates have it."""
    where = f"messages[{place}]"
    content = given.content
    if isinstance(content, list):
        for part in content:
            if part.type not in ("text", "refusal") or part.text is None:
                raise invalid(
                    f"`{where}.content` has a part of type {part.type[:40]!r}; only text is read, and nothing is "
                    "fetched from an address",
                    "messages",
                )
        content = "".join(part.text or "" for part in content)
    calls: list[Fields] = []
    for call in given.tool_calls or []:
        arguments: Any = call.function.arguments
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, dict):
            raise invalid(f"`{where}.tool_calls` has arguments that are no JSON object", "messages")
        calls.append({"name": call.function.name, "arguments": arguments})
    if content is None and not calls:
        raise invalid(f"`{where}` has no content", "messages")
    return Message("system" if given.role == "developer" else given.role, content or "", tuple(calls))


def _constraint(wanted: ResponseFormat | None) -> Constraint | None:
    if wanted is None or wanted.type == "text":
        return None
    value = wanted.value if wanted.json_schema is None else wanted.json_schema.schema_
    if value is None and wanted.type == "json_schema":
        raise invalid("`response_format.json_schema.schema` is missing", "response_format")
    return Constraint("json") if value is None else constraint(wanted.type, value, "response_format")


def _reason(finish: Finish, calls: list[dict[str, Any]]) -> str:
    return "tool_calls" if calls and finish != "length" else REASONS[finish]


def _shown(index: int, choice: Choice, calls: Calls, body: ChatRequest, service: Service) -> dict[str, Any]:
    text = calls.push(choice.text)
    rest, called = calls.finish()
    text = (text + rest).strip() if called else text + rest
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not called else None}
    if called:
        message["tool_calls"] = [{key: value for key, value in each.items() if key != "index"} for each in called]
    logprobs = {"content": [_logprob(token, service) for token in choice.tokens]} if body.logprobs else None
    return {
        "index": index,
        "message": {**message, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": _reason(choice.finish, called),
    }


def _logprob(token: Token, service: Service) -> dict[str, Any]:
    def one(id_: int, logprob: float | None) -> dict[str, Any]:
        content = service.loaded.tokenizer.bytes_of(id_)
        return {"token": service.token_name(id_), "logprob": logprob, "bytes": list(content)}

    return {**one(token.id, token.logprob), "top_logprobs": [one(*each) for each in token.top]}


def _stream(
    ticket: Ticket, body: ChatRequest, head: dict[str, Any], calls: list[Calls], service: Service
) -> AsyncIterator[bytes]:
    def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def chunks(_: int, each: Event, token: Token) -> Iterator[dict[str, Any]]:
        text, called = calls[each.choice].push(token.text), list[dict[str, Any]]()
        if each.finish is not None:
            rest, called = calls[each.choice].finish()
            text += rest
        logprobs = {"content": [_logprob(token, service)]} if body.logprobs else None
        if text or logprobs:
            yield chunk(each.choice, {"content": text}, logprobs)
        if called:
            yield chunk(each.choice, {"tool_calls": called})
        if each.finish is not None:
            yield chunk(each.choice, {}, finish=_reason(each.finish, called))

    first = [chunk(index, {"role": "assistant", "content": ""}) for index in range(len(calls))]
    return streamed(ticket, body, head, first, chunks)
