"""Preference data: how answers to prompts are stored, written and read.

A stored row is a prompt with its chosen answer and the prompt with the rejected one, or a prompt with one answer, which
may be undesirable. Beside each id is a code (`encode_part`): whether it belongs to an answer, to which of these, and
the margin of the pair. In a batch, chosen (or desirable) answers are documents with even numbers, the others with odd
ones (`split_answers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from jingu.data.batch import IGNORE_INDEX
from jingu.data.permutation import Int64Array
from jingu.data.row_sources import PackedDataset, RowArrays
from jingu.data.supervised import SupervisedDataset

# The integer that represents a margin of 1.
MARGIN_SCALE = 1000
# Margins are stored in 30 bits with sign.
MAX_MARGIN = 2**29 // MARGIN_SCALE


def encode_part(is_trained: npt.NDArray[np.bool_], is_rejected: bool, margin: float) -> npt.NDArray[np.int32]:
    """Return what is stored for each id of an answer with its prompt: bit 0 for the answer, bit 1 if it is rejected (or
    undesirable), and above them the margin of the pair in thousandths."""
    return is_trained.astype(np.int32) | (is_rejected << 1) | (round(margin * MARGIN_SCALE) << 2)


def decode_parts(parts: Int64Array) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Return for each id whether it is trained, whether it belongs to a rejected answer, and the margin."""
    return (parts & 1) > 0, (parts & 2) > 0, (parts >> 2) / MARGIN_SCALE


def join_answers(
    ids: Sequence[Sequence[int]],
    is_trained: Sequence[npt.NDArray[np.bool_]],
    is_rejected: Sequence[bool],
    margin: float,
) -> tuple[list[int], npt.NDArray[np.int32]]:
    """Return the ids and codes of a stored row.

    The row ends with an extra id that serves only as a label: the last id of a row is never an input.

    Args:
        ids: ids of each answer with its prompt; is_trained: which of them are the answer's.
        is_rejected: whether each answer is rejected or undesirable.
    """
    codes = [encode_part(*part, margin) for part in zip(is_trained, is_rejected, strict=True)]
    end = encode_part(np.array([False]), is_rejected[-1], margin)
    return [*(token_id for part in ids for token_id in part), ids[-1][-1]], np.concatenate([*codes, end])


def split_answers(values_BK: Any) -> tuple[Any, Any]:
    """Return the values of chosen (or desirable) answers, and of the others, from those of all documents of rows."""
    return values_BK[:, 0::2], values_BK[:, 1::2]


@dataclass(frozen=True)
class PreferenceDataset(SupervisedDataset):
    """Answers to prompts as sequences. In the arrays of rows, the documents of pair n have the numbers 2n and 2n + 1
    and the weights are the margins of the pairs.
    """

    def read(self, rows: Int64Array) -> RowArrays:
        arrays = PackedDataset.read(self, rows)
        documents = np.full_like(arrays.documents, -1)
        labels = np.full_like(arrays.labels, IGNORE_INDEX)
        weights = np.zeros(labels.shape, np.float32)
        for row, columns, offset, number in self.row_pieces(rows):
            parts = self.weights.gather(np.array([offset]), columns.stop - columns.start + 1)[0]
            is_trained, is_rejected, margins = decode_parts(parts)
            documents[row, columns] = 2 * number + is_rejected[:-1]
            labels[row, columns] = np.where(is_trained[1:], arrays.labels[row, columns], IGNORE_INDEX)
            weights[row, columns] = margins[1:]
        return replace(arrays, documents=documents, labels=labels, weights=weights)

    @cached_property
    def _document_lengths(self) -> Int64Array:
        return self.dataset.document_lengths()

    @cached_property
    def _document_starts(self) -> Int64Array:
        return np.cumsum(self._document_lengths) - self._document_lengths

    def read_mismatched(self, rows: Int64Array) -> RowArrays:
        """Read sequences of one answer each, with an answer to another prompt in place of its own (`_mismatched_row`).

        Such answers estimate how far a policy is from its reference (KTO, Ethayarajh et al., 2024).
        """
        shape = len(rows), self.sequence_length
        tokens = np.full(shape, self.dataset.eos_token_id)
        labels = np.full(shape, IGNORE_INDEX)
        documents = np.full(shape, -1)
        for index, row in enumerate(rows.tolist()):
            (number,) = self.row_documents(row)
            ids, is_trained = self._read_stored_row(number)
            other_ids, is_other_trained = self._read_stored_row(self._mismatched_row(number))
            start = int(is_trained.argmax())
            other_start = int(is_other_trained.argmax())
            joined_ids = np.concatenate([ids[:start], other_ids[other_start:]])[: self.sequence_length + 1]
            is_label = np.concatenate([is_trained[:start], is_other_trained[other_start:]])[: len(joined_ids)]
            columns = slice(0, len(joined_ids) - 1)
            tokens[index, columns] = joined_ids[:-1]
            labels[index, columns] = np.where(is_label[1:], joined_ids[1:], IGNORE_INDEX)
            documents[index, columns] = 0
        return RowArrays(tokens, labels, documents)

    def _mismatched_row(self, number: int) -> int:
        """Return the nearest stored row before this one that has another prompt; the first rows follow the last ones.

        If all rows have the same prompt, it is the row before.
        """
        count = len(self._document_starts)
        before = (number - 1) % count
        if self._has_one_prompt:
            return before
        # Both answers of a pair are rows, one after the other: the row before may be the other answer to this prompt.
        prompt = self._read_prompt(number)
        while np.array_equal(self._read_prompt(before), prompt):
            before = (before - 1) % count
        return before

    @cached_property
    def _has_one_prompt(self) -> bool:
        first = self._read_prompt(0)
        return all(np.array_equal(self._read_prompt(number), first) for number in range(len(self._document_starts)))

    def _read_prompt(self, number: int) -> Int64Array:
        """Return the ids of a stored row before its answer."""
        ids, is_trained = self._read_stored_row(number)
        return ids[: int(is_trained.argmax())]

    def _read_stored_row(self, number: int) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Return the ids of a stored row, and which of them are trained."""
        start = np.array([self._document_starts[number]])
        length = int(self._document_lengths[number])
        return self.dataset.gather(start, length)[0], decode_parts(self.weights.gather(start, length)[0])[0]

    def row_documents(self, row: int) -> Int64Array:
        """Return the numbers of the stored rows of a sequence, counted over the split."""
        offsets = [offset for _, _, offset, _ in self.row_pieces(np.array([row]))]
        return np.searchsorted(self._document_starts, offsets, side="right") - 1
