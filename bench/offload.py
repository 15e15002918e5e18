"""Training with master weights and optimizer state on disk, compared with training in memory.

Each side runs in its own process, one after the other. The table shows tokens/s and the peak anonymous memory (RssAnon,
which the system cannot write back to a file), measured after each optimizer step. Both sides use activation
checkpointing.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

from bench.children import ROOT, measure_in_child

LAYERS, WIDTH, HEADS, FEED_FORWARD, VOCABULARY = 12, 1024, 16, 2736, 8192
ROWS, SEQUENCE, STEPS = 2, 256, 6


def train_child(folder: str) -> None:
    """Train a few steps and print anonymous bytes, tokens/s and the number of parameters. Runs in a child process.

    Args:
        folder: where master weights and optimizer state are stored; empty: in memory.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    from jingu.config.sections.model import ModelSettings
    from jingu.config.sections.optimizers import AdamWSettings
    from jingu.model.decoder import Decoder
    from jingu.model.resolve import spec_from_settings
    from jingu.model.weight_init import init_weights
    from jingu.parallel.offload import DiskStorage
    from jingu.training.loss import linear_cross_entropy
    from jingu.training.optimizer import build_optimizer

    torch.set_num_threads(2)
    settings = ModelSettings(
        num_layers=LAYERS, hidden_size=WIDTH, num_heads=HEADS, intermediate_size=FEED_FORWARD, tie_word_embeddings=True
    )
    spec = spec_from_settings(settings, VOCABULARY, SEQUENCE)
    # Build the model on the meta device, then allocate its parameters in memory or on disk.
    with torch.device("meta"):
        model = Decoder(spec)
    disk = DiskStorage(Path(folder)) if folder else None
    model = model.to_empty(device="cpu") if disk is None else model._apply(disk.zeros_like)
    init_weights(model, spec, 0)
    # A run that is short of memory uses activation checkpointing too.
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    optimizer = build_optimizer(AdamWSettings(), model, disk)
    # Train, and record the memory after each optimizer step, when gradients still exist.
    rows = torch.randint(VOCABULARY, (STEPS, ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    seconds = []
    peak = 0
    for row in rows:
        started = time.perf_counter()
        labels = row[:, 1:].contiguous()
        loss = model(row[:, :-1], loss=lambda h, w, labels=labels: linear_cross_entropy(h, w, labels))
        (loss / labels.numel()).backward()
        optimizer.step()
        peak = max(peak, anonymous_bytes())
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    print(json.dumps([peak, ROWS * SEQUENCE / median(seconds[2:]), sum(p.numel() for p in model.parameters())]))


def anonymous_bytes() -> int:
    """Return the bytes of anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def run(rounds: int = 2) -> str:
    """Return the table as Markdown."""
    # Figures of each round: anonymous bytes, tokens/s, number of parameters.
    figures: dict[str, list[list[float]]] = {"memory": [], "disk": []}
    # In this repository rather than in /tmp, which may itself be memory.
    with tempfile.TemporaryDirectory(dir=ROOT) as name:
        for _ in range(rounds):
            for kind, results in figures.items():
                results.append(measure_in_child("offload", name if kind == "disk" else ""))
    memory = {kind: min(result[0] for result in results) for kind, results in figures.items()}
    rate = {kind: max(result[1] for result in results) for kind, results in figures.items()}
    parameters = figures["disk"][0][2]
    saving = 1 - memory["disk"] / memory["memory"]
    slowdown = rate["disk"] / rate["memory"]
    return "\n".join(
        [
            f"| {parameters / 1e6:.0f}M parameters, fp32, AdamW | anonymous memory | tokens/s |",
            "|---|---|---|",
            f"| in memory | {memory['memory'] / 1e6:,.0f} MB | {rate['memory']:,.0f} |",
            f"| master weights and state on disk | {memory['disk'] / 1e6:,.0f} MB | {rate['disk']:,.0f} |",
            f"| difference (target: 60% less memory, at least 0.5 of the speed) | {saving:.0%} less | {slowdown:.2f} |",
        ]
    )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        train_child(sys.argv[1])
    else:
        print(run())
