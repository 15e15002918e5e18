"""A built data set, opened for reading: the concatenated ids of its shards."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from jingu.data.array_reader import ArrayReader, ReaderType
from jingu.data.dataset_manifest import (
    CORPUS_FILES_NAME,
    DatasetManifest,
    ShardEntry,
    SplitEntry,
    SplitName,
    check_files,
    damaged_dataset_error,
)
from jingu.data.indexed_dataset import IndexedReader
from jingu.data.permutation import Int64Array
from jingu.errors import JinguError
from jingu.text.document_reader import format_location
from jingu.text.tokenizer import Tokenizer

# Documents whose entries in an index are read together.
_DOCUMENTS_AT_ONCE = 64
# Stands for the tokenizer's fingerprint in data sets that other tools wrote.
UNKNOWN_TOKENIZER = "unknown"


@dataclass(frozen=True)
class TokenDataset:
    """One split of a data set: the concatenated ids of all documents, with an EOS token after each.

    An offset is the index of a token in the split. A document is identified by a shard and its index in the shard.
    """

    path: Path
    split: SplitName
    manifest: DatasetManifest
    # The ids of each shard.
    shards: list[ArrayReader]
    # [shards + 1] offset of each shard's first token, and the total.
    shard_starts: Int64Array
    # The index of each shard.
    readers: list[IndexedReader]
    # Ids are below this. 0: the numbers are not ids, or the vocabulary is unknown.
    vocab_size: int = 0

    @property
    def tokens(self) -> int:
        """Number of ids in the split."""
        return int(self.shard_starts[-1])

    @property
    def eos_token_id(self) -> int:
        """The id after every document."""
        return self.manifest.eos_token_id

    def document_lengths(self) -> Int64Array:
        """Return [documents] the tokens of each document, EOS included. Reads the whole index."""
        return np.concatenate([reader.document_lengths for reader in self.readers])

    def document_range(self, shard: int, number: int) -> tuple[int, int]:
        """Return the offset and the length of a document."""
        start, end = self.readers[shard].document_starts(number, number + 2).tolist()
        return int(self.shard_starts[shard]) + start, end - start

    def find_document(self, offset: int) -> tuple[int, int]:
        """Return the document that contains an offset. Reads only a few entries of the index."""
        shard = int(np.searchsorted(self.shard_starts, offset, side="right")) - 1
        later_documents = range(1, self.readers[shard].num_documents)
        return shard, bisect_right(later_documents, offset, key=lambda number: self.document_range(shard, number)[0])

    def document_ids(self, starts: Int64Array, length: int) -> Int64Array:
        """Return [len(starts), length] the document of each token from each offset on, counted from 0 in each row.

        Rows continue as those of `gather`.
        """
        rows = np.empty((len(starts), length), dtype=np.int64)
        for row, offset in zip(rows, starts.tolist(), strict=True):
            first = True
            number = num_ids = 0
            shard, document = self.find_document(offset)
            position = offset - int(self.shard_starts[shard])
            while num_ids < length:
                reader = self.readers[shard]
                stop = min(document + _DOCUMENTS_AT_ONCE, reader.num_documents)
                ends = reader.document_starts(document, stop + 1)[1:]
                for end in ends.tolist():
                    count = min(end - position, length - num_ids)
                    if count > 0:
                        number += not first
                        first = False
                        row[num_ids : num_ids + count] = number
                        num_ids += count
                        position = end
                document = stop
                if document == reader.num_documents:
                    shard = (shard + 1) % len(self.readers)
                    document = position = 0
        return rows

    def document_name(self, shard: int, number: int) -> str:
        """Return the name of a document for users: SOURCE/SHARD:NUMBER."""
        return f"{self.path.name}/{self.manifest.split(self.split).shards[shard].name}:{number}"

    def document_origin(self, shard: int, number: int) -> str:
        """Return the corpus file of a document and the position in it; empty if they are unknown."""
        sidecars = self.manifest.split(self.split).sidecars
        names = self.path / CORPUS_FILES_NAME
        if not sidecars or not names.is_file():
            return ""
        # The sidecar has two numbers for each document.
        origins = IndexedReader(self.path / sidecars[shard].name).storage
        file_number, position = origins.read(2 * number, 2 * number + 2).tolist()
        return format_location(_read_file_names(names)[file_number], position)

    def gather(self, starts: Int64Array, length: int) -> Int64Array:
        """Return [len(starts), length] the ids from each offset on.

        Rows continue in the next shard, and after the last shard at the beginning of the data.
        """
        rows = np.empty((len(starts), length), dtype=np.int64)
        first_shards = np.searchsorted(self.shard_starts, starts, side="right") - 1
        for row, start, shard in zip(rows, starts.tolist(), first_shards.tolist(), strict=True):
            offset = start - int(self.shard_starts[shard])
            num_ids = 0
            while num_ids < length:
                # A reader returns fewer ids at the end of its shard.
                ids = self.shards[shard].read(offset, offset + length - num_ids)
                row[num_ids : num_ids + len(ids)] = ids
                num_ids += len(ids)
                offset = 0
                shard = (shard + 1) % len(self.shards)
        if self.vocab_size and rows.size and not 0 <= rows.min() <= rows.max() < self.vocab_size:
            raise self._invalid_id_error(rows, starts)
        return rows

    def _invalid_id_error(self, rows: Int64Array, starts: Int64Array) -> JinguError:
        """Return the error for the first id outside of the vocabulary."""
        row, column = np.argwhere((rows < 0) | (rows >= self.vocab_size))[0].tolist()
        offset = (int(starts[row]) + column) % self.tokens
        shard, number = self.find_document(offset)
        what = (
            f"document {number:,} has the id {rows[row, column]:,}, but the vocabulary has {self.vocab_size:,} entries."
        )
        return damaged_dataset_error(self.readers[shard].path.with_suffix(".bin"), what)


@lru_cache(maxsize=4)
def _read_file_names(path: Path) -> list[str]:
    names: list[str] = json.loads(path.read_text(encoding="utf-8"))
    return names


def open_dataset(
    path: Path,
    split: SplitName,
    reader_type: ReaderType = "mmap",
    eos_token_id: int = 0,
    build_command: str = "data build",
) -> TokenDataset:
    """Open a split of a data set.

    Args:
        path: the folder that `jingu data build` or `tune prepare` made, or the prefix of files in Megatron's format.
        eos_token_id: the id after each document of files in Megatron's format, which do not store it.
        build_command: the command that builds such data sets, for error messages.

    Raises:
        JinguError: there is no data set, it has no validation split, or a file is missing or damaged.
    """
    # A path such as "." has no name.
    is_prefix = bool(path.name) and path.with_name(f"{path.name}.idx").is_file()
    if is_prefix:
        folder = path.parent
        manifest: DatasetManifest | None = _describe_prefix(path, eos_token_id)
    else:
        folder = path
        manifest = DatasetManifest.load(path)
    if manifest is None:
        raise JinguError("there is no data set here.", where=path, fix=f"Run `jingu {build_command}` first.")
    entry = manifest.split(split)
    if not entry.shards:
        fix = "Build it with data.validation_fraction above 0, or set evaluation.every to 0."
        raise JinguError("the data set has no validation split.", where=path, fix=fix)
    check_files(folder, entry)
    readers = []
    for shard in entry.shards:
        reader = IndexedReader(folder / shard.name, reader_type)
        if reader.dtype != manifest.dtype or reader.tokens != shard.tokens:
            raise damaged_dataset_error(reader.path, "the index is of another data set than the manifest.")
        readers.append(reader)
    starts = np.cumsum([0, *(reader.tokens for reader in readers)], dtype=np.int64)
    return TokenDataset(
        path, split, manifest, [reader.storage for reader in readers], starts, readers, manifest.vocab_size
    )


def _describe_prefix(prefix: Path, eos_token_id: int) -> DatasetManifest:
    """Return a manifest for files of Megatron's format, PREFIX.bin and PREFIX.idx; all documents are for training."""
    reader = IndexedReader(prefix, "lazy")
    shard = ShardEntry(
        name=prefix.name,
        documents=reader.num_documents,
        tokens=reader.tokens,
        text_bytes=0,
        bin_bytes=prefix.with_name(f"{prefix.name}.bin").stat().st_size,
        idx_bytes=reader.path.stat().st_size,
        # No checksum is known. A run compares this to notice that its data changed.
        bin_xxh3=f"{reader.tokens * np.dtype(reader.dtype).itemsize} bytes of {reader.dtype}",
        idx_xxh3="",
    )
    return DatasetManifest(
        tokenizer=UNKNOWN_TOKENIZER,
        vocab_size=0,
        eos_token_id=eos_token_id,
        dtype=reader.dtype,
        settings={},
        train=SplitEntry(shards=[shard]),
        validation=SplitEntry(),
    )


