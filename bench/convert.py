"""Import and export compared with `cp` of the same files: a Hugging Face folder of random weights, half a gigabyte.

Both sides end with the data on disk: jingu syncs the folder before it renames it, so `cp` is followed by `sync` of its
files. The sides alternate, with the source in the page cache. The table shows the best round of each side, because
other users of the disk can only slow a round down.
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
        to = Path(name) / "to"
        subprocess.run(["sync"], check=True)

        def copy() -> None:
            subprocess.run(["cp", "-r", str(source), str(to)], check=True)

        def copy_to_disk() -> None:
            copy()
            subprocess.run(["sync", *map(str, to.iterdir())], check=True)

        def jingu(dtype: str, check: bool = False) -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                convert(source, to, dtype, check)

        # Rates are relative to the first side.
        sides: dict[str, Callable[[], None]] = {
            "`cp -r`, then `sync` of the copied files": copy_to_disk,
            "`cp -r` alone": copy,
            "`jingu import`, dtype as stored": lambda: jingu("auto"),
            "`jingu import --check`": lambda: jingu("auto", True),
            "`jingu import --dtype bf16`": lambda: jingu("bf16"),
        }
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(rounds):
            for side, work in sides.items():
                seconds[side].append(time_call(work, to))
        size = sum(file.stat().st_size for file in source.iterdir()) / 1e6
    best = {side: min(values) for side, values in seconds.items()}
    reference = next(iter(best.values()))
    rows = [f"| {side} | {value:.2f} | {size / value:.0f} | {reference / value:.2f} |" for side, value in best.items()]
    return "\n".join(["| | seconds (best) | MB/s of the source | relative speed |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(run())
