"""Rows of supervised data: packed like documents, and trained only where a second file says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from jingu.config.schema import SupervisedSettings
from jingu.data.batch import IGNORED, Batch
from jingu.data.batches import restarted
from jingu.data.dataset import TokenDataset, open_dataset
from jingu.data.indexed import IndexedReader, IndexedWriter
from jingu.data.manifest import Shard, SplitName
from jingu.data.packing import Numbers, PackedRows
from jingu.data.reading import Ids
from jingu.errors import JinguError
from jingu.text.record import differences


@dataclass(frozen=True)
class SupervisedRows(PackedRows):
    """A data set as sequences of whole rows, in a new order each epoch."""

    trained: TokenDataset
    """1 for each id that is trained, in the places of the ids."""

    def read(self, rows: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """[rows, sequence] tokens, labels, and documents counted from 0; -1 where a row is empty."""
        tokens, labels, documents = super().read(rows)
        for row, pieces in enumerate(map(self._pieces, rows.tolist())):
            masks = [self.trained.gather(np.array([start + 1]), size)[0] for start, size in pieces.tolist()]
            mask = np.concatenate(masks)
            labels[row, : len(mask)][mask == 0] = IGNORED
        return tokens, labels, documents

    def batch(self, first: int, count: int) -> Batch:
        """Sequences [first, first + count) in their own order; those past the last have no labels."""
        tokens, labels, documents = self.read(np.minimum(np.arange(first, first + count), len(self) - 1))
        labels[max(0, len(self) - first) :] = IGNORED
        tokens_BT, labels_BT, documents_BT = map(torch.from_numpy, (tokens, labels, documents))
        return Batch(tokens_BT, labels_BT, torch.from_numpy(restarted(documents)), documents_BT)


def open_supervised(
    path: Path, split: SplitName, objective: SupervisedSettings, sequence_length: int, seed: int
) -> SupervisedRows:
    """Open what `jingu tune prepare` made in `path`. Raises JinguError where it is missing or made otherwise."""
    dataset = open_dataset(path, split)
    made = dataset.manifest.settings
    now = {**objective.model_dump(mode="json"), "sequence_length": sequence_length}
    then = {**made.get("objective", {"type": "causal"}), "sequence_length": made.get("sequence_length")}
    if changes := differences(then, now):
        raise JinguError(
            f"the data set here was made otherwise: {'; '.join(changes)}.",
            where=path,
            fix="Delete the folder and run `jingu tune prepare`, or set data.path to another folder.",
        )
    masks = [IndexedReader(path / shard.name).storage for shard in dataset.manifest.split(split).beside]
    return SupervisedRows(dataset, sequence_length, seed, replace(dataset, shards=masks))


def write_supervised(
    place: Path, split: SplitName, dtype: str, rows: Sequence[Ids], trained: Sequence[Ids]
) -> tuple[Shard, Shard]:
    """Write the rows of a split, and which of their ids are trained."""
    lengths = np.array([len(ids) for ids in rows])
    shards = []
    for name, kind, held in ((split, dtype, rows), (f"{split}-trained", "uint8", trained)):
        writer = IndexedWriter(place / f"{name}-00000", kind)
        writer.add(np.concatenate(held), lengths)
        shards.append(writer.close())
    return shards[0], shards[1]
