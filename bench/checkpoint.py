"""Checkpoints of a model with 300 MB of state, beside the plain disk: what a save costs training, and how fast it is.

Everything is on one disk in one run, each measured several times in turn; the median counts. Reading starts with
files that are not in the page cache. Another layout: what two ranks have written, each half of every tensor (its rows,
or its columns), read by one; for memory the other way round. What a copy costs training is small beside how much steps
differ from each other: pairs of short steps tell it, in one of which, by turns the first and the second, it is made.
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
READS = 5
"""In each round: the rate of one differs from the next by a fifth."""
STALLS = 40


def made(layers: int = LAYERS, width: int = WIDTH) -> tuple[Any, Any, dict[str, Any]]:
    """A Llama, its optimizer, and the tensors that a checkpoint holds."""
    import torch

    from jingu.config.sections.model import ModelSettings
    from jingu.config.sections.train import AdamWSettings
    from jingu.model.build import spec_from_settings
    from jingu.model.decoder import Decoder
    from jingu.model.initialise import initialise
    from jingu.train.optimizer import build_optimizer, named_state

    torch.set_num_threads(THREADS)
    spec = spec_from_settings(ModelSettings(family="llama", layers=layers, width=width, heads=8), 16384, SEQUENCE)
    with torch.device("meta"):
        model = Decoder(spec)
    model.to_empty(device="cpu")
    initialise(model, spec, 0)
    optimizer = build_optimizer(AdamWSettings(), model)
    tensors = {f"model/{name}": parameter for name, parameter in model.named_parameters()}
    tensors |= {f"optimizer/{name}": tensor for name, tensor in named_state(optimizer, model)}
    return model, optimizer, tensors


def seconds(work: Callable[[], object]) -> float:
    """Wall time."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def forget(*folders: Path) -> None:
    """Let the page cache forget files that are on disk."""
    for path in (path for folder in folders for path in folder.iterdir()):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def write_plainly(path: Path, size: int) -> None:
    """So many bytes in one file, on disk in the end."""
    block = memoryview(os.urandom(CHUNK))
    with path.open("wb", buffering=0) as file:
        for first in range(0, size, CHUNK):
            file.write(block[: min(CHUNK, size - first)])
        os.fsync(file.fileno())


def read_plainly(folder: Path) -> None:
    """Every byte of a folder's files, one after another."""
    buffer = memoryview(bytearray(CHUNK))
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def save_as_two(folder: Path, tensors: dict[str, Any]) -> None:
    """As two ranks would: half of the rows, or of the columns, of each tensor each."""
    from jingu.checkpoint.files import finish_save, partial_name
    from jingu.checkpoint.shards import Held
    from jingu.checkpoint.store import write_blocks

    partial_name(folder).mkdir(parents=True)
    for rank in range(2):
        blocks = []
        for name, found in halves(rank, {name: tuple(tensor.shape) for name, tensor in tensors.items()}).items():
            local = tensors[name].detach()
            for place, (first, extent) in enumerate(zip(found.offset, found.size, strict=True)):
                local = local.narrow(place, first, extent)
            blocks += [Held(name, found, local)] if local.dim() or rank == 0 else []
        write_blocks(partial_name(folder), blocks, rank, 2)
    finish_save(folder, {}, 2)


