"""Two hundred concurrent clients, most of them misbehaving: nothing leaks or hangs, and every error is reported."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.serve.conftest import CONTEXT, Running, Serve, eventually

CLIENTS = 200
MAY_BE_BUSY = (200, 429)


@dataclass
class ClientCrowd:
    """Clients of a server, and the outcomes of their requests."""

    server: Running
    random: random.Random
    met: Counter[str] = field(default_factory=Counter)

    async def ask(
        self, path: str, body: object, headers: str = ""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request."""
        reader, writer = await asyncio.open_connection(self.server.host, self.server.port, limit=2**22)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n{headers}"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return reader, writer

    async def hear(self, kind: str, allowed: tuple[int, ...], *body: Any) -> Any:
        """Return the response, whose status must be one of these; None for an error."""
        reader, writer = await self.ask(*body)
        status = int((await reader.readline()).split()[1])
        assert status in allowed, (kind, status, await reader.read())
        text = (await reader.read()).partition(b"\r\n\r\n")[2]
        writer.close()
        self.met[f"{kind} {status}"] += 1
        if status != 200:
            assert json.loads(text)["error"], (kind, text)
        return text if status == 200 else None

    def words(self) -> str:
        return "the weather is fine. "[: self.random.randint(1, 20)]

    async def patient(self) -> None:
        body = {"inputs": self.words(), "parameters": {"max_new_tokens": self.random.randint(1, 12), "details": True}}
        result = await self.hear("whole", MAY_BE_BUSY, "/generate", body)
        if result is not None:
            details = json.loads(result)["details"]
            ends = details["finish_reason"] == "eos_token"
            assert ends or details["generated_tokens"] == body["parameters"]["max_new_tokens"]

    async def streaming(self) -> None:
        body = {"model": "tiny", "prompt": self.words(), "max_tokens": self.random.randint(1, 12), "stream": True}
        result = await self.hear("stream", MAY_BE_BUSY, "/v1/completions", body)
        assert result is None or b"data: [DONE]\n\n" in result

    async def leaving(self) -> None:
        path = self.random.choice(["/generate", "/generate_stream"])
        reader, writer = await self.ask(path, {"inputs": self.words(), "parameters": {"max_new_tokens": 300}})
        if self.random.random() < 0.7:
            await reader.read(self.random.randint(1, 400))
        writer.transport.abort()
        self.met["left"] += 1

    async def slow(self) -> None:
        reader, writer = await self.ask(
            "/v1/completions",
            {"model": "tiny", "prompt": self.words(), "max_tokens": 20, "stream": True, "logprobs": 5},
        )
        while await reader.read(512):
            await asyncio.sleep(0.01)
        writer.close()
        self.met["slow"] += 1

    async def too_long(self) -> None:
        await self.hear("long", (422, 429), "/generate", {"inputs": "a" * 3 * CONTEXT})

    async def nonsense(self) -> None:
        body = self.random.choice(
            [b"{", b"", b"[" * 9999, b"\xff", b'{"inputs": 3}', b'{"inputs": "a", "parameters": 1}']
        )
        await self.hear("nonsense", (422,), "/generate", body)

    async def wrong(self) -> None:
        wrong = self.random.choice([{"max_tokens": "9"}, {"stop": 3}, {"n": 0}, {"prompt": None}, {"wish": 1}])
        await self.hear("wrong", (400,), "/v1/completions", {"model": "tiny", "prompt": "a", **wrong})

    async def huge(self) -> None:
        await self.hear("huge", (431,), "/generate", b"", f"X-Huge: {'a' * 70_000}\r\n")

    async def client(self, goes_on: Callable[[int], bool]) -> None:
        result = 0
        kinds = [
            self.patient,
            self.streaming,
            self.leaving,
            self.slow,
            self.too_long,
            self.nonsense,
            self.wrong,
            self.huge,
        ]
        while goes_on(result):
            await self.random.choice(kinds)()
            result += 1


def run_clients(server: Running, goes_on: Callable[[int], bool]) -> Counter[str]:
    """Run all clients at once, and return their outcomes. Every client terminates."""
    crowd = ClientCrowd(server, random.Random(5))

    async def all_of_them() -> None:
        await asyncio.gather(*(crowd.client(goes_on) for _ in range(CLIENTS)))

    asyncio.run(all_of_them())
    async_engine, engine = server.server.engine, server.engine
    eventually(lambda: async_engine.num_requests == 0 and not async_engine._owners and not engine.busy)
    assert engine.stats().used_blocks == engine.stats().running == engine.stats().waiting == 0
    assert server.call("/health")[0] == 200
    assert server.call("/generate", {"inputs": "the weather", "parameters": {"max_new_tokens": 2}})[0] == 200
    assert not [line for line in server.lines if line["level"] == "ERROR"]
    return crowd.met


KINDS = {"whole 200", "stream 200", "left", "slow", "long 422", "nonsense 422", "wrong 400", "huge 431"}


def test_two_hundred_clients(serve: Serve) -> None:
    outcomes = run_clients(serve(max_concurrent_requests=64), lambda result: result < 2)
    assert set(outcomes) >= KINDS


@pytest.mark.slow
def test_two_hundred_clients_for_a_minute(serve: Serve) -> None:
    end = time.monotonic() + 60
    outcomes = run_clients(serve(max_concurrent_requests=64), lambda _: time.monotonic() < end)
    assert set(outcomes) >= KINDS | {"whole 429"}
