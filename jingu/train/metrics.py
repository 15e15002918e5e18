"""metrics.jsonl: one JSON object a logged step, the source of every plot."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

from jingu.runtime.files import replace_text
from jingu.runtime.log import warn
from jingu.train.run import cannot_write


class MetricsFile:
    """Appends lines; a resumed run first drops the lines of steps that it will take again."""

    def __init__(
        self, path: Path, *, resume_at: int | None, evaluated: bool = True, tensorboard: Path | None = None
    ) -> None:
        """Open `path`, or raise JinguError.

        Args:
            resume_at: the last step whose lines stay; None for a run that begins.
            evaluated: whether an evaluation of that step stays, too.
            tensorboard: folder for the same numbers as TensorBoard events.
        """
        self._path = path
        try:
            self._keep_until(path, resume_at, evaluated)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise cannot_write(error, path) from error
        self._waiting, self._told = b"", False
        self._writer = _tensorboard(tensorboard, resume_at) if tensorboard else None

    @staticmethod
    def _keep_until(path: Path, step: int | None, evaluated: bool) -> None:
        if not path.exists():
            return
        kept = []
        # A killed run's last line may end within a character. splitlines() would also split at U+2028.
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            again = not evaluated and record.get("type") in ("evaluation", "sample")
            if step is not None and record.get("step", 0) <= step - again:
                kept.append(line)
        replace_text(path, "".join(f"{line}\n" for line in kept))

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one line. What the disk does not take waits for the next line; that is told once."""
        record = {"type": kind, "step": step, **{key: _plain(value) for key, value in values.items()}}
        self._waiting += json.dumps(record, ensure_ascii=False).encode() + b"\n"
        self._flush()
        if self._writer is not None:
            for key, value in values.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._writer.add_scalar(f"{kind}/{key}", value, step)
                elif kind == "sample" and key == "text":
                    self._writer.add_text(str(values.get("prompt")), value, step)

    def _flush(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self._told = False
        except OSError as error:
            if not self._told:
                warn(f"{cannot_write(error, self._path)} Training goes on, and the lines wait.")
            self._told = True

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self._flush()
        if self._waiting:
            lines = self._waiting.count(b"\n")
            warn(f"{self._path}: {lines} {'line is' if lines == 1 else 'lines are'} lost, for want of room.")
        with contextlib.suppress(OSError):
            self._file.close()
        if self._writer is not None:
            self._writer.close()


def _plain(value: Any) -> Any:
    """JSON has no NaN: a number that is none becomes its name."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _tensorboard(folder: Path, resume_at: int | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    # Events of steps that will be taken again are struck out.
    return SummaryWriter(str(folder), purge_step=None if resume_at is None else resume_at + 1)
