"""A built data set, opened for reading: its shards as one long row of ids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jingu.data.indexed import IndexedReader
from jingu.data.manifest import Manifest, SplitName, check_sizes, damaged
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenDataset:
    """One split of a data set: the ids of all its documents, each ended by `end_id`, memory-mapped."""

    path: Path
    split: SplitName
    manifest: Manifest
    shards: list[npt.NDArray[Any]]
    """[tokens of the shard] a shard."""
    starts: npt.NDArray[np.int64]
    """[shards + 1] place of each shard's first token in the whole, and the total."""

    @property
    def tokens(self) -> int:
        """Ids in the split."""
        return int(self.starts[-1])

    @property
    def end_id(self) -> int:
        """The id after every document."""
        return self.manifest.end_id

    def gather(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """[len(starts), length] ids from each start on; rows run over shards, and past the end to the beginning."""
        out = np.empty((len(starts), length), dtype=np.int64)
        firsts = np.searchsorted(self.starts, starts, side="right") - 1
        for row, start, shard in zip(out, starts.tolist(), firsts.tolist(), strict=True):
            done, place = 0, start - int(self.starts[shard])
            while done < length:
                part = self.shards[shard][place:][: length - done]
                row[done : done + len(part)] = part
                done, place = done + len(part), 0
                shard = (shard + 1) % len(self.shards)
        return out


def open_dataset(path: Path, split: SplitName) -> TokenDataset:
    """Open a split of the data set that `jingu data build` made in `path`.

    Raises JinguError where there is none, where nothing was held out, and where a file is missing or cut.
    """
    manifest = Manifest.load(path)
    if manifest is None:
        raise JinguError("there is no data set here.", where=path, fix="Run `jingu data build` first.")
    content = manifest.split(split)
    if not content.shards:
        raise JinguError(
            "the data set holds nothing out for evaluation.",
            where=path,
            fix="Build it with data.held_out above 0, or set evaluation.every to 0.",
        )
    check_sizes(path, content)
    shards = []
    for shard in content.shards:
        reader = IndexedReader(path / shard.name)
        if reader.dtype != manifest.dtype or len(reader.ids) != shard.tokens:
            raise damaged(path / f"{shard.name}.idx", "the index is of another data set than the manifest.")
        shards.append(reader.ids)
    starts = np.cumsum([0, *(len(ids) for ids in shards)], dtype=np.int64)
    return TokenDataset(path, split, manifest, shards, starts)


def joined(datasets: list[TokenDataset]) -> TokenDataset:
    """Splits of several data sets of one tokenizer, one after another."""
    shards = [ids for dataset in datasets for ids in dataset.shards]
    starts = np.cumsum([0, *(len(ids) for ids in shards)], dtype=np.int64)
    return replace(datasets[0], shards=shards, starts=starts)


def check_tokenizer(dataset: TokenDataset, tokenizer: Tokenizer) -> None:
    """JinguError where the data set was built with another tokenizer: its ids would mean other text."""
    if dataset.manifest.tokenizer != tokenizer.fingerprint():
        raise JinguError(
            f"the data set was built with another tokenizer ({dataset.manifest.tokenizer[:12]}, "
            f"{dataset.manifest.vocabulary:,} entries) than the run's ({tokenizer.fingerprint()[:12]}, "
            f"{tokenizer.vocabulary:,} entries).",
            where=dataset.path,
            fix="Set tokenizer.path to the tokenizer it was built with, or build a data set with this one.",
        )
