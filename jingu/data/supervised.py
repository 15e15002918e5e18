"""Rows of supervised data: packed like documents or one a sequence, and trained as the weights in a second file say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from jingu.config.sections.data import SupervisedSettings
from jingu.config.sections.train import BatchSettings
from jingu.data.batch import IGNORED, Batch
from jingu.data.dataset import TokenDataset, joined, open_dataset
from jingu.data.indexed import IndexedReader
from jingu.data.manifest import SplitName
from jingu.data.order import Numbers, Permutation
from jingu.data.packing import PackedRows, Rows, apart, pack
from jingu.text.record import refuse_changes

NOT_MADE = {"sequences"}
"""What of the objective does not change a data set's content."""
WHOLE = 100
"""A weight of 1, as it is stored."""


@dataclass(frozen=True)
class SupervisedRows(PackedRows):
    """A data set as sequences of whole rows, in a new order each epoch."""

    weights: TokenDataset
    """The weight of each id in hundredths, in the places of the ids; 0 where it is not trained."""
    packs: bool = True
    """Whether a sequence holds several rows."""
    together: int | None = None
    """So many samples that follow each other are rows of similar length; None: they are as it comes."""
    _orders: dict[int, Numbers] = field(default_factory=dict, init=False, repr=False, compare=False)

    def fill(self, sizes: Numbers) -> Numbers:
        return pack(sizes, self.sequence_length) if self.packs else np.arange(len(sizes))

    def __len__(self) -> int:
        """Sequences an epoch; where they go together, whole groups of them."""
        rows, size = len(self.ends), self.together or 1
        return rows // size * size or rows

    def starts(self, samples: Numbers) -> Numbers:
        if self.together is None:
            return super().starts(samples)
        epochs, places = np.divmod(samples, len(self))
        return np.array([self._by_length(epoch)[place] for epoch, place in zip(epochs.tolist(), places, strict=True)])

    def _by_length(self, epoch: int) -> Numbers:
        """The rows of an epoch in the order of their samples: groups in random order, a group's rows of similar length.

        A few rows that make no whole group are left out, others in each epoch.
        """
        if epoch not in self._orders:
            order = Permutation(len(self.ends), self.seed, epoch)(np.arange(len(self)))
            order = order[np.argsort(self.pieces[order, 1], kind="stable")]
            groups = order.reshape(-1, min(self.together or 1, len(self)))
            mixed = Permutation(len(groups), self.seed + 1, epoch)(np.arange(len(groups)))
            self._orders.clear()
            self._orders[epoch] = groups[mixed].reshape(-1)
        return self._orders[epoch]

    def read(self, rows: Numbers) -> Rows:
        """Rows by their number; what has no weight has no label."""
        found = super().read(rows)
        weights = np.zeros(found.labels.shape, np.float32)
        for there, start, _ in self.parts(rows):
            size = there[1].stop - there[1].start
            weights[there] = self.weights.gather(np.array([start + 1]), size)[0] / np.float32(WHOLE)
        return replace(found, labels=np.where(weights > 0, found.labels, IGNORED), weights=weights)

    def batch(self, first: int, count: int) -> Batch:
        """Sequences [first, first + count) in their own order; those past the last have no labels."""
        rows = self.read(np.minimum(np.arange(first, first + count), len(self.ends) - 1))
        rows.labels[max(0, len(self.ends) - first) :] = IGNORED
        return apart(rows)


def open_supervised(
    path: Path, split: SplitName, objective: SupervisedSettings, batch: BatchSettings, seed: int
) -> SupervisedRows:
    """Open what `jingu tune prepare` made in `path`. Raises JinguError where it is missing or made otherwise."""
    dataset = open_dataset(path, split, made_by="tune prepare")
    made = dataset.manifest.settings
    now = {**objective.model_dump(mode="json", exclude=NOT_MADE), "sequence_length": batch.sequence_length}
    then = {**made.get("objective", {"type": "causal"}), "sequence_length": made.get("sequence_length")}
    fix = "Delete the folder and run `jingu tune prepare`, or set data.path to another folder."
    refuse_changes(then, now, "the data set here was made", path, fix)
    beside = [IndexedReader(path / shard.name).storage for shard in dataset.manifest.split(split).beside]
    packs = objective.sequences == "packed" or split == "held_out"
    together = batch.global_size if objective.sequences == "by_length" and not packs else None
    return SupervisedRows(dataset, batch.sequence_length, seed, replace(dataset, shards=beside), packs, together)


def join_rows(rows: Sequence[SupervisedRows]) -> SupervisedRows:
    """Rows of several data sets, packed together."""
    datasets, weights = (joined([getattr(each, name) for each in rows]) for name in ("dataset", "weights"))
    return replace(rows[0], dataset=datasets, weights=weights)
