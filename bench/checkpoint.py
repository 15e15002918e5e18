"""Checkpoints of a model with 300 MB of state, compared with plain reads and writes: cost for training, and speed.

All measurements use one disk and alternate within one run; the table shows medians. Reads start with a cold page cache.

"Another layout": one rank loads a checkpoint that two ranks have written, each half of every tensor (rows or columns).
For the memory of a load it is the reverse: one of two ranks loads the checkpoint of one rank.

The cost of a copy is smaller than the variation between steps. So it is measured with pairs of short steps. One of the
two, alternately the first and the second, runs during a copy.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

THREADS = 2
CHUNK = 4 << 20
SEQUENCE, BATCH = 256, 4
LAYERS, WIDTH = 6, 480
SHORT_SEQUENCE = 128
ROUNDS = 5
READS = 5  # per round, because the rates of two reads differ by a fifth
STALLS = 40  # pairs of short steps


def build_state(layers: int = LAYERS, width: int = WIDTH) -> tuple[Any, Any, dict[str, Any]]:
    """Return a Llama, its optimizer, and the tensors of a checkpoint by name."""
    import torch

    from jingu.config.sections.model import ModelSettings
    from jingu.config.sections.optimizers import AdamWSettings
    from jingu.model.decoder import Decoder
    from jingu.model.resolve import spec_from_settings
    from jingu.model.weight_init import init_weights
    from jingu.training.optimizer import build_optimizer, named_optimizer_state

    torch.set_num_threads(THREADS)
    spec = spec_from_settings(
        ModelSettings(family="llama", num_layers=layers, hidden_size=width, num_heads=8), 16384, SEQUENCE
    )
    with torch.device("meta"):
        model = Decoder(spec)
    model.to_empty(device="cpu")
    init_weights(model, spec, 0)
    optimizer = build_optimizer(AdamWSettings(), model)
    tensors = {f"model/{name}": parameter for name, parameter in model.named_parameters()}
    tensors |= {f"optimizer/{name}": tensor for name, tensor, _ in named_optimizer_state(optimizer, model)}
    return model, optimizer, tensors


def time_call(work: Callable[..., object], *arguments: Any, **keywords: Any) -> float:
    """Return the wall time of a call in seconds."""
    started = time.perf_counter()
    work(*arguments, **keywords)
    return time.perf_counter() - started


def drop_page_cache(*folders: Path) -> None:
    """Drop the files of folders from the page cache."""
    for path in (path for folder in folders for path in folder.iterdir()):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def write_sequentially(path: Path, size: int) -> None:
    """Write `size` bytes to one file and sync it to disk."""
    block = memoryview(os.urandom(CHUNK))
    with path.open("wb", buffering=0) as file:
        for first in range(0, size, CHUNK):
            file.write(block[: min(CHUNK, size - first)])
        os.fsync(file.fileno())


def read_sequentially(folder: Path) -> None:
    """Read all files of a folder, one after another."""
    buffer = memoryview(bytearray(CHUNK))
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def save_as_two_ranks(folder: Path, tensors: dict[str, Any]) -> None:
    """Write a checkpoint as two ranks would, each with half of the rows or columns of every tensor."""
    from jingu.checkpoint.save_folder import finish_save, partial_path
    from jingu.checkpoint.store import write_blocks

    partial_path(folder).mkdir(parents=True)
    for rank in range(2):
        blocks = half_blocks(rank, tensors)
        # A scalar has no halves: the first rank writes it.
        mine = {name: block for name, block in blocks.items() if block.shape or rank == 0}
        write_blocks(partial_path(folder), mine, rank, 2)
    finish_save(folder, {}, 2)


def half_blocks(rank: int, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the block of each tensor that one of two ranks holds: half of its rows or columns."""
    from jingu.parallel.sharding import TensorBlock, block_region, subblock

    blocks = {}
    for index, (name, tensor) in enumerate(sorted(tensors.items())):
        # Matrices alternate between rows and columns; a scalar has no halves.
        dim = index % 2 if tensor.dim() > 1 else 0
        offset, size = block_region(tensor.shape, [(dim, 2, rank)] if tensor.dim() else [])
        local = subblock(tensor.detach(), (0,) * tensor.dim(), offset, size)
        blocks[name] = TensorBlock(local, tuple(tensor.shape), offset)
    return blocks


