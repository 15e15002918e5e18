"""Rows of whole documents, packed so that few places stay empty, in place of windows that cut them.

A row takes the documents that fill it best (best-fit decreasing, as in Ding et al., "Fewer Truncations Improve Language
Modeling", 2024). Only a document longer than a row is cut, into rows and a rest. The table of it, two numbers a
document, is made from the lengths alone when the data set is opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from jingu.data.batch import IGNORED, Batch
from jingu.data.dataset import TokenDataset
from jingu.data.order import Numbers, Permutation, groups
from jingu.errors import JinguError


@dataclass(frozen=True)
class Rows:
    """All [rows, sequence]."""

    tokens: Numbers
    labels: Numbers
    documents: Numbers | None = None
    """Counted from 0; -1 where a row is empty. None: not told apart yet."""
    weights: npt.NDArray[np.float32] | None = None
    """Of the labels; None: 1."""


def apart(rows: Rows) -> Batch:
    """A batch whose attention stays inside documents, with which positions begin anew."""
    assert rows.documents is not None
    return Batch(
        torch.from_numpy(rows.tokens),
        torch.from_numpy(rows.labels),
        torch.from_numpy(restarted(rows.documents)),
        torch.from_numpy(rows.documents),
        weights=None if rows.weights is None else torch.from_numpy(rows.weights),
    )


def restarted(documents_BT: Numbers) -> Numbers:
    """[rows, sequence] positions that begin anew with each document."""
    places = np.broadcast_to(np.arange(documents_BT.shape[1]), documents_BT.shape)
    begins = np.diff(documents_BT, axis=1, prepend=-2) != 0
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)


@dataclass(frozen=True)
class PackedRows:
    """A data set as rows of whole documents, in a new order each epoch."""

    dataset: TokenDataset
    sequence_length: int
    seed: int
    pieces: Numbers = field(init=False, repr=False)
    """[pieces, 2] place of the first token and number of predictions, row by row."""
    ends: Numbers = field(init=False, repr=False)
    """[rows] how many pieces the rows up to each one have."""

    def __post_init__(self) -> None:
        pieces = cut_documents(self.dataset.document_lengths(), self.sequence_length)
        if not len(pieces):
            raise JinguError("the data set has no document of two tokens.", where=self.dataset.path)
        rows = self.fill(pieces[:, 1])
        order = np.argsort(rows, kind="stable")
        object.__setattr__(self, "pieces", pieces[order])
        object.__setattr__(self, "ends", np.cumsum(np.bincount(rows)))

    def fill(self, sizes: Numbers) -> Numbers:
        """The row of each piece."""
        return pack(sizes, self.sequence_length)

    def __len__(self) -> int:
        """Rows an epoch."""
        return len(self.ends)

    def starts(self, samples: Numbers) -> Numbers:
        """The row that each sample is; samples are numbered over all epochs."""
        epochs, places = np.divmod(samples, len(self))
        rows = np.empty_like(places)
        for epoch, inside in groups(epochs):
            rows[inside] = Permutation(len(self), self.seed, epoch)(places[inside])
        return rows

    def read(self, rows: Numbers) -> Rows:
        """Rows by their number."""
        shape = len(rows), self.sequence_length
        tokens, labels = np.full(shape, self.dataset.end_id), np.full(shape, IGNORED)
        documents = np.full(shape, -1)
        for there, start, number in self.parts(rows):
            size = there[1].stop - there[1].start
            ids = self.dataset.gather(np.array([start]), size + 1)[0]
            tokens[there], labels[there], documents[there] = ids[:-1], ids[1:], number
        return Rows(tokens, labels, documents)

    def places(self, rows: Numbers) -> Numbers:
        """[rows, sequence] the place of each token in the data set; -2 where a row is empty."""
        places = np.full((len(rows), self.sequence_length), -2)
        for there, start, _ in self.parts(rows):
            places[there] = np.arange(start, start + there[1].stop - there[1].start)
        return places

    def parts(self, rows: Numbers) -> Iterator[tuple[tuple[int, slice], int, int]]:
        """Of every piece in these rows its row and places there, where it begins in the data set, and its number."""
        for row, which in enumerate(rows.tolist()):
            at = 0
            pieces = self.pieces[self.ends[which - 1] if which else 0 : self.ends[which]]
            for number, (start, size) in enumerate(pieces.tolist()):
                yield (row, slice(at, at + size)), start, number
                at += size


def cut_documents(lengths: Numbers, sequence_length: int) -> Numbers:
    """[pieces, 2] the first token and the predictions of each document, or of its parts where it is too long.

    A document of n tokens has n - 1 predictions; parts share a token, so that each prediction is in one of them.
    """
    starts, predictions = np.cumsum(lengths) - lengths, np.maximum(lengths - 1, 0)
    parts = -(-predictions // sequence_length)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    skipped = (np.arange(len(first)) - first) * sequence_length
    sizes = np.minimum(np.repeat(predictions, parts) - skipped, sequence_length)
    return np.stack([np.repeat(starts, parts) + skipped, sizes], axis=1).astype(np.int64)


def pack(sizes: Numbers, capacity: int) -> Numbers:
    """The row of each piece: the largest first, each into the row with the least room that it fits, else a new one."""
    rows = np.empty(len(sizes), dtype=np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms, count = 0, 0  # a bit for every room that some row has
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        if enough := rooms >> size:
            room = size + (enough & -enough).bit_length() - 1
            row = with_room[room].pop()
            rooms ^= 0 if with_room[room] else 1 << room
        else:
            room, row, count = capacity, count, count + 1
        rows[piece] = row
        if left := room - size:
            with_room[left].append(row)
            rooms |= 1 << left
    return rows
