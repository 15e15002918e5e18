"""`jingu data build`: the corpus to shards of ids; and `jingu data inspect`, which checks them.

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
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from tqdm import tqdm

from jingu.config.schema import DataSettings, RunConfig
from jingu.data.indexed import IndexedReader, IndexedWriter, best_dtype
from jingu.data.manifest import Manifest, Shard, Split, SplitName, check_sizes, damaged
from jingu.data.sources import checked_corpora
from jingu.errors import JinguError
from jingu.runtime.devices import usable_cores
from jingu.runtime.files import new_folder
from jingu.text.corpus import Span, Tally, describe_files, find_files, plan_units, read_documents
from jingu.text.record import differences
from jingu.text.tokenizer import Tokenizer

NOT_OF_THE_BUILD = {"path", "workers", "sources", "stages", "temperature", "order", "reading", "local", "objective"}
"""Settings of `data` that do not change a data set's content."""
Unit = tuple[Span, ...]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Encoded:
    """The documents of a unit: ids one after another, and for each its length, bytes of text and hash."""

    ids: npt.NDArray[Any]
    lengths: Counts
    text_bytes: Counts
    hashes: npt.NDArray[np.uint64]
    tally: Tally


def build(config: RunConfig) -> None:
    """Build the data set of each source of the run in its `path`, unless the very same is there already."""
    corpora = checked_corpora(config.data)
    for source in corpora:
        if source.input or len(corpora) == 1:
            build_source(config.data.of(source), Path(config.tokenizer.path))


def build_source(data: DataSettings, tokenizer_path: Path) -> None:
    """Build one data set."""
    path = Path(data.path)
    tokenizer = Tokenizer.load(tokenizer_path)
    files = find_files(data)
    settings = data.model_dump(mode="json", exclude=NOT_OF_THE_BUILD)
    settings |= {"corpus": describe_files(files), "tokenizer": tokenizer.fingerprint()}
    if (old := Manifest.load(path)) is not None:
        _refuse_other(path, old, settings)
        print(f"data: already built in {path}.")
        _print_summary(old)
        return
    units = plan_units(files)
    workers = min(usable_cores() if data.workers == "auto" else data.workers, max(len(units), 1))
    began = time.monotonic()
    with new_folder(path) as place:
        job = partial(_encode, tokenizer_path, tokenizer.fingerprint(), data)
        encode = partial(_encode_all, job, units, workers)
        manifest = _write(place, encode, settings, tokenizer, data)
        manifest.save(place)
    print(f"data: built in {path} in {time.monotonic() - began:.1f} s by {workers} process(es).")
    _print_summary(manifest)


def inspect(path: Path) -> None:
    """Print what a data set holds, and compare every file with its checksum."""
    manifest = Manifest.load(path)
    if manifest is None:
        raise JinguError("there is no data set here.", where=path, fix="Run `jingu data build`.")
    print(f"data: {path}, ids as {manifest.dtype} of a vocabulary of {manifest.vocabulary:,}.")
    _print_summary(manifest)
    for split in (manifest.train, manifest.held_out):
        check_sizes(path, split)
        for shard in split.shards:
            for name, checksum in ((f"{shard.name}.bin", shard.bin_xxh3), (f"{shard.name}.idx", shard.idx_xxh3)):
                with (path / name).open("rb") as stream:
                    if hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest() != checksum:
                        raise damaged(path / name, "the file's content is not what was written (checksum).")
            IndexedReader(path / shard.name)
    print("  every file has the checksum it was written with")


def _refuse_other(path: Path, old: Manifest, settings: dict[str, Any]) -> None:
    """JinguError unless the data set in `path` is whole and the one that the settings would make."""
    if changes := differences(old.settings, settings):
        raise JinguError(
            f"the data set here was built otherwise: {'; '.join(changes)}.",
            where=path,
            fix="Delete the folder to build it anew, or set data.path to another folder.",
        )
    check_sizes(path, old.train)
    check_sizes(path, old.held_out)


def _write(
    place: Path,
    encode: Callable[[], Generator[Encoded, None, None]],
    settings: dict[str, Any],
    tokenizer: Tokenizer,
    data: DataSettings,
) -> Manifest:
    """Write both splits into `place`.

    Where a small corpus leaves one side empty, it is read once more with the threshold moved just so far that
    one document (and its duplicates) changes sides.
    """
    dtype = best_dtype(tokenizer.vocabulary)
    threshold = int(data.held_out * 2**64)
    while True:
        tally, low, high = Tally(), 1 << 64, -1
        with ExitStack() as stack:
            train = stack.enter_context(SplitWriter(place, "train", dtype, data.shard_tokens))
            held_out = stack.enter_context(SplitWriter(place, "held_out", dtype, data.shard_tokens))
            for unit in stack.enter_context(closing(encode())):
                tally.add(unit.tally)
                if len(unit.hashes):
                    low, high = min(low, int(unit.hashes.min())), max(high, int(unit.hashes.max()))
                held = unit.hashes < np.uint64(threshold)
                train.add(unit, ~held)
                held_out.add(unit, held)
            splits = train.close(), held_out.close()
        _refuse_empty(tally, low == high, data)
        if splits[0].documents and (splits[1].documents or data.held_out == 0):
            break
        threshold = high if splits[1].documents else low + 1
        for left in place.iterdir():
            left.unlink()
    return Manifest(
        tokenizer=tokenizer.fingerprint(),
        vocabulary=tokenizer.vocabulary,
        end_id=tokenizer.end_id,
        dtype=dtype,
        settings=settings,
        train=splits[0],
        held_out=splits[1],
        empty=tally.empty,
        invalid=tally.invalid,
        replaced=tally.replaced,
    )


