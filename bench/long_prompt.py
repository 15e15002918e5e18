"""A long prompt beside streams that generate: CPU time of the steps, and until a short prompt behind it is answered."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from bench.smollm2 import find_smollm2
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import InferenceModel, load
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.serve.commands import MAX_PREFILL_SECONDS

STREAMS, PROMPT, MOST_STEPS = 32, 3000, 400


def measure(model: InferenceModel, limit: float | None) -> list[float]:
    """Return the seconds of a step without prompts and of steps with them (median, longest), and until the long and the
    short prompt are answered."""
    settings = EngineSettings(STREAMS + 2, kv_cache_bytes=400_000_000, max_prefill_seconds=limit)
    engine = Engine(model, settings)

    def submit(first: int, length: int, max_tokens: int) -> int:
        ids = tuple(1000 + (first + 7 * number) % 5000 for number in range(length))
        return engine.submit(Request(ids, SamplingParams(), max_tokens, ignore_eos=True))

    for number in range(STREAMS):
        submit(number, 10, MOST_STEPS + 10)
    alone = [_step(engine)[0] for _ in range(6)]
    waiting = {submit(0, PROMPT, 1), submit(1, 4, 1)}
    seconds: list[float] = []
    answered = {}
    while waiting and len(seconds) < MOST_STEPS:
        duration, ids = _step(engine)
        seconds.append(duration)
        for request_id in waiting & ids:
            answered[request_id] = sum(seconds)
        waiting -= ids
    long, short = (answered[request_id] for request_id in sorted(answered))
    return [median(alone[1:]), median(seconds), max(seconds), long, short]


def _step(engine: Engine) -> tuple[float, set[int]]:
    """Take a step; return its CPU time, and the requests that it has events of."""
    start = time.thread_time()
    events = engine.step()
    return time.thread_time() - start, {event.request_id for event in events}


def run() -> str:
    """Return the table as Markdown."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = load(find_smollm2(Path(folder)), "fp32", "cpu")
        rounds = [(measure(model, None), measure(model, MAX_PREFILL_SECONDS)) for _ in range(2)]
    rows = ["| | without the limit | with it |", "|---|---|---|"]
    titles = (
        "a step without prompts",
        "a step with prompts, median",
        "the longest",
        f"until the prompt of {PROMPT:,} tokens is answered",
        "until a prompt of 4 tokens behind it is answered",
    )
    for index, title in enumerate(titles):
        cells = [", ".join(f"{pair[side][index]:.2f}" for pair in rounds) for side in (0, 1)]
        rows.append(f"| {title} | {cells[0]} | {cells[1]} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(run())
