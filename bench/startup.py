"""Time to run `jingu --help`, plans, and the first training step of a tiny model without compilation."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.children import LITTLE_DATA, prepare_data

CONFIG = f"""{LITTLE_DATA}
model: {{num_layers: 2, hidden_size: 64, num_heads: 2}}
batch: {{sequence_length: 64, global_batch_size: 4}}
train: {{steps: 1, log_every: 1, compile: false}}
"""

# Plans: a title, the arguments of `jingu plan`, and the target in seconds.
PLANS = (
    (
        "llama-3-8b on 8 GPUs, one layout",
        "llama-3-8b parallel.zero_stage=3 batch.micro_batch_size=1 --on a100-80 --gpus 8",
        0.5,
    ),
    ("llama-3-8b on 8 GPUs, the best layout", "llama-3-8b --on a100-80 --gpus 8", 5),
    ("llama-3.1-405b on 4,096 GPUs, `--search`", "llama-3.1-405b --on h100 --nodes 512 --search", 5),
    ("llama-3-70b on 4,096 GPUs, `--search`", "llama-3-70b --on h100 --nodes 512 --search", 5),
    ("cpm2-moe-198b on 4,096 GPUs, `--search`", "cpm2-moe-198b --on a100-80 --nodes 512 --search", 5),
    ("cpm2-moe-198b on 3,072 GPUs, `--search`", "cpm2-moe-198b --on a100-80 --nodes 384 --search", 5),
)


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
        prepare_data(folder, CONFIG)
        helps = [time_command([*jingu, "--help"], folder) for _ in range(rounds)]
        runs = [time_command([*jingu, "train", "run.yaml", f"name=tiny-{number}"], folder) for number in range(rounds)]
        plans = [
            (title, median(time_command([*jingu, "plan", *words.split()], folder) for _ in range(rounds)), target)
            for title, words, target in PLANS
        ]
    return "\n".join(
        [
            "| | seconds (median) | target: below |",
            "|---|---|---|",
            f"| `jingu --help` | {median(helps):.2f} | 0.3 |",
            f"| `jingu train`, one step of a tiny model, saved, from start to exit | {median(runs):.1f} | 10 |",
            *(f"| `jingu plan`, {title} | {seconds:.2f} | {target} |" for title, seconds, target in plans),
        ]
    )


if __name__ == "__main__":
    print(run())
