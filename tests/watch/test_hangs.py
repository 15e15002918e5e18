"""Faults on four real gloo ranks: the watchdog names the right rank and the right cause, and ends the run."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from jingu.runtime.exit_codes import EXIT_STALLED, WATCHDOG_SIGNAL
from jingu.runtime.ranks import RankInfo
from jingu.watch.activity import Activity, watch_rank
from tests.limits import PATIENCE
from tests.rank_pool import fork_context

WORLD = 4
CULPRIT = 2
HEALTHY_STEPS = 3
TIMEOUT = 0.6


class Rank:
    """A rank of a little training loop on a mesh of 2 × 2, in which one step goes wrong."""

    def __init__(self, rank: int, activity: Activity) -> None:
        self.rank = rank
        self.activity = activity
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        self.groups = {axis: mesh[axis].get_group() for axis in ("shard", "tensor")}

    def is_culprit(self) -> bool:
        return self.rank == CULPRIT

    def step(self, step: int, fault: Callable[[Rank], None] | None = None) -> None:
        """Read data, compute with the ranks of `tensor`, sum over `shard`, and over all."""
        self.activity.enter("data", step)
        if fault is not None and self.is_culprit() and fault in LOCAL_FAULTS:
            fault(self)
        self.activity.enter("micro-batch", micro_batch=0)
        dist.all_reduce(torch.ones(6), group=self.groups["tensor"])
        self.activity.enter("gradients")
        if fault is not None and fault not in LOCAL_FAULTS:
            fault(self)
        else:
            dist.all_reduce(torch.ones(5))
        dist.all_reduce(torch.ones(7), group=self.groups["shard"])


def read_rows(rank: Rank) -> None:
    time.sleep(1000)


def stop_self(rank: Rank) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_self(rank: Rank) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hold_interpreter(rank: Rank) -> None:
    deque(itertools.repeat(None), maxlen=0)  # it never ends, and never lets another thread run


def hang_in_save(rank: Rank) -> None:
    rank.activity.enter("save")
    if rank.is_culprit():
        write_tensors()
    dist.all_reduce(torch.ones(5))


def write_tensors() -> None:
    time.sleep(1000)


def read_in_thread(rank: Rank) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(read_rows, rank).result()


def skip(rank: Rank) -> None:
    if not rank.is_culprit():
        dist.all_reduce(torch.ones(5))


def misshape(rank: Rank) -> None:
    dist.all_reduce(torch.ones(9 if rank.is_culprit() else 5))


def diverge(rank: Rank) -> None:
    if rank.is_culprit():
        dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3), group=rank.groups["tensor"])
    else:
        dist.all_reduce(torch.ones(5))


def mismatch_pipeline(rank: Rank) -> None:
    """Each rank passes two micro-batches to the next one, but the culprit passes only one."""
    for micro_batch in range(2):
        if rank.rank > 0:
            rank.activity.enter("receive", micro_batch=micro_batch, peer=rank.rank - 1)
            dist.recv(torch.ones(2), rank.rank - 1)
        if rank.rank + 1 < WORLD and not (rank.is_culprit() and micro_batch):
            rank.activity.enter("send", micro_batch=micro_batch, peer=rank.rank + 1)
            dist.send(torch.ones(2), rank.rank + 1)
    rank.activity.enter("gradients")
    dist.all_reduce(torch.ones(5))


LOCAL_FAULTS = (read_rows, read_in_thread, stop_self, kill_self, hold_interpreter)


def run_rank(rank: int, store: str, folder: str, fault: Callable[[Rank], None]) -> None:
    torch.set_num_threads(1)
    descriptor = os.open(f"{folder}/output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 2)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD, timeout=timedelta(seconds=PATIENCE)
    )
    with watch_rank(Path(folder), RankInfo(rank, WORLD, torch.device("cpu"), "node"), TIMEOUT) as activity:
        this = Rank(rank, activity)
        for step in range(HEALTHY_STEPS):
            this.step(step)
        for step in range(HEALTHY_STEPS, 50):
            this.step(step, fault if step == HEALTHY_STEPS else None)


@contextmanager
def start_ranks(folder: Path, fault: Callable[[Any], None], run: Callable[..., None] = run_rank) -> Iterator[list[Any]]:
    context = fork_context()
    arguments = (str(folder / "store"), str(folder), fault)
    processes = [context.Process(target=run, args=(rank, *arguments)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def find_verdict(folder: Path, fault: Callable[[Rank], None]) -> tuple[str, list[int | None]]:
    """Run the ranks to their end; return the verdict and the exit codes."""
    with start_ranks(folder, fault) as processes:
        for process in processes:
            process.join(PATIENCE)
        codes = [process.exitcode for process in processes]
    # Where all ranks fail at once, the watchdog ends after them.
    end = time.monotonic() + PATIENCE
    while not (verdicts := list(folder.glob("jingu-watch-*/verdict.txt"))):
        assert time.monotonic() < end, (codes, (folder / "output").read_text())
        time.sleep(0.01)
    return verdicts[0].read_text(), codes


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("fault", "sentences"),
    [
        pytest.param(
            read_rows,
            [
                f"in step {HEALTHY_STEPS + 1}.",
                "rank 2 (node) has not joined all-reduce",
                "ranks 0, 1 and 3 wait for it.",
                "test_hangs.py:",
                " read_rows since",
                "(read data)",
            ],
        ),
        pytest.param(read_in_thread, ["rank 2 (node) has not", "test_hangs.py:", " read_rows since"], marks=slow),
        pytest.param(hang_in_save, ["rank 2 (node) has not joined", " write_tensors since", "(save)"], marks=slow),
        pytest.param(stop_self, ["rank 2 (node) has not joined all-reduce", "It is stopped"], marks=slow),
        pytest.param(kill_self, ["rank 2 (node)", "It has ended, without an error message."], marks=slow),
        pytest.param(hold_interpreter, ["rank 2 (node)", "hold_interpreter holds the interpreter's lock"], marks=slow),
        pytest.param(
            skip,
            ["rank 2 (node) has not joined all-reduce 10 of all ranks; ranks 0, 1 and 3 wait", "It waits for rank 0"],
        ),
        pytest.param(
            misshape,
            ["rank 2 (node) called all-reduce of [[9]]", "where the other ranks called all-reduce of [[5]]"],
            marks=slow,
        ),
        pytest.param(diverge, ["rank 2 (node)", "It waits for rank 3 in all-gather", "axis `tensor`"], marks=slow),
        pytest.param(
            mismatch_pipeline,
            ["rank 2 (node) has not joined receive of hidden states of micro-batch 2 of axis `pipeline`; rank 3 waits"],
            marks=slow,
        ),
    ],
)
def test_the_right_rank_and_cause(tmp_path, fault, sentences):
    verdict, codes = find_verdict(tmp_path, fault)
    for sentence in sentences:
        assert sentence in verdict, verdict
    assert all(code not in (0, None) for code in codes), codes
    # Ranks that cannot end by themselves are killed; of some faults gloo itself notices, and ranks fail or abort.
    assert set(codes) <= {EXIT_STALLED, -WATCHDOG_SIGNAL, -signal.SIGKILL, -signal.SIGABRT, 1}


def no_fault(rank: Rank) -> None:
    rank.activity.enter("save")
    event = threading.Event()
    event.wait(0.1)
    rank.activity.enter("gradients")
    dist.all_reduce(torch.ones(5))


def test_healthy_ranks_end_without_a_trace(tmp_path):
    with start_ranks(tmp_path, no_fault) as processes:
        for process in processes:
            process.join(PATIENCE)
        assert [process.exitcode for process in processes] == [0] * WORLD
    assert (tmp_path / "output").read_text() == ""
    # The watchdog ends after the ranks.
    end = time.monotonic() + PATIENCE
    while list(tmp_path.glob("jingu-watch-*")):
        assert time.monotonic() < end
        time.sleep(0.01)
