"""The loop beside a bare hand-written one around the same model: what checkpoints, metrics and ZeRO's engine cost.

The bare loop is what one writes in a notebook: the same Decoder and loss, constant real data, torch's fused AdamW,
clipping. Each side runs in processes of its own, in turn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.train_step import BATCH, FEED_FORWARD, HEADS, LAYERS, SEQUENCE, THREADS, VOCABULARY, WIDTH

STEPS = 30
CONFIG = f"""
name: loop
tokenizer: {{path: tokenizer, vocabulary: {VOCABULARY}}}
data: {{input: text, path: data, suffixes: [.py], held_out: 0.01, invalid_utf8: skip}}
model: {{layers: {LAYERS}, width: {WIDTH}, heads: {HEADS}, feed_forward: {FEED_FORWARD}, tied_embeddings: false}}
batch: {{sequence_length: {SEQUENCE}, global_size: {BATCH}, micro_size: {BATCH}}}
train: {{steps: {STEPS}, compile: false, log_every: 10}}
precision: {{type: fp32}}
device: {{type: cpu, threads: {THREADS}}}
evaluation: {{every: 0}}
checkpoint: {{every: 0, resume: auto}}
"""


def prepare(folder: Path) -> None:
    """Real text, a tokenizer of 16,384 entries and a data set, in `folder`."""
    from examples.quickstart import collect

    collect(folder / "text")
    (folder / "run.yaml").write_text(CONFIG, encoding="utf-8")
    for verb in (["tokenizer", "train"], ["data", "build"]):
        subprocess.run([sys.executable, "-m", "jingu", *verb, "run.yaml"], cwd=folder, check=True, capture_output=True)


def bare(folder: Path) -> None:
    """Child process: the bare loop; prints tokens a second of the steps after the first ten."""
    import torch
    from torch import nn

    from jingu.config.load import load_config
    from jingu.data.batches import BatchSource, Windows
    from jingu.data.dataset import open_dataset
    from jingu.data.mixture import plan_mixture
    from jingu.model.build import spec_from_settings
    from jingu.model.decoder import Decoder
    from jingu.model.initialise import initialise
    from jingu.train.loss import summed_cross_entropy

    torch.set_num_threads(THREADS)
    config = load_config(folder / "run.yaml", [])
    windows = Windows(open_dataset(folder / "data", "train"), SEQUENCE, 0)
    source = BatchSource((windows,), plan_mixture([(0, [1.0])], [None]), BATCH)
    spec = spec_from_settings(config.model, VOCABULARY, SEQUENCE)
    with torch.device("meta"):
        model = Decoder(spec)
    model.to_empty(device="cpu")
    initialise(model, spec, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    seconds = []
    for step in range(STEPS):
        started = time.perf_counter()
        batch = source.batch(step, 0, BATCH)
        loss = model(batch.tokens, loss=lambda h, w, labels=batch.labels: summed_cross_entropy(h, w, labels))
        (loss / batch.labels.numel()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    print(json.dumps((STEPS - 10) * BATCH * SEQUENCE / sum(seconds[10:])))


def through_jingu(folder: Path, number: int) -> float:
    """`jingu train` on the same data; tokens a second of the steps after the first ten, from metrics.jsonl."""
    command = [sys.executable, "-m", "jingu", "train", "run.yaml", f"name=loop-{number}"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    lines = (folder / f"runs/loop-{number}/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    trained = [record for record in map(json.loads, lines) if record["type"] == "train"]
    first, last = trained[0], trained[-1]
    return (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])


def run(rounds: int = 3) -> str:
    """The table, as Markdown."""
    root = str(Path(__file__).parents[1])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        ours, theirs = [], []
        for number in range(rounds):
            ours.append(through_jingu(folder, number))
            done = subprocess.run(
                [sys.executable, "-m", "bench.loop", str(folder)], cwd=root, check=True, capture_output=True, text=True
            )
            theirs.append(float(done.stdout.splitlines()[-1]))
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return "\n".join(
        [
            "| | tokens/s (median) |",
            "|---|---|",
            f"| jingu train | {median(ours):,.0f} |",
            f"| bare loop | {median(theirs):,.0f} |",
            f"| ratio, pair by pair | {', '.join(f'{ratio:.3f}' for ratio in ratios)} |",
        ]
    )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        bare(Path(sys.argv[1]))
    else:
        print(run())
