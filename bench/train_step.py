"""A training step of a 17M Llama in jingu and in transformers: tokens/s and peak memory.

Each side runs in its own processes with the same number of threads; the sides alternate (A B A B …). Ratios are those
of the medians.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import median

LAYERS, WIDTH, HEADS, FEED_FORWARD, VOCABULARY = 6, 384, 6, 1024, 16384
SEQUENCE, BATCH, THREADS, WARMUP = 512, 4, 2, 1


@dataclass(frozen=True)
class Measurement:
    """Figures of one process."""

    tokens_per_second: float
    peak_bytes: int
    start_bytes: int


def measure(side: str, precision: str, steps: int) -> None:
    """Run `steps` steps after a warm-up step, and print the figures as JSON. Runs in a child process."""
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
    """Return a function that does what `jingu train` does in a step, on one rank."""

    from jingu.config.batch_plan import BatchPlan
    from jingu.config.schema import RunConfig
    from jingu.config.sections.model import ModelSettings
    from jingu.config.sections.parallel import ParallelSettings
    from jingu.config.sections.train import AdamWSettings, PrecisionSettings
    from jingu.data.batch import Batch
    from jingu.model.resolve import spec_from_settings
    from jingu.parallel.layout import Layout
    from jingu.parallel.materialize import materialize
    from jingu.parallel.mesh import build_mesh, resolve_axis_sizes
    from jingu.runtime.ranks import join_process_group
    from jingu.training.optimizer import build_optimizer
    from jingu.training.precision import choose_precision
    from jingu.training.pretraining import Pretraining
    from jingu.training.step import train_step

    group = join_process_group("cpu", THREADS)
    ranks = group.__enter__()
    settings = ModelSettings(
        family="llama",
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_heads=HEADS,
        intermediate_size=FEED_FORWARD,
        tie_word_embeddings=False,
    )
    spec = spec_from_settings(settings, VOCABULARY, SEQUENCE)
    chosen = choose_precision(PrecisionSettings(type=precision), ranks.device)  # type: ignore[arg-type]
    parallel = ParallelSettings()
    mesh = build_mesh(resolve_axis_sizes(parallel, ranks.world, spec), ranks.device)
    model = materialize(spec, mesh, Layout(parallel, compile=compiled), chosen, 0)
    optimizer = build_optimizer(AdamWSettings(), model)

    class Constant(Pretraining):
        def batch(self, step: int, first: int, count: int) -> Batch:
            return current[0]

    current: list[Batch] = []
    task = Constant(None, spec, mesh, RunConfig(), compile=compiled)  # type: ignore[arg-type]
    plan = BatchPlan(BATCH, BATCH, 1, BATCH * SEQUENCE)

    def step(batch: Batch) -> None:
        current[:] = [batch]
        result = train_step(model, optimizer, task, plan, step=0, max_grad_norm=1.0)
        result.loss.item()

    step.group = group  # type: ignore[attr-defined]  # keeps the process group alive
    return step


def _jingu(precision: str, compiled: bool):
    """Return a function that runs a step of jingu on rows of tokens."""
    from jingu.data.batch import Batch

    step = make_step(precision, compiled)
    return lambda tokens: step(Batch(tokens[:, :-1], tokens[:, 1:]))


def _transformers(precision: str, _compiled: bool):
    """Return the same step as written with transformers: the model's own loss, autocast, torch's AdamW, clipping."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False,
        use_cache=False,
    )
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


def measure_in_child(side: str, precision: str, steps: int) -> Measurement:
    """Measure one side in a child process."""
    command = [sys.executable, "-m", "bench.train_step", side, precision, str(steps)]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    return Measurement(**json.loads(process.stdout.splitlines()[-1]))


def compare(precision: str, rounds: int, steps: int) -> list[str]:
    """Return rows of the table: the figures and ratios of each side."""
    sides: dict[str, list[Measurement]] = {"jingu": [], "jingu-eager": [], "transformers": []}
    for _ in range(rounds):
        for side, figures in sides.items():
            figures.append(measure_in_child(side, precision, steps))
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
