"""Losses in bf16 and fp16 beside those in fp32: one real run of 200 steps on Python's standard library in each."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

KINDS = ("fp32", "bf16", "fp16")
STEPS, EVERY = 200, 10
CONFIG = """
tokenizer: {{path: tokenizer, vocabulary: 4096, sample_bytes: 3000000}}
data: {{input: text, path: data, suffixes: [.py], held_out: 0.01, invalid_utf8: skip}}
model: {{layers: 4, width: 192, heads: 4}}
batch: {{sequence_length: 256, global_size: 8}}
train: {{steps: {steps}, compile: false, log_every: {every}}}
device: {{type: cpu}}
evaluation: {{every: {steps}, sequences: 200}}
checkpoint: {{every: 0}}
"""


def jingu(folder: Path, *words: str) -> None:
    """Run `jingu WORDS` in a folder."""
    subprocess.run([sys.executable, "-m", "jingu", *words], cwd=folder, check=True, capture_output=True)


def losses(folder: Path, kind: str) -> tuple[list[float], float, float]:
    """Mean losses of every `EVERY` steps, the held-out loss at the end, and steps that were skipped."""
    jingu(folder, "train", "run.yaml", f"name={kind}", f"precision.type={kind}")
    lines = (folder / f"runs/{kind}/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    trained = [record for record in records if record["type"] == "train"]
    (held_out,) = [record["loss"] for record in records if record["type"] == "evaluation"]
    return [record["loss"] for record in trained], held_out, trained[-1].get("skipped", 0)


def run(steps: int = STEPS, every: int = EVERY) -> str:
    """The table, as Markdown."""
    from examples.quickstart import collect

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        collect(folder / "text")
        (folder / "run.yaml").write_text(CONFIG.format(steps=steps, every=every), encoding="utf-8")
        jingu(folder, "tokenizer", "train", "run.yaml")
        jingu(folder, "data", "build", "run.yaml")
        found = {kind: losses(folder, kind) for kind in KINDS}
    exact = found["fp32"][0]
    lines = [
        f"| | loss of the last {every} steps | held-out loss | farthest from fp32 (must be 1% or less) | skipped |",
        "|---|---|---|---|---|",
    ]
    for kind, (means, held_out, skipped) in found.items():
        apart = max(abs(mean / there - 1) for mean, there in zip(means, exact, strict=True))
        lines.append(f"| {kind} | {means[-1]:.4f} | {held_out:.4f} | {apart:.2%} | {skipped} |")
    return "\n".join(lines)
