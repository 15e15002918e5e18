"""Handle Ctrl-C, SIGTERM and SIGUSR1 as a request to stop: the loop finishes its step, saves, and exits.

This module does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# Exit code after Ctrl-C; the run was saved.
EXIT_INTERRUPTED = 130
# Exit code after a scheduler's signal; the run was saved. EX_TEMPFAIL: start it again.
EXIT_PREEMPTED = 75
# Exit code of ranks that the watchdog ends, because the run hangs.
EXIT_STALLED = 70
REPEAT_SECONDS = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Environment variable with the descriptor, or the path, of a pipe whose other end only the launcher of the ranks has.
LAUNCHER_PIPE = "JINGU_LAUNCHER_PIPE"


class StopRequest:
    """Set by a signal. A second signal of the same kind takes effect at once.

    Some schedulers send a signal to every process of a job, and torchrun passes it on to its ranks: what comes twice
    within `REPEAT_SECONDS` counts once.
    """

    def __init__(self, announce: bool = False) -> None:
        self.signal: signal.Signals | None = None
        self._announce = announce
        self._first_times: dict[int, float] = {}

    @property
    def code(self) -> int:
        """Exit code for the request; 0 if there is none."""
        if self.signal is None:
            return 0
        return EXIT_INTERRUPTED if self.signal == signal.SIGINT else EXIT_PREEMPTED

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if number in self._first_times:
            if now - self._first_times[number] > REPEAT_SECONDS:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self._first_times[number] = now
        self.signal = signal.Signals(number)
        if self._announce:
            # Without Python's buffers: the interrupted code may be in the middle of printing.
            with contextlib.suppress(OSError):
                os.write(2, b"\nStopping after this step, and saving. Repeat to stop at once.\n")


def stop_with_launcher() -> None:
    """Send this process SIGTERM when the launcher that started it as a rank ends, also if it is killed."""
    descriptor = os.environ.pop(LAUNCHER_PIPE, None)
    if descriptor is None:
        return

    def watch() -> None:
        # The path is gone if the launcher is.
        with contextlib.suppress(FileNotFoundError):
            pipe = os.open(descriptor, os.O_RDONLY) if descriptor.startswith("/") else int(descriptor)
            os.read(pipe, 1)  # returns when the other end is closed
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    """Install a handler for these signals within the block."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous_handler in previous.items():
            signal.signal(number, previous_handler)


@contextmanager
def catch_stop_signals(announce: bool = False) -> Iterator[StopRequest]:
    """Turn `STOP_SIGNALS` into a `StopRequest` within the block; `announce` it on the terminal."""
    request = StopRequest(announce)
    with handle_signals(request._receive, *STOP_SIGNALS):
        yield request


@contextmanager
def defer_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed within the block; it raises no exception there.

    A second Ctrl-C exits at once.
    """
    pressed = False

    def press(_number: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise SystemExit(EXIT_INTERRUPTED)
        pressed = True

    with handle_signals(press, signal.SIGINT):
        yield lambda: pressed
