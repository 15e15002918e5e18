"""The shards of a data set, written from encoded units of work.

Units are encoded in any order, by any processes and several jobs, each into a file of its own; a unit whose file
exists is not encoded again. All units in the order of the corpus make the shards of both splits.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from jingu.config.sections.data import DataSettings, PreferenceSettings, RowSettings
from jingu.data.dataset_manifest import SplitEntry, SplitName
from jingu.data.indexed_dataset import IndexedWriter
from jingu.data.permutation import Int64Array
from jingu.errors import JinguError, pluralize
from jingu.runtime.files import fsync_path
from jingu.text.document_reader import ReadCounts


def hash_document(content: bytes) -> int:
    """Return 64 bits that decide the split: they depend on the content alone, so that copies are in one split."""
    # This key must never change: it determines which documents are for validation.
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, key=b"jingu held out").digest(), "little")


@dataclass(frozen=True)
class EncodedDocuments:
    """The concatenated ids of documents, and for each document its length, bytes of text, hash and sidecar."""

    ids: npt.NDArray[Any]
    lengths: Int64Array
    text_bytes: Int64Array
    # They decide the split. Answers to one prompt have the same hash without being copies.
    hashes: npt.NDArray[np.uint64]
    # [documents, 2] the number of its file in the corpus and the position in it; for supervised data [ids] loss
    # weights.
    sidecar: npt.NDArray[Any]

    @property
    def is_supervised(self) -> bool:
        return self.sidecar.ndim == 1

    def copy_hashes(self) -> list[int]:
        """Return for each document a hash that only its copies share."""
        if not self.is_supervised:
            return self.hashes.tolist()
        ends = np.cumsum(self.lengths)
        # Rows with the same ids and other loss weights are no copies.
        parts = (np.split(array, ends)[:-1] for array in (self.ids, self.sidecar))
        return [hash_document(ids.tobytes() + weights.tobytes()) for ids, weights in zip(*parts, strict=True)]

    def select(self, mask: npt.NDArray[np.bool_]) -> EncodedDocuments:
        """Return the documents where `mask` is true."""
        id_mask = np.repeat(mask, self.lengths)
        sidecar = self.sidecar[id_mask if self.is_supervised else mask]
        return EncodedDocuments(
            self.ids[id_mask], self.lengths[mask], self.text_bytes[mask], self.hashes[mask], sidecar
        )


# Encodes the documents of a unit of work, some at a time so that memory is bounded, and counts what it reads.
UnitEncoder = Callable[[Any, ReadCounts], Iterator[EncodedDocuments]]


class UnitFile:
    """The file of an encoded unit: NumPy arrays one after another, and a summary of them as JSON at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as stream:
            # The last 8 bytes hold the size of the summary.
            stream.seek(-8, os.SEEK_END)
            summary_end = stream.tell()
            self._arrays_end = summary_end - int.from_bytes(stream.read(8), "little")
            stream.seek(self._arrays_end)
            summary = json.loads(stream.read(summary_end - self._arrays_end))
        self.counts = ReadCounts(**summary["counts"])
        # The range of the documents' hashes; empty (lowest > highest) without documents.
        self.lowest_hash: int = summary["lowest_hash"]
        self.highest_hash: int = summary["highest_hash"]

    @staticmethod
    def path(folder: Path, number: int) -> Path:
        """Return the path of the unit with this number."""
        return folder / f"{number:06d}.unit"

    def documents(self) -> Iterator[EncodedDocuments]:
        """Yield all documents, some at a time."""
        with self._path.open("rb") as stream:
            while stream.tell() < self._arrays_end:
                yield EncodedDocuments(*(np.load(stream, allow_pickle=False) for _ in fields(EncodedDocuments)))


def encode_unit(folder: Path, encode: UnitEncoder, numbered_unit: tuple[int, Any]) -> None:
    """Write the file of a unit, given with its number. The file appears complete or not at all."""
    number, unit = numbered_unit
    counts = ReadCounts()
    lowest_hash = 1 << 64
    highest_hash = -1
    # Another job may be writing the same unit.
    partial = folder / f".{uuid4().hex}"
    try:
        with partial.open("wb") as stream:
            for documents in encode(unit, counts):
                for array in vars(documents).values():
                    np.save(stream, array, allow_pickle=False)
                lowest_hash = min(lowest_hash, int(documents.hashes.min()))
                highest_hash = max(highest_hash, int(documents.hashes.max()))
            summary = {"counts": asdict(counts), "lowest_hash": lowest_hash, "highest_hash": highest_hash}
            content = json.dumps(summary).encode()
            stream.write(content + len(content).to_bytes(8, "little"))
        fsync_path(partial)
        partial.rename(UnitFile.path(folder, number))
    finally:
        partial.unlink(missing_ok=True)