def _refuse_empty(tally: Tally, one: bool, data: DataSettings) -> None:
    if tally.documents == 0:
        what = f"the corpus has no text: {tally.empty} documents are empty, {tally.invalid} are not UTF-8."
        raise JinguError(what, where="data.input", fix="Name files with text in them.")
    if one and data.held_out > 0:
        raise JinguError(
            "the corpus has only one document (or copies of one), so none can be held out for evaluation.",
            where="data.held_out",
            fix="Split the text into several files or .jsonl lines, or set data.held_out to 0 "
            "and evaluation.every to 0 to train without evaluation.",
        )


class SplitWriter:
    """Writes one side of the split as shards of about `shard_tokens`; documents are never cut."""

    def __init__(self, place: Path, name: SplitName, dtype: str, shard_tokens: int) -> None:
        self._place, self._name, self._dtype, self._shard_tokens = place, name, dtype, shard_tokens
        self._shards: list[Shard] = []
        self._writer: IndexedWriter | None = None

    def add(self, unit: Encoded, mask: npt.NDArray[np.bool_]) -> None:
        """Append the unit's documents where `mask` holds."""
        ids = unit.ids[np.repeat(mask, unit.lengths)]
        lengths, text_bytes = unit.lengths[mask], unit.text_bytes[mask]
        while len(lengths):
            if self._writer is None:
                self._writer = IndexedWriter(self._place / f"{self._name}-{len(self._shards):05d}", self._dtype)
            ends = np.cumsum(lengths)
            count = int(np.searchsorted(ends, self._shard_tokens - self._writer.tokens)) + 1
            end = int(ends[:count][-1])
            self._writer.add(ids[:end], lengths[:count], int(text_bytes[:count].sum()))
            ids, lengths, text_bytes = ids[end:], lengths[count:], text_bytes[count:]
            if self._writer.tokens >= self._shard_tokens:
                self._close_shard()

    def close(self) -> Split:
        self._close_shard()
        return Split(shards=self._shards)

    def _close_shard(self) -> None:
        if self._writer is not None:
            self._shards.append(self._writer.close())
            self._writer = None

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.stream.close()


def _encode_all(job: Callable[[Unit], Encoded], units: list[Unit], workers: int) -> Generator[Encoded, None, None]:
    """The units encoded, in order, by so many processes (1: this one), with a progress bar."""
    sizes = [sum(span.end - span.start for span in unit) for unit in units]
    results = (job(unit) for unit in units) if workers == 1 else _in_processes(job, units, workers)
    with tqdm(total=sum(sizes), unit="B", unit_scale=True, desc="data", disable=None) as bar, closing(results):
        for size, result in zip(sizes, results, strict=True):
            yield result
            bar.update(size)


def _in_processes(job: Callable[[Unit], Encoded], units: list[Unit], workers: int) -> Generator[Encoded, None, None]:
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
def _load_once(path: Path, fingerprint: str) -> Tokenizer:
    """A process's tokenizer, read at its first unit."""
    tokenizer = Tokenizer.load(path)
    if tokenizer.fingerprint() != fingerprint:
        raise JinguError("the tokenizer changed during the build.", where=path, fix="Run `jingu data build` again.")
    return tokenizer


def _encode(path: Path, fingerprint: str, data: DataSettings, unit: Unit) -> Encoded:
    """Read and encode the documents of one unit with the tokenizer in `path`; each gets the end token."""
    tokenizer = _load_once(path, fingerprint)
    tally = Tally()
    dtype = best_dtype(tokenizer.vocabulary)
    end = np.array([tokenizer.end_id], dtype=dtype)
    parts: list[npt.NDArray[Any]] = [np.zeros(0, dtype)]
    lengths, text_bytes, hashes = [], [], []
    for document in read_documents(unit, data, tally):
        ids = np.array(tokenizer.encode(document.text), dtype=dtype)
        parts += [ids, end]
        lengths.append(len(ids) + 1)
        text_bytes.append(document.bytes)
        hashes.append(_hash(document.text))
    return Encoded(
        ids=np.concatenate(parts),
        lengths=np.array(lengths, dtype=np.int64),
        text_bytes=np.array(text_bytes, dtype=np.int64),
        hashes=np.array(hashes, dtype=np.uint64),
        tally=tally,
    )


def _hash(text: str) -> int:
    """64 bits that decide the split: of the text alone, so that copies fall on one side."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, key=b"jingu held out").digest(), "little")


def _print_summary(manifest: Manifest) -> None:
    for title, split in (("train", manifest.train), ("held out", manifest.held_out)):
        print(
            f"  {title}: {split.documents:,} documents, {split.tokens:,} tokens, {split.text_bytes:,} bytes of text"
            f" ({split.text_bytes / max(split.tokens, 1):.2f} a token), {len(split.shards)} shard(s)"
        )
    print(
        f"  left out: {manifest.empty} empty, {manifest.invalid} not UTF-8;"
        f" taken with bytes replaced: {manifest.replaced}"
    )
