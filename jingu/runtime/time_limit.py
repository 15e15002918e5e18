"""A limit on the CPU time of code that may not end, such as a template or a regular expression of a user's file."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Seconds between two signals after the limit.
_INTERVAL = 0.1


class TimeLimitError(Exception):
    """Code ran longer than its limit."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError in the code of a `with` statement after some CPU seconds of this process.

    A signal ends loops, and also the regular expressions of `re`. Only the main thread receives signals; in other
    threads there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TimeLimitError(f"it runs for more than {seconds:g} s")

    previous = signal.signal(signal.SIGVTALRM, stop)
    # It repeats: the code may drop the first exception, as Jinja does when it computes constants.
    outer = signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _INTERVAL)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *outer)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL if previous is None else previous)
