"""A data set cut into windows of equal length, in a new order each epoch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jingu.data.dataset import TokenDataset
from jingu.data.packing import RowArrays
from jingu.data.permutation import BlockPermutation, Int64Array, Permutation, masks_by_value, window_offset
from jingu.errors import JinguError


@dataclass(frozen=True)
class WindowDataset:
    """A data set cut into windows of `sequence_length` predictions, in a new order each epoch.

    Window w of an epoch holds the tokens [o + w·s, o + w·s + s], both ends included, where s is the sequence length
    and o the epoch's own offset below s (0 in the first epoch); past the end of the data it wraps around. So an epoch
    predicts each token once, except for less than a window's worth of them, and these differ between epochs.
    """

    dataset: TokenDataset
    sequence_length: int
    seed: int
    # Windows in a block of the order for slow storage. None: one order over all windows.
    block_windows: int | None = None
    # Blocks whose windows are mixed with each other.
    open_blocks: int = 1

    def __post_init__(self) -> None:
        if len(self) < 1:
            what = (
                f"the data set has {self.dataset.tokens:,} tokens for training, but one sequence of "
                f"{self.sequence_length:,} needs {self.sequence_length + 1:,}."
            )
            raise JinguError(what, where=self.dataset.path, fix="Add text, or set batch.sequence_length lower.")

    def __len__(self) -> int:
        """Return the number of windows of an epoch."""
        return (self.dataset.tokens - 1) // self.sequence_length

    def locate(self, samples: Int64Array) -> Int64Array:
        """Return the offset of each sample's first token; samples are numbered across epochs."""
        epochs, positions = np.divmod(samples, len(self))
        starts = np.empty_like(positions)
        for epoch, mask in masks_by_value(epochs):
            windows = self._order(epoch)(positions[mask])
            starts[mask] = windows * self.sequence_length + window_offset(self.sequence_length, self.seed, epoch)
        return starts % self.dataset.tokens

    def read(self, starts: Int64Array) -> RowArrays:
        """Read the windows that begin at these offsets."""
        # One more token than predictions: the labels are the tokens shifted by one.
        rows_BS = self.dataset.gather(starts, self.sequence_length + 1)
        return RowArrays(rows_BS[:, :-1].copy(), rows_BS[:, 1:].copy())

    def token_offsets(self, starts: Int64Array) -> Int64Array:
        """Return [rows, sequence] the offset of each token in the data set."""
        return (starts[:, None] + np.arange(self.sequence_length)) % self.dataset.tokens

    def _order(self, epoch: int) -> Permutation | BlockPermutation:
        if self.block_windows is None:
            return Permutation(len(self), self.seed, epoch)
        return BlockPermutation(len(self), self.block_windows, self.open_blocks, self.seed, epoch)
