"""Training with master weights and optimizer state on disk beside training with them in memory.

Each side in a process of its own, one after the other: the anonymous memory (RssAnon, which no disk can take back) at
its highest between steps, and the tokens a second. Both sides compute activations again rather than keep them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

LAYERS, WIDTH, HEADS, FEED_FORWARD, VOCABULARY = 12, 1024, 16, 2736, 8192
ROWS, SEQUENCE, STEPS = 2, 256, 6


def child(folder: str) -> None:
    """Train a few steps; prints anonymous bytes and tokens a second. `folder` is empty to stay in memory."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from jingu.config.sections.model import ModelSettings
    from jingu.config.sections.train import AdamWSettings
    from jingu.model.build import spec_from_settings
    from jingu.model.decoder import Decoder
    from jingu.model.initialise import initialise
    from jingu.parallel.offload import Disk
    from jingu.train.loss import summed_cross_entropy
    from jingu.train.optimizer import build_optimizer

    torch.set_num_threads(2)
    settings = ModelSettings(layers=LAYERS, width=WIDTH, heads=HEADS, feed_forward=FEED_FORWARD, tied_embeddings=True)
    spec = spec_from_settings(settings, VOCABULARY, SEQUENCE)
    with torch.device("meta"):
        model = Decoder(spec)
    disk = Disk(Path(folder)) if folder else None
    model = model.to_empty(device="cpu") if disk is None else model._apply(disk.zeros_like)
    initialise(model, spec, 0)
    for block in model.blocks:  # as everybody does for whom memory is short
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    optimizer = build_optimizer(AdamWSettings(), model, disk)
    rows = torch.randint(VOCABULARY, (STEPS, ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    seconds, most = [], 0
    for row in rows:
        started = time.perf_counter()
        labels = row[:, 1:].contiguous()
        loss = model(row[:, :-1], loss=lambda h, w, labels=labels: summed_cross_entropy(h, w, labels))
        (loss / labels.numel()).backward()
        optimizer.step()
        most = max(most, anonymous())
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    print(json.dumps([most, ROWS * SEQUENCE / median(seconds[2:]), sum(p.numel() for p in model.parameters())]))


def anonymous() -> int:
    """Bytes of anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def run(rounds: int = 2) -> str:
    """The table, as Markdown."""
    root = Path(__file__).parents[1]
    found: dict[str, list[list[float]]] = {"memory": [], "disk": []}
    # Beside this repository rather than in /tmp, which may itself be memory.
    with tempfile.TemporaryDirectory(dir=root) as name:
        for _ in range(rounds):
            for kind, results in found.items():
                command = [sys.executable, "-m", "bench.offload", name if kind == "disk" else ""]
                done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
                results.append(json.loads(done.stdout.splitlines()[-1]))
    inside, outside = (min(bytes_ for bytes_, _, _ in results) for results in found.values())
    fast, slow = (max(rate for _, rate, _ in results) for results in found.values())
    return "\n".join(
        [
            f"| {found['disk'][0][2] / 1e6:.0f}M parameters, fp32, AdamW | anonymous memory | tokens/s |",
            "|---|---|---|",
            f"| in memory | {inside / 1e6:,.0f} MB | {fast:,.0f} |",
            f"| master weights and state on disk | {outside / 1e6:,.0f} MB | {slow:,.0f} |",
            f"| difference (must: 60% lower, at 0.5 or more) | {1 - outside / inside:.0%} lower | {slow / fast:.2f} |",
        ]
    )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        child(sys.argv[1])
    else:
        print(run())
