"""A tiny model behind a real server; and an engine that says what it is told to, or fails."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jingu.config.sections.model import ModelSettings
from jingu.errors import JinguError
from jingu.infer.engine import Engine, EngineSettings, EngineStats
from jingu.infer.load import Loaded
from jingu.infer.load import loaded as in_memory
from jingu.infer.request import Event, Request, Token
from jingu.infer.text import TextStream
from jingu.model.build import spec_from_settings
from jingu.model.decoder import Decoder
from jingu.model.initialise import initialise
from jingu.serve.server import Server, make
from jingu.serve.service import ServeSettings
from jingu.text.tokenizer import Tokenizer
from jingu.text.training import train_tokenizer
from jingu.tune.speak import find_speech

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONTEXT = 2048


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    text = ["the weather is fine, the end is far. " * 3, "的数据 🙂 naïve"]
    return train_tokenizer(iter(text), 300, SPECIAL)


@pytest.fixture(scope="session")
def loaded(tokenizer: Tokenizer) -> Loaded:
    settings = ModelSettings(width=24, heads=3, layers=2, initial_std=0.4)
    spec = spec_from_settings(settings, tokenizer.vocabulary, CONTEXT)
    decoder = Decoder(spec)
    initialise(decoder, spec, 1)
    return replace(in_memory(decoder, spec, tokenizer, name="tiny"), end_ids=(0,))


@dataclass
class Spoken:
    """An engine without a model: it says what `says` makes of a prompt, a token a step.

    Attributes:
        before: called before each step; it may wait, or raise.
    """

    loaded: Loaded
    says: Callable[[str], str] = lambda prompt: prompt
    before: Callable[[], None] = lambda: None
    live: dict[int, list[Any]] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    number: int = 0

    def submit(self, request: Request) -> int:
        if len(request.prompt) + request.max_tokens > CONTEXT:
            raise JinguError(f"the prompt has {len(request.prompt)} tokens, which is too long.", where="prompt")
        self.number += 1
        text = self.says(self.loaded.tokenizer.decode(list(request.prompt), special=True))
        ids = [*self.loaded.tokenizer.encode(text), 0]
        decode = partial(self.loaded.tokenizer.decode, special=False)
        self.live[self.number] = [request, ids, [TextStream(decode, request.stop) for _ in range(request.n)], 0]
        return self.number

    def cancel(self, number: int) -> None:
        if self.live.pop(number, None):
            self.cancelled.append(number)

    @property
    def busy(self) -> bool:
        return bool(self.live)

    def step(self) -> list[Event]:
        self.before()
        events = []
        for number, (request, ids, streams, place) in list(self.live.items()):
            finish = "end" if ids[place] == 0 else "length" if place + 1 == request.max_tokens else None
            for choice, stream in enumerate(streams):
                text = "" if finish == "end" else stream.push(ids[place])
                ends = "stop" if stream.stopped else finish
                text += stream.finish() if ends else ""
                token = Token(ids[place], text, -0.5, ((ids[place], -0.5),) * (request.logprobs or 0))
                events.append(Event(number, choice, token, ends, None, len(request.prompt), 0))
            self.live[number][3] += 1
            if ends:
                del self.live[number]
        return events

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.live), pages_used=len(self.live), pages_total=64)


@dataclass
class Running:
    """A server that answers."""

    server: Server
    engine: Any
    host: str
    port: int
    lines: list[dict[str, Any]]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def call(
        self, path: str, body: object = None, method: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON (or text) and headers of an answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method or ("GET" if body is None else "POST"), path, sent, {**kind, **(headers or {})})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        found = {key.lower(): value for key, value in answer.getheaders()}
        is_json = found.get("content-type", "").startswith("application/json")
        return answer.status, json.loads(text) if is_json else text, found

    def events(self, path: str, body: object) -> list[Any]:
        """The events of a stream; the one that says [DONE] as text."""
        status, text, headers = self.call(path, body)
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
        shown = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        return [each if each == "[DONE]" else json.loads(each) for each in shown]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append({"event": record.getMessage(), "level": record.levelname, **getattr(record, "told", {})})


Serve = Callable[..., Running]


@pytest.fixture(scope="module")
def serve(loaded: Loaded) -> Iterator[Serve]:
    """Starts servers, on an engine of its own or one that is given; all end with the module."""
    stop: list[Callable[[], None]] = []
    logger = logging.getLogger("jingu.serve")
    handler = _Lines()
    logger.addHandler(handler)
    before, logger.level = logger.level, logging.INFO

    def start(engine: Any = None, template: str | None = "qwen", **settings: Any) -> Running:
        chosen = ServeSettings(**{"port": 0, "grace": 5.0, **settings})
        driven = engine or Engine(loaded, EngineSettings(max_batch=16))
        speech = None if template is None else find_speech(Path("nowhere"), loaded.tokenizer, template)
        ready, address = threading.Event(), []

        def tell(where: str) -> None:
            address.append(where)
            ready.set()

        server = make(driven, chosen, "tiny", speech, tell)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
        thread.start()
        assert ready.wait(120)

        def end() -> None:
            server.should_exit = True
            thread.join(120)
            assert not thread.is_alive()

        stop.append(end)
        host, _, port = address[0].removeprefix("http://").rpartition(":")
        return Running(server, driven, host, int(port), handler.lines)

    yield start
    for end in stop:
        end()
    logger.removeHandler(handler)
    logger.level = before


def eventually(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait until what another thread will do is done."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        threading.Event().wait(0.005)
