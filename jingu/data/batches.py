"""The batch of step n: a pure function of the data, the seed and n."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from jingu.data.batch import Batch
from jingu.data.dataset import TokenDataset
from jingu.data.order import Permutation
from jingu.errors import JinguError

IGNORED = -100
"""Label of a place that is not trained."""


@dataclass(frozen=True)
class BatchSource:
    """Training batches from a data set cut into windows of `sequence_length` predictions.

    Window w holds the tokens [w·s, w·s + s], both ends in, so that each token but the first is predicted once
    an epoch. Samples are numbered over the whole run: sample j is in epoch j // windows, and the epoch's own
    permutation says which window it is. Step n takes samples [n·global_size, (n + 1)·global_size).
    """

    dataset: TokenDataset
    sequence_length: int
    global_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.windows < 1:
            raise JinguError(
                f"the data set has {self.dataset.tokens:,} tokens for training, but one sequence of "
                f"{self.sequence_length:,} needs {self.sequence_length + 1:,}.",
                where=self.dataset.path,
                fix="Give more text, or set batch.sequence_length lower.",
            )

    @property
    def windows(self) -> int:
        """Windows an epoch."""
        return (self.dataset.tokens - 1) // self.sequence_length

    def sample_ids(self, step: int) -> npt.NDArray[np.int64]:
        """[global_size] numbers, over the whole run, of the samples of step `step` (0-based)."""
        return np.arange(step * self.global_size, (step + 1) * self.global_size, dtype=np.int64)

    def window_ids(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The window that each sample is."""
        epochs, places = np.divmod(samples, self.windows)
        windows = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            of_epoch = epochs == epoch
            windows[of_epoch] = Permutation(self.windows, self.seed, epoch)(places[of_epoch])
        return windows

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Rows [first, first + count) of the global batch of step `step` (0-based)."""
        if not 0 <= first <= first + count <= self.global_size:
            raise ValueError(f"rows {first} to {first + count} of a global batch of {self.global_size}")
        windows = self.window_ids(self.sample_ids(step)[first : first + count])
        rows_BS = self.dataset.gather(windows * self.sequence_length, self.sequence_length + 1)
        return _batch(rows_BS[:, :-1], rows_BS[:, 1:])


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


def _batch(tokens_BT: npt.NDArray[np.int64], labels_BT: npt.NDArray[np.int64]) -> Batch:
    # Copies, so that each is contiguous and the two share no memory.
    return Batch(torch.from_numpy(tokens_BT.copy()), torch.from_numpy(labels_BT.copy()))
