"""A tiny model behind a real server, and an engine with scripted answers."""

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

import anthropic
import ollama
import openai
import pytest

from jingu.chat.chat_format import find_chat_format
from jingu.config.sections.model import ModelSettings
from jingu.errors import JinguError
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings, EngineStats
from jingu.infer.inference_model import InferenceModel
from jingu.infer.request import Event, Request, Token
from jingu.infer.sequence import IncrementalDetokenizer
from jingu.model.decoder import Decoder
from jingu.model.resolve import spec_from_settings
from jingu.model.weight_init import init_weights
from jingu.serve.server import Server, build_server
from jingu.serve.settings import ServeSettings
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer
from tests.limits import PATIENCE

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONTEXT = 2048


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    text = ["the weather is fine, the end is far. " * 3, "的数据 🙂 naïve"]
    return train_tokenizer(iter(text), 300, SPECIAL)


@pytest.fixture(scope="session")
def tiny_model(tokenizer: Tokenizer) -> InferenceModel:
    settings = ModelSettings(hidden_size=24, num_heads=3, num_layers=2, initializer_range=0.4)
    spec = spec_from_settings(settings, tokenizer.vocab_size, CONTEXT)
    decoder = Decoder(spec)
    init_weights(decoder, spec, 1)
    return replace(InferenceModel(decoder, spec, tokenizer, name="tiny"), eos_token_ids=(0,))


@dataclass
class ScriptedEngine:
    """An engine without a model. It answers a prompt with `says(prompt)`, one token per step.

    Attributes:
        before: called before each step; it may wait, or raise.
    """

    model: InferenceModel
    says: Callable[[str], str] = lambda prompt: prompt
    before: Callable[[], None] = lambda: None
    live: dict[int, list[Any]] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    number: int = 0

    def submit(self, request: Request) -> int:
        if len(request.prompt) + request.max_tokens > CONTEXT:
            raise JinguError(f"the prompt has {len(request.prompt)} tokens, which is too long.", where="prompt")
        self.number += 1
        text = self.says(self.model.tokenizer.decode(list(request.prompt), keep_special_tokens=True))
        ids = [*self.model.tokenizer.encode(text), 0]
        decode = partial(self.model.tokenizer.decode, keep_special_tokens=False)
        if request.pooling is not None:
            ids = [0]
        self.live[self.number] = [
            request,
            ids,
            [IncrementalDetokenizer(decode, request.stop) for _ in range(request.n)],
            0,
        ]
        return self.number

    def max_new_tokens(self, prompt_tokens: int) -> int:
        return CONTEXT - prompt_tokens

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
                embedding = None if request.pooling is None else (0.6, 0.8)
                events.append(Event(number, choice, token, ends, None, len(request.prompt), 0, embedding=embedding))
            self.live[number][3] += 1
            if ends:
                del self.live[number]
        return events

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.live), used_bytes=len(self.live), total_bytes=64)


@dataclass
class Running:
    """A running server."""

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
        """Return status, JSON (or text) and headers of a response."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method or ("GET" if body is None else "POST"), path, data, {**kind, **(headers or {})})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        result = {key.lower(): value for key, value in answer.getheaders()}
        is_json = result.get("content-type", "").startswith("application/json")
        return answer.status, json.loads(text) if is_json else text, result

    def events(self, path: str, body: object) -> list[Any]:
        """Return the events of a stream; the last one is the text [DONE]."""
        status, text, headers = self.call(path, body)
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
        rendered = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        return [item if item == "[DONE]" else json.loads(item) for item in rendered]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append({"event": record.getMessage(), "level": record.levelname, **getattr(record, "fields", {})})


Serve = Callable[..., Running]


@pytest.fixture(scope="module")
def serve(tiny_model: InferenceModel) -> Iterator[Serve]:
    """Start servers with an engine of their own or a given one; stop them at the end of the module."""
    stop: list[Callable[[], None]] = []
    logger = logging.getLogger("jingu.serve")
    handler = _Lines()
    logger.addHandler(handler)
    before, logger.level = logger.level, logging.INFO

    def start(engine: Any = None, template: str | None = "qwen", **settings: Any) -> Running:
        serve_settings = ServeSettings(**{"port": 0, "grace": 5.0, **settings})
        driven = engine or Engine(tiny_model, EngineSettings(max_num_seqs=16))
        speech = None if template is None else find_chat_format(Path("nowhere"), tiny_model.tokenizer, template)
        ready, address = threading.Event(), []

        def tell(where: str) -> None:
            address.append(where)
            ready.set()

        server = build_server(driven, serve_settings, "tiny", speech, tell)
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


# Clients of the server that a module's own fixture `server` starts.


@pytest.fixture(scope="module")
def claude(server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="a", max_retries=0)


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="a", max_retries=0)


@pytest.fixture(scope="module")
def llama(server: Running) -> ollama.Client:
    return ollama.Client(host=server.url)


def send(server: Running, path: str, body: object) -> http.client.HTTPConnection:
    """Send a request without waiting for the response."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=PATIENCE)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait until a condition that another thread will fulfil holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        threading.Event().wait(0.005)
