"""An undocumented habit of glibc's allocator: it keeps freed memory in the arenas of threads until `malloc_trim`."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache


@cache
def _find_trim() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim`; None with other C libraries, which do not have it."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim


def release_free_memory() -> bool:
    """Return memory that the process has freed to the operating system; return whether there was any.

    Other threads run in the meantime, except that they wait to allocate from the arena that is being processed.
    """
    trim = _find_trim()
    return trim is not None and trim(0) == 1
