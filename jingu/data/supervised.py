"""Supervised data: rows of token ids with loss weights, packed into sequences or as one sequence for each row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jingu.config.sections.data import PreferenceSettings, RowSettings
from jingu.config.sections.train import BatchSettings
from jingu.data.batch import IGNORE_INDEX, Batch
from jingu.data.dataset import TokenDataset, open_dataset
from jingu.data.dataset_manifest import SplitName
from jingu.data.indexed_dataset import IndexedReader
from jingu.data.permutation import Int64Array, Permutation
from jingu.data.row_sources import PackedDataset, RowArrays, pack_best_fit
from jingu.text.build_record import refuse_changes
from jingu.text.identity import content_settings

# The integer that represents a weight of 1.
WEIGHT_SCALE = 100
# The integer that represents a margin of 1.
MARGIN_SCALE = 1000


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


@dataclass(frozen=True)
class PreferenceDataset(SupervisedDataset):
    """Answers to prompts as sequences. A stored row is a prompt with its chosen answer and the prompt with the rejected
    one, or a prompt with one answer. What is stored for each id says which of these it belongs to (`encode_part`).

    Of the rows' arrays, the documents have even numbers for chosen (or desirable) answers and odd ones for the others,
    where the answers of pair n have the numbers 2n and 2n + 1; the weights are the margins of the pairs.
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


def encode_part(is_trained: npt.NDArray[np.bool_], is_rejected: bool, margin: float) -> npt.NDArray[np.int32]:
    """Return what is stored for each id of an answer with its prompt: bit 0 for the answer, bit 1 if it is rejected (or
    undesirable), and above them the margin of the pair in thousandths."""
    return is_trained.astype(np.int32) | (is_rejected << 1) | (round(margin * MARGIN_SCALE) << 2)


def decode_parts(parts: Int64Array) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Return for each id whether it is trained, whether it belongs to a rejected answer, and the margin."""
    return (parts & 1) > 0, (parts & 2) > 0, (parts >> 2) / MARGIN_SCALE


def open_supervised(
    path: Path, split: SplitName, objective: RowSettings, batch: BatchSettings, seed: int
) -> SupervisedDataset:
    """Open a data set that `jingu tune prepare` or `jingu align prepare` made in `path`.

    Raises:
        JinguError: it is missing, or was made with other settings.
    """
    dataset = open_dataset(path, split, build_command=objective.BUILD_COMMAND)
    stored_settings = dataset.manifest.settings
    old = {
        **stored_settings.get("objective", {"type": "causal"}),
        "sequence_length": stored_settings.get("sequence_length"),
    }
    new = {**content_settings(objective), "sequence_length": batch.sequence_length}
    fix = f"Delete the folder and run `jingu {objective.BUILD_COMMAND}`, or set data.path to another folder."
    refuse_changes(old, new, "the data set here was made", path, fix)
    weights = [IndexedReader(path / entry.name).storage for entry in dataset.manifest.split(split).sidecars]
    # Validation reads every row once, in any order, for which packing is fastest. But some preference tasks read one
    # answer per row.
    is_preference = isinstance(objective, PreferenceSettings)
    is_packed = objective.packing == "packed" or (split == "validation" and not is_preference)
    group_size = None
    if objective.packing == "group_by_length" and not is_packed:
        group_size = batch.global_batch_size
    dataset_type = PreferenceDataset if is_preference else SupervisedDataset
    return dataset_type(
        dataset, batch.sequence_length, seed, replace(dataset, shards=weights, vocab_size=0), is_packed, group_size
    )
