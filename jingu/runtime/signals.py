"""Ctrl-C and SIGTERM as a request: the loop finishes its step, saves, and leaves."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist


class StopRequest:
    """Set by a signal; a second signal of the same kind acts at once."""

    def __init__(self, tell: bool = False) -> None:
        self.signal: signal.Signals | None = None
        self._tell = tell

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        if self._tell:
            # Straight to the terminal: the interrupted code may be in the middle of printing.
            with contextlib.suppress(OSError):
                os.write(2, b"\nSaving after this step, then leaving; a second time leaves at once.\n")
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@contextmanager
def listening(tell: bool = False) -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a `StopRequest` while inside; `tell` the person at the terminal that it came."""
    request = StopRequest(tell)
    before = {number: signal.signal(number, request._receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class SharedStop:
    """A stop request that all ranks take at the same step, wherever the signal arrived.

    The question of one step is asked in the background and answered at the next, so it costs no waiting.
    """

    def __init__(self, request: StopRequest, world: int) -> None:
        self._request = request
        self._world = world
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def asked(self) -> bool:
        """Whether to stop now. Every rank must call this once a step."""
        if self._world == 1:
            return self._request.signal is not None
        if self._work is not None:
            self._work.wait()
        stop = bool(self._flag.item())
        self._flag.fill_(int(self._request.signal is not None))
        self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, async_op=True)
        return stop

    def settle(self) -> None:
        """Wait for the question still in flight; call before leaving the group."""
        if self._work is not None:
            self._work.wait()
            self._work = None
