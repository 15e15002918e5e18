"""A function over many items in several processes, each with a time limit per item.

The processes are forks of this one, so they start in milliseconds with everything that it has imported. An item that
takes too long, or that kills its process, costs the time of this item alone. Only a process without threads may use
this.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, cast

# Values of items that took too long, and of those whose process ended.
LATE, ENDED = "late", "ended"
# Seconds after which an item is slow. A slow item does not count as work for a core, so others need not wait for it.
_SLOW = 0.25
_MAX_PROCESSES = 32
# Address space of a process, in bytes.
_MEMORY = 2 * 2**30


class _Child(NamedTuple):
    """A process, the item that it computes, and when it began."""

    process: BaseProcess
    item: int
    start: float


def map_in_processes(function: Callable[[Any], Any], items: Sequence[Any], seconds: float) -> list[Any]:
    """Return the values of a function, which are JSON; for an item without one, `LATE` or `ENDED`.

    Args:
        seconds: time limit per item.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    values: list[Any] = [ENDED] * len(items)
    pending = deque(range(len(items)))
    busy: dict[Connection, _Child] = {}
    idle: list[tuple[Connection, BaseProcess]] = []
    while pending or busy:
        now = time.monotonic()
        fast = sum(now - child.start < _SLOW for child in busy.values())
        while pending and fast < cores and len(busy) < _MAX_PROCESSES:
            connection, process = idle.pop() if idle else _start(function, items, seconds)
            _send(connection, pending[0])
            busy[connection] = _Child(process, pending.popleft(), now)
            fast += 1
        for ready in wait([*busy], _SLOW):
            connection = cast(Connection, ready)
            child = busy.pop(connection)
            try:
                values[child.item] = json.loads(connection.recv_bytes())
            except (EOFError, OSError):
                child.process.join()
                values[child.item] = LATE if child.process.exitcode == -signal.SIGALRM else ENDED
                connection.close()
                continue
            idle.append((connection, child.process))
    for connection, process in idle:
        connection.close()
        process.kill()
        process.join()
    return values


def _send(connection: Connection, item: int) -> None:
    # A process that has ended is noticed when its reply is read.
    with suppress(OSError):
        connection.send_bytes(str(item).encode())


def _start(function: Callable[[Any], Any], items: Sequence[Any], seconds: float) -> tuple[Connection, BaseProcess]:
    """Start a process that computes the items whose numbers it receives."""
    context = get_context("fork")
    connection, other = context.Pipe()
    process = context.Process(target=_serve, args=(other, connection, function, items, seconds), daemon=True)
    process.start()
    other.close()
    return connection, process


def _serve(
    connection: Connection, other: Connection, function: Callable[[Any], Any], items: Sequence[Any], seconds: float
) -> None:
    other.close()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard), hard))
    with suppress(EOFError, OSError):
        while True:
            item = items[int(connection.recv_bytes())]
            # The signal ends the process even within a library that never returns to Python.
            signal.setitimer(signal.ITIMER_REAL, seconds)
            value = json.dumps(function(item)).encode()
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            connection.send_bytes(value)
    os._exit(0)
