"""The current activity of this rank, in a small memory-mapped file that the node's watchdog reads.

The training loop writes its step, phase and micro-batch there, with one store into mapped memory and no system call.
PyTorch's flight recorder counts the collectives. A thread of the rank dumps the recorder's content when the watchdog
asks for it, which happens only after a hang.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median_low
from typing import Any

from jingu.compat.torch_distributed import process_groups, recorded_collectives
from jingu.runtime.device import gpu_uuid
from jingu.runtime.exit_codes import EXIT_STALLED
from jingu.runtime.files import write_text_atomically
from jingu.runtime.ranks import RankInfo, gather_from_all, master_address
from jingu.runtime.signals import exits_path
from jingu.watch.slot import (
    BEAT,
    COMMAND,
    EXIT,
    LISTEN,
    OPERATION,
    READS,
    READS_OFFSET,
    REPORT,
    SLOT_BYTES,
    STAGE,
    STAGE_OFFSET,
    start_time,
)

# Number of latest calls of each process group in a report: enough to find the first one in which ranks differ.
REPORTED_CALLS = 200
# Interval at which the thread checks for commands.
_POLL_SECONDS = 0.5
# Smaller clock differences may be due to ranks that read their clocks at different times.
_CLOCK_SECONDS = 5.0


class Activity:
    """Records what this rank does.

    Attributes:
        phase: the current phase.

    Args:
        slot: the mapped file that the watchdog reads; None if there is no watchdog.
    """

    def __init__(self, slot: mmap.mmap | None = None) -> None:
        self.phase = ""
        self._slot = slot
        self._changes = 0
        self._step = 0
        self._since = 0.0
        self._reads = (0, 0.0, 0.0)

    def enter(self, phase: str, step: int | None = None, micro_batch: int = -1, peer: int = -1) -> None:
        """Record what this rank does from now on.

        Args:
            phase: one of `jingu.watch.slot.PHASES`.
            step: the step, from 0; None keeps the current one.
            micro_batch: the micro-batch, from 0; -1 for none.
            peer: the rank with which it exchanges hidden states; -1 for none.
        """
        last_phase, self.phase = self.phase, phase
        if self._slot is None:
            return
        now = time.monotonic()
        if last_phase == "data":
            count, total, squares = self._reads
            seconds = now - self._since
            self._reads = (count + 1, total + seconds, squares + seconds * seconds)
            READS.pack_into(self._slot, READS_OFFSET, *self._reads)
        self._since = now
        if step is not None:
            self._step = step
        self._changes += 1
        OPERATION.pack_into(self._slot, 0, self._changes, phase.encode(), self._step, micro_batch, peer, now)

    def set_stage(self, stage: int) -> None:
        """Record the rank's pipeline stage: its computation time is compared with other ranks of that stage."""
        if self._slot is not None:
            STAGE.pack_into(self._slot, STAGE_OFFSET, stage)


@contextmanager
def watch_rank(folder: Path, ranks: RankInfo, timeout: float | None) -> Iterator[Activity]:
    """Record what this rank does within the block, and start a watchdog process on each node.

    Args:
        folder: folder of the run, below which the watchdogs of all nodes write their reports.
        timeout: seconds without progress after which training counts as hung; None disables the watchdog.
    """
    # The watchdog reads the states of processes from Linux's /proc.
    if timeout is None or sys.platform != "linux":
        yield Activity()
        return
    # The ranks of a node share a folder in main memory. The first of them creates it and starts the watchdog.
    hosts = gather_from_all(ranks.host)
    leader = hosts.index(ranks.host)
    local = ""
    if leader == ranks.rank:
        shared_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        local = tempfile.mkdtemp(prefix="jingu-watch-", dir=shared_memory)
    everywhere = gather_from_all([local, time.time()])
    if ranks.is_first:
        for sentence in describe_clocks(hosts, [clock for _, clock in everywhere]):
            print(f"jingu: {sentence}", file=sys.stderr, flush=True)
    folders = [folder_name for folder_name, _ in everywhere]
    slots = Path(folders[leader])
    with _open_slot(slots, ranks) as slot:
        gather_from_all(None)  # the watchdog must see the slots of all local ranks
        if leader == ranks.rank:
            # The random name of the first node's folder identifies this start of the run on all nodes.
            words = [
                str(slots),
                str(folder / Path(folders[0]).name),
                str(ranks.world),
                str(timeout),
                *map(str, master_address()),
            ]
            # In its own process group, so that Ctrl-C reaches only the ranks.
            watchdog = subprocess.Popen(
                [sys.executable, "-m", "jingu.watch.watchdog", *words], process_group=0, stdin=subprocess.DEVNULL
            )
            threading.Thread(target=watchdog.wait, daemon=True).start()
        yield Activity(slot)


