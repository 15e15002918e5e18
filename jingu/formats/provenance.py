"""The record of the data that a model and its ancestors were trained on. Exports copy it with the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jingu.runtime.files import read_json, write_text_atomically
from jingu.runtime.hub import local_path

RECORD_NAME = "provenance.json"
# `data`: for each data set its path, checksums, and the receipt of its task mixture (None: it was made of text).
# `initial`: path (`model`) and record (`record`) of the model that training started from; None: random weights.
Record = dict[str, Any]


def run_of(model: Path) -> Path:
    """Return the run of a checkpoint's folder; any other folder itself."""
    step = model.absolute()
    return step.parent.parent if step.parent.name == "checkpoints" else model


def read_provenance(model: Path) -> Record | None:
    """Return the record of a run, of a step (that of its run), or of an exported folder; None if there is none."""
    for folder in dict.fromkeys((model, run_of(model))):
        if (folder / RECORD_NAME).is_file():
            return read_json(folder / RECORD_NAME, "Restore the file, or delete it to forget the training data.")
    return None


def extend_provenance(run: Path, data: list[Record], initial: Path | None, adapter: Path | None = None) -> None:
    """Add data sets to the record of a run, or write its first record.

    A record of an earlier start of the run keeps its data sets and its initial model.

    Args:
        data: records of the data sets, as under `data`.
        initial: path of the model that the run started from; None: random weights.
        adapter: path of the adapter that the run started from, which may have been trained for another model.
    """
    earlier = read_provenance(run)
    if earlier is None:
        start = None
        if initial is not None:
            record = read_provenance(local_path(initial))
            start = {"model": str(initial), "record": record}
            if adapter is not None:
                adapter_record = read_provenance(local_path(adapter))
                start = {"model": str(adapter), "record": add_ancestor(adapter_record, initial, record)}
        earlier = {"data": [], "initial": start}
    new_items = [item for item in data if item not in earlier["data"]]
    content = {**earlier, "data": earlier["data"] + new_items}
    write_text_atomically(run / RECORD_NAME, json.dumps(content, ensure_ascii=False, indent=2) + "\n")


def add_ancestor(record: Record | None, model: Path, ancestor: Record | None) -> Record | None:
    """Return a record with another model at the beginning of its chain of ancestors, unless the chain contains it.

    Args:
        record: the record of an adapter; None: its training data is unknown, and None is returned.
        model: path of the model that the adapter is combined with.
        ancestor: the record of that model; None: it has none.
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
    """Copy the record of a model, if there is one, to the folder of its export.

    Args:
        base: the model that an adapter was merged with, if that is not the one that it was trained for.
    """
    record = read_provenance(model)
    if base is not None:
        record = add_ancestor(record, base, read_provenance(base))
    if record is not None:
        write_text_atomically(folder / RECORD_NAME, json.dumps(record, ensure_ascii=False, indent=2) + "\n")
