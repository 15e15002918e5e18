"""Messages that may be lost: a full disk or a terminal that is gone must not decide how a command ends."""

from __future__ import annotations

import io
import sys
from typing import Any


class _LenientFile(io.FileIO):
    """A file that drops what it cannot write."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def ignore_failing_stderr() -> None:
    """Let `sys.stderr` drop what it cannot write, unless something has replaced it (a notebook, a test)."""
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        buffer = io.BufferedWriter(_LenientFile(sys.stderr.fileno(), "w", closefd=False))
        encoding = sys.stderr.encoding
        sys.stderr = io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=True)