class SplitWriter:
    """Writes one split as shards of about `shard_tokens` tokens. A document is never divided."""

    def __init__(self, folder: Path, name: SplitName, dtype: str, shard_tokens: int) -> None:
        self._folder = folder
        self._name = name
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._entry = SplitEntry()
        # Writers of the current shard and of its sidecar.
        self._writers: tuple[IndexedWriter, IndexedWriter] | None = None

    def add(self, documents: EncodedDocuments) -> None:
        """Append documents, and start a new shard whenever one is full."""
        while len(documents.lengths):
            if self._writers is None:
                self._writers = self._open_shard(documents)
            ids_writer, sidecar_writer = self._writers
            # A shard is full with the first document that reaches its size.
            ends = np.cumsum(documents.lengths)
            count = int(np.searchsorted(ends, self._shard_tokens - ids_writer.tokens)) + 1
            is_first_part = np.arange(len(ends)) < count
            part = documents.select(is_first_part)
            documents = documents.select(~is_first_part)
            ids_writer.add(part.ids, part.lengths, int(part.text_bytes.sum()))
            # Origins are stored as one sequence for all documents, weights as one sequence for each document.
            sidecar_lengths = part.lengths if part.is_supervised else np.array([part.sidecar.size])
            sidecar_writer.add(part.sidecar.ravel(), sidecar_lengths)
            if ids_writer.tokens >= self._shard_tokens:
                self.close()

    def _open_shard(self, documents: EncodedDocuments) -> tuple[IndexedWriter, IndexedWriter]:
        """Return the writers of the next shard."""
        number = f"{len(self._entry.shards):05d}"
        kind = "weights" if documents.is_supervised else "origins"
        return (
            IndexedWriter(self._folder / f"{self._name}-{number}", self._dtype),
            IndexedWriter(self._folder / f"{self._name}-{kind}-{number}", documents.sidecar.dtype.name),
        )

    def close(self) -> SplitEntry:
        """Finish the current shard, and return the entries of all shards."""
        if self._writers is not None:
            ids_writer, sidecar_writer = self._writers
            self._entry.shards.append(ids_writer.close())
            self._entry.sidecars.append(sidecar_writer.close())
            self._writers = None
        return self._entry


def write_splits(
    units: Sequence[UnitFile], folder: Path, dtype: str, data: DataSettings
) -> tuple[SplitEntry, SplitEntry, ReadCounts]:
    """Write both splits into `folder`, and return the training split, the validation split and the counts.

    The hash of a document decides its split. In a corpus so small that a split would be empty, the threshold moves just
    far enough that one document (and its copies) changes sides.
    """
    counts = ReadCounts()
    for unit in units:
        counts.add(unit.counts)
    lowest_hash = min(unit.lowest_hash for unit in units)
    highest_hash = max(unit.highest_hash for unit in units)
    _check_corpus(counts, data, has_one_document=lowest_hash == highest_hash)
    # Documents with a hash below the threshold are for validation.
    threshold = int(data.validation_fraction * 2**64)
    if data.validation_fraction:
        threshold = min(max(threshold, lowest_hash + 1), highest_hash)
    train = SplitWriter(folder, "train", dtype, data.shard_tokens)
    validation = SplitWriter(folder, "validation", dtype, data.shard_tokens)
    copy_hashes: set[int] = set()
    drops_duplicates = data.duplicates == "drop"
    for documents in (documents for unit in units for documents in unit.documents()):
        is_kept = np.ones(len(documents.hashes), dtype=np.bool_)
        if drops_duplicates or documents.is_supervised:
            is_first = is_kept.copy()
            for number, copy_hash in enumerate(documents.copy_hashes()):
                is_first[number] = copy_hash not in copy_hashes
                copy_hashes.add(copy_hash)
            counts.copies += int((~is_first).sum())
            if drops_duplicates:
                is_kept = is_first
        is_validation = documents.hashes < np.uint64(threshold)
        train.add(documents.select(is_kept & ~is_validation))
        validation.add(documents.select(is_kept & is_validation))
    return train.close(), validation.close(), counts


def _check_corpus(counts: ReadCounts, data: DataSettings, *, has_one_document: bool) -> None:
    """Raise JinguError for a corpus that is empty, or too small for a validation split."""
    if counts.documents == 0 and isinstance(data.objective, RowSettings):
        raise JinguError(
            "no row is left to train on.",
            where="data.input",
            fix=f"`jingu {data.objective.BUILD_COMMAND.split()[0]} preview` says why.",
        )
    if counts.documents == 0:
        verb = "is" if counts.empty == 1 else "are"
        what = (
            f"the corpus contains no text: {pluralize(counts.empty, 'document')} {verb} empty, "
            f"{counts.invalid:,} not UTF-8."
        )
        raise JinguError(what, where="data.input", fix="Name files that contain text.")
    if has_one_document and data.validation_fraction > 0:
        what = "one prompt" if isinstance(data.objective, PreferenceSettings) else "one document (or copies of one)"
        raise JinguError(
            f"the corpus has only {what}, which cannot be split into training and validation.",
            where="data.validation_fraction",
            fix="Split the text into several files or .jsonl lines, or set data.validation_fraction to 0 "
            "and evaluation.every to 0 to train without evaluation.",
        )
