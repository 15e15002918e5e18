"""The record of what a model was trained on, and of its ancestors; it goes with the model into other folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jingu.runtime.files import write_text_atomically

RECORD_NAME = "provenance.json"
# `data`: of each data set its path, checksums, and the receipt of its mixture (None: it is text). `initial`: the path
# and the record of the model that the training started from; None: random weights.
Record = dict[str, Any]


def read_provenance(model: Path) -> Record | None:
    """Return the record of a run, a step of one, or an exported folder; None if there is none."""
    step = model.absolute()
    for folder in (model, *([step.parent.parent] if step.parent.name == "checkpoints" else [])):
        if (folder / RECORD_NAME).is_file():
            record: Record = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
            return record
    return None


def extend_provenance(run: Path, data: list[Record], initial: Path | None, adapter: Path | None = None) -> None:
    """Write the record of a run. What an earlier start of it was trained on remains.

    Args:
        initial: the model that it started from.
        adapter: the adapter, of this model or of another one, that it started from.
    """
    earlier = read_provenance(run)
    if earlier is None:
        start = None
        if initial is not None:
            record = read_provenance(initial)
            start = {"model": str(initial), "record": record}
            if adapter is not None:
                start = {"model": str(adapter), "record": add_ancestor(read_provenance(adapter), initial, record)}
        earlier = {"data": [], "initial": start}
    added = [item for item in data if item not in earlier["data"]]
    content = {**earlier, "data": earlier["data"] + added}
    write_text_atomically(run / RECORD_NAME, json.dumps(content, ensure_ascii=False, indent=2) + "\n")


def add_ancestor(record: Record | None, model: Path, ancestor: Record | None) -> Record | None:
    """Return a record with another model before the first one of its chain, unless it is in the chain already.

    Args:
        record: of an adapter; None: what it was trained on is unknown, and remains so.
        model: path of the model that the adapter is joined with.
        ancestor: its record.
    """
    if record is None:
        return None
    initial = record["initial"]
    if initial is None:
        return {**record, "initial": {"model": str(model), "record": ancestor}}
    if initial["record"] == ancestor:
        return record
    return {**record, "initial": {**initial, "record": add_ancestor(initial["record"], model, ancestor)}}


def copy_provenance(model: Path, folder: Path, base: Path | None = None) -> None:
    """Copy the record of a model, if there is one, into a folder that it is exported to.

    Args:
        base: if the model is an adapter, another model than the one that it was trained for, with which it was merged.
    """
    record = read_provenance(model)
    if base is not None:
        record = add_ancestor(record, base, read_provenance(base))
    if record is not None:
        write_text_atomically(folder / RECORD_NAME, json.dumps(record, ensure_ascii=False, indent=2) + "\n")
