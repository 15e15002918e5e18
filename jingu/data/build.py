"""`jingu data build`: the corpus to shards of ids.

Units of work are fixed by the corpus and written in its order, so that the number of workers changes nothing
but the time.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from jingu.config.schema import RunConfig
from jingu.config.sections.data import DataSettings, SupervisedSettings
from jingu.data.cluster import in_order, on_ray
from jingu.data.indexed import best_dtype
from jingu.data.manifest import FILES, Manifest, check_sizes, print_summary
from jingu.data.parts import join_parts, part_folder
from jingu.data.writing import PROGRESS, Assembled, Assembly, Encoded, EncodedUnit
from jingu.errors import JinguError
from jingu.runtime.devices import usable_cores
from jingu.runtime.files import new_folder
from jingu.text.corpus import checked_corpora, describe_files, find_files, plan_units
from jingu.text.readers import Document, Span, Tally, read_documents
from jingu.text.record import refuse_changes
from jingu.text.storage import CorpusFile
from jingu.text.tokenizer import Tokenizer

_OTHER = (
    "path workers on_error beginning sources stages temperature order reading local objective packing within_documents"
    " drop"
)
NOT_OF_THE_BUILD = set(_OTHER.split())
"""Settings of `data` that do not change a data set's content."""
PART_IDS = 1 << 22
"""Ids that are held in memory at a time, but for a document's."""
Executor = Literal["processes", "ray"]
Unit = tuple[Span, ...]


def build(
    config: RunConfig,
    part: tuple[int, int] | None = None,
    on_error: str | None = None,
    executor: Executor = "processes",
) -> None:
    """Build the data set of each source of the run in its `path`, unless the very same is there already.

    Args:
        part: (i, n) builds the i-th of n parts (from 1), as a job of its own; the last to be done joins them.
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


@dataclass(frozen=True)
class Job:
    """A data set to build, and what decides its content."""

    data: DataSettings
    path: Path
    files: list[CorpusFile]
    settings: dict[str, Any]
    """What the manifest tells of it."""
    tokenizer_path: Path
    tokenizer: Tokenizer
    executor: Executor


def build_source(
    data: DataSettings, tokenizer_path: Path, part: tuple[int, int] | None, executor: Executor = "processes"
) -> None:
    """Build one data set, or a part of it."""
    path = Path(data.path)
    tokenizer = Tokenizer.load(tokenizer_path)
    files = find_files(data)
    settings = data.model_dump(mode="json", exclude=NOT_OF_THE_BUILD)
    settings |= {"corpus": describe_files(files), "tokenizer": tokenizer.fingerprint()}
    if beginning := tokenizer.beginning if data.beginning else []:
        settings["beginning"] = beginning
    if already_made(path, settings):
        return
    units, job = plan_units(files), Job(data, path, files, settings, tokenizer_path, tokenizer, executor)
    if part is None:
        manifest = _build(job, units, whole=True)
    else:
        number, parts = part
        some = units[len(units) * (number - 1) // parts : len(units) * number // parts]
        place = part_folder(path, number, parts)
        if (done := Manifest.load(place)) is None or done.settings != settings:
            _build(replace(job, path=place), some, whole=False)
        joined = join_parts(path, parts, settings)
        if joined is None:
            return
        manifest = joined
    print_summary(manifest)


def _build(job: Job, units: list[Unit], *, whole: bool) -> Manifest:
    data, path, tokenizer = job.data, job.path, job.tokenizer
    workers = min(usable_cores() if data.workers == "auto" else data.workers, max(len(units), 1))
    began = time.monotonic()
    with new_folder(path, PROGRESS) as place:
        dtype = best_dtype(tokenizer.vocabulary)
        assembly = Assembly(place, job.settings, dtype, data)
        if assembly.units:
            print(f"data: going on in {path} after {assembly.units:,} of {len(units):,} units of work.")
        encode = partial(_encode, job.tokenizer_path.absolute(), tokenizer.fingerprint(), data, place)
        done = assembly.write(partial(_encode_all, encode, units, workers, job.executor), whole=whole)
        manifest = manifest_of(done, job.settings, tokenizer, data)
        names = [file.path for file in job.files]
        (place / FILES).write_text(json.dumps(names, ensure_ascii=False), encoding="utf-8")
        manifest.save(place)
    by = "a Ray cluster" if job.executor == "ray" else f"{workers} process(es)"
    print(f"data: built in {path} in {time.monotonic() - began:.1f} s by {by}.")
    return manifest


def manifest_of(done: Assembled, settings: dict[str, Any], tokenizer: Tokenizer, data: DataSettings) -> Manifest:
    """What tells of a data set that was written."""
    return Manifest(
        tokenizer=tokenizer.fingerprint(),
        vocabulary=tokenizer.vocabulary,
        end_id=tokenizer.end_id,
        dtype=best_dtype(tokenizer.vocabulary),
        settings=settings,
        train=done.train,
        held_out=done.held_out,
        empty=done.tally.empty,
        invalid=done.tally.invalid,
        replaced=done.tally.replaced,
        skipped=len(done.tally.skipped),
        duplicates=done.duplicates if data.duplicates == "drop" else 0,
    )


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


def _encode_all(
    job: Callable[[Unit], EncodedUnit], units: list[Unit], workers: int, executor: Executor, first: int
) -> Generator[EncodedUnit, None, None]:
    """The units from `first` on encoded, in order, by so many processes (1: this one), with a progress bar."""
    sizes = [sum(span.end - span.start for span in unit) for unit in units]
    left = units[first:]
    if executor == "ray":
        results = on_ray(job, left)
    else:
        results = (job(unit) for unit in left) if workers == 1 else in_processes(job, left, workers)
    bar = tqdm(total=sum(sizes), initial=sum(sizes[:first]), unit="B", unit_scale=True, desc="data", disable=None)
    with bar, closing(results):
        for size, result in zip(sizes[first:], results, strict=True):
            yield result
            bar.update(size)


def in_processes(
    job: Callable[[Any], EncodedUnit], units: Sequence[Any], workers: int
) -> Generator[EncodedUnit, None, None]:
    """Results in the order of the units; only a few units are under way or waiting at a time."""
    # spawn: a forked child would inherit the threads of the tokenizer and of torch.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_follow_parent)
    try:
        yield from in_order(lambda unit: pool.submit(job, unit), Future.result, units, 2 * workers)
    except BrokenProcessPool as error:
        raise JinguError(
            "a building process was killed, most likely because memory ran out.",
            where="data build",
            fix="Set data.workers to a smaller number.",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _follow_parent() -> None:
    """In a worker: leave Ctrl-C to the parent, and end when the parent ends, however it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@lru_cache(maxsize=1)
def load_once(path: Path, fingerprint: str) -> Tokenizer:
    """A process's tokenizer, read at its first unit."""
    tokenizer = Tokenizer.load(path)
    if tokenizer.fingerprint() != fingerprint:
        raise JinguError("the tokenizer changed during the build.", where=path, fix="Run it again.")
    return tokenizer


def _encode(path: Path, fingerprint: str, data: DataSettings, place: Path, unit: Unit) -> EncodedUnit:
    """Read and encode the documents of one unit with the tokenizer in `path`. What does not fit into memory goes to a
    file in `place`."""
    tally, name = Tally(), hash_of(f"{unit[0].file.path}:{unit[0].start}".encode())
    parts = _parts(read_documents(unit, data, tally), load_once(path, fingerprint), begins=data.beginning)
    return EncodedUnit.gathered(parts, tally, place / f"{name:016x}.spill")


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
