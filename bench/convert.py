"""Import and export compared with `cp` of the same files: a Hugging Face folder of random weights, half a gigabyte, and
a run that started from it.

Both sides end with the data on disk: jingu syncs the folder before it renames it, so `cp` is followed by `sync` of its
files. The sides alternate, with the source in the page cache. The table shows the best round of each side, because
other users of the disk can only slow a round down. Memory is the growth of anonymous memory during a call, relative to
the largest tensor in fp32, in the last round.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.children import run_jingu
from bench.packed_forms import peak_memory

ROUNDS = 7


def build_source(folder: Path, width: int = 1024, dtype: str = "fp32") -> Path:
    """Write a Hugging Face folder with a model and a small tokenizer: 134M parameters at a width of 1,024."""
    import torch

    from jingu.config.sections.model import ModelSettings
    from jingu.formats.export import export_hf
    from jingu.model.decoder import parameter_shapes
    from jingu.model.resolve import spec_from_settings
    from jingu.runtime.device import DTYPES
    from jingu.text.tokenizer_training import train_tokenizer

    train_tokenizer(iter(["some text"]), 257, ["<|endoftext|>"]).save(folder / "tokenizer")
    settings = ModelSettings(
        family="llama", hidden_size=width, num_heads=16, num_layers=8, vocab_size=16000, tie_word_embeddings=False
    )
    spec = spec_from_settings(settings, 257, 512)
    shapes = parameter_shapes(spec)
    generator = torch.Generator().manual_seed(0)
    export_hf(
        spec,
        lambda name: torch.randn(shapes[name], generator=generator),
        folder / "tokenizer",
        folder / "from",
        DTYPES[dtype],
    )
    return folder / "from"


# A run of one step on little text, from the weights of the folder.
RUN = """
name: convert
tokenizer: {path: tokenizer, vocab_size: 257}
data: {input: text, path: data}
model: {family: llama, hidden_size: 1024, num_heads: 16, num_layers: 8, vocab_size: 16000, tie_word_embeddings: false}
initialize: {from: from}
batch: {sequence_length: 16, global_batch_size: 1, micro_batch_size: 1}
optimizer: {type: sgd, lr: 0.001, momentum: 0.0}
train: {steps: 1, compile: false}
precision: {type: fp32}
device: {type: cpu}
evaluation: {every: 0}
"""
LARGEST = 16000 * 1024 * 4


def train_run(folder: Path) -> Path:
    """Train a run from the folder that `build_source` has written, for one step, and return it."""
    (folder / "text").mkdir()
    (folder / "text" / "words.txt").write_text("some text " * 500, encoding="utf-8")
    (folder / "run.yaml").write_text(RUN, encoding="utf-8")
    run_jingu(folder, "data", "build", "run.yaml")
    run_jingu(folder, "train", "run.yaml")
    return folder / "runs" / "convert"


def time_call(work: Callable[[], object], to: Path) -> float:
    """Return the wall time of a call that writes the folder `to`, and delete the folder."""
    started = time.perf_counter()
    work()
    elapsed = time.perf_counter() - started
    shutil.rmtree(to)
    return elapsed


def run(rounds: int = ROUNDS) -> str:
    """Return the table as Markdown."""
    from jingu.formats.export import convert

    with tempfile.TemporaryDirectory() as name:
        source = build_source(Path(name))
        trained_run = train_run(Path(name))
        to = Path(name) / "to"
        subprocess.run(["sync"], check=True)

        def copy() -> None:
            subprocess.run(["cp", "-r", str(source), str(to)], check=True)

        def copy_to_disk() -> None:
            copy()
            subprocess.run(["sync", *map(str, to.iterdir())], check=True)

        def jingu(dtype: str, check: bool = False, model: Path = source) -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                convert(model, to, dtype, check)

        # Rates are relative to the first side.
        sides: dict[str, Callable[[], None]] = {
            "`cp -r`, then `sync` of the copied files": copy_to_disk,
            "`cp -r` alone": copy,
            "`jingu import`, dtype as stored": lambda: jingu("auto"),
            "`jingu import --check`": lambda: jingu("auto", True),
            "`jingu import --dtype bf16`": lambda: jingu("bf16"),
            "`jingu export` of a run": lambda: jingu("auto", model=trained_run),
            "`jingu export --dtype bf16`": lambda: jingu("bf16", model=trained_run),
        }
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(rounds):
            for side, work in sides.items():
                seconds[side].append(time_call(work, to))
        memory = dict.fromkeys(sides, "")
        for side, work in sides.items():
            if "jingu" in side:
                memory[side] = f"{peak_memory(work) / LARGEST:.2f}"
                shutil.rmtree(to)
        size = sum(file.stat().st_size for file in source.iterdir()) / 1e6
    best = {side: min(values) for side, values in seconds.items()}
    reference = next(iter(best.values()))
    rows = [
        f"| {side} | {value:.2f} | {size / value:.0f} | {reference / value:.2f} | {memory[side]} |"
        for side, value in best.items()
    ]
    return "\n".join(
        ["| | seconds (best) | MB/s of the source | relative speed | memory |", "|---|---|---|---|---|", *rows]
    )


if __name__ == "__main__":
    print(run())
