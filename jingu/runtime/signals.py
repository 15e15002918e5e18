"""Turn Ctrl-C, SIGTERM and SIGUSR1 into a request to stop: the training loop finishes its step, saves, and exits.

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

from jingu.runtime.exit_codes import EXIT_INTERRUPTED, EXIT_PREEMPTED

# A signal that is repeated within these seconds counts once.
REPEAT_SECONDS = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Environment variable with the file descriptor or the path of a pipe; only the launcher of the ranks has its other end.
LAUNCHER_PIPE = "JINGU_LAUNCHER_PIPE"
# Environment variable with the path of a file of the launcher: a line for each rank that has ended, with its process id
# and its exit code. The watchdog is not their parent, and reads there how they have ended.
EXITS_VARIABLE = "JINGU_EXITS"


class StopRequest:
    """A request to stop, which a signal sets. A second signal of the same kind ends the process at once.

    Some schedulers send a signal to every process of a job, and torchrun forwards it to its ranks. So a signal that is
    repeated within `REPEAT_SECONDS` counts once.

    Attributes:
        signal: the latest signal; None: no request.

    Args:
        announce: whether to print a message when a signal arrives.
    """

    def __init__(self, announce: bool = False) -> None:
        self.signal: signal.Signals | None = None
        self._announce = announce
        self._first_times: dict[int, float] = {}

    @property
    def code(self) -> int:
        """Exit code for the request; 0 without a request."""
        if self.signal is None:
            return 0
        return EXIT_INTERRUPTED if self.signal == signal.SIGINT else EXIT_PREEMPTED

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal; it runs in the main thread, between two instructions of the interrupted code."""
        now = time.monotonic()
        if number in self._first_times:
            if now - self._first_times[number] > REPEAT_SECONDS:
                # Restore the default action, and let the signal take effect.
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self._first_times[number] = now
        self.signal = signal.Signals(number)
        if self._announce:
            # Bypass Python's buffers: the interrupted code may be in the middle of printing.
            with contextlib.suppress(OSError):
                os.write(2, b"\nStopping after this step, and saving. Repeat to stop at once.\n")


def exits_path() -> str:
    """Return the path of the file in which the launcher records how ranks end; empty if no launcher of jingu runs."""
    return os.environ.get(EXITS_VARIABLE, "")


def stop_with_launcher() -> None:
    """Send this process SIGTERM when its launcher ends, even if the launcher is killed.

    Does nothing if no launcher of jingu started this process.
    """
    descriptor = os.environ.pop(LAUNCHER_PIPE, None)
    if descriptor is None:
        return

    def watch() -> None:
        # If the path does not exist, the launcher has already ended.
        with contextlib.suppress(FileNotFoundError):
            pipe = os.open(descriptor, os.O_RDONLY) if descriptor.startswith("/") else int(descriptor)
            os.read(pipe, 1)  # returns when the other end is closed
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    """Install a handler for these signals within the block, and restore the previous handlers after it."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous_handler in previous.items():
            signal.signal(number, previous_handler)


@contextmanager
def catch_stop_signals(announce: bool = False) -> Iterator[StopRequest]:
    """Turn `STOP_SIGNALS` into a `StopRequest` within the block.

    Args:
        announce: whether to print a message on stderr when a signal arrives.
    """
    request = StopRequest(announce)
    with handle_signals(request._receive, *STOP_SIGNALS):
        yield request


@contextmanager
def defer_interrupt() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C raise no exception within the block; yield a function that returns whether it was pressed.

    A second Ctrl-C exits at once.
    """
    is_pressed = False

    def press(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_pressed
        if is_pressed:
            raise SystemExit(EXIT_INTERRUPTED)
        is_pressed = True

    with handle_signals(press, signal.SIGINT):
        yield lambda: is_pressed
