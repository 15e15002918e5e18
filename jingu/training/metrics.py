"""metrics.jsonl, the source of every plot: a JSON object per line, such as the metrics of a logged step."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

from jingu.errors import pluralize
from jingu.runtime.files import write_text_atomically
from jingu.runtime.log import log_warning
from jingu.training.run_folder import run_write_error
from jingu.training.trackers import Trackers


class MetricsFile:
    """Appends lines to metrics.jsonl. A resumed run first drops the lines of steps that it will repeat.

    Args:
        resume_step: the last step whose lines stay; None for a new run, which drops all lines.
        is_evaluated: whether the evaluation and the samples of that step stay, too.
        trackers: services that receive the same numbers.

    Raises:
        JinguError: the file cannot be written.
    """

    def __init__(
        self, path: Path, *, resume_step: int | None, is_evaluated: bool = True, trackers: Trackers | None = None
    ) -> None:
        self._path = path
        try:
            if path.exists():
                _drop_lines_after(path, resume_step, is_evaluated)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise run_write_error(error, path) from error
        self._buffer = b""
        self._has_warned = False
        self._trackers = trackers

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one line, and pass it to the trackers.

        If writing fails, this warns once, and tries again with the next line. Lines are kept in memory until then.

        Args:
            kind: `type` of the line, such as `train` or `evaluation`.
        """
        record = {"type": kind, "step": step, **{key: _to_json(value) for key, value in values.items()}}
        self._buffer += json.dumps(record, ensure_ascii=False).encode() + b"\n"
        self._flush()
        if self._trackers is not None:
            self._trackers.log(kind, values, step)

    def _flush(self) -> None:
        try:
            while self._buffer:
                size = self._file.write(self._buffer)
                self._buffer = self._buffer[size:]
            self._has_warned = False
        except OSError as error:
            if not self._has_warned:
                log_warning(
                    f"{run_write_error(error, self._path)} Training continues, and the lines are kept in memory."
                )
            self._has_warned = True

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self._flush()
        if self._buffer:
            lines = self._buffer.count(b"\n")
            log_warning(f"{self._path}: the disk is full; {pluralize(lines, 'line')} lost.")
        with contextlib.suppress(OSError):
            self._file.close()
        if self._trackers is not None:
            self._trackers.close()


def _drop_lines_after(path: Path, step: int | None, is_evaluated: bool) -> None:
    """Rewrite a file without damaged lines and lines of later steps; arguments as for `MetricsFile`."""
    lines = []
    # The last line of a killed run may end in the middle of a character. Do not use splitlines(): it also splits at
    # U+2028, which JSON strings may contain.
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        last_step = step
        if step is not None and not is_evaluated and record.get("type") in ("evaluation", "sample"):
            last_step = step - 1
        if last_step is not None and record.get("step", 0) <= last_step:
            lines.append(line)
    write_text_atomically(path, "".join(f"{line}\n" for line in lines))


def _to_json(value: Any) -> Any:
    """Return a non-finite number as its name (`nan`, `inf`, `-inf`), because JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
