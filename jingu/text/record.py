"""Records: JSON beside what a command made, that tells from which settings it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jingu.errors import JinguError, counted


def read_record(path: Path, name: str, maker: str) -> dict[str, Any] | None:
    """The JSON object `name` in the folder `path`; None where the folder is missing or empty.

    A folder that holds other things is not ours to replace, and is refused; `maker` is the command that
    makes such folders.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    fix = "Move it away or choose another path."
    if not (path / name).is_file():
        raise JinguError(f"there is something here that `{maker}` did not make.", where=path, fix=fix)
    try:
        record = json.loads((path / name).read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        raise JinguError(f"the file is damaged ({error}).", where=path / name, fix=fix) from error
    return record


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write the JSON object as people like to read it."""
    path.write_text(json.dumps(record, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def refuse_changes(then: dict[str, Any], now: dict[str, Any], what: str, where: Path, fix: str) -> None:
    """JinguError where two records differ: it tells in what."""
    changes = [
        f"{key} was {_shown(then.get(key))} and is now {_shown(now.get(key))}"
        for key in sorted({*then, *now})
        if then.get(key) != now.get(key)
    ]
    if changes:
        raise JinguError(f"{what} otherwise: {'; '.join(changes)}.", where=where, fix=fix)


def _shown(value: object) -> str:
    """A setting as JSON; a corpus by what a person knows of it."""
    if isinstance(value, dict) and value.keys() == {"files", "bytes", "listing"}:
        size = f"{counted(value['files'], 'file')} of {counted(value['bytes'], 'byte')}"
        return f"{size} (names and sizes {value['listing'][:6]})"
    return json.dumps(value, ensure_ascii=False)