def make_step(model: Any, optimizer: Any, batch: int = BATCH, sequence: int = SEQUENCE) -> Callable[[], float]:
    """Return a function that runs one training step and returns its duration in seconds."""
    import torch

    from jingu.training.loss import linear_cross_entropy

    tokens = torch.randint(0, 16384, (batch, sequence + 1), generator=torch.Generator().manual_seed(0))

    def step() -> float:
        started = time.perf_counter()
        loss = model(tokens[:, :-1], loss=lambda h, w: linear_cross_entropy(h, w, tokens[:, 1:].contiguous()))
        (loss / (batch * sequence)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started

    return step


def measure_stalls(
    saver: Any, tensors: dict[str, Any], step: Callable[[], float], folder: Path
) -> Iterator[tuple[float, float]]:
    """Yield, for each save, the seconds for which training is blocked, and the seconds that it loses in total.

    The writer process is paused during these steps, because `measure_throughput` measures its cost separately.
    """
    from jingu.checkpoint.resume import step_folder
    from jingu.checkpoint.retention import Retention

    # Record the time that the optimizer waits for the copy.
    settle_seconds = [0.0]
    saver.wait_for_copy = partial(lambda wait: settle_seconds.append(time_call(wait)), saver.wait_for_copy)
    for number in range(STALLS):
        step()  # warms up after the previous save has waited for the disk
        os.kill(saver._process.pid, signal.SIGSTOP)
        target = step_folder(folder, number)
        save_seconds = 0.0
        step_seconds = {}
        for copies in (number % 2 == 0, number % 2 == 1):
            if copies:
                save_seconds = time_call(saver.save, target, tensors, {}, Retention(1))
            step_seconds[copies] = step()
        yield save_seconds + settle_seconds[-1], save_seconds + step_seconds[True] - step_seconds[False]
        os.kill(saver._process.pid, signal.SIGCONT)
        saver.poll(None)


def load_peak(folder: Path, ranks: int) -> float:
    """Return the peak memory of a load beyond the rank's own state, relative to that state. Runs in a child process.

    Args:
        ranks: 1: the rank loads all tensors; 2: it loads half of each tensor.
    """
    import torch

    from jingu.checkpoint.save_folder import open_checkpoint
    from jingu.checkpoint.shards import DTYPES
    from jingu.checkpoint.store import load_blocks, local_blocks
    from jingu.runtime.device import peak_memory

    manifest = open_checkpoint(folder)
    tensors = {
        name: torch.empty(record.shape, dtype=DTYPES[record.dtype], device="meta")
        for name, record in manifest.tensors.items()
    }
    blocks = {
        name: replace(block, local=torch.ones(block.size, dtype=block.local.dtype))
        for name, block in (half_blocks(0, tensors) if ranks == 2 else local_blocks(tensors)).items()
    }
    before = peak_memory(torch.device("cpu"))
    load_blocks(folder, manifest, blocks)
    extra = peak_memory(torch.device("cpu")) - before
    return extra / sum(block.local.nbytes for block in blocks.values())


def measure_memory_copies(
    rank: int, ranks: int, folder: Path, rounds: int, layers: int, width: int
) -> list[tuple[float, float, float]]:
    """Return, for each round, the seconds of a synchronous save, of an in-memory copy, and of loading that copy.

    Runs on two ranks.
    """
    from jingu.checkpoint.memory_copies import MemoryCopies
    from jingu.checkpoint.resume import step_folder
    from jingu.checkpoint.store import load, save
    from jingu.runtime.ranks import gather_from_all

    _, _, tensors = build_state(layers, width)
    memory = MemoryCopies(Path("/dev/shm"), os.getppid(), lambda: tensors)
    results = []

    def resume() -> None:
        load(memory.gather(memory.steps()[-1]), tensors, gather=gather_from_all)

    for number in range(rounds):
        target = step_folder(folder, number)
        saved = time_call(save, target, tensors, {}, rank=rank, ranks=ranks, gather=gather_from_all)
        copied = time_call(memory.save, {}, number)
        resumed = time_call(resume)
        memory.release()
        results.append((saved, copied, resumed))
    memory.delete()
    return results


def measure_disk(folder: Path, tensors: dict[str, Any], number: int, note: Callable[[str, float], None]) -> None:
    """Measure one round of plain writes and reads, synchronous saves and loads, and the memory of loads.

    Args:
        note: records a figure by name.
    """
    from jingu.checkpoint.resume import step_folder
    from jingu.checkpoint.store import load, save

    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    note("plain write", time_call(write_sequentially, folder / "plain", size))
    (folder / "plain").unlink()
    saved = step_folder(folder / "sync", number)
    note("sync save", time_call(save, saved, tensors, {}))
    other = step_folder(folder / "other", number)
    save_as_two_ranks(other, tensors)
    drop_page_cache(saved, other)
    read_sequentially(other)  # the first read after these writes waits for the disk
    drop_page_cache(other)
    for _ in range(READS):
        note("plain read", time_call(read_sequentially, saved))
        drop_page_cache(saved)
        note("load", time_call(load, saved, tensors))
        drop_page_cache(saved)
        note("other layout", time_call(load, other, tensors))
        drop_page_cache(other)
    for name, ranks in (("load peak", "1"), ("load peak, half", "2")):
        child = [sys.executable, "-m", "bench.checkpoint", str(saved), ranks]
        note(name, float(subprocess.run(child, check=True, capture_output=True, text=True).stdout))
    shutil.rmtree(folder / "sync")
    shutil.rmtree(folder / "other")


def measure_throughput(saver: Any, tensors: dict[str, Any], step: Callable[[], float], target: Path) -> float:
    """Return the training throughput during an asynchronous save, relative to the throughput without a save."""
    from jingu.checkpoint.retention import Retention

    step()
    alone = median(step() for _ in range(5))
    saver.save(target, tensors, {}, Retention(1))
    during_save = []
    while saver.poll() is None:
        during_save.append(step())
    return alone * len(during_save) / sum(during_save)


def run(rounds: int = ROUNDS, layers: int = LAYERS, width: int = WIDTH) -> str:
    """Return the table as Markdown."""
    # Use the default scheduling policy: with a real-time policy, threads would not share a core, and here some must.
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    from jingu.checkpoint.async_save import AsyncSaver
    from jingu.checkpoint.resume import step_folder
    from tests.rank_pool import RankPool

    model, optimizer, tensors = build_state(layers, width)
    step = make_step(model, optimizer)
    figures: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)

    Path("build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir="build") as name:
        folder = Path(name)
        # Rates, and the throughput during asynchronous saves.
        saver = AsyncSaver(tensors, optimizer)
        for number in range(rounds):
            measure_disk(folder, tensors, number, note)
            target = step_folder(folder / "background", number)
            note("throughput", measure_throughput(saver, tensors, step, target))
        # The cost of a copy.
        short_step = make_step(model, optimizer, 1, SHORT_SEQUENCE)
        for blocked, lost in measure_stalls(saver, tensors, short_step, folder / "stalls"):
            note("blocked", blocked)
            note("lost", lost)
        saver.close()
        # Copies in memory, with two ranks.
        pool = RankPool()
        results = pool.run(measure_memory_copies, 2, folder / "two", rounds, layers, width)[0]
        pool.close()
        for saved, copied, resumed in results:
            note("two ranks: save", saved)
            note("two ranks: copy", copied)
            note("two ranks: resume", resumed)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return format_table({name: median(values) for name, values in figures.items()}, size)


def format_table(medians: dict[str, float], size: int) -> str:
    """Return the table as Markdown.

    Args:
        medians: medians of the figures, by name.
        size: bytes of the state.
    """
    # Ratios, with their targets.
    sync_save = medians["sync save"]
    rows = [
        (
            "training time lost to the copy of an asynchronous save / synchronous save",
            medians["lost"] / sync_save,
            "at most 0.04",
        ),
        ("of that, training blocked", medians["blocked"] / sync_save, ""),
        ("training throughput during the write / undisturbed", medians["throughput"], "at least 0.9"),
        ("synchronous save rate / sequential write rate", medians["plain write"] / sync_save, "at least 0.8"),
        ("load rate / sequential read rate", medians["plain read"] / medians["load"], "at least 0.8"),
        ("load in another layout / in the same layout", medians["other layout"] / medians["load"], "at most 1.25"),
        (
            "in-memory copy of two ranks / their synchronous save",
            medians["two ranks: copy"] / medians["two ranks: save"],
            "",
        ),
        ("resuming from it / that save", medians["two ranks: resume"] / medians["two ranks: save"], ""),
        ("memory of a load beyond the state / state", medians["load peak"], "at most 0.1"),
        ("the same, one of two ranks loading the checkpoint of one rank", medians["load peak, half"], "at most 0.1"),
    ]
    lines = [f"| {what} | {value:.3f} | {target} |" for what, value, target in rows]
    # Absolute figures, in one sentence.
    rates = {
        "sequential write": size / medians["plain write"],
        "synchronous save": size / sync_save,
        "sequential read": size / medians["plain read"],
    }
    summary = ", ".join(f"{what} {rate / 1e6:,.0f} MB/s" for what, rate in rates.items())
    cost = f"an asynchronous save costs {1e3 * medians['lost']:.0f} ms"
    return "\n".join(
        [
            "| | ratio (median) | target |",
            "|---|---|---|",
            *lines,
            "",
            f"{size / 1e6:,.0f} MB of state; {summary}; {cost}.",
        ]
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(load_peak(Path(sys.argv[1]), int(sys.argv[2])))
    else:
        print(run())
