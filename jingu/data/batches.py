"""The batch of step n: a pure function of the data, the seed and n."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from jingu.data.batch import IGNORED, Batch
from jingu.data.dataset import TokenDataset
from jingu.data.drop import Dropped
from jingu.data.fill import FillInTheMiddle
from jingu.data.mixture import Mixture
from jingu.data.order import BlockOrder, Permutation, window_offset
from jingu.data.packing import PackedRows
from jingu.errors import JinguError

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

    def read(self, starts: Numbers) -> tuple[Numbers, Numbers, None]:
        """[rows, sequence] tokens and labels; documents are told apart by their ends."""
        rows_BS = self.dataset.gather(starts, self.sequence_length + 1)
        return rows_BS[:, :-1], rows_BS[:, 1:], None

    def places(self, starts: Numbers) -> Numbers:
        """[rows, sequence] the place of each token in the data set."""
        return (starts[:, None] + np.arange(self.sequence_length)) % self.dataset.tokens

    def _order(self, epoch: int) -> Permutation | BlockOrder:
        if self.block_windows is None:
            return Permutation(len(self), self.seed, epoch)
        return BlockOrder(len(self), self.block_windows, self.open_blocks, self.seed, epoch)


@dataclass(frozen=True)
class BatchSource:
    """Training batches: sample j of the run comes from the source that the mixture says, in that source's order.

    Step n takes samples [n·global_size, (n + 1)·global_size).
    """

    sources: tuple[Windows | PackedRows, ...]
    mixture: Mixture
    global_size: int
    apart: bool = False
    """Whether attention stays inside each document, and positions begin anew with it."""
    dropped: Dropped | None = None
    fill: FillInTheMiddle | None = None

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
        samples = np.arange(start, start + count, dtype=np.int64)
        which, _, starts = self._locate(samples)
        shape = count, self.sources[0].sequence_length
        tokens, labels, documents = (np.empty(shape, dtype=np.int64) for _ in range(3))
        for number in np.unique(which).tolist():
            source, inside = self.sources[number], which == number if len(self.sources) > 1 else slice(None)
            end_id = source.dataset.end_id
            tokens[inside], labels[inside], known = source.read(starts[inside])
            if self.dropped is not None and step in self.dropped:
                places = source.places(starts[inside])
                tokens[inside] = np.where(self.dropped.has(number, places), end_id, tokens[inside])
                following = (places + 1) % source.dataset.tokens
                labels[inside] = np.where(self.dropped.has(number, following), IGNORED, labels[inside])
            if self.fill is not None:
                tokens[inside], labels[inside] = self.fill.batch(tokens[inside], labels[inside], samples[inside])
            if self.apart:
                documents[inside] = between_ends(tokens[inside], end_id) if known is None else known
        if not self.apart:
            return Batch(torch.from_numpy(tokens), torch.from_numpy(labels))
        return Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(labels),
            torch.from_numpy(restarted(documents)),
            torch.from_numpy(documents),
        )

    def _locate(self, samples: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        which, numbers = self.mixture.locate(samples)
        starts = np.empty_like(numbers)
        for source in np.unique(which).tolist():
            inside = which == source
            starts[inside] = self.sources[source].starts(numbers[inside])
        return which, numbers, starts


def between_ends(tokens_BT: Numbers, end_id: int) -> Numbers:
    """[rows, sequence] the document of each token, counted from 0 in each row; an end belongs to what it ends."""
    ends = tokens_BT == end_id
    return np.cumsum(ends, axis=1) - ends


def restarted(documents_BT: Numbers) -> Numbers:
    """[rows, sequence] positions that begin anew with each document."""
    places = np.broadcast_to(np.arange(documents_BT.shape[1]), documents_BT.shape)
    begins = np.diff(documents_BT, axis=1, prepend=-2) != 0
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)


def held_out_windows(dataset: TokenDataset, sequence_length: int) -> int:
    """Windows that cover the split."""
    return -(-dataset.tokens // sequence_length)


def held_out_batch(
    dataset: TokenDataset, sequence_length: int, first: int, count: int, *, apart: bool = False
) -> Batch:
    """Windows [first, first + count) of the split in its own order, which together predict each token once.

    The first token of all is predicted from the end token. Places past the end of the split, whole windows
    too, hold the end token and the label -100. `apart`: attention stays inside documents.
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
    tokens_BT, labels_BT = tokens.reshape(count, sequence_length), labels.reshape(count, sequence_length)
    if not apart:
        return _batch(tokens_BT, labels_BT)
    documents_BT = between_ends(tokens_BT, dataset.end_id)
    return replace(
        _batch(tokens_BT, labels_BT),
        positions=torch.from_numpy(restarted(documents_BT)),
        documents=torch.from_numpy(documents_BT),
    )


def _batch(tokens_BT: Numbers, labels_BT: Numbers) -> Batch:
    # Copies, so that each is contiguous and the two share no memory.
    return Batch(torch.from_numpy(tokens_BT.copy()), torch.from_numpy(labels_BT.copy()))
