"""Both sides of a data set written unit by unit, so that a build that was killed goes on where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jingu.config.schema import DataSettings
from jingu.data.indexed import IndexedWriter, Written
from jingu.data.manifest import Shard, Split, SplitName
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
    """The documents of a unit: ids one after another, and for each its length, bytes of text and hash."""

    ids: npt.NDArray[Any]
    lengths: Counts
    text_bytes: Counts
    hashes: npt.NDArray[np.uint64]
    tally: Tally
    beside: npt.NDArray[np.uint8] | None = None
    """Of supervised data, the weight of each id."""
    spilled: str | None = None
    """The file that holds the ids, where they are many; it goes when they are written."""


class SplitWriter:
    """Writes one side of the split as shards of about `shard_tokens`; documents are never cut."""

    def __init__(self, place: Path, name: SplitName, dtype: str, shard_tokens: int, done: dict[str, Any]) -> None:
        """`done`: what `sync` gave, to go on from there."""
        self._place, self._name, self._dtype, self._shard_tokens = place, name, dtype, shard_tokens
        self._shards = [Shard(**shard) for shard in done.get("shards", [])]
        self._writer = self._open(Written(**done["open"])) if done.get("open") else None
        self._beside = [Shard(**shard) for shard in done.get("beside", [])]
        self._weights = self._open_beside(Written(**done["open"])) if done.get("weights") else None

    def add(self, unit: Encoded, mask: npt.NDArray[np.bool_]) -> None:
        """Append the unit's documents where `mask` holds."""
        ids = unit.ids[np.repeat(mask, unit.lengths)]
        lengths, text_bytes = unit.lengths[mask], unit.text_bytes[mask]
        beside = None if unit.beside is None else unit.beside[np.repeat(mask, unit.lengths)]
        while len(lengths):
            self._writer = self._writer or self._open(None)
            ends = np.cumsum(lengths)
            count = int(np.searchsorted(ends, self._shard_tokens - self._writer.tokens)) + 1
            end = int(ends[:count][-1])
            self._writer.add(ids[:end], lengths[:count], int(text_bytes[:count].sum()))
            if beside is not None:
                self._weights = self._weights or self._open_beside(None)
                self._weights.add(beside[:end], lengths[:count])
                beside = beside[end:]
            ids, lengths, text_bytes = ids[end:], lengths[count:], text_bytes[count:]
            if self._writer.tokens >= self._shard_tokens:
                self._close_shard()

    def sync(self) -> dict[str, Any]:
        """Bring all that was added to the disk; what it takes to go on from here."""
        written = self._writer and asdict(self._writer.sync())
        shards, beside = ([shard.model_dump() for shard in each] for each in (self._shards, self._beside))
        return {
            "shards": shards,
            "beside": beside,
            "open": written,
            "weights": bool(self._weights and self._weights.sync()),
        }

    def close(self) -> Split:
        self._close_shard()
        return Split(shards=self._shards, beside=self._beside)

    def _open(self, done: Written | None) -> IndexedWriter:
        return IndexedWriter(self._place / f"{self._name}-{len(self._shards):05d}", self._dtype, done)

    def _open_beside(self, done: Written | None) -> IndexedWriter:
        return IndexedWriter(self._place / f"{self._name}-weights-{len(self._shards):05d}", "uint8", done)

    def _close_shard(self) -> None:
        if self._writer is not None:
            self._shards.append(self._writer.close())
            self._writer = None
        if self._weights is not None:
            self._beside.append(self._weights.close())
            self._weights = None

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *error: object) -> None:
        for writer in (self._writer, self._weights):
            if writer is not None:
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

    def write(self, encode: Callable[[int], Generator[Encoded, None, None]], *, whole: bool) -> Assembled:
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

    def _pass(self, encode: Callable[[int], Generator[Encoded, None, None]]) -> tuple[Split, Split]:
        """One reading of the corpus, or what is left of it."""
        written: Callable[[SplitName], SplitWriter] = lambda name: SplitWriter(  # noqa: E731
            self._place, name, self._dtype, self._data.shard_tokens, self._splits[name]
        )
        with ExitStack() as stack:
            writers = [stack.enter_context(written("train")), stack.enter_context(written("held_out"))]
            synced = time.monotonic()
            for unit in stack.enter_context(closing(encode(self._units))):
                self._add(unit, *writers)
                self._units += 1
                if time.monotonic() - synced >= SYNC_SECONDS:
                    self._sync(*writers)
                    synced = time.monotonic()
            return writers[0].close(), writers[1].close()

    def _add(self, unit: Encoded, train: SplitWriter, held_out: SplitWriter) -> None:
        self._tally.add(unit.tally)
        if len(unit.hashes):
            self._low = min(self._low, int(unit.hashes.min()))
            self._high = max(self._high, int(unit.hashes.max()))
        first = np.ones(len(unit.hashes), dtype=np.bool_)
        drops = self._data.duplicates == "drop"
        if drops or unit.beside is not None:
            for number, hash_ in enumerate(unit.hashes.tolist()):
                first[number] = hash_ not in self._seen
                if first[number]:
                    self._seen.add(hash_)
                    self._new.append(hash_)
            self._duplicates += int((~first).sum())
        first |= not drops
        held = unit.hashes < np.uint64(self._threshold)
        train.add(unit, first & ~held)
        held_out.add(unit, first & held)
        if unit.spilled is not None:
            Path(unit.spilled).unlink()

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
