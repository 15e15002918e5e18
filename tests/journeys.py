"""Counts the files of jingu in which functions run during a piece of work: what a reader of it would have to open."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jingu.runtime.files import PACKAGE_ROOT


class Journey:
    """Records the files whose functions are called.

    Attributes:
        is_active: whether calls are recorded now.
        files: the files, relative to the package.
    """

    def __init__(self) -> None:
        self.is_active = False
        self.files: set[str] = set()
        self._root = f"{PACKAGE_ROOT}/"

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call, as a function for `sys.setprofile`."""
        path = frame.f_code.co_filename
        if self.is_active and event == "call" and path.startswith(self._root):
            self.files.add(path.removeprefix(self._root))


@contextmanager
def record_journey() -> Iterator[Journey]:
    """Record this thread while the journey is active, and the threads that it starts."""
    journey = Journey()
    before = sys.getprofile()
    threading.setprofile(journey.profile)
    sys.setprofile(journey.profile)
    try:
        yield journey
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
