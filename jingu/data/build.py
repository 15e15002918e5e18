"""`jingu data build`: the corpus to shards of ids.

Units of work are fixed by the corpus and written in its order, so that the number of workers changes nothing
but the time, nor does it matter how often a build is killed or how many jobs divide it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from jingu.config.schema import RunConfig
from jingu.config.sections.data import DataSettings, SupervisedSettings
from jingu.data.indexed import best_dtype
from jingu.data.manifest import FILES, Manifest, check_sizes, print_summary
from jingu.data.workers import Executor, spread
from jingu.data.writing import Encode, Encoded, UnitFile, assemble, encode_unit
from jingu.errors import JinguError, counted
from jingu.runtime.devices import usable_cores
from jingu.runtime.files import cannot_write, new_folder, replace_text
from jingu.text.corpus import checked_corpora, describe_files, find_files, plan_units
from jingu.text.readers import Document, Span, Tally, read_documents
from jingu.text.record import refuse_changes
from jingu.text.tokenizer import Tokenizer

_OTHER = (
    "path workers on_error beginning sources stages temperature order reading local objective packing within_documents"
    " drop"
)
NOT_OF_THE_BUILD = set(_OTHER.split())
"""Settings of `data` that do not change a data set's content."""
PART_IDS = 1 << 22
"""Ids that are held in memory at a time, but for a document's."""
PROGRESS, UNITS, SKIPPED = "progress.json", "units", "skipped.txt"
KEPT_SECONDS = 10.0
"""What a build has done is kept, should it fail, when it has taken so long."""


@dataclass(frozen=True)
class Work:
    """A data set to make in `data.path`, and what decides its content."""

    data: DataSettings
    tokenizer: Tokenizer
    settings: dict[str, Any]
    """What the manifest tells of it."""
    encode: Encode
    units: Sequence[Any]
    sizes: Sequence[int]
    """Bytes of each unit."""
    workers: int
    """Processes, of this machine."""
    files: tuple[str, ...] = ()
    """Names, where documents tell the file that they come from by its number."""
    executor: Executor = "processes"

    @property
    def path(self) -> Path:
        return Path(self.data.path)


def build(
    config: RunConfig,
    part: tuple[int, int] | None = None,
    on_error: str | None = None,
    executor: Executor = "processes",
) -> None:
    """Build the data set of each source of the run in its `path`, unless the very same is there already.

    Args:
        part: (i, n) encodes the i-th of n parts (from 1), as a job of its own; the last to be done makes the data set.
        on_error: in place of `data.on_error`.
        executor: processes of this machine, or tasks on a Ray cluster.
    """
    if isinstance(config.data.objective, SupervisedSettings):
        raise JinguError(
            "supervised data is made by another verb.", where="data.objective", fix="Run `jingu tune prepare`."
        )
    data = config.data if on_error is None else config.data.model_copy(update={"on_error": on_error})
    corpora = checked_corpora(data)
    for source in corpora:
        if source.input or len(corpora) == 1:
            build_source(data.of(source), Path(config.tokenizer.path), part, executor)


def build_source(
    data: DataSettings, tokenizer_path: Path, part: tuple[int, int] | None, executor: Executor = "processes"
) -> None:
    """Build one data set, or a part of it."""
    tokenizer = Tokenizer.load(tokenizer_path)
    files = find_files(data)
    settings = data.model_dump(mode="json", exclude=NOT_OF_THE_BUILD)
    settings |= {"corpus": describe_files(files), "tokenizer": tokenizer.fingerprint()}
    if beginning := tokenizer.beginning if data.beginning else []:
        settings["beginning"] = beginning
    if already_made(Path(data.path), settings):
        return
    units = plan_units(files)
    work = Work(
        data,
        tokenizer,
        settings,
        partial(_encode, tokenizer_path.absolute(), tokenizer.fingerprint(), data),
        units,
        [sum(span.end - span.start for span in unit) for unit in units],
        min(usable_cores() if data.workers == "auto" else data.workers, max(len(units), 1)),
        tuple(file.path for file in files),
        executor,
    )
    began = time.monotonic()
    try:
        made = make(work) if part is None else _make_part(work, *part)
    except OSError as error:  # of a part: else `new_folder` tells
        raise cannot_write(error, work.path, "run the command again (it goes on with what is done)") from error
    if made is not None:
        by = "a Ray cluster" if executor == "ray" else counted(work.workers, "process")
        print(f"data: built in {data.path} in {time.monotonic() - began:.1f} s by {by}.")
        print_summary(made[0])


