"""Startup time: of `jingu --help`, and of the first training step of a tiny model without compilation."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

CONFIG = """
name: tiny
tokenizer: {path: tokenizer, vocab_size: 512}
data: {input: text, path: data}
model: {num_layers: 2, hidden_size: 64, num_heads: 2}
batch: {sequence_length: 64, global_batch_size: 4}
train: {steps: 1, log_every: 1, compile: false}
evaluation: {every: 0}
"""


def time_command(command: list[str], folder: Path) -> float:
    """Return the wall time of a command in seconds."""
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - started


def run(rounds: int = 5) -> str:
    """Return the table as Markdown."""
    jingu = [sys.executable, "-m", "jingu"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").mkdir()
        for number in range(20):
            text = Path(json.__file__).read_text(encoding="utf-8") + str(number)
            (folder / "text" / f"{number}.txt").write_text(text, encoding="utf-8")
        (folder / "run.yaml").write_text(CONFIG, encoding="utf-8")
        for verb in (["tokenizer", "train"], ["data", "build"]):
            subprocess.run([*jingu, *verb, "run.yaml"], cwd=folder, check=True, capture_output=True)
        helps = [time_command([*jingu, "--help"], folder) for _ in range(rounds)]
        runs = [time_command([*jingu, "train", "run.yaml", f"name=tiny-{number}"], folder) for number in range(rounds)]
    return "\n".join(
        [
            "| | seconds (median) | target: below |",
            "|---|---|---|",
            f"| `jingu --help` | {median(helps):.2f} | 0.3 |",
            f"| `jingu train`, one step of a tiny model, saved, from start to exit | {median(runs):.1f} | 10 |",
        ]
    )


if __name__ == "__main__":
    print(run())
