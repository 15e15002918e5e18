"""Keep threads from spinning while other programs compute.

A thread of GCC's OpenMP that waits for the others spins for milliseconds before it sleeps. On a quiet machine that is
fastest. Beside other programs it burns the time slices of the very threads that it waits for, and training can slow
down ten times more than its share of the CPU. OpenMP reads how long to spin once, at its start; but it stops spinning
while the process has more of its threads than CPUs. So they are added when threads begin to wait for a CPU, and ended
when they do not any more. They only sleep, and results do not depend on them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jingu.runtime.gpus import num_usable_cores

# Seconds between two looks at the machine.
_INTERVAL = 0.5
# Seconds for which a process's threads waited for a CPU in each second: the machine is busy above the first, and quiet
# again below the second. Beside one program per two cores both ways of waiting are as fast; beside more, sleeping is.
_BUSY_SHARE = 0.5
_QUIET_SHARE = 0.3
_TASKS = Path("/proc/self/task")


@contextmanager
def sleep_on_busy_machine() -> Iterator[None]:
    """Inside of this context, let waiting OpenMP threads sleep instead of spinning while the machine is busy.

    Does nothing where the system does not tell how long threads waited for a CPU, as only Linux does.
    """
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(stop,), name="spinning", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()


def _watch(stop: threading.Event) -> None:
    sleepers: SleepingThreads | None = None
    waited, now = seconds_without_cpu(), time.monotonic()
    while waited is not None and not stop.wait(_INTERVAL):
        before, then = waited, now
        waited, now = seconds_without_cpu(), time.monotonic()
        # A thread that has ended takes its seconds along.
        share = max((waited or 0.0) - before, 0.0) / (now - then)
        if sleepers is None and share > _BUSY_SHARE and "torch" in sys.modules:
            sleepers = SleepingThreads()
        elif sleepers is not None and share < _QUIET_SHARE:
            sleepers.end()
            sleepers = None
    if sleepers is not None:
        sleepers.end()


def seconds_without_cpu() -> float | None:
    """Return how long the threads of this process were ready to run but had no CPU; None: the system does not tell."""
    nanoseconds = 0
    try:
        for task in _TASKS.iterdir():
            # A thread may end while it is looked at.
            with suppress(FileNotFoundError, ProcessLookupError):
                nanoseconds += int((task / "schedstat").read_text(encoding="ascii").split()[1])
    except (OSError, LookupError, ValueError):
        return None
    return nanoseconds / 1e9


class SleepingThreads:
    """OpenMP threads that only sleep: with those of one computing thread, more than there are CPUs."""

    def __init__(self) -> None:
        import torch

        self._done = threading.Event()
        self._threads: list[threading.Thread] = []
        size = torch.get_num_threads()
        total = size
        # A thread that computes has a pool of its own, with one thread less than the number that compute.
        while size > 1 and total <= num_usable_cores():
            started = threading.Event()
            self._threads.append(threading.Thread(target=self._keep_pool, args=(started,), daemon=True))
            self._threads[-1].start()
            started.wait()
            total += size - 1

    def end(self) -> None:
        """End the threads, and wait for them."""
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _keep_pool(self, started: threading.Event) -> None:
        import torch

        # Enough elements for an operation in parallel, which starts the pool.
        torch.ones(1 << 18).add_(1)
        started.set()
        self._done.wait()
