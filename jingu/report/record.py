"""A run's folder, read for its report.

The reader is forgiving: the run may still be writing, or may have been killed in the middle of a line. What it
had to leave out it says in `RunRecord.notes`, so that the page can say it too.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jingu.errors import JinguError
from jingu.evaluate.smooth_measures import TASKS_PREFIX
from jingu.runtime.files import read_error

Row = dict[str, Any]


@dataclass
class RunRecord:
    """What `metrics.jsonl` and its neighbours say of a run; rows by step, the later word winning.

    Attributes:
        folder: where it is; None: nowhere, and no other files are read.
        plan: the last comparison of the run with its plan.
        config: text of config.yaml.
        model: text of model.json.
        notes: what was left out, and why.
    """

    name: str
    folder: Path | None = None
    starts: list[Row] = field(default_factory=list)
    train: dict[int, Row] = field(default_factory=dict)
    evaluations: dict[int, Row] = field(default_factory=dict)
    samples: dict[tuple[int, str], Row] = field(default_factory=dict)
    baselines: dict[str, Row] = field(default_factory=dict)
    divergences: list[Row] = field(default_factory=list)
    plan: Row = field(default_factory=dict)
    config: str = ""
    model: str = ""
    family: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def resumes(self) -> list[int]:
        """Steps from which the run was resumed."""
        return [start["step"] for start in self.starts[1:]]

    @property
    def stages(self) -> list[int]:
        """First steps of the stages of the data, after the first stage."""
        stages = self.starts[-1].get("stages") if self.starts else None
        return [step for step in stages if type(step) is int and step > 0] if isinstance(stages, list) else []

    @property
    def sources(self) -> list[str]:
        """Names of the sources whose validation loss was measured."""
        keys = {key: None for row in self.evaluations.values() for key in row if key.startswith("loss/")}
        return [key.removeprefix("loss/") for key in keys]

    @property
    def tasks(self) -> list[str]:
        """Names of the evaluation tasks that were measured."""
        keys = {key: None for row in self.evaluations.values() for key in row if key.startswith(TASKS_PREFIX)}
        names = [key.removeprefix(TASKS_PREFIX).rpartition("/")[0] for key in keys if key.endswith("/bits_per_byte")]
        return list(dict.fromkeys(names))

    @property
    def has_diverged(self) -> bool:
        """Whether the loss was not finite at the last step."""
        return bool(self.train) and not math.isfinite(get_number(self.train[max(self.train)], "loss"))

    @property
    def alike(self) -> list[dict[int, Row]]:
        """Evaluations in groups that read equally many tokens, and so are comparable; the last one's group is last."""
        groups: dict[str, dict[int, Row]] = {}
        for step, row in sorted(self.evaluations.items()):
            tokens = str(row.get("tokens"))
            groups[tokens] = groups.pop(tokens, {}) | {step: row}
        return list(groups.values())


def get_number(row: Row | None, key: str) -> float:
    """Return a value as a float; NaN if it is missing, null, or not a number."""
    value = row.get(key) if row else None
    if value in ("inf", "-inf"):  # JSON has no infinity, so metrics.jsonl has its name
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def read_run(run: Path) -> RunRecord:
    """Read the folder of a run. Raises JinguError if there is no run, or it has not trained yet."""
    metrics = run / "metrics.jsonl"
    if not run.is_dir():
        fix = "Give the folder of a run, such as runs/NAME; `jingu train` makes it."
        raise JinguError("there is no run here.", where=run, fix=fix)
    if not metrics.is_file():
        raise JinguError(
            "this folder holds no metrics.jsonl, so there is nothing to report.",
            where=run,
            fix="Give the folder of a run that has trained, or train it first with `jingu train`.",
        )
    record = RunRecord(name=run.resolve().name, folder=run)
    try:
        _read_metrics(metrics, record)
    except OSError as error:
        raise read_error(metrics, error) from error
    record.config = _read_text(run / "config.yaml", record)
    record.model = _read_text(run / "model.json", record)
    model = parse_line(record.model)
    record.family = str(model.get("family", "")) if model else ""
    return record


def parse_line(line: str) -> Row | None:
    """Return a JSON object; None if the text is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _read_metrics(path: Path, record: RunRecord) -> None:
    damaged: list[int] = []
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            line = raw.decode("utf-8", errors="replace").strip()
            if (row := parse_line(line)) is not None:
                _add_row(row, record)
            elif line and raw.endswith(b"\n"):
                damaged.append(number)
            elif line:
                record.notes.append(
                    "The last line of metrics.jsonl is torn (the run is still writing, or was killed while it wrote); "
                    "it is left out."
                )
    if damaged:
        where = ", ".join(map(str, damaged[:5])) + (" …" if len(damaged) > 5 else "")
        lines = "line" if len(damaged) == 1 else "lines"
        record.notes.append(f"{len(damaged)} {lines} of metrics.jsonl could not be read and are left out: {where}.")


def _add_row(row: Row, record: RunRecord) -> None:
    """Add a row to the record by its type. Rows of unknown types, of later versions, are skipped."""
    kind, step = row.get("type"), row.get("step")
    if kind == "baseline":
        record.baselines[str(row.get("name", ""))] = row
        return
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53:
        return
    if kind == "start":
        record.starts.append(row)
    elif kind == "divergence":
        record.divergences.append(row)
    elif kind == "plan":
        record.plan = row
    elif kind == "train":
        record.train[step] = row
    elif kind == "evaluation":
        record.evaluations[step] = row
    elif kind == "sample":
        record.samples[step, str(row.get("prompt", ""))] = row


def _read_text(path: Path, record: RunRecord) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        record.notes.append(f"{path.name} is missing or cannot be read.")
        return ""


def read_warnings(folder: Path) -> list[str]:
    """Return the warnings in the log of a run's first rank, each once, the first line of each."""
    try:
        text = (folder / "log" / "rank-00000.log").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # Date, time, level, message.
    lines = (line.split(" ", 3) for line in text.split("\n"))
    return list(dict.fromkeys(parts[3] for parts in lines if len(parts) == 4 and parts[2] == "WARNING"))
