"""Import and export beside `cp` of the same files: a Hugging Face folder of random weights, half a gigabyte.

Both sides end on the disk: the folder that jingu writes is synced before it takes its name, so `cp` is followed by
`sync` of what it wrote. They take turns; each starts from a page cache that holds the source, and the best round of
each counts, since what others do with the disk only ever slows a round down.
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


def made(folder: Path) -> Path:
    """A model of 134M parameters in fp32 and a small tokenizer, as a Hugging Face folder."""
    import torch

    from jingu.checkpoint.export import export_hf
    from jingu.config.sections.model import ModelSettings
    from jingu.model.build import spec_from_settings
    from jingu.model.decoder import parameter_shapes
    from jingu.text.training import train_tokenizer

    train_tokenizer(iter(["some text"]), 257, ["<|endoftext|>"]).save(folder / "tokenizer")
    settings = ModelSettings(family="llama", width=1024, heads=16, layers=8, vocabulary=16000, tied_embeddings=False)
    spec = spec_from_settings(settings, 257, 512)
    shapes = parameter_shapes(spec)
    generator = torch.Generator().manual_seed(0)
    export_hf(spec, lambda name: torch.randn(shapes[name], generator=generator), folder / "tokenizer", folder / "from")
    return folder / "from"


def seconds(work: Callable[[], object], to: Path) -> float:
    """Wall time of a piece of work that makes the folder `to`, which is deleted."""
    started = time.perf_counter()
    work()
    taken = time.perf_counter() - started
    shutil.rmtree(to)
    return taken


def run(rounds: int = ROUNDS) -> str:
    """The table, as Markdown."""
    from jingu.checkpoint.verbs import convert

    with tempfile.TemporaryDirectory() as name:
        source, to = made(Path(name)), Path(name) / "to"
        subprocess.run(["sync"], check=True)

        def copy() -> None:
            subprocess.run(["cp", "-r", str(source), str(to)], check=True)

        def copy_to_disk() -> None:
            copy()
            subprocess.run(["sync", *map(str, to.iterdir())], check=True)

        def jingu(dtype: str, check: bool = False) -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                convert(source, to, dtype, check)

        sides: dict[str, Callable[[], None]] = {
            "`cp -r`, then `sync` of its files": copy_to_disk,
            "`cp -r` alone": copy,
            "`jingu import`, as stored": lambda: jingu("auto"),
            "`jingu import --check`": lambda: jingu("auto", True),
            "`jingu import --dtype bf16`": lambda: jingu("bf16"),
        }
        taken: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(rounds):
            for side, work in sides.items():
                taken[side].append(seconds(work, to))
        size = sum(file.stat().st_size for file in source.iterdir()) / 1e6
    first, *_ = times = [min(values) for values in taken.values()]
    rows = [
        f"| {side} | {value:.2f} | {size / value:.0f} | {first / value:.2f} |"
        for side, value in zip(taken, times, strict=True)
    ]
    return "\n".join(["| | seconds (best) | MB of the source a second | speed |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(run())
