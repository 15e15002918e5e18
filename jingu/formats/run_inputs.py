"""What a run reads beside its own folder: models and code, with their contents, in RUN/inputs.json.

A path can lead to something else after a while. Whatever uses a run again therefore compares the contents.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import xxhash

from jingu.checkpoint.manifest import MANIFEST
from jingu.checkpoint.remote import CheckpointPath
from jingu.errors import JinguError
from jingu.formats.stored_model import StoredModel
from jingu.runtime.checksums import NO_RECORDS, ContentRecord, Records, digest_records, parse_records, record_file
from jingu.runtime.files import read_json, write_text_atomically
from jingu.runtime.hub import hub_name_of, parse_name
from jingu.text.identity import INPUTS_NAME

BASE = "initialize.from"
"""The name of the model for which a run trains adapters."""
BASE_RECORD = "base.json"
"""The record of the model for which the adapters in a peft folder were trained; only jingu writes it."""
# The files of a model's folder that determine its parameters.
_MODEL_FILES = ("*.safetensors", "*.index.json", "*.gguf", "config.json", "adapter_config.json", MANIFEST)
_FIX = "Restore the file, or delete it: then the contents of what the run reads are recorded anew."


@dataclass(frozen=True)
class RunInput:
    """One thing that a run reads.

    Attributes:
        path: absolute path.
        relative: path relative to the run's folder; empty if there is none.
        content: hash of the contents of all its files.
        files: absolute paths of these files, if they have records.
    """

    path: str
    relative: str
    content: str
    files: Sequence[str] = ()


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run by the setting that names them, and records of their files."""

    inputs: dict[str, RunInput] = field(default_factory=dict)
    files: dict[str, ContentRecord] = field(default_factory=dict)

    @classmethod
    def load(cls, run: Path) -> RunInputs:
        """Read RUN/inputs.json; nothing if the run has none. Raises JinguError if it is damaged."""
        path = run / INPUTS_NAME
        if not path.is_file():
            return cls()
        content = read_json(path, _FIX)
        try:
            inputs = {key: RunInput(**value) for key, value in content["inputs"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise JinguError("the file is damaged.", where=path, fix=_FIX) from error
        return cls(inputs, parse_records(content.get("files")))

    def save(self, run: Path) -> None:
        """Write RUN/inputs.json atomically, also beside other processes. Raises OSError if that fails."""
        content: dict[str, Any] = {"inputs": {key: vars(value) for key, value in self.inputs.items()}}
        content["files"] = [record.to_json() for record in self.files.values()]
        partial = run / f".{INPUTS_NAME}.{uuid4().hex}"
        try:
            partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            partial.replace(run / INPUTS_NAME)
        finally:
            partial.unlink(missing_ok=True)

    def add(self, path: CheckpointPath, records: Sequence[ContentRecord], run: Path) -> RunInput:
        """Add the records of the files of an input, and return the input.

        Args:
            run: the run's folder.
        """
        self.files.update({record.path: record for record in records})
        absolute = str(path.absolute()) if isinstance(path, Path) else str(path)
        relative = os.path.relpath(absolute, run.absolute()) if isinstance(path, Path) else ""
        return RunInput(absolute, relative, digest_records(records), [record.path for record in records])


def record_model(model: StoredModel, records_before: Records = NO_RECORDS) -> list[ContentRecord]:
    """Return the records of all files that determine a model's parameters, with those of its base and adapters.

    Raises:
        JinguError: a file cannot be read.
    """
    records = []
    for part in model.parts or (model.where,):
        if not isinstance(part, Path):
            # The manifest of a checkpoint has the checksums of all its files.
            content = (part / MANIFEST).read_bytes()
            records.append(ContentRecord(str(part / MANIFEST), len(content), "", xxhash.xxh3_128_hexdigest(content)))
        elif part.is_file():
            records.append(record_file(part, records_before))
        else:
            files = sorted({file for pattern in _MODEL_FILES for file in part.glob(pattern) if file.is_file()})
            records += [record_file(file, records_before) for file in files]
    return records


def write_base_record(folder: Path, base: StoredModel, path: Path) -> None:
    """Write into a peft folder which model its adapters were trained for, with the checksums of that model's files.

    Args:
        path: the model's path, for error messages.

    Raises:
        JinguError: a file of the model cannot be read.
    """
    _save_base_record(folder, str(path), record_model(base))


def _save_base_record(folder: Path, model: str, records: Sequence[ContentRecord]) -> None:
    files = [record.to_json() for record in records]
    content = {"model": model, "content": digest_records(records), "files": files}
    write_text_atomically(folder / BASE_RECORD, json.dumps(content, indent=2) + "\n")


def find_other_base(folder: Path, base: StoredModel) -> str | None:
    """Return the path of the model for which the adapters in a peft folder were trained, if it is not this one.

    Returns:
        None if it is this model, or not known, as in the folders of other tools.

    Raises:
        JinguError: the record is damaged, or a file of the model cannot be read.
    """
    path = folder / BASE_RECORD
    if not path.is_file():
        return None
    fix = "Restore the file; or delete it, and the base of the adapters is not compared."
    content = read_json(path, fix)
    if not isinstance(content, dict) or not all(isinstance(content.get(key), str) for key in ("model", "content")):
        raise JinguError("the file is damaged.", where=path, fix=fix)
    old_records = parse_records(content.get("files"))
    records = record_model(base, old_records)
    if digest_records(records) != content["content"]:
        return str(content["model"])
    if any(old_records.get(record.path) != record for record in records):
        with suppress(OSError):  # the records only save time
            _save_base_record(folder, content["model"], records)
    return None


def _pin(name: str, base: RunInput | None) -> Path:
    """Return the name of a base on a hub at the commit that the run was started with; any other name as it is."""
    pinned_name = None if base is None else hub_name_of(Path(base.path))
    return Path(name if pinned_name is None or parse_name(name) is None else str(pinned_name))


def open_base(run: Path, name: str, open_model: Callable[[Path], StoredModel]) -> tuple[StoredModel, Path]:
    """Open the model for which a run trained adapters, from wherever the command runs; also return its path.

    Args:
        name: the path in the run's configuration, relative to the folder in which the run was started.
        open_model: opens a model.

    Raises:
        JinguError: the model is not to be found, or is not the one that the run was started with.
    """
    inputs = RunInputs.load(run)
    expected_base = inputs.inputs.get(BASE)
    # A run that stands beside its base finds it also after both have moved.
    candidates = [Path(name), run.absolute().parent.parent / name]
    if expected_base is not None:
        candidates = [Path(expected_base.path), run / expected_base.relative, *candidates]
    existing = [path for path in dict.fromkeys(candidates) if path.exists()] or [_pin(name, expected_base)]
    for path in existing:
        stored_model = open_model(path)
        if expected_base is None:
            return stored_model, path
        records = record_model(stored_model, inputs.files)
        if digest_records(records) == expected_base.content:
            if any(inputs.files.get(record.path) != record for record in records):
                with suppress(OSError):  # the records only save time
                    RunInputs(inputs.inputs, inputs.files | {record.path: record for record in records}).save(run)
            return stored_model, path
    raise JinguError(
        f"{existing[0]} is not the model for which these adapters were trained: its contents have changed.",
        where=run,
        fix=f"Restore it; or put the adapters on it nevertheless: `jingu tune merge {run} --base {existing[0]} --to "
        "FOLDER`.",
    )
