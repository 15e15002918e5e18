"""vLLM's routes for reward models: scores of answers, and documents ranked by score."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from jingu.serve import protocol
from jingu.serve.async_engine import RequestHandle
from jingu.serve.chat_run import encode_conversation
from jingu.serve.http_errors import bad_request
from jingu.serve.responses import respond_once
from jingu.serve.service import Service, ServiceDependency

router = APIRouter(prefix="/v1", tags=["scoring"], route_class=protocol.StrictRoute)
# The paths of Jina and of Cohere.
unversioned_router = APIRouter(tags=["scoring"], route_class=protocol.StrictRoute)
Prompt = str | list[protocol.ChatMessage]


@router.post("/score")
async def score(body: protocol.ScoreRequest, request: HttpRequest, service: ServiceDependency) -> Response:
    """Score answers to prompts by a reward model: one prompt with each answer, or pairs."""
    answers = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    prompts = _list_prompts(body.text_1)
    if len(prompts) not in (1, len(answers)):
        message = f"`text_1` has {len(prompts)} entries and `text_2` {len(answers)}: send as many, or one `text_1`"
        raise bad_request(message, "text_1")
    handle = await _submit(body, prompts, answers, request, service)

    async def collect() -> Any:
        scores = await _collect_scores(handle)
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
        head = {"id": f"score-{secrets.token_hex(12)}", "object": "list", "created": int(time.time())}
        return {**head, "model": body.model, "data": data, "usage": _format_usage(handle)}

    return await respond_once(request, handle, collect())


@router.post("/rerank")
@unversioned_router.post("/rerank")
@unversioned_router.post("/v2/rerank")
async def rerank(body: protocol.RerankRequest, request: HttpRequest, service: ServiceDependency) -> Response:
    """Return documents by the reward model's score of each as the answer to a query, the best first."""
    documents = body.documents
    handle = await _submit(body, [body.query], documents, request, service)

    async def collect() -> Any:
        scores = await _collect_scores(handle)
        ranking = sorted(range(len(documents)), key=lambda index: -scores[index])
        # As in vLLM, 0 means all.
        results: list[dict[str, Any]] = []
        for index in ranking[: body.top_n or None]:
            document = {} if body.return_documents is False else {"document": {"text": documents[index]}}
            results.append({"index": index, **document, "relevance_score": scores[index]})
        head = {"id": f"rerank-{secrets.token_hex(12)}", "model": body.model}
        return {**head, "results": results, "usage": _format_usage(handle)}

    return await respond_once(request, handle, collect())


def _list_prompts(text_1: Any) -> list[Prompt]:
    """Return the prompts of `text_1`: a text, texts, or the messages of one conversation."""
    is_single = isinstance(text_1, str) or isinstance(text_1[0], protocol.ChatMessage)
    return [text_1] if is_single else list(text_1)


async def _submit(
    body: protocol.ScoringRequest,
    prompts: Sequence[Prompt],
    answers: Sequence[str],
    request: HttpRequest,
    service: Service,
) -> RequestHandle:
    """Submit answers to the engine, each after its own prompt, or all after a single prompt."""
    if len(prompts) == 1:
        prompts = [*prompts] * len(answers)
    pairs = zip(prompts, answers, strict=True)
    ids = [await _encode(body.model, prompt, answer, service) for prompt, answer in pairs]
    return await service.submit_pooling(request, ids, body.model, "score")


async def _encode(model: str, prompt: Prompt, answer: str, service: Service) -> tuple[int, ...]:
    """Return the token ids of an answer with its prompt, tokenized as one text.

    In a conversation, special tokens in the answer are plain text, and the end tokens of the template are appended.
    """
    if isinstance(prompt, str):
        return await service.encode(prompt + answer)
    chat_format = service.chat_format
    if chat_format is None:
        raise bad_request("the model has no chat template: send text, or start the server with --template")
    messages = [*prompt, protocol.ChatMessage(role="assistant", content=answer)]
    body = protocol.ChatRequest(model=model, messages=messages, continue_final_message=True)
    ids = await encode_conversation(body, service)
    return (*ids, *(chat_format.eos_token_ids or service.model.tokenizer.encode("".join(chat_format.stop))))


async def _collect_scores(handle: RequestHandle) -> list[float]:
    """Wait for the scores and return them. Raise ApiError if the request fails."""
    scores = []
    for (completion,) in await handle.collect():
        assert completion.embedding is not None
        scores.append(completion.embedding[0])
    return scores


def _format_usage(handle: RequestHandle) -> dict[str, int]:
    tokens = handle.stats.prompt_tokens
    return {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