def already_made(path: Path, settings: dict[str, Any]) -> bool:
    """Whether the very data set that the settings would make is in `path`, which is told. JinguError where what is
    there is another one, or not whole."""
    if (old := Manifest.load(path)) is None:
        return False
    fix = "Delete the folder to build it anew, or set data.path to another folder."
    refuse_changes(old.settings, settings, "the data set here was built", path, fix)
    check_sizes(path, old.train, old.held_out)
    print(f"data: already built in {path}.")
    print_summary(old)
    return True


def make(work: Work) -> tuple[Manifest, Tally]:
    """Make a data set, going on with what an earlier process did with the same settings; its manifest, and what became
    of the documents."""
    with new_folder(work.path, PROGRESS) as place:
        progress, units = place / PROGRESS, place / UNITS
        if progress.is_file() and json.loads(progress.read_text(encoding="utf-8")) != work.settings:
            progress.unlink()
            shutil.rmtree(units, ignore_errors=True)
        units.mkdir(exist_ok=True)
        began = time.monotonic()
        for _ in _encoded(work, units, range(len(work.units))):
            if time.monotonic() - began >= KEPT_SECONDS and not progress.is_file():
                replace_text(progress, json.dumps(work.settings))
        for left in {*place.iterdir()} - {progress, units}:
            left.unlink()  # of a process that was killed as it wrote them
        made = _assembled(work, units, place)
        shutil.rmtree(units)
        progress.unlink(missing_ok=True)
    return made


