"""metrics.jsonl: one JSON object a logged step, the source of every plot."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any


class MetricsFile:
    """Appends lines; a resumed run first drops the lines of steps that it will take again."""

    def __init__(self, path: Path, *, resume_at: int | None, tensorboard: Path | None = None) -> None:
        self._keep_until(path, resume_at)
        self._file = path.open("a", encoding="utf-8")
        self._writer = _tensorboard(tensorboard) if tensorboard else None

    @staticmethod
    def _keep_until(path: Path, step: int | None) -> None:
        if not path.exists():
            return
        kept = []
        for line in path.read_text(encoding="utf-8").split("\n"):  # splitlines() would also split at U+2028
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # a killed run's last line
                continue
            if step is not None and record.get("step", 0) <= step:
                kept.append(line)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        partial.replace(path)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one line, flushed."""
        record = {"type": kind, "step": step, **{key: _plain(value) for key, value in values.items()}}
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()
        if self._writer is not None:
            for key, value in values.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._writer.add_scalar(f"{kind}/{key}", value, step)
                elif kind == "sample" and key == "text":
                    self._writer.add_text(str(values.get("prompt")), value, step)

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def _plain(value: Any) -> Any:
    """JSON has no NaN: a number that is none becomes its name."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _tensorboard(folder: Path) -> Any:
    from jingu.errors import JinguError

    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise JinguError(
            "train.tensorboard is on, but the tensorboard package is not installed.",
            fix="Install it (`pip install tensorboard`), or set train.tensorboard=false.",
        ) from None
    return SummaryWriter(str(folder))
