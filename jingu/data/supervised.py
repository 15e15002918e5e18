"""Supervised data: rows of token ids with loss weights, packed into sequences or as one sequence for each row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from jingu.data.batch import IGNORE_INDEX, Batch
from jingu.data.dataset import TokenDataset
from jingu.data.permutation import Int64Array, Permutation
from jingu.data.row_sources import PackedDataset, RowArrays, pack_best_fit

# The integer that represents a weight of 1.
WEIGHT_SCALE = 100


@dataclass(frozen=True)
class SupervisedDataset(PackedDataset):
    """A data set as sequences of whole rows, in a new order each epoch."""

    # The stored weight of each id, at the offset of the id; 0 where it is not trained.
    weights: TokenDataset
    # Whether a sequence holds several rows.
    is_packed: bool = True
    # Group rows by length: this many consecutive samples have similar lengths. None: no grouping.
    group_size: int | None = None
    # The grouped order of one epoch, computed when it is first needed.
    _epoch_orders: dict[int, Int64Array] = field(default_factory=dict, init=False, repr=False, compare=False)

    def assign_rows(self, sizes: Int64Array) -> Int64Array:
        if self.is_packed:
            return pack_best_fit(sizes, self.sequence_length)
        return np.arange(len(sizes))

    def __len__(self) -> int:
        """Return the number of sequences of an epoch: only whole groups, if there is at least one."""
        rows = len(self.row_ends)
        group_size = self.group_size or 1
        return rows // group_size * group_size or rows

    def locate(self, samples: Int64Array) -> Int64Array:
        if self.group_size is None:
            return super().locate(samples)
        epochs, positions = np.divmod(samples, len(self))
        pairs = zip(epochs.tolist(), positions.tolist(), strict=True)
        return np.array([self._grouped_order(epoch)[position] for epoch, position in pairs])

    def _grouped_order(self, epoch: int) -> Int64Array:
        """Return the rows of an epoch in sample order: groups in random order, rows of similar length in each.

        The few rows that do not fill a group are left out, different ones in each epoch.
        """
        if epoch not in self._epoch_orders:
            rows = Permutation(len(self.row_ends), self.seed, epoch)(np.arange(len(self)))
            rows = rows[np.argsort(self.pieces[rows, 1], kind="stable")]
            groups = rows.reshape(-1, min(self.group_size or 1, len(self)))
            group_order = Permutation(len(groups), self.seed + 1, epoch)(np.arange(len(groups)))
            self._epoch_orders.clear()
            self._epoch_orders[epoch] = groups[group_order].reshape(-1)
        return self._epoch_orders[epoch]

    def read(self, rows: Int64Array) -> RowArrays:
        """Read rows by their numbers; labels of weight 0 are ignored."""
        arrays = super().read(rows)
        weights = np.zeros(arrays.labels.shape, np.float32)
        for row, columns, offset, _ in self.row_pieces(rows):
            # The weights belong to the labels, which begin one id after the tokens.
            stored_weight = self.weights.gather(np.array([offset + 1]), columns.stop - columns.start)[0]
            weights[row, columns] = stored_weight / np.float32(WEIGHT_SCALE)
        return replace(arrays, labels=np.where(weights > 0, arrays.labels, IGNORE_INDEX), weights=weights)

    def batch(self, first: int, count: int) -> Batch:
        """Return sequences [first, first + count) in their own order; all labels past the last are ignored."""
        rows = self.read(np.minimum(np.arange(first, first + count), len(self.row_ends) - 1))
        rows.labels[max(0, len(self.row_ends) - first) :] = IGNORE_INDEX
        return rows.to_batch()
