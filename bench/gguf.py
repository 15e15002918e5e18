"""Writing GGUF files, compared with `cp` of the written file, in wall and in CPU time.

The sources are Hugging Face folders in 16 bits, in the page cache. jingu ends with the file on disk, and `cp` with
copy in the page cache, or on disk after `sync`. The sides alternate; the table shows the best round of each, because
other users of the machine can only slow a round down. Memory is the growth of the process while it writes, without
mapped files, relative to the largest tensor of the file.

Argument `tiny` is a quick check with a small model.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.convert import build_source
from bench.packed_forms import cpu_time, peak_memory
from jingu.compat.malloc import release_free_memory
from jingu.formats.gguf_export import export_gguf
from jingu.formats.models import open_model

ROUNDS = 7
# The dtype of the source, and that of the file.
CASES = (("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp16"), ("bf16", "q8_0"))


def _time(work: Callable[[], object]) -> tuple[float, float]:
    """Return the wall time and the CPU time of a call."""
    begin, cpu_begin = time.perf_counter(), cpu_time()
    work()
    return time.perf_counter() - begin, cpu_time() - cpu_begin


def _measure(source: Path, dtype: str, folder: Path, rounds: int) -> str:
    """Return the cells of a row."""
    file, copy = folder / "model.gguf", folder / "copy.gguf"

    def write() -> None:
        export_gguf(open_model(source), file, dtype)

    def copy_file() -> None:
        subprocess.run(["cp", str(file), str(copy)], check=True)

    def copy_to_disk() -> None:
        copy_file()
        subprocess.run(["sync", str(copy)], check=True)

    write()
    largest = _largest_tensor(file)
    file.unlink()
    release_free_memory()
    memory = peak_memory(write) / largest
    times: dict[Callable[[], None], list[tuple[float, float]]] = {write: [], copy_file: [], copy_to_disk: []}
    for _ in range(rounds):
        for work, output in ((write, file), (copy_file, copy), (copy_to_disk, copy)):
            output.unlink(missing_ok=True)
            times[work].append(_time(work))
    size = file.stat().st_size / 1e9
    best = {work: [min(values) for values in zip(*each, strict=True)] for work, each in times.items()}
    ratios = [best[work][kind] / best[write][kind] for kind in (0, 1) for work in (copy_file, copy_to_disk)]
    figures = [size, *(size / best[work][0] for work in (copy_file, copy_to_disk, write)), *ratios, memory]
    return " | ".join(f"{value:.2f}" for value in figures)


def _largest_tensor(file: Path) -> int:
    import gguf

    return max(int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors)


def run(argument: str = "") -> str:
    """Return the table as Markdown."""
    width, rounds = (128, 2) if argument == "tiny" else (2048, ROUNDS)
    lines = [
        "| source | `--dtype` | file, GB | `cp`, GB/s | with `sync` | jingu, GB/s | jingu / `cp` | with `sync` |"
        " CPU time | with `sync` | memory |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    torch.set_num_threads(1)
    for stored, dtype in CASES:
        with tempfile.TemporaryDirectory() as name:
            source = build_source(Path(name), width, stored)
            lines.append(f"| {stored} | {dtype} | {_measure(source, dtype, Path(name), rounds)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    print(run(*sys.argv[1:]))
