"""Ctrl-C, SIGTERM and SIGUSR1 as a request: the loop finishes its step, saves, and leaves."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

STOPPED = 130
"""Exit code of a rank that a person asked to stop, and that saved."""
PREEMPTED = 75
"""Exit code of a rank that a scheduler asked to stop, and that saved: a temporary failure, to be started again."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Set by a signal; a second signal of the same kind acts at once."""

    def __init__(self, tell: bool = False) -> None:
        self.signal: signal.Signals | None = None
        self._tell = tell

    @property
    def code(self) -> int:
        """The exit code that the request asks for; 0 where there is none."""
        return 0 if self.signal is None else STOPPED if self.signal == signal.SIGINT else PREEMPTED

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        if self._tell:
            # Straight to the terminal: the interrupted code may be in the middle of printing.
            with contextlib.suppress(OSError):
                os.write(2, b"\nSaving after this step, then leaving; a second time leaves at once.\n")
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@contextmanager
def handling(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    """Give these signals to a handler while inside."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def listening(tell: bool = False) -> Iterator[StopRequest]:
    """Turn `STOP_SIGNALS` into a `StopRequest` while inside; `tell` the person at the terminal that one came."""
    request = StopRequest(tell)
    with handling(request._receive, *STOP_SIGNALS):
        yield request


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed while inside, rather than an exception in the middle of something; a second time
    leaves at once."""
    pressed = False

    def press(_number: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise SystemExit(STOPPED)
        pressed = True

    with handling(press, signal.SIGINT):
        yield lambda: pressed


class Told(NamedTuple):
    """What all ranks know at a step."""

    stop: int
    """The exit code with which to leave, or 0."""
    save: bool
    """Whether some rank wishes to save."""
    busy: bool
    """Whether on some rank a save is under way."""


class SharedStop:
    """A stop request (and what else ranks wish) that all ranks take at the same step, wherever the signal arrived.

    The question of one step is asked in the background and answered at the next, so it costs no waiting.
    """

    def __init__(self, request: StopRequest, world: int) -> None:
        self._request = request
        self._world = world
        self._flags = torch.zeros(3, dtype=torch.int32)
        self._work: dist.Work | None = None
        self.code = 0
        """The exit code with which all ranks stop; 0 while they do not."""

    def ask(self, save: bool = False, busy: bool = False) -> Told:
        """Whether to stop now, and what ranks wish. Every rank must call this once a step."""
        told = mine = [self._request.code, int(save), int(busy)]
        if self._world > 1:
            if self._work is not None:
                self._work.wait()
            told = self._flags.tolist()
            self._flags = torch.tensor(mine, dtype=torch.int32)
            self._work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, async_op=True)
        self.code = told[0]
        return Told(told[0], bool(told[1]), bool(told[2]))

    def settle(self, limit: timedelta | None = None) -> None:
        """Wait for the question still in flight; call before leaving the group. With a limit (another rank may never
        ask), no longer than that."""
        work, self._work = self._work, None
        if work is not None and limit is not None:
            with contextlib.suppress(RuntimeError):
                work.wait(limit)
        elif work is not None:
            work.wait()
