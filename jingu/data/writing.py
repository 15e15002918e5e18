"""A data set out of encoded units, each in a file of its own.

Units are encoded in any order, by any processes, and by several jobs; one that is there need not be made again. All of
them, in the order of the corpus, make the shards of both sides.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from jingu.config.sections.data import DataSettings, SupervisedSettings
from jingu.data.indexed import IndexedWriter
from jingu.data.manifest import Split, SplitName
from jingu.data.order import Numbers
from jingu.errors import JinguError, counted
from jingu.runtime.files import sync
from jingu.text.readers import Tally


@dataclass(frozen=True)
class Encoded:
    """Documents: ids one after another, and for each its length, bytes of text, hash, and where it comes from."""

    ids: npt.NDArray[Any]
    lengths: Numbers
    text_bytes: Numbers
    hashes: npt.NDArray[np.uint64]
    beside: npt.NDArray[Any]
    """[documents, 2] the file's number in the corpus, and the place in it; of supervised data [ids], their weights."""

    @property
    def supervised(self) -> bool:
        return self.beside.ndim == 1


Encode = Callable[[Any, Tally], Iterator[Encoded]]
"""The documents of a unit of work, some at a time so that memory is bounded; counts into the tally."""


class UnitFile:
    """A unit that was encoded: numpy's arrays one after another, and last what is told of all of them, as JSON."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as stream:
            stream.seek(-8, os.SEEK_END)
            last = stream.tell()
            self._end = last - int.from_bytes(stream.read(8), "little")
            stream.seek(self._end)
            told = json.loads(stream.read(last - self._end))
        self.tally = Tally(**told["tally"])
        self.lowest: int = told["lowest"]
        """Of the documents' hashes, as `highest`; beyond all of them where there are no documents."""
        self.highest: int = told["highest"]

    @staticmethod
    def place(folder: Path, number: int) -> Path:
        """Where the unit of this number lies."""
        return folder / f"{number:06d}.unit"

    def documents(self) -> Iterator[Encoded]:
        """All of them, some at a time."""
        with self._path.open("rb") as stream:
            while stream.tell() < self._end:
                yield Encoded(*(np.load(stream, allow_pickle=False) for _ in fields(Encoded)))


def encode_unit(folder: Path, encode: Encode, numbered: tuple[int, Any]) -> None:
    """Make the file of a unit, given with its number; it appears whole or not at all."""
    number, unit = numbered
    tally, lowest, highest = Tally(), 1 << 64, -1
    partial = folder / f".{uuid4().hex}"  # another job may be at the same unit
    try:
        with partial.open("wb") as stream:
            for part in encode(unit, tally):
                for array in vars(part).values():
                    np.save(stream, array, allow_pickle=False)
                lowest, highest = min(lowest, int(part.hashes.min())), max(highest, int(part.hashes.max()))
            told = json.dumps({"tally": asdict(tally), "lowest": lowest, "highest": highest}).encode()
            stream.write(told + len(told).to_bytes(8, "little"))
        sync(partial)
        partial.rename(UnitFile.place(folder, number))
    finally:
        partial.unlink(missing_ok=True)


class SplitWriter:
    """Writes one side of the split as shards of about `shard_tokens`; documents are never cut."""

    def __init__(self, place: Path, name: SplitName, dtype: str, shard_tokens: int) -> None:
        self._place, self._name, self._dtype, self._shard_tokens = place, name, dtype, shard_tokens
        self._done = Split()
        self._open: tuple[IndexedWriter, IndexedWriter] | None = None

    def add(self, part: Encoded, mask: npt.NDArray[np.bool_]) -> None:
        """Append the documents where `mask` holds."""
        ids = part.ids[np.repeat(mask, part.lengths)]
        lengths, text_bytes = part.lengths[mask], part.text_bytes[mask]
        beside = part.beside[np.repeat(mask, part.lengths) if part.supervised else mask]
        while len(lengths):
            writer, its_beside = self._open = self._open or self._opened(part)
            ends = np.cumsum(lengths)
            count = int(np.searchsorted(ends, self._shard_tokens - writer.tokens)) + 1
            end = int(ends[:count][-1])
            writer.add(ids[:end], lengths[:count], int(text_bytes[:count].sum()))
            some, beside = np.split(beside, [end if part.supervised else count])
            its_beside.add(some.ravel(), lengths[:count] if part.supervised else np.array([some.size]))
            ids, lengths, text_bytes = ids[end:], lengths[count:], text_bytes[count:]
            if writer.tokens >= self._shard_tokens:
                self.close()

    def _opened(self, part: Encoded) -> tuple[IndexedWriter, IndexedWriter]:
        """Writers of the next shard: its ids, and what is beside them."""
        number, kind = f"{len(self._done.shards):05d}", "weights" if part.supervised else "places"
        return (
            IndexedWriter(self._place / f"{self._name}-{number}", self._dtype),
            IndexedWriter(self._place / f"{self._name}-{kind}-{number}", part.beside.dtype.name),
        )

    def close(self) -> Split:
        """End the last shard; all that were written."""
        if self._open is not None:
            self._done.shards.append(self._open[0].close())
            self._done.beside.append(self._open[1].close())
            self._open = None
        return self._done


def assemble(units: Sequence[UnitFile], place: Path, dtype: str, data: DataSettings) -> tuple[Split, Split, Tally]:
    """Write both sides into `place`; training, held out, and what was counted.

    The hash of a document decides its side. In a corpus so small that one would stay empty, the threshold moves just so
    far that one document (and its copies) changes sides.
    """
    tally = Tally()
    for unit in units:
        tally.add(unit.tally)
    lowest, highest = min(unit.lowest for unit in units), max(unit.highest for unit in units)
    _refuse_empty(tally, lowest == highest, data)
    threshold = int(data.held_out * 2**64)
    if data.held_out:
        threshold = min(max(threshold, lowest + 1), highest)
    train, held_out = (SplitWriter(place, name, dtype, data.shard_tokens) for name in ("train", "held_out"))
    seen, drops = set[int](), data.duplicates == "drop"
    for part in (part for unit in units for part in unit.documents()):
        first = np.ones(len(part.hashes), dtype=np.bool_)
        if drops or part.supervised:
            for number, hash_ in enumerate(part.hashes.tolist()):
                first[number] = hash_ not in seen
                seen.add(hash_)
            tally.copies += int((~first).sum())
        kept, held = first | (not drops), part.hashes < np.uint64(threshold)
        train.add(part, kept & ~held)
        held_out.add(part, kept & held)
    return train.close(), held_out.close(), tally


def _refuse_empty(tally: Tally, one: bool, data: DataSettings) -> None:
    if tally.documents == 0 and isinstance(data.objective, SupervisedSettings):
        raise JinguError("no row is left to train on.", where="data.input", fix="`jingu tune preview` tells why.")
    if tally.documents == 0:
        empty = f"{counted(tally.empty, 'document')} {'is' if tally.empty == 1 else 'are'} empty"
        what = f"the corpus has no text: {empty}, {tally.invalid:,} not UTF-8."
        raise JinguError(what, where="data.input", fix="Name files with text in them.")
    if one and data.held_out > 0:
        raise JinguError(
            "the corpus has only one document (or copies of one), so none can be held out for evaluation.",
            where="data.held_out",
            fix="Split the text into several files or .jsonl lines, or set data.held_out to 0 "
            "and evaluation.every to 0 to train without evaluation.",
        )