def check_tokenizer(dataset: TokenDataset, tokenizer: Tokenizer) -> None:
    """Raise JinguError if the data set was built with another tokenizer, in which its ids stand for other text."""
    manifest = dataset.manifest
    if manifest.tokenizer == UNKNOWN_TOKENIZER:
        _check_ids(dataset, tokenizer.vocab_size)
    elif manifest.tokenizer != tokenizer.fingerprint():
        raise JinguError(
            f"the data set was built with another tokenizer ({manifest.tokenizer[:12]}, {manifest.vocab_size:,} "
            f"entries) than the run's ({tokenizer.fingerprint()[:12]}, {tokenizer.vocab_size:,} entries).",
            where=dataset.path,
            fix="Set tokenizer.path to the tokenizer it was built with, or build a data set with this one.",
        )


def _check_ids(dataset: TokenDataset, vocab_size: int) -> None:
    """Raise JinguError if the first ids of a data set that another tool wrote are outside the vocabulary."""
    ids = dataset.shards[0].read(0, 1 << 20)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        what = (
            f"the data set has ids from {int(ids.min())} to {int(ids.max()):,}, but the tokenizer has only "
            f"{vocab_size:,} entries."
        )
        raise JinguError(what, where=dataset.path, fix="Set tokenizer.path to the tokenizer it was built with.")