def _make_part(work: Work, number: int, parts: int) -> tuple[Manifest, Tally] | None:
    """Encode one of the parts; where that was the last to be done, make the data set."""
    units = work.path.with_name(f"{work.path.name}.parts")
    units.mkdir(parents=True, exist_ok=True)
    progress, count = units / PROGRESS, len(work.units)
    with _locked(units):
        if progress.is_file():
            what, fix = "other parts here were built", "Delete the folder, and build all parts anew."
            refuse_changes(json.loads(progress.read_text(encoding="utf-8")), work.settings, what, units, fix)
        else:
            replace_text(progress, json.dumps(work.settings))
    for _ in _encoded(work, units, range(count * (number - 1) // parts, count * number // parts)):
        pass
    try:
        return _join_parts(work, units, number, parts)
    except FileNotFoundError:  # of the lock: a job that found all there first has made the data set of it
        if not already_made(work.path, work.settings):
            raise
        return None


def _join_parts(work: Work, units: Path, number: int, parts: int) -> tuple[Manifest, Tally] | None:
    """Make the data set, where all units are there."""
    count = len(work.units)
    with _locked(units):  # another job may find all there at the same time
        if already_made(work.path, work.settings):
            return None
        if missing := sum(not UnitFile.place(units, each).is_file() for each in range(count)):
            print(f"data: part {number} of {parts} is encoded; {missing:,} of {count:,} units of work are left.")
            return None
        with new_folder(work.path) as place:
            made = _assembled(work, units, place)
        shutil.rmtree(units)
    return made


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other job holds the folder, and hold it."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _encoded(work: Work, folder: Path, numbers: range) -> Iterator[None]:
    """Encode those of these units that are not in the folder, with a progress bar; a moment after each."""
    left = [number for number in numbers if not UnitFile.place(folder, number).is_file()]
    if len(left) < len(numbers):
        done = len(numbers) - len(left)
        print(f"data: going on in {work.path} after {done:,} of {len(numbers):,} units of work.")
    tasks = [(number, work.units[number]) for number in left]
    results = spread(partial(encode_unit, folder, work.encode), tasks, work.workers, work.executor)
    total, rest = (sum(work.sizes[number] for number in some) for some in (numbers, left))
    bar = tqdm(total=total, initial=total - rest, unit="B", unit_scale=True, desc="data", disable=None)
    with bar, closing(results):
        for number, _ in zip(left, results, strict=True):
            bar.update(work.sizes[number])
            yield


def _assembled(work: Work, units: Path, place: Path) -> tuple[Manifest, Tally]:
    """Everything of the data set, in `place`."""
    found = [UnitFile(UnitFile.place(units, number)) for number in range(len(work.units))]
    dtype, tokenizer = best_dtype(work.tokenizer.vocabulary), work.tokenizer
    train, held_out, tally = assemble(found, place, dtype, work.data)
    manifest = Manifest(
        tokenizer=tokenizer.fingerprint(),
        vocabulary=tokenizer.vocabulary,
        end_id=tokenizer.end_id,
        dtype=dtype,
        settings=work.settings,
        train=train,
        held_out=held_out,
        empty=tally.empty,
        invalid=tally.invalid,
        replaced=tally.replaced,
        skipped=len(tally.skipped),
        duplicates=tally.copies if work.data.duplicates == "drop" else 0,
    )
    if tally.skipped:
        (place / SKIPPED).write_text("".join(f"{line}\n" for line in tally.skipped), encoding="utf-8")
    if work.files:
        (place / FILES).write_text(json.dumps(work.files, ensure_ascii=False), encoding="utf-8")
    manifest.save(place)
    return manifest, tally


@lru_cache(maxsize=1)
def load_once(path: Path, fingerprint: str) -> Tokenizer:
    """A process's tokenizer, read at its first unit."""
    tokenizer = Tokenizer.load(path)
    if tokenizer.fingerprint() != fingerprint:
        raise JinguError("the tokenizer changed during the build.", where=path, fix="Run it again.")
    return tokenizer


def _encode(
    path: Path, fingerprint: str, data: DataSettings, unit: tuple[Span, ...], tally: Tally
) -> Iterator[Encoded]:
    """The documents of a unit, with the tokenizer in `path`."""
    return _parts(read_documents(unit, data, tally), load_once(path, fingerprint), begins=data.beginning)


def _parts(documents: Iterator[Document], tokenizer: Tokenizer, *, begins: bool) -> Iterator[Encoded]:
    """The documents, as many at a time as have about `PART_IDS` ids; each ends with the end token."""
    dtype = np.dtype(best_dtype(tokenizer.vocabulary))
    first, end = np.array(tokenizer.beginning if begins else [], dtype), np.array([tokenizer.end_id], dtype)
    more = True
    while more:
        ids: list[npt.NDArray[Any]] = []
        rows: list[tuple[int, int, int, int, int]] = []
        waiting, more = 0, False
        for document in documents:
            begun = len(ids)
            ids += [first, *tokenizer.encode_parts(document.text, dtype), end]
            length = sum(map(len, ids[begun:]))
            rows.append((length, document.bytes, hash_of(document.text.encode()), document.file.number, document.place))
            waiting += length
            if more := waiting >= PART_IDS:
                break
        if rows:
            lengths, text_bytes, hashes, files, places = zip(*rows, strict=True)
            counts = (np.array(lengths), np.array(text_bytes), np.array(hashes, dtype=np.uint64))
            yield Encoded(np.concatenate(ids), *counts, np.array([files, places]).T)


def hash_of(content: bytes) -> int:
    """64 bits that decide the split: of the content alone, so that copies fall on one side."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, key=b"jingu held out").digest(), "little")
