"""A built data set, opened for reading: its shards as one long row of ids."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from jingu.data.indexed import IndexedReader
from jingu.data.manifest import FILES, Manifest, Shard, Split, SplitName, check_sizes, damaged
from jingu.data.order import Numbers
from jingu.data.reading import Reading, Stored
from jingu.errors import JinguError
from jingu.text.readers import place_in_words
from jingu.text.tokenizer import Tokenizer

UNKNOWN = "unknown"
"""In place of a tokenizer's fingerprint, for data sets that others wrote."""


@dataclass(frozen=True)
class TokenDataset:
    """One split of a data set: the ids of all its documents, each ended by `end_id`."""

    path: Path
    split: SplitName
    manifest: Manifest
    shards: list[Stored]
    """The ids of each shard."""
    starts: Numbers
    """[shards + 1] place of each shard's first token in the whole, and the total."""
    readers: list[IndexedReader]
    """The index of each shard."""

    @property
    def tokens(self) -> int:
        """Ids in the split."""
        return int(self.starts[-1])

    def document_lengths(self) -> Numbers:
        """[documents] tokens of each, its end included. Reads the whole index."""
        return np.concatenate([reader.lengths.astype(np.int64) for reader in self.readers])

    def document(self, shard: int, number: int) -> tuple[int, int]:
        """Place of the first token, and tokens, of a document of a shard."""
        start, length = self.readers[shard].place(number)
        return int(self.starts[shard]) + start, length

    def find(self, place: int) -> tuple[int, int]:
        """The shard, and the number in it, of the document that a place is in; reads a few entries of the index."""
        shard = int(np.searchsorted(self.starts, place, side="right")) - 1
        numbers = range(1, len(self.readers[shard]))
        return shard, bisect_right(numbers, place, key=lambda number: self.document(shard, number)[0])

    def name(self, shard: int, number: int) -> str:
        """A document as people name it: SOURCE/SHARD:NUMBER."""
        return f"{self.path.name}/{self.manifest.split(self.split).shards[shard].name}:{number}"

    def origin(self, shard: int, number: int) -> str:
        """The file of the corpus that a document comes from, and its place there; empty where that is not known."""
        beside = self.manifest.split(self.split).beside
        if not beside or not (self.path / FILES).is_file():
            return ""
        numbers = IndexedReader(self.path / beside[shard].name).storage.read(2 * number, 2 * number + 2)
        file, place = numbers.tolist()
        return place_in_words(_names(self.path / FILES)[file], place)

    @property
    def end_id(self) -> int:
        """The id after every document."""
        return self.manifest.end_id

    def gather(self, starts: Numbers, length: int) -> Numbers:
        """[len(starts), length] ids from each start on; rows run over shards, and past the end to the beginning."""
        out = np.empty((len(starts), length), dtype=np.int64)
        firsts = np.searchsorted(self.starts, starts, side="right") - 1
        for row, start, shard in zip(out, starts.tolist(), firsts.tolist(), strict=True):
            done, place = 0, start - int(self.starts[shard])
            while done < length:
                part = self.shards[shard].read(place, place + length - done)
                row[done : done + len(part)] = part
                done, place = done + len(part), 0
                shard = (shard + 1) % len(self.shards)
        return out


@lru_cache(maxsize=4)
def _names(path: Path) -> list[str]:
    """The names of a corpus' files."""
    found: list[str] = json.loads(path.read_text(encoding="utf-8"))
    return found


def open_dataset(
    path: Path, split: SplitName, reading: Reading = "mmap", end_id: int = 0, made_by: str = "data build"
) -> TokenDataset:
    """Open a split of the data set that a verb made in `path`, or files of Megatron's format (a prefix),
    which do not say that `end_id` ends their documents.

    Raises JinguError where there is none, where nothing was held out, and where a file is missing or cut.
    """
    foreign = path.with_name(f"{path.name}.idx").is_file()
    manifest = _manifest_of(path, end_id) if foreign else Manifest.load(path)
    if manifest is None:
        raise JinguError("there is no data set here.", where=path, fix=f"Run `jingu {made_by}` first.")
    content, folder = manifest.split(split), path.parent if foreign else path
    if not content.shards:
        raise JinguError(
            "the data set holds nothing out for evaluation.",
            where=path,
            fix="Build it with data.held_out above 0, or set evaluation.every to 0.",
        )
    check_sizes(folder, content)
    readers = []
    for shard in content.shards:
        reader = IndexedReader(folder / shard.name, reading)
        if reader.dtype != manifest.dtype or reader.tokens != shard.tokens:
            raise damaged(reader.path, "the index is of another data set than the manifest.")
        readers.append(reader)
    starts = np.cumsum([0, *(reader.tokens for reader in readers)], dtype=np.int64)
    return TokenDataset(path, split, manifest, [reader.storage for reader in readers], starts, readers)


def _manifest_of(prefix: Path, end_id: int) -> Manifest:
    """What is known of files of Megatron's format that others wrote, PREFIX.bin and PREFIX.idx; all is for training."""
    reader = IndexedReader(prefix, "lazy")
    shard = Shard(
        name=prefix.name,
        documents=len(reader),
        tokens=reader.tokens,
        text_bytes=0,
        bin_bytes=prefix.with_name(f"{prefix.name}.bin").stat().st_size,
        idx_bytes=reader.path.stat().st_size,
        bin_xxh3=f"{reader.tokens * np.dtype(reader.dtype).itemsize} bytes of {reader.dtype}",
        idx_xxh3="",
    )
    return Manifest(
        tokenizer=UNKNOWN,
        vocabulary=0,
        end_id=end_id,
        dtype=reader.dtype,
        settings={},
        train=Split(shards=[shard]),
        held_out=Split(),
    )


def joined(datasets: list[TokenDataset]) -> TokenDataset:
    """Splits of several data sets of one tokenizer, one after another."""
    shards = [ids for dataset in datasets for ids in dataset.shards]
    starts = np.cumsum([0, *(len(ids) for ids in shards)], dtype=np.int64)
    readers = [reader for dataset in datasets for reader in dataset.readers]
    return replace(datasets[0], shards=shards, starts=starts, readers=readers)


def check_tokenizer(dataset: TokenDataset, tokenizer: Tokenizer) -> None:
    """JinguError where the data set was built with another tokenizer: its ids would mean other text."""
    if dataset.manifest.tokenizer == UNKNOWN:
        _check_ids(dataset, tokenizer.vocabulary)
    elif dataset.manifest.tokenizer != tokenizer.fingerprint():
        raise JinguError(
            f"the data set was built with another tokenizer ({dataset.manifest.tokenizer[:12]}, "
            f"{dataset.manifest.vocabulary:,} entries) than the run's ({tokenizer.fingerprint()[:12]}, "
            f"{tokenizer.vocabulary:,} entries).",
            where=dataset.path,
            fix="Set tokenizer.path to the tokenizer it was built with, or build a data set with this one.",
        )


def _check_ids(dataset: TokenDataset, vocabulary: int) -> None:
    """JinguError where the first ids of a data set that others wrote are not the tokenizer's."""
    first = dataset.shards[0].read(0, 1 << 20)
    if len(first) and not 0 <= int(first.min()) <= int(first.max()) < vocabulary:
        raise JinguError(
            f"the data set has ids from {int(first.min())} to {int(first.max()):,}, but the tokenizer has only "
            f"{vocabulary:,} entries.",
            where=dataset.path,
            fix="Set tokenizer.path to the tokenizer it was built with.",
        )