def describe_clocks(hosts: Sequence[str], clocks: Sequence[float]) -> list[str]:
    """Return a warning for each node whose clock differs from those of the others."""
    usual = median_low(clocks)
    return [
        f"The clock of {host} is {abs(skew):,.0f} s {'ahead of' if skew > 0 else 'behind'} those of the other nodes: "
        "times in logs are wrong there, and connections with certificates fail. Let NTP set it."
        for host, skew in {host: clock - usual for host, clock in zip(hosts, clocks, strict=True)}.items()
        if abs(skew) > _CLOCK_SECONDS
    ]


@contextmanager
def _open_slot(slots: Path, ranks: RankInfo) -> Iterator[mmap.mmap]:
    """Map this rank's slot, write a description of the process, and answer the watchdog within the block."""
    name = f"rank-{ranks.rank:05d}"
    path = slots / f"{name}.slot"
    path.write_bytes(bytes(SLOT_BYTES))
    with path.open("r+b") as file, (slots / f"{name}.stack").open("wb") as stack:
        slot = mmap.mmap(file.fileno(), SLOT_BYTES)
        # faulthandler's C signal handler writes the stacks even while a call holds the GIL.
        faulthandler.register(signal.SIGUSR2, file=stack, all_threads=True)
        # It also writes them if a library crashes or aborts the process.
        is_enabled = faulthandler.is_enabled()
        if not is_enabled:
            faulthandler.enable(file=stack)
        process = {
            "rank": ranks.rank,
            "host": ranks.host or socket.gethostname(),
            "pid": os.getpid(),
            "start_time": start_time(os.getpid()),
            "thread": f"{threading.main_thread().ident:016x}",
            "exits": exits_path(),
            "device": ranks.device.type,
            "gpu": gpu_uuid(ranks.device),
        }
        write_text_atomically(slots / f"{name}.json", json.dumps(process))
        reporter = _Reporter(slot, slots / f"{name}.calls")
        reporter.start()
        try:
            yield slot
        except BaseException:
            # The calls of a rank that fails may show the cause.
            reporter.report()
            OPERATION.pack_into(slot, 0, -1, b"failed", 0, -1, -1, time.monotonic())
            raise
        else:
            (slots / f"{name}.json").unlink(missing_ok=True)
        finally:
            reporter.stop()
            faulthandler.unregister(signal.SIGUSR2)
            if not is_enabled:
                faulthandler.disable()


class _Reporter(threading.Thread):
    """A thread that shows regularly that it still gets the GIL, and executes the watchdog's commands."""

    def __init__(self, slot: mmap.mmap, path: Path) -> None:
        super().__init__(name="watch", daemon=True)
        self._slot = slot
        self._path = path
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            BEAT.pack_into(self._slot, OPERATION.size, time.monotonic())
            command = self._slot[COMMAND]
            if command == EXIT:
                os._exit(EXIT_STALLED)
            if command == REPORT:
                self.report()
                self._slot[COMMAND] = LISTEN

    def report(self) -> None:
        """Write the latest calls of each process group, with the group's axis and ranks."""
        with suppress(OSError):
            write_text_atomically(self._path, json.dumps(_describe_calls()))

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def _describe_calls() -> dict[str, Any]:
    """Return the process groups of this rank by name: axis, ranks, and calls (number, operation, shapes, is done)."""
    calls: dict[str, list[list[Any]]] = {}
    for call in recorded_collectives():
        if not call["is_p2p"]:
            operation = call["profiling_name"].rpartition(":")[2]
            sizes = call["input_sizes"] or call["output_sizes"]
            call_key = [call["collective_seq_id"], operation, sizes, call["retired"]]
            calls.setdefault(call["process_group"][0], []).append(call_key)
    groups = {}
    for name, description, members in process_groups():
        axis = "all ranks" if description == "default_pg" else description.removeprefix("mesh_")
        groups[name] = {"axis": axis, "ranks": members, "calls": calls.get(name, [])[-REPORTED_CALLS:]}
    return groups
