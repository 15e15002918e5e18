"""The batch of step n: a pure function of the data, the seed and n."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from jingu.data.batch import IGNORED, Batch, changed
from jingu.data.dataset import TokenDataset
from jingu.data.drop import Dropped
from jingu.data.fill import FillInTheMiddle
from jingu.data.mixture import Mixture
from jingu.data.order import BlockOrder, Numbers, Permutation, groups, window_offset
from jingu.data.packing import PackedRows, Rows, apart
from jingu.errors import JinguError


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
        for epoch, inside in groups(epochs):
            windows = self._order(epoch)(places[inside])
            starts[inside] = windows * self.sequence_length + window_offset(self.sequence_length, self.seed, epoch)
        return starts % self.dataset.tokens

    def read(self, starts: Numbers) -> Rows:
        """Documents are told apart by their ends."""
        rows_BS = self.dataset.gather(starts, self.sequence_length + 1)
        return Rows(rows_BS[:, :-1], rows_BS[:, 1:])

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
    short: bool = False
    """Whether a batch is only as long as its longest row, in eighths of a sequence."""

    def locate(self, step: int) -> tuple[Numbers, Numbers, Numbers]:
        """For each row of step `step` (0-based): its source, its number among that source's samples, and the place

        of its first token there; all [global_size].
        """
        return self.locate_samples(np.arange(step * self.global_size, (step + 1) * self.global_size, dtype=np.int64))

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Rows [first, first + count) of the global batch of step `step` (0-based)."""
        if not 0 <= first <= first + count <= self.global_size:
            raise ValueError(f"rows {first} to {first + count} of a global batch of {self.global_size}")
        start = step * self.global_size + first
        samples = np.arange(start, start + count, dtype=np.int64)
        which, _, starts = self.locate_samples(samples)
        shape = count, self.sources[0].sequence_length
        tokens, labels, documents = (np.empty(shape, dtype=np.int64) for _ in range(3))
        weights = None
        for number, there in groups(which):
            source, inside = self.sources[number], there if len(self.sources) > 1 else slice(None)
            end_id = source.dataset.end_id
            rows = source.read(starts[inside])
            tokens[inside], labels[inside] = rows.tokens, rows.labels
            if self.dropped is not None and step in self.dropped:
                places = source.places(starts[inside])
                tokens[inside] = np.where(self.dropped.has(number, places), end_id, tokens[inside])
                following = (places + 1) % source.dataset.tokens
                labels[inside] = np.where(self.dropped.has(number, following), IGNORED, labels[inside])
            if self.fill is not None:
                tokens[inside], labels[inside] = self.fill.batch(tokens[inside], labels[inside], samples[inside])
            if self.apart:
                known = rows.documents
                documents[inside] = between_ends(tokens[inside], end_id) if known is None else known
            if rows.weights is not None:
                weights = np.empty(shape, dtype=np.float32) if weights is None else weights
                weights[inside] = rows.weights
        if not self.apart:
            return Batch(torch.from_numpy(tokens), torch.from_numpy(labels))
        batch = apart(Rows(tokens, labels, documents, weights))
        if not self.short:
            return batch
        eighth = -(-shape[1] // 8)
        used = -(-int((documents >= 0).sum(1).max(initial=1)) // eighth) * eighth
        return changed(batch, lambda each: each[:, :used].contiguous())

    def locate_samples(self, samples: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """`locate` for any samples of the run."""
        which, numbers = self.mixture.locate(samples)
        starts = np.empty_like(numbers)
        for source, inside in groups(which):
            starts[inside] = self.sources[source].starts(numbers[inside])
        return which, numbers, starts


def between_ends(tokens_BT: Numbers, end_id: int) -> Numbers:
    """[rows, sequence] the document of each token, counted from 0 in each row; an end belongs to what it ends."""
    ends = tokens_BT == end_id
    return np.cumsum(ends, axis=1) - ends


def held_out_windows(dataset: TokenDataset, sequence_length: int) -> int:
    """Windows that cover the split."""
    return -(-dataset.tokens // sequence_length)


def held_out_batch(
    dataset: TokenDataset, sequence_length: int, first: int, count: int, *, inside: bool = False
) -> Batch:
    """Windows [first, first + count) of the split in its own order, which together predict each token once.

    The first token of all is predicted from the end token. Places past the end of the split, whole windows
    too, hold the end token and the label -100. `inside`: attention stays inside documents.
    """
    start = first * sequence_length
    # Before the first token is the last one, an end.
    ids = dataset.gather(np.array([(start - 1) % dataset.tokens]), count * sequence_length + 1)[0]
    past = np.arange(start, start + count * sequence_length) >= dataset.tokens
    tokens_BT = np.where(past, dataset.end_id, ids[:-1]).reshape(count, sequence_length)
    labels_BT = np.where(past, IGNORED, ids[1:]).reshape(count, sequence_length)
    if not inside:
        return Batch(torch.from_numpy(tokens_BT), torch.from_numpy(labels_BT))
    return apart(Rows(tokens_BT, labels_BT, between_ends(tokens_BT, dataset.end_id)))
