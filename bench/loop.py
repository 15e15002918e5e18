"""The training loop compared with a bare loop around the same model: the cost of checkpoints, metrics and FSDP2.

The bare loop is a loop as in a notebook: the same `Decoder` and loss, real data, PyTorch's fused AdamW, gradient
clipping. Each measurement runs in its own process; the sides alternate.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.children import measure_in_child, prepare_data, run_jingu
from bench.train_step import BATCH, FEED_FORWARD, HEADS, LAYERS, SEQUENCE, THREADS, VOCABULARY, WIDTH

STEPS = 30
CONFIG = f"""
name: loop
tokenizer: {{path: tokenizer, vocab_size: {VOCABULARY}}}
data: {{input: text, path: data, suffixes: [.py], validation_fraction: 0.01, invalid_utf8: skip}}
model:
  num_layers: {LAYERS}
  hidden_size: {WIDTH}
  num_heads: {HEADS}
  intermediate_size: {FEED_FORWARD}
  tie_word_embeddings: false
batch: {{sequence_length: {SEQUENCE}, global_batch_size: {BATCH}, micro_batch_size: {BATCH}}}
train: {{steps: {STEPS}, compile: false, log_every: 10}}
precision: {{type: fp32}}
device: {{type: cpu, threads: {THREADS}}}
evaluation: {{every: 0}}
checkpoint: {{every: 0, resume: auto}}
"""


def prepare(folder: Path) -> None:
    """Write real text, a tokenizer with 16,384 entries and a data set to `folder`."""
    from examples.quickstart import collect

    collect(folder / "text")
    prepare_data(folder, CONFIG)


def run_bare_loop(folder: Path) -> None:
    """Run the bare loop and print the tokens/s of the steps after the first ten. Runs in a child process."""
    import torch
    from torch import nn

    from jingu.config.load import load_config
    from jingu.data.dataset import open_dataset
    from jingu.data.mixture import MixtureDataset, plan_mixture
    from jingu.data.row_sources import WindowDataset
    from jingu.model.decoder import Decoder
    from jingu.model.resolve import spec_from_settings
    from jingu.model.weight_init import init_weights
    from jingu.training.loss import linear_cross_entropy

    # The data of the run, without jingu's prefetching.
    torch.set_num_threads(THREADS)
    config = load_config(folder / "run.yaml", [])
    windows = WindowDataset(open_dataset(folder / "data", "train"), SEQUENCE, 0)
    source = MixtureDataset((windows,), plan_mixture([(0, [1.0])], [None]), BATCH)
    # The model of the run, without FSDP, and PyTorch's optimizer.
    spec = spec_from_settings(config.model, VOCABULARY, SEQUENCE)
    with torch.device("meta"):
        model = Decoder(spec)
    model.to_empty(device="cpu")
    init_weights(model, spec, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    # The loop.
    seconds = []
    for step in range(STEPS):
        started = time.perf_counter()
        batch = source.batch(step, 0, BATCH)
        loss = model(batch.tokens, loss=lambda h, w, labels=batch.labels: linear_cross_entropy(h, w, labels))
        (loss / batch.labels.numel()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    print(json.dumps((STEPS - 10) * BATCH * SEQUENCE / sum(seconds[10:])))


def measure_jingu(folder: Path, number: int) -> float:
    """Run `jingu train` on the same data and return the tokens/s after the first ten steps, from metrics.jsonl."""
    run_jingu(folder, "train", "run.yaml", f"name=loop-{number}")
    lines = (folder / f"runs/loop-{number}/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record["type"] == "train"]
    first = records[0]
    last = records[-1]
    return (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])


def run(rounds: int = 3) -> str:
    """Return the table as Markdown."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        jingu_rates = []
        bare_rates = []
        for number in range(rounds):
            jingu_rates.append(measure_jingu(folder, number))
            bare_rates.append(measure_in_child("loop", folder))
    ratios = sorted(jingu / bare for jingu, bare in zip(jingu_rates, bare_rates, strict=True))
    return "\n".join(
        [
            "| | tokens/s (median) |",
            "|---|---|",
            f"| jingu train | {median(jingu_rates):,.0f} |",
            f"| bare loop | {median(bare_rates):,.0f} |",
            f"| ratio of each pair | {', '.join(f'{ratio:.3f}' for ratio in ratios)} |",
        ]
    )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        run_bare_loop(Path(sys.argv[1]))
    else:
        print(run())
