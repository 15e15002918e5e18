"""A data set as rows of equal length: windows of the text, or packed documents.

Packing fills each row with the whole documents that fit it best (best-fit decreasing, as in Ding et al., "Fewer
Truncations Improve Language Modeling", 2024), so that little padding remains. Only a document longer than a row is cut.
The table of the packing, two numbers a piece, is computed from the document lengths when the data set is opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from jingu.data.batch import IGNORE_INDEX, Batch
from jingu.data.dataset import TokenDataset
from jingu.data.permutation import BlockPermutation, Int64Array, Permutation, masks_by_value, window_offset
from jingu.errors import JinguError


@dataclass(frozen=True)
class RowArrays:
    """Rows of a batch as NumPy arrays, all [rows, sequence]."""

    tokens: Int64Array
    labels: Int64Array
    # Document ids, counted from 0 in each row; -1: padding. None: attention crosses documents.
    documents: Int64Array | None = None
    # Loss weights of the labels. None: 1.
    weights: npt.NDArray[np.float32] | None = None

    def to_batch(self) -> Batch:
        """Return the rows as a batch; with document ids, positions restart at each document."""
        tokens = torch.from_numpy(self.tokens)
        labels = torch.from_numpy(self.labels)
        if self.documents is None:
            return Batch(tokens, labels)
        return Batch(
            tokens,
            labels,
            positions=torch.from_numpy(document_positions(self.documents)),
            documents=torch.from_numpy(self.documents),
            weights=None if self.weights is None else torch.from_numpy(self.weights),
        )


def document_positions(documents_BT: Int64Array) -> Int64Array:
    """Return [B, T] positions that restart at 0 with each document."""
    columns = np.broadcast_to(np.arange(documents_BT.shape[1]), documents_BT.shape)
    is_first = np.diff(documents_BT, axis=1, prepend=-2) != 0
    return columns - np.maximum.accumulate(np.where(is_first, columns, 0), axis=1)


@dataclass(frozen=True)
class PackedDataset:
    """A data set as packed sequences, in a new order each epoch."""

    dataset: TokenDataset
    sequence_length: int
    seed: int
    # [pieces, 2] offset of each piece's first token in the data set, and its number of predictions; row by row.
    pieces: Int64Array = field(init=False, repr=False)
    # [rows] the number of pieces up to and including each row.
    row_ends: Int64Array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        pieces = split_long_documents(self.dataset.document_lengths(), self.sequence_length)
        if not len(pieces):
            raise JinguError("the data set has no document of at least two tokens.", where=self.dataset.path)
        rows = self.assign_rows(pieces[:, 1])
        # The dataclass is frozen, so that a data set never changes after it is opened.
        object.__setattr__(self, "pieces", pieces[np.argsort(rows, kind="stable")])
        object.__setattr__(self, "row_ends", np.cumsum(np.bincount(rows)))

    def assign_rows(self, sizes: Int64Array) -> Int64Array:
        """Return the row of each piece."""
        return pack_best_fit(sizes, self.sequence_length)

    def __len__(self) -> int:
        """Return the number of sequences of an epoch."""
        return len(self.row_ends)

    def locate(self, samples: Int64Array) -> Int64Array:
        """Return the row number of each sample; samples are numbered across epochs."""
        epochs, positions = np.divmod(samples, len(self))
        rows = np.empty_like(positions)
        for epoch, mask in masks_by_value(epochs):
            rows[mask] = Permutation(len(self), self.seed, epoch)(positions[mask])
        return rows

    def read(self, rows: Int64Array) -> RowArrays:
        """Read rows by their numbers."""
        shape = len(rows), self.sequence_length
        tokens = np.full(shape, self.dataset.eos_token_id)
        labels = np.full(shape, IGNORE_INDEX)
        documents = np.full(shape, -1)
        for row, columns, offset, number in self.row_pieces(rows):
            size = columns.stop - columns.start
            # One more token than predictions: the last token is only a label.
            ids = self.dataset.gather(np.array([offset]), size + 1)[0]
            tokens[row, columns] = ids[:-1]
            labels[row, columns] = ids[1:]
            documents[row, columns] = number
        return RowArrays(tokens, labels, documents)

    def token_offsets(self, rows: Int64Array) -> Int64Array:
        """Return [rows, sequence] the offset of each token in the data set; -2 for padding."""
        offsets = np.full((len(rows), self.sequence_length), -2)
        for row, columns, offset, _ in self.row_pieces(rows):
            offsets[row, columns] = np.arange(offset, offset + columns.stop - columns.start)
        return offsets

    def row_pieces(self, rows: Int64Array) -> Iterator[tuple[int, slice, int, int]]:
        """Yield for each piece of these rows: index into `rows`, columns, offset in the data set, number in its row."""
        for index, row in enumerate(rows.tolist()):
            first_piece = self.row_ends[row - 1] if row else 0
            column = 0
            for number, (offset, size) in enumerate(self.pieces[first_piece : self.row_ends[row]].tolist()):
                yield index, slice(column, column + size), offset, number
                column += size


def split_long_documents(lengths: Int64Array, sequence_length: int) -> Int64Array:
    """Return [pieces, 2] the offset and the number of predictions of each document, or of its parts if it is too long.

    A document of n tokens has n - 1 predictions. Parts share a token, so that each prediction is in exactly one.
    """
    starts = np.cumsum(lengths) - lengths
    predictions = np.maximum(lengths - 1, 0)
    num_parts = -(-predictions // sequence_length)
    # Within each document, count its parts from 0 and skip the predictions of the earlier ones.
    first_parts = np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    skipped_tokens = (np.arange(len(first_parts)) - first_parts) * sequence_length
    sizes = np.minimum(np.repeat(predictions, num_parts) - skipped_tokens, sequence_length)
    return np.stack([np.repeat(starts, num_parts) + skipped_tokens, sizes], axis=1).astype(np.int64)


def pack_best_fit(sizes: Int64Array, capacity: int) -> Int64Array:
    """Return the row of each piece by best-fit decreasing.

    The largest piece comes first; each goes into the row with the least room that fits it, or else into a new row.
    """
    rows = np.empty(len(sizes), dtype=np.int64)
    rows_by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit r is set where some row has exactly r places left: the lowest bit of enough room is found at once.
    room_bits = 0
    num_rows = 0
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        fitting_bits = room_bits >> size
        if fitting_bits:
            room = size + (fitting_bits & -fitting_bits).bit_length() - 1
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                room_bits ^= 1 << room
        else:
            room = capacity
            row = num_rows
            num_rows += 1
        rows[piece] = row
        remaining = room - size
        if remaining:
            rows_by_room[remaining].append(row)
            room_bits |= 1 << remaining
    return rows


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


def count_validation_windows(dataset: TokenDataset, sequence_length: int) -> int:
    """Return the number of windows that cover the split."""
    return -(-dataset.tokens // sequence_length)


def validation_batch(
    dataset: TokenDataset, sequence_length: int, first: int, count: int, *, document_mask: bool = False
) -> Batch:
    """Return windows [first, first + count) of the split in its own order.

    Together all windows predict each token once; the very first token is predicted from the EOS token. Positions past
    the end of the split, whole windows too, hold the EOS token and IGNORE_INDEX as label. With `document_mask`,
    attention stays inside documents.
    """
    start = first * sequence_length
    # The token before the first one is the last of the split, an EOS token.
    ids = dataset.gather(np.array([(start - 1) % dataset.tokens]), count * sequence_length + 1)[0]
    is_past_end = np.arange(start, start + count * sequence_length) >= dataset.tokens
    tokens_BT = np.where(is_past_end, dataset.eos_token_id, ids[:-1]).reshape(count, sequence_length)
    labels_BT = np.where(is_past_end, IGNORE_INDEX, ids[1:]).reshape(count, sequence_length)
    documents_BT = None
    if document_mask:
        ids = dataset.document_ids(np.array([(start - 1) % dataset.tokens]), count * sequence_length)[0]
        documents_BT = ids.reshape(count, sequence_length)
        documents_BT = documents_BT - documents_BT[:, :1]
    return RowArrays(tokens_BT, labels_BT, documents_BT).to_batch()
