"""The batch of step n: a pure function of the data, the seed and n."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from jingu.data.batch import Batch
from jingu.data.dataset import TokenDataset
from jingu.data.mixture import Mixture
from jingu.data.order import BlockOrder, Permutation, window_offset
from jingu.errors import JinguError

IGNORED = -100
"""Label of a place that is not trained."""

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Windows:
    """A data set cut into windows of `sequence_length` predictions, in a new order each epoch.

    Window w of an epoch holds the tokens [o + w·s, o + w·s + s], both ends in, where s is the sequence length and o
    the epoch's own offset below s (0 in the first); past the end of the data it goes on at its beginning. So an
    epoch predicts each token once, but for less than a window's worth of them, and these are others each time.
    """

    dataset: TokenDataset
    sequence_length: int
    seed: int
    block_windows: int | None = None
    """Windows of a block of the order for slow storage; None: one order over all."""
    open_blocks: int = 1
    """Blocks whose windows are mixed."""

    def __post_init__(self) -> None:
        if len(self) < 1:
            raise JinguError(
                f"the data set has {self.dataset.tokens:,} tokens for training, but one sequence of "
                f"{self.sequence_length:,} needs {self.sequence_length + 1:,}.",
                where=self.dataset.path,
                fix="Give more text, or set batch.sequence_length lower.",
            )

    def __len__(self) -> int:
        """Windows an epoch."""
        return (self.dataset.tokens - 1) // self.sequence_length

    def starts(self, samples: Numbers) -> Numbers:
        """The place of each sample's first token; samples are numbered over all epochs."""
        epochs, places = np.divmod(samples, len(self))
        starts = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            inside = epochs == epoch
            windows = self._order(epoch)(places[inside])
            starts[inside] = windows * self.sequence_length + window_offset(self.sequence_length, self.seed, epoch)
        return starts % self.dataset.tokens

    def _order(self, epoch: int) -> Permutation | BlockOrder:
        if self.block_windows is None:
            return Permutation(len(self), self.seed, epoch)
        return BlockOrder(len(self), self.block_windows, self.open_blocks, self.seed, epoch)


@dataclass(frozen=True)
class BatchSource:
    """Training batches: sample j of the run comes from the source that the mixture says, in that source's order.

    Step n takes samples [n·global_size, (n + 1)·global_size).
    """

    sources: tuple[Windows, ...]
    mixture: Mixture
    global_size: int

    def locate(self, step: int) -> tuple[Numbers, Numbers, Numbers]:
        """For each row of step `step` (0-based): its source, its number among that source's samples, and the place

        of its first token there; all [global_size].
        """
        samples = np.arange(step * self.global_size, (step + 1) * self.global_size, dtype=np.int64)
        return self._locate(samples)

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Rows [first, first + count) of the global batch of step `step` (0-based)."""
        if not 0 <= first <= first + count <= self.global_size:
            raise ValueError(f"rows {first} to {first + count} of a global batch of {self.global_size}")
        start = step * self.global_size + first
        which, _, starts = self._locate(np.arange(start, start + count, dtype=np.int64))
        rows_BS = np.empty((count, self.sources[0].sequence_length + 1), dtype=np.int64)
        for source in np.unique(which).tolist():
            inside = which == source
            rows_BS[inside] = self.sources[source].dataset.gather(starts[inside], rows_BS.shape[1])
        return _batch(rows_BS[:, :-1], rows_BS[:, 1:])

    def _locate(self, samples: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        which, numbers = self.mixture.locate(samples)
        starts = np.empty_like(numbers)
        for source in np.unique(which).tolist():
            inside = which == source
            starts[inside] = self.sources[source].starts(numbers[inside])
        return which, numbers, starts


def held_out_windows(dataset: TokenDataset, sequence_length: int) -> int:
    """Windows that cover the split."""
    return -(-dataset.tokens // sequence_length)


def held_out_batch(dataset: TokenDataset, sequence_length: int, first: int, count: int) -> Batch:
    """Windows [first, first + count) of the split in its own order, which together predict each token once.

    The first token of all is predicted from the end token. Places past the end of the split, whole windows
    too, hold the end token and the label -100.
    """
    start = first * sequence_length
    size = count * sequence_length
    there = min(max(dataset.tokens - start, 0), size)
    labels = np.full(size, IGNORED, dtype=np.int64)
    tokens = np.full(size, dataset.end_id, dtype=np.int64)
    if there:
        labels[:there] = dataset.gather(np.array([start]), there)[0]
        before = dataset.gather(np.array([start - 1]), 1)[0, 0] if start else dataset.end_id
        tokens[:there] = np.concatenate([[before], labels[: there - 1]])
    return _batch(tokens.reshape(count, sequence_length), labels.reshape(count, sequence_length))


def _batch(tokens_BT: Numbers, labels_BT: Numbers) -> Batch:
    # Copies, so that each is contiguous and the two share no memory.
    return Batch(torch.from_numpy(tokens_BT.copy()), torch.from_numpy(labels_BT.copy()))
