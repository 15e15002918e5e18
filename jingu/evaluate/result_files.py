"""Files of results: how they are called, and their content. Reading them needs neither a model nor PyTorch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jingu.errors import JinguError
from jingu.runtime.files import read_json, read_text

RESULT_SUFFIX = ".json"
SAMPLES_SUFFIX = ".samples.jsonl"
SPREAD_SUFFIX = ".spread.json"
_FIX = "Evaluate the task again."


@dataclass(frozen=True)
class Spread:
    """The variation of a metric over the templates and numbers of shots of a task; `values` are by task name."""

    mean: float
    standard_deviation: float
    lowest: float
    highest: float
    values: dict[str, float]
    precision: str = ""


def read_spreads(folder: Path) -> dict[str, dict[str, Spread]]:
    """Read the spread of each metric by task from a folder of results. Raises JinguError for a damaged file."""
    contents = [read_json(file, _FIX) for file in sorted(folder.glob(f"*{SPREAD_SUFFIX}"))]
    return {
        content["task"]: {metric: Spread(**spread) for metric, spread in content["results"].items()}
        for content in contents
    }


def read_results(folder: Path) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return the results and samples of all tasks in a folder.

    Raises:
        JinguError: an evaluation was interrupted while it wrote its files, or a file is damaged.
    """
    results = {}
    for file in sorted(folder.glob(f"*{SAMPLES_SUFFIX}")):
        name = file.name.removesuffix(SAMPLES_SUFFIX)
        result_file = folder / f"{name}{RESULT_SUFFIX}"
        if not result_file.is_file():
            what = "the file is missing: an evaluation was interrupted before it wrote the results."
            raise JinguError(what, where=result_file, fix=_FIX)
        result = read_json(result_file, _FIX)
        results[result["task"]] = (result, read_json_lines(file, _FIX))
    return results


def read_json_lines(file: Path, fix: str) -> list[dict[str, Any]]:
    """Return the JSON objects in a file, one per line.

    Args:
        fix: what the user can do if the file is damaged.

    Raises:
        JinguError: the file cannot be read, or a line holds no JSON object.
    """
    records = []
    # JSON may contain the other characters at which `splitlines` splits, such as U+2028.
    for number, line in enumerate(read_text(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise JinguError(f"the file is damaged ({error.msg}).", where=f"{file}:{number}", fix=fix) from None
        if not isinstance(record, dict):
            raise JinguError("the file is damaged (not a JSON object).", where=f"{file}:{number}", fix=fix)
        records.append(record)
    return records
