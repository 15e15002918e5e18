"""OpenAI's chat completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from jingu.chat.messages import JsonObject
from jingu.chat.tool_calls import CallFragment, ToolCall
from jingu.infer.request import FinishReason, Token
from jingu.serve.chat_run import ChatAnswer, ChatRun, start_chat
from jingu.serve.http_errors import bad_request
from jingu.serve.openai import FINISH_REASONS, SYSTEM_FINGERPRINT, format_usage, stream_chunks
from jingu.serve.protocol import ChatRequest, StrictRoute
from jingu.serve.responses import STREAMING_RESPONSES, EventStream, respond_once
from jingu.serve.service import Service, ServiceDependency

router = APIRouter(prefix="/v1", tags=["openai"], route_class=StrictRoute)


@router.post("/chat/completions", responses=STREAMING_RESPONSES)
async def chat_completions(body: ChatRequest, request: HttpRequest, service: ServiceDependency) -> Response:
    """Answer a conversation."""
    if body.max_tokens == 0:
        raise bad_request("`max_tokens` must be at least 1", "max_tokens")
    if body.add_generation_prompt is not None and body.add_generation_prompt == bool(body.continue_final_message):
        raise bad_request("`add_generation_prompt` must be the opposite of `continue_final_message`", "messages")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("`top_logprobs` requires `logprobs`: true", "top_logprobs")
    run = await start_chat(body, request, service)
    head = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": body.model,
        "system_fingerprint": SYSTEM_FINGERPRINT,
    }
    if body.stream:
        head["object"] = "chat.completion.chunk"
        return EventStream(run.handle, stream_chunks(run.handle, body, head, _stream(run, body, service)))

    async def collect() -> Any:
        choices = [_format_choice(index, answer, body, service) for index, answer in enumerate(await run.collect())]
        return {**head, "object": "chat.completion", "choices": choices, "usage": format_usage(run.handle.stats)}

    return await respond_once(request, run.handle, collect())


def _finish_reason(reason: FinishReason, has_calls: bool) -> str:
    return "tool_calls" if has_calls and reason != "length" else FINISH_REASONS[reason]


def _format_choice(index: int, answer: ChatAnswer, body: ChatRequest, service: Service) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.text.strip() or None
        message["tool_calls"] = [_format_tool_call(call) for call in answer.calls]
    return {
        "index": index,
        "message": message,
        "logprobs": {"content": format_logprobs(answer.tokens, service)} if body.logprobs else None,
        "finish_reason": _finish_reason(answer.finish_reason, bool(answer.calls)),
    }


def format_logprobs(tokens: list[Token], service: Service) -> list[dict[str, Any]]:
    """Format the log-probabilities of tokens, and those of alternatives to each."""

    def format_token(token_id: int, logprob: float | None) -> dict[str, Any]:
        content = service.model.tokenizer.token_bytes(token_id)
        return {"token": service.token_name(token_id), "logprob": logprob, "bytes": list(content)}

    return [
        {
            **format_token(token.id, token.logprob),
            "top_logprobs": [format_token(token_id, logprob) for token_id, logprob in token.top],
        }
        for token in tokens
    ]


async def _stream(run: ChatRun, body: ChatRequest, service: Service) -> AsyncIterator[list[JsonObject]]:
    """Yield the choices of each engine step, one for each chunk."""

    def format_chunk(index: int, delta: JsonObject, logprobs: Any = None, finish: str | None = None) -> JsonObject:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    has_calls: set[int] = set()
    yield [format_chunk(index, {"role": "assistant", "content": ""}) for index in range(body.n or 1)]
    async for deltas in run.deltas():
        chunks = []
        for delta in deltas:
            index = delta.choice
            logprobs = {"content": format_logprobs([delta.token], service)} if body.logprobs else None
            if delta.reasoning:
                chunks.append(format_chunk(index, {"reasoning_content": delta.reasoning}))
            if delta.text or logprobs:
                chunks.append(format_chunk(index, {"content": delta.text}, logprobs))
            if delta.calls:
                has_calls.add(index)
                chunks.append(format_chunk(index, {"tool_calls": [_format_fragment(part) for part in delta.calls]}))
            if delta.finish_reason is not None:
                finish = _finish_reason(delta.finish_reason, index in has_calls)
                chunks.append(format_chunk(index, {}, finish=finish))
        yield chunks


def _format_fragment(fragment: CallFragment) -> JsonObject:
    """Return a part of a call; the first one has its id and name."""
    if not fragment.name:
        return {"index": fragment.index, "function": {"arguments": fragment.arguments}}
    return {"index": fragment.index, **_format_tool_call(ToolCall(fragment.name, fragment.arguments))}


def _format_tool_call(call: ToolCall) -> dict[str, Any]:
    # Clients return the id with the tool's result.
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
