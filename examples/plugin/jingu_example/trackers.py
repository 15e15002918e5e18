"""A table of the numbers of a run."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from jingu.config.schema import RunConfig
from jingu.training.trackers import Tracker


class CsvTracker(Tracker):
    """Appends a row for each number to `metrics.csv` in the folder of the run."""

    def __init__(self, run_id: str | None, folder: Path, config: RunConfig) -> None:
        self.run_id = run_id or config.name
        self._file = (folder / "metrics.csv").open("a", encoding="utf-8", newline="")
        self._rows = csv.writer(self._file)

    def log_numbers(self, numbers: Mapping[str, float], step: int) -> None:
        self._rows.writerows([step, name, value] for name, value in numbers.items())
        self._file.flush()

    def close(self) -> None:
        self._file.close()
