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
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

from jingu.runtime.gpus import num_usable_cores

# Values of items that took too long, and of those whose process ended.
LATE, ENDED = "late", "ended"
# Limit of the time that passes, relative to that of the computation: for an item that waits for ever.
PATIENCE = 30.0
# Items that may take too long before the limit falls to a part of it for the remaining ones.
_MAX_LATE, _PART = 4, 0.2
# Address space of a process, in bytes.
_MEMORY = 2 * 2**30


def map_in_processes(function: Callable[[Any], Any], items: Sequence[Any], seconds: float) -> list[Any]:
    """Return the values of a function, which are JSON; for an item without one, `LATE` or `ENDED`.

    Args:
        seconds: limit of CPU time per item: on a busy machine, an item may wait for longer. After four late items it is
            a fifth of this, so that many of them do not hold up the others.
    """
    cores = num_usable_cores()
    values: list[Any] = [ENDED] * len(items)
    pending = deque(range(len(items)))
    busy: dict[Connection, tuple[BaseProcess, int]] = {}
    idle: list[tuple[Connection, BaseProcess]] = []
    while pending or busy:
        while pending and len(busy) < cores:
            connection, process = idle.pop() if idle else _start(function, items)
            limit = seconds * (1.0 if values.count(LATE) < _MAX_LATE else _PART)
            _send(connection, pending[0], limit)
            busy[connection] = process, pending.popleft()
        for ready in wait([*busy]):
            connection = cast(Connection, ready)
            process, item = busy.pop(connection)
            try:
                values[item] = json.loads(connection.recv_bytes())
            except (EOFError, OSError):
                process.join()
                is_late = process.exitcode in (-signal.SIGPROF, -signal.SIGALRM)
                values[item] = LATE if is_late else ENDED
                connection.close()
                continue
            idle.append((connection, process))
    for connection, process in idle:
        _end(connection, process)
    return values


def _end(connection: Connection, process: BaseProcess) -> None:
    connection.close()
    process.kill()
    process.join()


def _send(connection: Connection, item: int, seconds: float) -> None:
    # A process that has ended is noticed when its reply is read.
    with suppress(OSError):
        connection.send_bytes(json.dumps([item, seconds]).encode())


def _start(function: Callable[[Any], Any], items: Sequence[Any]) -> tuple[Connection, BaseProcess]:
    """Start a process that computes the items whose numbers it receives."""
    context = get_context("fork")
    connection, child_connection = context.Pipe()
    process = context.Process(target=_serve, args=(child_connection, connection, function, items), daemon=True)
    process.start()
    child_connection.close()
    return connection, process


def _serve(
    connection: Connection, unused_end: Connection, function: Callable[[Any], Any], items: Sequence[Any]
) -> None:
    unused_end.close()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard), hard))
    with suppress(EOFError, OSError):
        while True:
            item, seconds = json.loads(connection.recv_bytes())
            # The signals end the process even within a library that never returns to Python.
            signal.setitimer(signal.ITIMER_PROF, seconds)
            signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds)
            value = json.dumps(function(items[item])).encode()
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            connection.send_bytes(value)
    os._exit(0)
