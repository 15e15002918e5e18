"""`jingu data build`: the corpus to shards of ids.

Units of work are fixed by the corpus and written in its order, so that the number of workers changes nothing
but the time.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from functools import lru_cache, partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from jingu.config.schema import DataSettings, RunConfig, SupervisedSettings
from jingu.data.indexed import best_dtype
from jingu.data.manifest import Manifest, check_sizes, print_summary
from jingu.data.parts import join_parts, part_folder
from jingu.data.writing import PROGRESS, Assembly, Encoded
from jingu.errors import JinguError
from jingu.runtime.devices import usable_cores
from jingu.runtime.files import new_folder
from jingu.text.corpus import checked_corpora, describe_files, find_files, plan_units
from jingu.text.readers import Span, Tally, read_documents
from jingu.text.record import differences
from jingu.text.tokenizer import Tokenizer

NOT_OF_THE_BUILD = {
    "path",
    "workers",
    "on_error",
    *(
        "sources",
        "stages",
        "temperature",
        "order",
        "reading",
        "local",
        "objective",
        "packing",
        "within_documents",
        "drop",
    ),
}
"""Settings of `data` that do not change a data set's content."""
SPILL_IDS = 1 << 25
"""Ids of a unit that are held in memory at most."""
Unit = tuple[Span, ...]


def build(config: RunConfig, part: tuple[int, int] | None = None, on_error: str | None = None) -> None:
    """Build the data set of each source of the run in its `path`, unless the very same is there already.

    Args:
        part: (i, n) builds the i-th of n parts (from 1), as a job of its own; the last to be done joins them.
        on_error: in place of `data.on_error`.
    """
    if isinstance(config.data.objective, SupervisedSettings):
        raise JinguError(
            "supervised data is made by another verb.", where="data.objective", fix="Run `jingu tune prepare`."
        )
    data = config.data if on_error is None else config.data.model_copy(update={"on_error": on_error})
    corpora = checked_corpora(data)
    for source in corpora:
        if source.input or len(corpora) == 1:
            build_source(data.of(source), Path(config.tokenizer.path), part)


