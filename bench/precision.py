"""Losses in bf16 and fp16 compared with fp32: a real run of 200 steps in each, on Python's standard library."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from bench.children import prepare_data, run_jingu

KINDS = ("fp32", "bf16", "fp16")
STEPS, EVERY = 200, 10
CONFIG = """
tokenizer: {{path: tokenizer, vocab_size: 4096, sample_bytes: 3000000}}
data: {{input: text, path: data, suffixes: [.py], validation_fraction: 0.01, invalid_utf8: skip}}
model: {{num_layers: 4, hidden_size: 192, num_heads: 4}}
batch: {{sequence_length: 256, global_batch_size: 8}}
train: {{steps: {steps}, compile: false, log_every: {every}}}
device: {{type: cpu}}
evaluation: {{every: {steps}, num_sequences: 200}}
checkpoint: {{every: 0}}
"""


def train_losses(folder: Path, kind: str) -> tuple[list[float], float, float]:
    """Train; return the mean loss of each logged interval, the validation loss, and the number of skipped steps."""
    run_jingu(folder, "train", "run.yaml", f"name={kind}", f"precision.type={kind}")
    lines = (folder / f"runs/{kind}/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    train_records = [record for record in records if record["type"] == "train"]
    (validation_loss,) = [record["loss"] for record in records if record["type"] == "evaluation"]
    return [record["loss"] for record in train_records], validation_loss, train_records[-1].get("skipped", 0)


def run(steps: int = STEPS, every: int = EVERY) -> str:
    """Return the table as Markdown."""
    from examples.quickstart import collect

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        collect(folder / "text")
        prepare_data(folder, CONFIG.format(steps=steps, every=every))
        results = {kind: train_losses(folder, kind) for kind in KINDS}
    reference = results["fp32"][0]
    lines = [
        f"| | loss of the last {every} steps | validation loss |"
        " largest deviation from fp32 (target: at most 1%) | skipped steps |",
        "|---|---|---|---|---|",
    ]
    for kind, (losses, validation_loss, skipped) in results.items():
        deviation = max(abs(loss / exact - 1) for loss, exact in zip(losses, reference, strict=True))
        lines.append(f"| {kind} | {losses[-1]:.4f} | {validation_loss:.4f} | {deviation:.2%} | {skipped} |")
    return "\n".join(lines)
