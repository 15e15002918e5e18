"""A training step of a 17M Llama in jingu and in transformers: tokens/s and peak memory.

Each measurement runs in its own process, with the same number of threads. The sides alternate (A B A B …). Ratios are
ratios of medians.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace

from bench.children import measure_in_child
from bench.llama import llama_config

LAYERS, WIDTH, HEADS, FEED_FORWARD, VOCABULARY = 6, 384, 6, 1024, 16384
SEQUENCE, BATCH, THREADS, WARMUP = 512, 4, 2, 1


@dataclass(frozen=True)
class Measurement:
    """Figures of one process; `start_bytes` is its peak memory before the first step."""

    tokens_per_second: float
    peak_bytes: int
    start_bytes: int


def measure(side: str, precision: str, steps: int) -> None:
    """Run `steps` steps after a warm-up step, and print the figures as JSON. Runs in a child process.

    Args:
        side: `jingu` (compiled blocks), `jingu-eager` or `transformers`.
    """
    import torch

    from jingu.runtime.device import peak_memory

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    step = {"jingu": _jingu, "jingu-eager": _jingu, "transformers": _transformers}[side](precision, side == "jingu")
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1))
    device = torch.device("cpu")
    start_bytes = peak_memory(device)
    for _ in range(WARMUP):
        step(tokens)
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        step(tokens)
        seconds.append(time.perf_counter() - started)
    figures = Measurement(BATCH * SEQUENCE / median(seconds), peak_memory(device), start_bytes)
    print(json.dumps(figures.__dict__))


def make_step(precision: str, compiled: bool):
    """Return a function that runs a training step on a batch as `jingu train` does, on one rank."""

    from jingu.config.schema import RunConfig
    from jingu.config.sections.model import ModelSettings
    from jingu.config.sections.optimizers import AdamWSettings
    from jingu.config.sections.parallel import ParallelSettings
    from jingu.config.sections.train import PrecisionSettings
    from jingu.model.resolve import spec_from_settings
    from jingu.parallel.layout import Layout
    from jingu.parallel.materialize import materialize
    from jingu.parallel.mesh import build_mesh, resolve_axis_sizes
    from jingu.runtime.ranks import join_process_group
    from jingu.training.optimizer import build_optimizer
    from jingu.training.precision import choose_precision

    group = join_process_group("cpu", THREADS)
    ranks = group.__enter__()
    settings = ModelSettings(family="llama", **_size(), tie_word_embeddings=False)
    spec = spec_from_settings(settings, VOCABULARY, SEQUENCE)
    chosen = choose_precision(PrecisionSettings(type=precision), ranks.device)  # type: ignore[arg-type]
    parallel = ParallelSettings()
    mesh = build_mesh(resolve_axis_sizes(parallel, ranks.world, spec), ranks.device)
    model = materialize(spec, mesh, Layout(parallel, compile=compiled), chosen, 0)
    optimizer = build_optimizer(AdamWSettings(), model)

    step = step_on_batch(model, optimizer, spec, mesh, RunConfig(), compiled)
    step.group = group  # type: ignore[attr-defined]  # keeps the process group alive
    return step


def step_on_batch(model, optimizer, spec, mesh, config, compiled: bool):
    """Return a function that runs a training step on a batch, as one micro-batch."""
    from jingu.config.batch_plan import BatchPlan
    from jingu.training.pretraining import Pretraining
    from jingu.training.step import train_step

    current = []
    source = SimpleNamespace(batch=lambda step, first, count: current[0])
    task = Pretraining(source, spec, mesh, config, compile=compiled)  # type: ignore[arg-type]

    def step(batch) -> None:
        current[:] = [batch]
        rows = len(batch.tokens)
        result = train_step(
            model, optimizer, task, BatchPlan(rows, rows, 1, batch.tokens.numel()), step=0, max_grad_norm=1.0
        )
        result.loss.item()

    return step


def _size() -> dict[str, int]:
    return {"num_layers": LAYERS, "hidden_size": WIDTH, "num_heads": HEADS, "intermediate_size": FEED_FORWARD}


def _jingu(precision: str, compiled: bool):
    """Return a function that runs a training step of jingu on rows of tokens."""
    from jingu.data.batch import Batch

    step = make_step(precision, compiled)
    return lambda tokens: step(Batch(tokens[:, :-1], tokens[:, 1:]))


def _transformers(precision: str, _compiled: bool):
    """Return the same step with transformers: the model's own loss, autocast, PyTorch's AdamW, gradient clipping."""
    import torch
    from transformers import LlamaForCausalLM

    config = llama_config(_size(), VOCABULARY, SEQUENCE, tie_word_embeddings=False, use_cache=False)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def step(tokens: torch.Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def compare(precision: str, rounds: int, steps: int) -> list[str]:
    """Return rows of the table: the figures of each side, and their ratio to transformers."""
    sides: dict[str, list[Measurement]] = {"jingu": [], "jingu-eager": [], "transformers": []}
    for _ in range(rounds):
        for side, figures in sides.items():
            figures.append(Measurement(**measure_in_child("train_step", side, precision, steps)))
    base = median(m.tokens_per_second for m in sides["transformers"])
    lines = []
    for side, figures in sides.items():
        rate = median(m.tokens_per_second for m in figures)
        memory = median(m.peak_bytes for m in figures)
        lines.append(f"| {side} {precision} | {rate:,.0f} | {rate / base:.2f} | {memory / 2**20:,.0f} |")
    return lines


def run() -> str:
    """Return the table as Markdown."""
    rows = [*compare("fp32", rounds=2, steps=6), *compare("bf16", rounds=2, steps=6)]
    return "\n".join(["| | tokens/s | × transformers | peak memory, MiB |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    if len(sys.argv) == 4:
        measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        print(run())
