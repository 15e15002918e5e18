"""Keep OpenMP threads from spinning while other programs compute.

A waiting thread of GCC's OpenMP spins for milliseconds before it sleeps. That is fastest on an idle machine. Beside
other programs, it uses up the time slices of the threads that it waits for, and training can slow down ten times more
than its share of the CPU explains. OpenMP reads the spin time only once, at its start. But it does not spin while the
process has more OpenMP threads than CPUs. So this module adds OpenMP threads when threads of the process wait for a
CPU, and ends them when they no longer wait. The added threads only sleep, and results do not depend on them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jingu.runtime.gpus import num_usable_cores

# Seconds between two measurements.
_INTERVAL = 0.5
# Seconds per second for which the threads of this process, together, waited for a CPU. The machine is busy above the
# first threshold, and idle again below the second. With one other program per two cores, spinning and sleeping are
# equally fast; with more programs, sleeping is faster.
_BUSY_SHARE = 0.5
_QUIET_SHARE = 0.3
_TASKS = Path("/proc/self/task")


@contextmanager
def sleep_on_busy_machine() -> Iterator[None]:
    """Let waiting OpenMP threads sleep instead of spinning while the machine is busy, within the block.

    Does nothing if the system does not report how long threads waited for a CPU; only Linux does.
    """
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(stop,), name="spinning", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()


def _watch(stop: threading.Event) -> None:
    """Measure how long threads wait for a CPU, and start and end `SleepingThreads`, until `stop` is set."""
    sleepers: SleepingThreads | None = None
    idle_seconds, now = seconds_without_cpu(), time.monotonic()
    while idle_seconds is not None and not stop.wait(_INTERVAL):
        before, then = idle_seconds, now
        idle_seconds, now = seconds_without_cpu(), time.monotonic()
        # The sum can decrease: a thread that has ended no longer counts.
        share = max((idle_seconds or 0.0) - before, 0.0) / (now - then)
        if sleepers is None and share > _BUSY_SHARE and "torch" in sys.modules:
            sleepers = SleepingThreads()
        elif sleepers is not None and share < _QUIET_SHARE:
            sleepers.end()
            sleepers = None
    if sleepers is not None:
        sleepers.end()


def seconds_without_cpu() -> float | None:
    """Return the total time for which this process's threads were runnable without a CPU; None: not reported."""
    nanoseconds = 0
    try:
        for task in _TASKS.iterdir():
            # A thread may end while its file is read.
            with suppress(FileNotFoundError, ProcessLookupError):
                nanoseconds += int((task / "schedstat").read_text(encoding="ascii").split()[1])
    except (OSError, LookupError, ValueError):
        return None
    return nanoseconds / 1e9


class SleepingThreads:
    """OpenMP threads that only sleep. Together with the pool of one computing thread, they outnumber the CPUs."""

    def __init__(self) -> None:
        import torch

        self._end = threading.Event()
        self._threads: list[threading.Thread] = []
        size = torch.get_num_threads()
        total = size
        # Each thread that computes creates a pool of `size` - 1 further threads.
        while size > 1 and total <= num_usable_cores():
            start_event = threading.Event()
            self._threads.append(threading.Thread(target=self._keep_pool, args=(start_event,), daemon=True))
            self._threads[-1].start()
            start_event.wait()
            total += size - 1

    def end(self) -> None:
        """End the threads, and wait for them."""
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _keep_pool(self, is_ready: threading.Event) -> None:
        import torch

        # Large enough for PyTorch to run the operation in parallel, which starts the pool.
        torch.ones(1 << 18).add_(1)
        is_ready.set()
        self._end.wait()
