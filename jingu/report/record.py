"""Read the folder of a run for its report.

The run may still be writing, or may have been killed in the middle of a line, so unreadable lines and files are left
out rather than being errors. `RunRecord.notes` lists them, and the page shows these notes.
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
    """The contents of `metrics.jsonl`, `config.yaml` and `model.json` of a run.

    If a step was logged twice, as after a rollback, the later row counts.

    Attributes:
        name: name of the run's folder.
        folder: folder of the run; None: the record is not from a folder, and the report reads no further files.
        starts: rows of type start, one for the start and each resume.
        train: rows of type train, by step.
        evaluations: rows of type evaluation, by step.
        samples: sampled texts, by step and prompt.
        baselines: results of compressors on the validation text, by name.
        divergences: rows of type divergence.
        plan: the last comparison of the run with its plan.
        config: text of config.yaml.
        model: text of model.json.
        family: family of the model.
        notes: notes for the reader about lines and files that were left out.
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
        """Steps from which the run was resumed, each once."""
        return list(dict.fromkeys(start["step"] for start in self.starts[1:]))

    @property
    def stages(self) -> list[int]:
        """First step of each stage of the data, except the first stage."""
        stages = self.starts[-1].get("stages") if self.starts else None
        return [step for step in stages if type(step) is int and step > 0] if isinstance(stages, list) else []

    @property
    def sources(self) -> list[str]:
        """Names of the data sources that have a validation loss."""
        keys = {key: None for row in self.evaluations.values() for key in row if key.startswith("loss/")}
        return [key.removeprefix("loss/") for key in keys]

    @property
    def tasks(self) -> list[str]:
        """Names of the evaluation tasks with results."""
        keys = {key: None for row in self.evaluations.values() for key in row if key.startswith(TASKS_PREFIX)}
        names = [key.removeprefix(TASKS_PREFIX).rpartition("/")[0] for key in keys if key.endswith("/bits_per_byte")]
        return list(dict.fromkeys(names))

    @property
    def has_diverged(self) -> bool:
        """Whether the loss was not finite at the last step."""
        return bool(self.train) and not math.isfinite(get_number(self.train[max(self.train)], "loss"))

    @property
    def alike(self) -> list[dict[int, Row]]:
        """Comparable evaluations in groups, by step: those of a group read the same number of tokens.

        The group of the last evaluation comes last.
        """
        groups: dict[str, dict[int, Row]] = {}
        for step, row in sorted(self.evaluations.items()):
            tokens = str(row.get("tokens"))
            groups[tokens] = groups.pop(tokens, {}) | {step: row}
        return list(groups.values())


def get_number(row: Row | None, key: str) -> float:
    """Return a value as a float; NaN if it is missing, null, or not a number."""
    value = row.get(key) if row else None
    if value in ("inf", "-inf"):  # JSON has no infinity, so metrics.jsonl stores it as text.
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def read_run(run: Path) -> RunRecord:
    """Read the folder of a run. Raises JinguError if there is no run, or the run has no metrics yet."""
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
    """Return the JSON object in a text; None if the text is not a JSON object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _read_metrics(path: Path, record: RunRecord) -> None:
    """Add the rows of metrics.jsonl to the record, and notes about lines that cannot be read."""
    damaged_lines: list[int] = []
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            line = raw.decode("utf-8", errors="replace").strip()
            if (row := parse_line(line)) is not None:
                _add_row(row, record)
            elif line and raw.endswith(b"\n"):
                damaged_lines.append(number)
            elif line:
                record.notes.append(
                    "The last line of metrics.jsonl is torn (the run is still writing, or was killed while it wrote); "
                    "it is left out."
                )
    if damaged_lines:
        where = ", ".join(map(str, damaged_lines[:5])) + (" …" if len(damaged_lines) > 5 else "")
        lines = "line" if len(damaged_lines) == 1 else "lines"
        record.notes.append(
            f"{len(damaged_lines)} {lines} of metrics.jsonl could not be read and are left out: {where}."
        )


def _add_row(row: Row, record: RunRecord) -> None:
    """Add a row to the record by its type. Rows of unknown types, as from later versions, are skipped."""
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
    """Return the text of a file; an empty text, and a note in the record, if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        record.notes.append(f"{path.name} is missing or cannot be read.")
        return ""


def read_warnings(folder: Path) -> list[str]:
    """Return the distinct warnings in the log of a run's first rank; of each, the first line."""
    try:
        text = (folder / "log" / "rank-00000.log").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # A line has a date, a time, a level and a message.
    lines = (line.split(" ", 3) for line in text.split("\n"))
    return list(dict.fromkeys(parts[3] for parts in lines if len(parts) == 4 and parts[2] == "WARNING"))
