"""Build records: JSON files in a folder that store the settings with which a command created it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jingu.errors import JinguError, pluralize
from jingu.runtime.files import read_json
from jingu.tables import flatten


def read_record(path: Path, name: str, maker: str) -> dict[str, Any] | None:
    """Return the JSON object `name` in the folder `path`; None if the folder is missing or empty.

    Args:
        maker: the command that creates such folders, for the error message.

    Raises:
        JinguError: the folder contains something else, which must not be replaced, or the record is damaged.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    fix = "Move it away or choose another path."
    if not (path / name).is_file():
        raise JinguError(f"`{maker}` did not make what is here.", where=path, fix=fix)
    return read_json(path / name, fix)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record as indented JSON to the file `path`."""
    path.write_text(json.dumps(record, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def refuse_changes(old: dict[str, Any], new: dict[str, Any], what: str, where: Path, fix: str) -> None:
    """Raise JinguError with the differences if two records differ.

    Args:
        what: beginning of the message, before "with other settings".
    """
    old, new = (_flatten(record) for record in (old, new))
    changes = [
        f"{key} was {_format_setting(old.get(key))} and is now {_format_setting(new.get(key))}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]
    if changes:
        raise JinguError(f"{what} with other settings: {'; '.join(changes)}.", where=where, fix=fix)


def _flatten(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the settings of its sections by dotted keys; a corpus stays together."""
    sections = {key: value for key, value in record.items() if isinstance(value, dict) and "bytes" not in value}
    return {key: value for key, value in record.items() if key not in sections} | flatten(sections)


def _format_setting(value: object) -> str:
    """Return a setting as JSON; a corpus (see `describe_records`) as the number and size of its files."""
    if isinstance(value, dict) and {"files", "bytes"} < value.keys():
        size = f"{pluralize(value['files'], 'file')} of {pluralize(value['bytes'], 'byte')}"
        kind, digest = ("content", value["content"]) if "content" in value else ("names and sizes", value["listing"])
        return f"{size} ({kind} {digest[:6]})"
    return json.dumps(value, ensure_ascii=False)