def build_source(data: DataSettings, tokenizer_path: Path, part: tuple[int, int] | None) -> None:
    """Build one data set, or a part of it."""
    path = Path(data.path)
    tokenizer = Tokenizer.load(tokenizer_path)
    files = find_files(data)
    settings = data.model_dump(mode="json", exclude=NOT_OF_THE_BUILD)
    settings |= {"corpus": describe_files(files), "tokenizer": tokenizer.fingerprint()}
    if (old := Manifest.load(path)) is not None:
        refuse_other(path, old, settings)
        print(f"data: already built in {path}.")
        print_summary(old)
        return
    units = plan_units(files)
    if part is None:
        manifest = _build(path, units, settings, tokenizer_path, tokenizer, data, whole=True)
    else:
        number, parts = part
        some = units[len(units) * (number - 1) // parts : len(units) * number // parts]
        place = part_folder(path, number, parts)
        if (done := Manifest.load(place)) is None or done.settings != settings:
            _build(place, some, settings, tokenizer_path, tokenizer, data, whole=False)
        joined = join_parts(path, parts, settings)
        if joined is None:
            return
        manifest = joined
    print_summary(manifest)


def _build(
    path: Path,
    units: list[Unit],
    settings: dict[str, Any],
    tokenizer_path: Path,
    tokenizer: Tokenizer,
    data: DataSettings,
    *,
    whole: bool,
) -> Manifest:
    workers = min(usable_cores() if data.workers == "auto" else data.workers, max(len(units), 1))
    began = time.monotonic()
    with new_folder(path, PROGRESS) as place:
        dtype = best_dtype(tokenizer.vocabulary)
        assembly = Assembly(place, settings, dtype, data)
        if assembly.units:
            print(f"data: going on in {path} after {assembly.units:,} of {len(units):,} units of work.")
        job = partial(_encode, tokenizer_path, tokenizer.fingerprint(), data, place)
        done = assembly.write(partial(_encode_all, job, units, workers), whole=whole)
        manifest = Manifest(
            tokenizer=tokenizer.fingerprint(),
            vocabulary=tokenizer.vocabulary,
            end_id=tokenizer.end_id,
            dtype=dtype,
            settings=settings,
            train=done.train,
            held_out=done.held_out,
            empty=done.tally.empty,
            invalid=done.tally.invalid,
            replaced=done.tally.replaced,
            skipped=len(done.tally.skipped),
            duplicates=done.duplicates,
        )
        manifest.save(place)
    print(f"data: built in {path} in {time.monotonic() - began:.1f} s by {workers} process(es).")
    return manifest


def refuse_other(path: Path, old: Manifest, settings: dict[str, Any]) -> None:
    """JinguError unless the data set in `path` is whole and the one that the settings would make."""
    if changes := differences(old.settings, settings):
        raise JinguError(
            f"the data set here was built otherwise: {'; '.join(changes)}.",
            where=path,
            fix="Delete the folder to build it anew, or set data.path to another folder.",
        )
    check_sizes(path, old.train)
    check_sizes(path, old.held_out)


def _encode_all(
    job: Callable[[Unit], Encoded], units: list[Unit], workers: int, first: int
) -> Generator[Encoded, None, None]:
    """The units from `first` on encoded, in order, by so many processes (1: this one), with a progress bar."""
    sizes = [sum(span.end - span.start for span in unit) for unit in units]
    left = units[first:]
    results = (job(unit) for unit in left) if workers == 1 else in_processes(job, left, workers)
    bar = tqdm(total=sum(sizes), initial=sum(sizes[:first]), unit="B", unit_scale=True, desc="data", disable=None)
    with bar, closing(results):
        for size, result in zip(sizes[first:], results, strict=True):
            yield result
            bar.update(size)


def in_processes(job: Callable[[Any], Encoded], units: Sequence[Any], workers: int) -> Generator[Encoded, None, None]:
    """Results in the order of the units; only a few units are under way or waiting at a time."""
    # spawn: a forked child would inherit the threads of the tokenizer and of torch.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_follow_parent)
    waiting: deque[Future[Encoded]] = deque()
    try:
        for unit in units:
            waiting.append(pool.submit(job, unit))
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
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


def _encode(path: Path, fingerprint: str, data: DataSettings, place: Path, unit: Unit) -> Encoded:
    """Read and encode the documents of one unit with the tokenizer in `path`; each gets the end token.

    Ids of a unit that is a large file by itself are brought to a file in `place`, so that memory stays bounded.
    """
    tokenizer = load_once(path, fingerprint)
    tally = Tally()
    dtype = np.dtype(best_dtype(tokenizer.vocabulary))
    end = np.array([tokenizer.end_id], dtype=dtype)
    parts: list[npt.NDArray[Any]] = [np.zeros(0, dtype)]
    lengths, text_bytes, hashes, waiting = [], [], [], 0
    spill = place / f"{_hash(f'{unit[0].file.path}:{unit[0].start}'):016x}.spill"
    with ExitStack() as stack:
        stream = None
        for document in read_documents(unit, data, tally):
            ids = np.array(tokenizer.encode(document.text), dtype=dtype)
            parts += [ids, end]
            lengths.append(len(ids) + 1)
            text_bytes.append(document.bytes)
            hashes.append(_hash(document.text))
            waiting += len(ids) + 1
            if waiting >= SPILL_IDS:
                stream = stream or stack.enter_context(spill.open("wb"))
                np.concatenate(parts).tofile(stream)
                parts, waiting = [np.zeros(0, dtype)], 0
        if stream is not None:
            np.concatenate(parts).tofile(stream)
    return Encoded(
        ids=np.concatenate(parts) if stream is None else np.memmap(spill, dtype, "r"),
        lengths=np.array(lengths, dtype=np.int64),
        text_bytes=np.array(text_bytes, dtype=np.int64),
        hashes=np.array(hashes, dtype=np.uint64),
        tally=tally,
        spilled=None if stream is None else str(spill),
    )


def _hash(text: str) -> int:
    """64 bits that decide the split: of the text alone, so that copies fall on one side."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, key=b"jingu held out").digest(), "little")
