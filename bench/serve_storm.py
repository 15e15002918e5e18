"""The server under a storm: 64 streams, a fifth of them cut at random, beside prompts of 2 MB and slow readers.

All prompts are short, and answers greedy in fp32, so each must equal the quiet one. A gap is the time between two
events of a stream. The model's share of it is at most the longest gap without hostile clients.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from bench.serve import build_tiny_model
from bench.smollm2 import find_smollm2

STREAMS, PROMPTS, TOKENS, SECONDS, STORMS = 64, 12, 16, 12.0, 6
KV_CACHE = "500MB"


@dataclass
class Storm:
    """The clients of a server, and what they saw.

    Attributes:
        answers: the quiet answers, by prompt.
        gap: the longest time between two events of a stream that was read without pause, in seconds.
    """

    port: int
    tokens: int
    long_bodies: list[bytes]
    random: random.Random = field(default_factory=lambda: random.Random(1))
    answers: dict[int, str] = field(default_factory=dict)
    num_whole: int = 0
    num_cut: int = 0
    num_different: int = 0
    num_refused: int = 0
    gap: float = 0.0
    health: float = 0.0

    async def send(self, path: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        kind = "POST" if body else "GET"
        head = f"{kind} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return reader, writer

    async def stream(self, number: int, limit: int | None = None) -> str | None:
        """Return the answer to a prompt; None if the stream was cut after `limit` events."""
        body = {"model": "tgi", "prompt": f"The number {number} is", "max_tokens": self.tokens, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True}
        reader, writer = await self.send("/v1/completions", json.dumps(body).encode())
        text = ""
        count = 0
        previous = 0.0
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            text += json.loads(line[6:])["choices"][0]["text"]
            now = time.perf_counter()
            self.gap = max(self.gap, now - previous) if previous else self.gap
            previous = now
            count += 1
            if count == limit:
                writer.transport.abort()
                return None
        writer.close()
        return text

    async def client(self, end: float) -> None:
        """Send prompts until the end; cut a fifth of the streams."""
        while time.perf_counter() < end:
            number = self.random.randrange(PROMPTS)
            limit = self.random.randint(1, self.tokens - 1) if self.random.random() < 0.2 else None
            answer = await self.stream(number, limit)
            self.num_cut += answer is None
            if answer is not None:
                self.num_whole += 1
                self.num_different += answer != self.answers[number]

    async def send_long_prompts(self, end: float) -> None:
        """Send prompts of almost 2 MB until the end."""
        while time.perf_counter() < end:
            reader, writer = await self.send("/v1/completions", self.random.choice(self.long_bodies))
            status = (await reader.readline()).split()[1:2]
            self.num_refused += status == [b"400"]
            writer.transport.abort()
            await asyncio.sleep(0.5)

    async def read_large_events(self, end: float, is_hostile: bool) -> None:
        """Request several answers with log-probabilities; read nothing until the end if `is_hostile`, or else all."""
        body = {"model": "tgi", "prompt": "a", "max_tokens": 10 * self.tokens, "stream": True, "logprobs": 20, "n": 4}
        reader, writer = await self.send("/v1/completions", json.dumps({**body, "ignore_eos": True}).encode())
        if is_hostile:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(max(end - time.perf_counter(), 0))
        while not is_hostile and time.perf_counter() < end and await reader.readline():
            pass
        writer.transport.abort()

    async def check_health(self, end: float) -> None:
        """Measure the longest time until /health is answered."""
        while time.perf_counter() < end:
            start = time.perf_counter()
            reader, writer = await self.send("/health", b"")
            await reader.read()
            writer.close()
            self.health = max(self.health, time.perf_counter() - start)
            await asyncio.sleep(0.1)

    async def run(self, seconds: float) -> tuple[float, float]:
        """Run the storm; return the longest gaps of streams without and with hostile clients, in seconds."""
        for number in range(PROMPTS):
            self.answers[number] = str(await self.stream(number))
        gaps = []
        for is_hostile in (False, True):
            self.gap = self.health = 0.0
            end = time.perf_counter() + seconds
            clients = [self.client(end) for _ in range(STREAMS)]
            # In both, so that the model computes the same.
            clients += [self.read_large_events(end, is_hostile) for _ in range(4)]
            if is_hostile:
                clients += [self.send_long_prompts(end), self.send_long_prompts(end), self.check_health(end)]
            await asyncio.gather(*clients)
            gaps.append(self.gap)
        return gaps[0], gaps[1]


def build_long_bodies() -> list[bytes]:
    """Return requests with prompts of almost 2 MB, of several kinds of text."""
    bodies = []
    for kind in ("a", "x1 ", "naïve 北京 ", "\n"):
        prompt = (kind * (1_900_000 // len(kind.encode()))) + "<|"
        bodies.append(json.dumps({"model": "tgi", "prompt": prompt, "max_tokens": 1}, ensure_ascii=False).encode())
    return bodies


def measure(model: str, seconds: float, tokens: int) -> list[str]:
    """Start the server with a model and return the rows of the table."""
    command = [sys.executable, "-m", "jingu", "serve", model, "--port", "0", "--precision", "fp32"]
    # Blocks of the KV cache are kept for later prompts: with a small one, the first storm fills it.
    command += ["--max-concurrent-requests", "256", "--kv-cache", KV_CACHE]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        assert server.stdout is not None
        storm = Storm(int(server.stdout.readline().split()[-1].rpartition(":")[2]), tokens, build_long_bodies())
        process = psutil.Process(server.pid)
        asyncio.run(storm.run(1.0))
        gaps = []
        memory = []
        for _ in range(STORMS):
            gaps.append(asyncio.run(storm.run(seconds)))
            memory.append(process.memory_info().rss)
        quiet, hostile = ([pair[phase] for pair in gaps] for phase in (0, 1))
        differences = [second - first for first, second in gaps]
    finally:
        server.terminate()
        server.wait(60)
    return [
        f"| answers that differ from quiet ones, of {storm.num_whole} | {storm.num_different} | 0 |",
        f"| streams cut; prompts of 1.9 MB refused | {storm.num_cut}; {storm.num_refused} | |",
        f"| longest gap of a stream in each of {STORMS} storms, without hostile clients | {_list(quiet)} s | |",
        f"| the same with them | {_list(hostile)} s | |",
        f"| beyond that without them, median | {median(differences):.2f} s | at most 0.3 s |",
        f"| longest time of `/health` | {storm.health:.2f} s | |",
        f"| memory after each of {STORMS} storms | {', '.join(f'{size / 1e6:.0f}' for size in memory)} MB | flat |",
    ]


def _list(seconds: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in seconds)


def run(size: str = "") -> str:
    """Return the table as Markdown. Size `tiny` is a quick check."""
    with tempfile.TemporaryDirectory() as folder:
        if size == "tiny":
            rows = measure(build_tiny_model(Path(folder)), 2.0, 16)
        else:
            rows = measure(str(find_smollm2(Path(folder))), SECONDS, TOKENS)
    return "\n".join([f"| {STREAMS} streams, a fifth cut | | target |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(run(*sys.argv[1:]))
