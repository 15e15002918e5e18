"""The common state of the handlers of all protocols: the model, its names, and the tokenization of prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, TypeVar

from fastapi import Depends
from fastapi import Request as HttpRequest

from jingu.chat.chat_format import ChatFormat
from jingu.errors import JinguError
from jingu.infer.inference_model import InferenceModel
from jingu.infer.request import Pooling, Request
from jingu.infer.sampling import SamplingParams
from jingu.serve.async_engine import AsyncEngine, RequestHandle
from jingu.serve.http_errors import ApiError
from jingu.serve.prometheus import ServerMetrics
from jingu.serve.responses import cancel_on_disconnect
from jingu.serve.settings import ServeSettings

T = TypeVar("T")
# Model names that clients of text-generation-inference send, whose server has a single model: the base model here.
PLACEHOLDER_MODELS = frozenset({"", "dummy", "tgi"})
# Texts of more characters than this are tokenized on another thread, so that they do not block the event loop.
_LONG_TEXT = 4_000


@dataclass(frozen=True)
class Service:
    """A served model, and everything that handlers need.

    Attributes:
        name: the base model's name in requests.
        chat_format: the format of conversations; None if the model has no chat template.
        created: when the server started, in seconds since the epoch.
    """

    model: InferenceModel
    engine: AsyncEngine
    settings: ServeSettings
    metrics: ServerMetrics
    name: str
    chat_format: ChatFormat | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters' names in requests."""
        return self.model.adapters.names

    def find_adapter(self, model: str | None) -> str | None:
        """Return the adapter with this model name; None for the base model. Raise ApiError for an unknown name."""
        if model is None or model == self.name or model in PLACEHOLDER_MODELS:
            return None
        if model not in self.adapters:
            # Ollama's clients add a tag to names that have none.
            model = model.removesuffix(":latest")
            if model == self.name:
                return None
        if model in self.adapters:
            return model
        names = ", ".join([self.name, *self.adapters])
        raise ApiError(404, f"the model {model[:200]!r} does not exist; available: {names}", field="model")

    @property
    def context_length(self) -> int:
        """The most tokens of a prompt and its answer: the model's context, or less if the KV cache is smaller."""
        limit = self.model.spec.max_position_embeddings
        return limit if self.model.spec.num_encoder_layers is not None else self.engine.max_new_tokens(1) + 1

    async def encode(self, text: str, *, is_truncated: bool = False) -> tuple[int, ...]:
        """Return the token ids of a prompt, with BOS if the model has it. Special tokens in the text are parsed.

        Args:
            is_truncated: whether the caller truncates the prompt, so that it may be longer than the context.
        """

        def tokenize() -> tuple[int, ...]:
            ids = tuple(self.model.tokenizer.encode(text, parse_special_tokens=True))
            prefix = self.model.prompt_prefix_ids
            # Clients that apply a template themselves may have added the BOS token already.
            return ids if prefix and ids[: len(prefix)] == prefix else (*prefix, *ids)

        if not is_truncated:
            await self.check_length(text)
        return await run_off_loop(tokenize, len(text))

    async def check_length(self, text: str) -> None:
        """Raise JinguError for a text that cannot fit the context, without the cost of tokenizing the whole of it."""
        tokenizer, limit = self.model.tokenizer, self.model.spec.max_position_embeddings
        tokens = tokenizer.min_tokens(text)
        # Tokenize longer and longer beginnings of a long text. A margin allows for words that are cut.
        size = 8 * limit
        while tokens <= limit and size < len(text):
            encode = partial(tokenizer.encode, text[:size], parse_special_tokens=True)
            tokens = len(await run_off_loop(encode, size)) * 3 // 4
            size *= 4
        if tokens > limit:
            what = f"the prompt's {tokens:,} or more tokens exceed the model's context of {limit}."
            raise JinguError(what, where="prompt", fix="Shorten the prompt.")

    def max_new_tokens(self, prompt: Sequence[int]) -> int:
        """Return how many tokens fit after a prompt, at least 1: the engine reports prompts that are too long."""
        return max(self.engine.max_new_tokens(len(prompt)), 1)

    def token_text(self, token: int) -> str:
        """Return the text of a single token."""
        return self.model.tokenizer.decode([token], keep_special_tokens=True)

    def token_name(self, token: int) -> str:
        """Return the text of a single token, or `bytes:` and its escaped bytes if they are not valid UTF-8."""
        content = self.model.tokenizer.token_bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    async def submit_pooling(
        self, http_request: HttpRequest, prompts: Sequence[tuple[int, ...]], model: str, pooling: Pooling
    ) -> RequestHandle:
        """Submit prompts whose hidden states are pooled or scored, as `submit` does.

        Args:
            model: the model name of the HTTP request.
        """
        adapter = self.find_adapter(model)
        requests = [Request(prompt, SamplingParams(), 1, adapter=adapter, pooling=pooling) for prompt in prompts]
        return await self.submit(http_request, requests)

    async def submit(self, http_request: HttpRequest, requests: Sequence[Request]) -> RequestHandle:
        """Submit requests to the engine for an HTTP request, and add them to its log line.

        Raises:
            ApiError: the server is full, stopping or broken, or the client has disconnected.
            JinguError: one of the requests can never be served.
        """
        state = http_request.state
        handle = await cancel_on_disconnect(http_request.receive, self.engine.submit(requests, state.arrival_time))
        state.log["handle"] = handle
        if self.settings.log_prompts:
            state.log["prompts"] = [self.model.tokenizer.decode(list(request.prompt)) for request in requests]
        return handle


async def get_service(request: HttpRequest) -> Service:
    """Return the service of an application (a FastAPI dependency).

    It is asynchronous because FastAPI would call a plain function on one of 40 threads.
    """
    service: Service = request.app.state.service
    return service


ServiceDependency = Annotated[Service, Depends(get_service)]


async def run_off_loop(function: Callable[[], T], text_length: int) -> T:
    """Call a function that processes text, on another thread if the text is long, and return its value."""
    if text_length > _LONG_TEXT:
        return await asyncio.to_thread(function)
    return function()
