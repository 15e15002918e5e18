"""Both sides of a data set written unit by unit, so that a build that was killed goes on where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, fields
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jingu.config.sections.data import DataSettings, SupervisedSettings
from jingu.data.indexed import IndexedWriter, Written
from jingu.data.manifest import Split, SplitName
from jingu.errors import JinguError
from jingu.runtime.files import replace_text, sync
from jingu.text.readers import Tally

PROGRESS = "progress.json"
SKIPPED = "skipped.txt"
HASHES = "hashes"
SYNC_SECONDS = 10.0
"""Time between two moments from which a later process can go on."""
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


@dataclass(frozen=True)
class EncodedUnit:
    """The documents of a unit. Where they are many, some at a time are brought to a file, which goes when it is read:

    so memory does not grow with the unit."""

    tally: Tally
    parts: list[Encoded]
    spilled: Path | None = None

    @staticmethod
    def gathered(parts: Iterator[Encoded], tally: Tally, spill: Path) -> EncodedUnit:
        """Of parts that come one after another; more than one go to the file `spill`."""
        first = list(islice(parts, 2))
        if len(first) < 2:
            return EncodedUnit(tally, first)
        with spill.open("wb") as stream:
            for part in chain(first, parts):
                for array in vars(part).values():
                    np.save(stream, array, allow_pickle=False)
        return EncodedUnit(tally, [], spill)

    def documents(self) -> Iterator[Encoded]:
        """All of them, a part at a time."""
        yield from self.parts
        if self.spilled is not None:
            with self.spilled.open("rb") as stream:
                while stream.peek(1):
                    yield Encoded(*(np.load(stream, allow_pickle=False) for _ in fields(Encoded)))
            self.spilled.unlink()


class SplitWriter:
    """Writes one side of the split as shards of about `shard_tokens`; documents are never cut."""

    def __init__(self, place: Path, name: SplitName, dtype: str, shard_tokens: int, done: dict[str, Any]) -> None:
        """`done`: what `sync` gave, to go on from there."""
        self._place, self._name, self._dtype, self._shard_tokens = place, name, dtype, shard_tokens
        self._done = Split.model_validate(done.get("split", {}))
        open_ = done.get("open")
        self._writers = self._opened(open_[0], *(Written(**written) for written in open_[1:])) if open_ else None

    def add(self, part: Encoded, mask: npt.NDArray[np.bool_]) -> None:
        """Append the documents where `mask` holds."""
        ids = part.ids[np.repeat(mask, part.lengths)]
        lengths, text_bytes = part.lengths[mask], part.text_bytes[mask]
        beside = part.beside[np.repeat(mask, part.lengths) if part.supervised else mask]
        while len(lengths):
            self._writers = self._writers or self._opened(beside.dtype.name)
            writer, its_beside = self._writers
            ends = np.cumsum(lengths)
            count = int(np.searchsorted(ends, self._shard_tokens - writer.tokens)) + 1
            end = int(ends[:count][-1])
            writer.add(ids[:end], lengths[:count], int(text_bytes[:count].sum()))
            some, beside = np.split(beside, [end if part.supervised else count])
            its_beside.add(some.ravel(), lengths[:count] if part.supervised else np.array([some.size]))
            ids, lengths, text_bytes = ids[end:], lengths[count:], text_bytes[count:]
            if writer.tokens >= self._shard_tokens:
                self._close_shard()

    def sync(self) -> dict[str, Any]:
        """Bring all that was added to the disk; what it takes to go on from here."""
        open_ = self._writers and [self._writers[1].dtype, *(asdict(writer.sync()) for writer in self._writers)]
        return {"split": self._done.model_dump(), "open": open_}

    def close(self) -> Split:
        self._close_shard()
        return self._done

    def _opened(
        self, beside: str, ids_done: Written | None = None, beside_done: Written | None = None
    ) -> tuple[IndexedWriter, IndexedWriter]:
        """Writers of the next shard: its ids, and numbers of the type `beside`."""
        number = f"{len(self._done.shards):05d}"
        place = self._place / f"{self._name}-{'weights' if beside == 'uint8' else 'places'}-{number}"
        return (
            IndexedWriter(self._place / f"{self._name}-{number}", self._dtype, ids_done),
            IndexedWriter(place, beside, beside_done),
        )

    def _close_shard(self) -> None:
        if self._writers is not None:
            self._done.shards.append(self._writers[0].close())
            self._done.beside.append(self._writers[1].close())
            self._writers = None

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *error: object) -> None:
        for writer in self._writers or ():
            writer.stream.close()


@dataclass(frozen=True)
class Assembled:
    """What was written."""

    train: Split
    held_out: Split
    tally: Tally
    duplicates: int
    """Copies of earlier documents, left out or not; where they are kept, counted of supervised data only."""


class Assembly:
    """Writes both sides into `place`, going on with what an earlier process did there with the same settings."""

    def __init__(self, place: Path, settings: dict[str, Any], dtype: str, data: DataSettings) -> None:
        self._place, self._settings, self._dtype, self._data = place, settings, dtype, data
        self._threshold = int(data.held_out * 2**64)
        self._begin({})
        if (place / PROGRESS).is_file():
            state = json.loads((place / PROGRESS).read_text(encoding="utf-8"))
            if state["settings"] == settings:
                self._begin(state)
            else:
                self._empty()

    @property
    def units(self) -> int:
        """Units that are written."""
        return self._units

    def write(self, encode: Callable[[int], Generator[EncodedUnit, None, None]], *, whole: bool) -> Assembled:
        """Write the units from `encode(first)`, where `first` are done already.

        Where a small corpus leaves one side empty, it is read once more with the threshold moved just so far that
        one document (and its duplicates) changes sides; not so for a part of a corpus (`whole` is false).
        """
        while True:
            train, held_out = self._pass(encode)
            if whole:
                _refuse_empty(self._tally, self._low == self._high, self._data)
            if not whole or (train.documents and (held_out.documents or self._data.held_out == 0)):
                break
            self._threshold = self._high if held_out.documents else self._low + 1
            self._empty()
            self._begin({})
        self._finish()
        return Assembled(train, held_out, self._tally, self._duplicates)

    def _begin(self, state: dict[str, Any]) -> None:
        self._units, self._low, self._high = state.get("units", 0), state.get("low", 1 << 64), state.get("high", -1)
        self._threshold = state.get("threshold", self._threshold)
        self._tally, self._duplicates = Tally(**state.get("tally", {})), state.get("duplicates", 0)
        self._splits: dict[str, dict[str, Any]] = state.get("splits", {"train": {}, "held_out": {}})
        self._seen: set[int] = set()
        self._new: list[int] = []
        if count := state.get("hashes", 0):
            self._seen = set(np.fromfile(self._place / HASHES, "<u8", count).tolist())

    def _empty(self) -> None:
        (self._place / PROGRESS).unlink(missing_ok=True)
        for left in self._place.iterdir():
            left.unlink()

    def _pass(self, encode: Callable[[int], Generator[EncodedUnit, None, None]]) -> tuple[Split, Split]:
        """One reading of the corpus, or what is left of it."""
        written: Callable[[SplitName], SplitWriter] = lambda name: SplitWriter(  # noqa: E731
            self._place, name, self._dtype, self._data.shard_tokens, self._splits[name]
        )
        with ExitStack() as stack:
            writers = [stack.enter_context(written("train")), stack.enter_context(written("held_out"))]
            synced = time.monotonic()
            for unit in stack.enter_context(closing(encode(self._units))):
                for part in unit.documents():
                    self._add(part, *writers)
                self._tally.add(unit.tally)
                self._units += 1
                if time.monotonic() - synced >= SYNC_SECONDS:
                    self._sync(*writers)
                    synced = time.monotonic()
            return writers[0].close(), writers[1].close()

    def _add(self, part: Encoded, train: SplitWriter, held_out: SplitWriter) -> None:
        if len(part.hashes):
            self._low = min(self._low, int(part.hashes.min()))
            self._high = max(self._high, int(part.hashes.max()))
        first, drops = np.ones(len(part.hashes), dtype=np.bool_), self._data.duplicates == "drop"
        if drops or part.supervised:
            for number, hash_ in enumerate(part.hashes.tolist()):
                first[number] = hash_ not in self._seen
                if first[number]:
                    self._seen.add(hash_)
                    self._new.append(hash_)
            self._duplicates += int((~first).sum())
        first |= not drops
        held = part.hashes < np.uint64(self._threshold)
        train.add(part, first & ~held)
        held_out.add(part, first & held)

    def _sync(self, train: SplitWriter, held_out: SplitWriter) -> None:
        """A moment from which a later process can go on."""
        splits = {"train": train.sync(), "held_out": held_out.sync()}
        if self._new:
            with (self._place / HASHES).open("ab") as stream:
                stream.truncate(8 * (len(self._seen) - len(self._new)))  # what a killed process wrote after its last
                np.array(self._new, "<u8").tofile(stream)
            sync(self._place / HASHES)
            self._new = []
        state = {
            "settings": self._settings,
            "threshold": self._threshold,
            "units": self._units,
            "low": self._low,
            "high": self._high,
            "tally": asdict(self._tally),
            "duplicates": self._duplicates,
            "hashes": len(self._seen),
            "splits": splits,
        }
        replace_text(self._place / PROGRESS, json.dumps(state))

    def _finish(self) -> None:
        """Bring everything to the disk, and remove what it took to go on."""
        if self._tally.skipped:
            (self._place / SKIPPED).write_text("".join(f"{line}\n" for line in self._tally.skipped), encoding="utf-8")
        kept = [path for path in self._place.iterdir() if path.suffix in (".bin", ".idx") or path.name == SKIPPED]
        for path in kept:
            sync(path)
        for path in self._place.iterdir():
            if path not in kept:
                path.unlink()


def _refuse_empty(tally: Tally, one: bool, data: DataSettings) -> None:
    if tally.documents == 0 and isinstance(data.objective, SupervisedSettings):
        raise JinguError("no row is left to train on.", where="data.input", fix="`jingu tune preview` tells why.")
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
