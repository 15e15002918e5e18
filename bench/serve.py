"""The server: time to first token on an idle server and with 16 streams, and the time spent outside the model.

The server is a separate process; the clients run here, on one event loop. No two prompts have a common prefix, so
prefix caching has no effect.
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

from bench.smollm2 import find_smollm2

PROMPT, STREAMS, TOKENS, PROBES = 200, 16, 400, 12


class Client:
    """A client that opens one connection per request."""

    def __init__(self, address: str) -> None:
        self.host, _, port = address.removeprefix("http://").rpartition(":")
        self.port = int(port)

    async def _send(self, request: str, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        headers = f"{request} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return reader, writer

    async def stream(self, prompt: list[int], tokens: int) -> list[float]:
        """Send a completion request; return the seconds from sending it to each of the streamed events."""
        body = {"model": "tgi", "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        started = time.perf_counter()
        reader, writer = await self._send("POST /v1/completions", json.dumps({**body, "logprobs": 0}).encode())
        times = []
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter() - started)
        writer.close()
        assert len(times) == tokens, "an answer is incomplete"
        return times

    async def metrics(self) -> dict[str, float]:
        """Return the server's metrics by name."""
        reader, writer = await self._send("GET /metrics")
        page = (await reader.read()).decode()
        writer.close()
        return {name: float(value) for name, value in re.findall(r"^([\w:]+)\{[^}]*\} (\S+)$", page, re.MULTILINE)}


def build_prompt(number: int, vocab_size: int) -> list[int]:
    """Return the token ids of a prompt that shares no prefix with the prompts of other numbers."""
    return [(number * 7919 + position * 104_729) % (vocab_size - 300) + 200 for position in range(PROMPT)]


async def measure(client: Client, vocab_size: int, tokens: int, probes: int) -> dict[str, float]:
    """Return the figures of the table by name.

    Args:
        tokens: tokens per answer of the streams that load the server.
        probes: number of requests whose time to first token is measured, for each state of the server.
    """
    # Time to first token on an idle server, after a warm-up request.
    numbers = iter(range(1, 10_000))
    await client.stream(build_prompt(next(numbers), vocab_size), 8)
    idle = [(await client.stream(build_prompt(next(numbers), vocab_size), 2))[0] for _ in range(probes)]
    stop = asyncio.Event()

    async def generate_until_stopped() -> None:
        while not stop.is_set():
            await client.stream(build_prompt(next(numbers), vocab_size), tokens)

    # The same while other streams decode.
    streams = [asyncio.ensure_future(generate_until_stopped()) for _ in range(STREAMS)]
    while (await client.metrics())["vllm:num_requests_running"] < STREAMS:
        await asyncio.sleep(0.05)
    before = await client.metrics()
    started = time.perf_counter()
    busy = [(await client.stream(build_prompt(next(numbers), vocab_size), 2))[0] for _ in range(probes)]
    after = await client.metrics()
    seconds = time.perf_counter() - started
    stop.set()
    await asyncio.gather(*streams)
    change = {name: after[name] - before[name] for name in before}
    forward = change["tgi_batch_forward_duration_sum"]
    return {
        "idle": median(idle),
        "busy": median(busy),
        "rate": change["vllm:generation_tokens_total"] / seconds,
        "scheduler": (change["tgi_batch_inference_duration_sum"] - forward) / seconds,
        "outside": 1 - forward / seconds,
    }


def measure_server(model: str, vocab_size: int, tokens: int, probes: int) -> dict[str, float]:
    """Start `jingu serve` with a model and return its figures."""
    command = [sys.executable, "-m", "jingu", "serve", model, "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        assert server.stdout is not None
        client = Client(server.stdout.readline().split()[-1])
        return asyncio.run(measure(client, vocab_size, tokens, probes))
    finally:
        server.terminate()
        server.wait(60)


def build_tiny_model(folder: Path) -> str:
    """Write a small model with random weights and return its folder."""
    from jingu.config.sections.model import ModelSettings
    from jingu.formats.export import export_hf
    from jingu.model.decoder import Decoder
    from jingu.model.resolve import spec_from_settings
    from jingu.model.weight_init import init_weights
    from jingu.text.tokenizer_training import train_tokenizer

    train_tokenizer(iter(["some text"]), 600, ["<|endoftext|>"]).save(folder / "tokenizer")
    spec = spec_from_settings(ModelSettings(hidden_size=64, num_heads=4, num_layers=2, vocab_size=600), 600, 2048)
    model = Decoder(spec)
    init_weights(model, spec, 1)
    export_hf(spec, model.state_dict().__getitem__, folder / "tokenizer", folder / "model")
    return str(folder / "model")


def run(size: str = "") -> str:
    """Return the table as Markdown. Size `tiny` is a quick check."""
    with tempfile.TemporaryDirectory() as folder:
        if size == "tiny":
            figures = measure_server(build_tiny_model(Path(folder)), 600, 30, 3)
        else:
            figures = measure_server(str(find_smollm2(Path(folder))), 49_152, TOKENS, PROBES)
    return "\n".join(
        [
            f"| {STREAMS} streams, prompts of {PROMPT} tokens | | target |",
            "|---|---|---|",
            f"| time to first token, idle server | {figures['idle'] * 1000:.0f} ms | |",
            f"| time to first token with {STREAMS} streams | {figures['busy'] * 1000:.0f} ms | |",
            f"| ratio | {figures['busy'] / figures['idle']:.2f} | at most 2 |",
            f"| tokens/s of all streams meanwhile | {figures['rate']:.0f} | |",
            f"| time outside the model | {figures['outside']:.1%} | at most 10% |",
            f"| of that, in the engine's scheduler and sampler | {figures['scheduler']:.1%} | |",
        ]
    )


if __name__ == "__main__":
    print(run(*sys.argv[1:]))
