"""Encoded units: what a part of a corpus becomes, in a file of its own.

They are made in any order, by any processes, and by several jobs; one that is there need not be made again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from jingu.runtime.files import sync
from jingu.text.readers import Tally

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Encoded:
    """Documents: ids one after another, and for each its length, bytes of text, hash, and where it comes from."""

    ids: npt.NDArray[Any]
    lengths: Counts
    text_bytes: Counts
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
