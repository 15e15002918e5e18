"""The server: time to the first token beside 16 streams and alone, and what is spent outside the model.

The server is a process of its own; the clients are here, on one event loop. Prompts have no beginning in common, so no
part of any is in the cache.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.smollm2 import smollm2

PROMPT, STREAMS, TOKENS, PROBES = 200, 16, 400, 12


class Client:
    """Asks a server, over a connection a request."""

    def __init__(self, address: str) -> None:
        self.host, _, port = address.removeprefix("http://").rpartition(":")
        self.port = int(port)

    async def _ask(self, head: str, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        words = f"{head} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{words}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return reader, writer

    async def stream(self, prompt: list[int], tokens: int) -> list[float]:
        """When each event of a completion came, from its sending on."""
        body = {"model": "tgi", "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        started = time.perf_counter()
        reader, writer = await self._ask("POST /v1/completions", json.dumps({**body, "logprobs": 0}).encode())
        times = []
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter() - started)
        writer.close()
        assert len(times) == tokens, "an answer is not whole"
        return times

    async def metrics(self) -> dict[str, float]:
        """The server's own numbers, by name."""
        reader, writer = await self._ask("GET /metrics")
        page = (await reader.read()).decode()
        writer.close()
        return {name: float(value) for name, value in re.findall(r"^([\w:]+)\{[^}]*\} (\S+)$", page, re.MULTILINE)}


def prompt(number: int, vocabulary: int) -> list[int]:
    """Ids of a prompt that no other begins as."""
    return [(number * 7919 + place * 104_729) % (vocabulary - 300) + 200 for place in range(PROMPT)]


async def measure(client: Client, vocabulary: int, tokens: int, probes: int) -> dict[str, float]:
    """Seconds and shares, under the names of the table."""
    numbers = iter(range(1, 10_000))
    await client.stream(prompt(next(numbers), vocabulary), 8)
    idle = [(await client.stream(prompt(next(numbers), vocabulary), 2))[0] for _ in range(probes)]
    over = asyncio.Event()

    async def keep_on() -> None:
        while not over.is_set():
            await client.stream(prompt(next(numbers), vocabulary), tokens)

    others = [asyncio.ensure_future(keep_on()) for _ in range(STREAMS)]
    while (await client.metrics())["vllm:num_requests_running"] < STREAMS:
        await asyncio.sleep(0.05)
    before, started = await client.metrics(), time.perf_counter()
    loaded = [(await client.stream(prompt(next(numbers), vocabulary), 2))[0] for _ in range(probes)]
    after, seconds = await client.metrics(), time.perf_counter() - started
    over.set()
    await asyncio.gather(*others)
    spent = {name: after[name] - before[name] for name in before}
    return {
        "idle": median(idle),
        "loaded": median(loaded),
        "rate": spent["vllm:generation_tokens_total"] / seconds,
        "scheduler": (spent["tgi_batch_inference_duration_sum"] - spent["tgi_batch_forward_duration_sum"]) / seconds,
        "outside": 1 - spent["tgi_batch_forward_duration_sum"] / seconds,
    }


def served(model: str, vocabulary: int, tokens: int, probes: int) -> dict[str, float]:
    """Figures of a model, behind `jingu serve`."""
    command = [sys.executable, "-m", "jingu", "serve", model, "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        assert server.stdout is not None
        client = Client(server.stdout.readline().split()[-1])
        return asyncio.run(measure(client, vocabulary, tokens, probes))
    finally:
        server.terminate()
        server.wait(60)


def tiny(folder: Path) -> str:
    """A small model with random weights, as a folder."""
    from jingu.checkpoint.export import export_hf
    from jingu.config.sections.model import ModelSettings
    from jingu.model.build import spec_from_settings
    from jingu.model.decoder import Decoder
    from jingu.model.initialise import initialise
    from jingu.text.training import train_tokenizer

    train_tokenizer(iter(["some text"]), 600, ["<|endoftext|>"]).save(folder / "tokenizer")
    spec = spec_from_settings(ModelSettings(width=64, heads=4, layers=2, vocabulary=600), 600, 2048)
    model = Decoder(spec)
    initialise(model, spec, 1)
    export_hf(spec, model.state_dict().__getitem__, folder / "tokenizer", folder / "model")
    return str(folder / "model")


def run(size: str = "") -> str:
    """The table, as Markdown. Of size `tiny`, to see it run."""
    with tempfile.TemporaryDirectory() as folder:
        if size == "tiny":
            found = served(tiny(Path(folder)), 600, 30, 3)
        else:
            found = served(str(smollm2(Path(folder))), 49_152, TOKENS, PROBES)
    return "\n".join(
        [
            f"| {STREAMS} streams, prompts of {PROMPT} tokens | | must be |",
            "|---|---|---|",
            f"| first token, idle server | {found['idle'] * 1000:.0f} ms | |",
            f"| first token beside {STREAMS} streams | {found['loaded'] * 1000:.0f} ms | |",
            f"| ratio | {found['loaded'] / found['idle']:.2f} | at most 2 |",
            f"| tokens generated a second meanwhile | {found['rate']:.0f} | |",
            f"| time outside the model | {found['outside']:.1%} | at most 10% |",
            f"| of that, in the engine's scheduler and sampling | {found['scheduler']:.1%} | |",
        ]
    )


if __name__ == "__main__":
    print(run(*sys.argv[1:]))