def halves(rank: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """What one of two ranks holds: half of the rows, or of the columns, of each tensor."""
    from torch.distributed.tensor import Shard

    from jingu.checkpoint.slices import local_slice

    found = {}
    for number, (name, shape) in enumerate(sorted(shapes.items())):
        axes = [Shard(number % 2 if len(shape) > 1 else 0)] if shape else []
        found[name] = local_slice(shape, [2][: len(axes)], [rank][: len(axes)], axes)
    return found


def steps_of(model: Any, optimizer: Any, batch: int = BATCH, sequence: int = SEQUENCE) -> Callable[[], float]:
    """A function that takes one training step, and its seconds."""
    import torch

    from jingu.train.loss import summed_cross_entropy

    tokens = torch.randint(0, 16384, (batch, sequence + 1), generator=torch.Generator().manual_seed(0))

    def step() -> float:
        started = time.perf_counter()
        loss = model(tokens[:, :-1], loss=lambda h, w: summed_cross_entropy(h, w, tokens[:, 1:].contiguous()))
        (loss / (batch * sequence)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started

    return step


def stalls(
    saver: Any, tensors: dict[str, Any], step: Callable[[], float], folder: Path
) -> Iterator[tuple[float, float]]:
    """Seconds that training stands still for a save, and that it loses in all: a step more than another one.

    The process that writes is stopped meanwhile: what that costs is the throughput beside it.
    """
    from jingu.checkpoint.resume import Keep, step_folder

    stood = [0.0]
    saver.settle = partial(lambda settle: stood.append(seconds(settle)), saver.settle)
    for number in range(STALLS):
        step()  # the processor has waited for the disk
        os.kill(saver._process.pid, signal.SIGSTOP)
        goal, saved, taken = step_folder(folder, number), 0.0, {}
        for copies in (number % 2 == 0, number % 2 == 1):
            if copies:
                saved = seconds(lambda goal=goal: saver.save(goal, tensors, {}, Keep(1)))
            taken[copies] = step()
        yield saved + stood[-1], saved + taken[True] - taken[False]
        os.kill(saver._process.pid, signal.SIGCONT)
        saver.poll(None)


def peak_of_a_load(folder: Path, ranks: int) -> float:
    """Child process: memory that a load takes at its peak, over the rank's own state, as a share of that state; one of
    two ranks has half of each tensor."""
    import torch

    from jingu.checkpoint.files import open_checkpoint
    from jingu.checkpoint.shards import DTYPES, Held
    from jingu.checkpoint.slices import local_slice
    from jingu.checkpoint.store import load_blocks
    from jingu.runtime.device import peak_memory

    manifest = open_checkpoint(folder)
    shapes = {name: stored.shape for name, stored in manifest.tensors.items()}
    slices = halves(0, shapes) if ranks == 2 else {name: local_slice(shapes[name], [], [], []) for name in shapes}
    blocks = [
        Held(name, found, torch.ones(found.size, dtype=DTYPES[manifest.tensors[name].dtype]))
        for name, found in slices.items()
    ]
    before = peak_memory(torch.device("cpu"))
    load_blocks(folder, manifest, blocks)
    taken = peak_memory(torch.device("cpu")) - before
    return taken / sum(block.local.numel() * block.local.element_size() for block in blocks)


def copies_of_two(
    rank: int, ranks: int, folder: Path, rounds: int, layers: int, width: int
) -> list[tuple[float, float, float]]:
    """On two ranks: seconds of a save that waits, of a copy in their memory, and of filling the tensors from that."""
    from jingu.checkpoint.memory import MemoryCopies
    from jingu.checkpoint.resume import step_folder
    from jingu.checkpoint.store import load, save
    from jingu.runtime.ranks import all_agree

    _, _, tensors = made(layers, width)
    memory, taken = MemoryCopies(Path("/dev/shm"), os.getppid(), lambda: tensors), []
    for number in range(rounds):
        goal = step_folder(folder, number)
        saved = seconds(lambda goal=goal: save(goal, tensors, {}, rank=rank, ranks=ranks, agree=all_agree))
        copied = seconds(lambda number=number: memory.save({}, number))
        found = seconds(lambda: load(memory.gather(memory.steps()[-1]), tensors, agree=all_agree))
        memory.release()
        taken.append((saved, copied, found))
    memory.forget()
    return taken


def run(rounds: int = ROUNDS, layers: int = LAYERS, width: int = WIDTH) -> str:
    """The table, as Markdown."""
    # Threads of a real-time policy do not share a core, and here some must.
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    from jingu.checkpoint.background import BackgroundSaver
    from jingu.checkpoint.resume import Keep, step_folder
    from jingu.checkpoint.store import load, save
    from tests.rank_pool import RankPool

    model, optimizer, tensors = made(layers, width)
    step = steps_of(model, optimizer)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    taken: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        taken.setdefault(name, []).append(value)

    Path("build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir="build") as name:
        folder = Path(name)
        saver = BackgroundSaver(tensors, optimizer)
        for number in range(rounds):
            note("plain write", seconds(lambda: write_plainly(folder / "plain", size)))
            (folder / "plain").unlink()
            saved = step_folder(folder / "sync", number)
            note("sync save", seconds(lambda saved=saved: save(saved, tensors, {})))
            other = step_folder(folder / "other", number)
            save_as_two(other, tensors)
            forget(saved, other)
            read_plainly(other)  # what is read right after all this was written waits for the disk
            forget(other)
            for _ in range(READS):
                note("plain read", seconds(lambda saved=saved: read_plainly(saved)))
                forget(saved)
                note("load", seconds(lambda saved=saved: load(saved, tensors)))
                forget(saved)
                note("other layout", seconds(lambda other=other: load(other, tensors)))
                forget(other)
            for name, ranks in (("peak of a load", "1"), ("peak of a load by half", "2")):
                child = [sys.executable, "-m", "bench.checkpoint", str(saved), ranks]
                note(name, float(subprocess.run(child, check=True, capture_output=True, text=True).stdout))
            shutil.rmtree(folder / "sync")
            shutil.rmtree(folder / "other")
            step()
            alone = median(step() for _ in range(5))
            goal = step_folder(folder / "background", number)
            saver.save(goal, tensors, {}, Keep(1))
            beside = []
            while saver.poll() is None:
                beside.append(step())
            note("throughput beside the writer", alone * len(beside) / sum(beside))
        for stood, lost in stalls(saver, tensors, steps_of(model, optimizer, 1, SHORT_SEQUENCE), folder / "stalls"):
            note("stood still", stood)
            note("lost", lost)
        saver.close()
        pool = RankPool()
        both = pool.run(copies_of_two, 2, folder / "two", rounds, layers, width)[0]
        pool.close()
        for saved, copied, found in both:
            note("two ranks' save", saved)
            note("two ranks' copy", copied)
            note("two ranks' way back", found)
    now = {key: median(values) for key, values in taken.items()}
    rows = [
        (
            "training time lost to the copy of a save in the background / a save that waits",
            now["lost"] / now["sync save"],
        ),
        ("of that, training standing still", now["stood still"] / now["sync save"]),
        ("throughput while the writer works / undisturbed", now["throughput beside the writer"]),
        ("rate of a save that waits / plain sequential write", now["plain write"] / now["sync save"]),
        ("rate of a load / plain sequential read", now["plain read"] / now["load"]),
        ("load in another layout / in the same one", now["other layout"] / now["load"]),
        ("a copy in the memory of two ranks / their save that waits", now["two ranks' copy"] / now["two ranks' save"]),
        ("going back to it / that save", now["two ranks' way back"] / now["two ranks' save"]),
        ("memory a load takes beside the state / the state", now["peak of a load"]),
        ("the same, where one of two ranks loads what one has saved", now["peak of a load by half"]),
    ]
    goals = ("at most 0.04", "", "at least 0.9", "at least 0.8", "at least 0.8", "at most 1.25", "", "")
    goals += ("at most 0.1", "at most 0.1")
    lines = [f"| {what} | {value:.3f} | {goal} |" for (what, value), goal in zip(rows, goals, strict=True)]
    rates = ", ".join(f"{key} {size / now[key] / 1e6:,.0f} MB/s" for key in ("plain write", "sync save", "plain read"))
    ends = f"{size / 1e6:,.0f} MB of state; {rates}; a save in the background costs {1e3 * now['lost']:.0f} ms."
    return "\n".join(["| | ratio (median) | must be |", "|---|---|---|", *lines, "", ends])


if __name__ == "__main__":
    print(peak_of_a_load(Path(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 1 else run())
