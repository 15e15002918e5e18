"""What the handlers of both protocols share: the model, its names, prompts to ids, and choices put together."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Depends
from fastapi import Request as HttpRequest

from jingu.infer.load import Loaded
from jingu.infer.request import Constraint, Event, Finish, Request, Token, room_after
from jingu.infer.sampling import Sampling
from jingu.serve.answers import unless_gone
from jingu.serve.driver import Driver, Ticket
from jingu.serve.errors import ServeError, invalid
from jingu.serve.metrics import Metrics
from jingu.serve.schema import GenerateParameters, Sampled
from jingu.tune.speak import Speech

T = TypeVar("T")
PLACEHOLDERS = frozenset({"", "dummy", "tgi"})
"""Names that clients of text-generation-inference send, which knows only one model; they stand for the base."""
_LONG = 4_000
"""Characters from which on a prompt is tokenized on a thread of its own."""
_GREEDY_BELOW = 1e-4
"""Temperatures below this could make infinities of scores, and choose no other token than the likeliest."""
_SAME = ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class ServeSettings:
    """How a model is served.

    Attributes:
        host: address to listen on.
        port: to listen on; 0 takes a free one.
        queue: requests accepted and not finished, at most.
        timeout: seconds that a request may take.
        grace: seconds that requests under way get to finish when the server is asked to stop.
        patience: seconds to wait for a client that does not send, or does not read.
        body_bytes: the largest body of a request.
        keys: of which a client must send one; none: nobody is asked.
        origins: pages from there may call the server (CORS).
        hosts: names by which it may be called; none: any.
        log_prompts: whether logs have the text of prompts.
        pooling: how an embedding is made of the states of its tokens.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    queue: int = 128
    timeout: float = 600.0
    grace: float = 30.0
    patience: float = 60.0
    body_bytes: int = 2_000_000
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    log_prompts: bool = False
    pooling: Literal["mean", "last"] = "mean"


@dataclass(frozen=True)
class Service:
    """A model that is served.

    Attributes:
        name: of the base, by which clients ask for it.
        speech: how conversations are written; None: the model has none.
    """

    loaded: Loaded
    driver: Driver
    settings: ServeSettings
    metrics: Metrics
    name: str
    speech: Speech | None = None
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters, by which clients ask for them."""
        return self.loaded.adapters.names

    def adapter(self, model: str | None) -> str | None:
        """The adapter that a model's name asks for; None: the base. Raises ServeError for another name."""
        if model is None or model == self.name or model in PLACEHOLDERS:
            return None
        if model in self.adapters:
            return model
        names = ", ".join([self.name, *self.adapters])
        raise ServeError(404, f"there is no model {model[:200]!r} here, but {names}", field="model")

    async def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a prompt as it stands: special tokens written in it are such."""

        def ids() -> tuple[int, ...]:
            found = tuple(self.loaded.tokenizer.encode(text, special=True))
            begin = self.loaded.beginning
            return found if begin and found[: len(begin)] == begin else (*begin, *found)

        return await off_loop(ids, len(text))

    def room(self, prompt: Sequence[int]) -> int:
        """Tokens that can follow a prompt; at least 1, for the engine to refuse in its words."""
        return max(room_after(self.loaded.spec, len(prompt)), 1)

    def token_text(self, token: int) -> str:
        """A token by itself, as text."""
        return self.loaded.tokenizer.decode([token], special=True)

    def token_name(self, token: int) -> str:
        """A token as text; where its bytes are part of a character, as `bytes:` and these."""
        found = self.loaded.tokenizer.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    async def submit(self, http: HttpRequest, requests: Sequence[Request]) -> Ticket:
        """As `Driver.submit`. The log tells of the ticket."""
        ticket = await unless_gone(http.receive, self.driver.submit(requests, http.state.arrived))
        http.state.log["ticket"] = ticket
        if self.settings.log_prompts:
            http.state.log["prompts"] = [self.loaded.tokenizer.decode(list(each.prompt)) for each in requests]
        return ticket


def service_of(request: HttpRequest) -> Service:
    """The service behind an application."""
    found: Service = request.app.state.service
    return found


Served = Annotated[Service, Depends(service_of)]


def sampling(asked: Sampled | GenerateParameters, temperature: float, **more: Any) -> Sampling:
    """How tokens are chosen: what both protocols call the same, and `more`. A request without a seed gets one."""
    same = {name: value for name in _SAME if (value := getattr(asked, name, None)) is not None}
    seed = secrets.randbits(31) if asked.seed is None else asked.seed
    return Sampling(temperature if temperature >= _GREEDY_BELOW else 0.0, seed=seed, **same, **more)


def constraint(kind: str, value: Any, field: str) -> Constraint:
    """What a text must be: of kind regex an expression, else what a schema of JSON allows."""
    if kind != "regex":
        return Constraint("json_schema", value if isinstance(value, str) else json.dumps(value))
    if not isinstance(value, str):
        raise invalid(f"`{field}.value` of a regex must be text", field)
    return Constraint("regex", value)


async def off_loop(function: Callable[[], T], size: int) -> T:
    """The value of a function that takes time with so many characters: of many, on another thread."""
    return await asyncio.to_thread(function) if size > _LONG else function()


@dataclass
class Choice:
    """One answer, put together of its events."""

    tokens: list[Token] = field(default_factory=list)
    prompt: tuple[Token, ...] = ()
    finish: Finish = "length"
    logprob: float = 0.0

    def take(self, event: Event) -> None:
        """Add what a step has brought."""
        self.prompt = self.prompt or event.prompt
        if event.token is not None:
            self.tokens.append(event.token)
        self.finish = event.finish or self.finish
        self.logprob = event.logprob

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(token.text for token in self.tokens)


async def gathered(ticket: Ticket) -> list[list[Choice]]:
    """All answers of a ticket, by request and choice. Raises ServeError."""
    choices = [[Choice() for _ in range(request.n)] for request in ticket.requests]
    async for lot in ticket.batches():
        for place, event in lot:
            choices[place][event.choice].take(event)
    return choices
