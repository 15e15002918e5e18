"""The training batch of step n: a pure function of the data, the seed and n.

It depends on no rank, no worker and no earlier step. So every rank reads its own rows without communication, and
the step number is all that a resumed run needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jingu.data.batch import IGNORE_INDEX, Batch, map_tensors
from jingu.data.dropped_documents import DroppedDocuments
from jingu.data.fill_in_the_middle import FillInTheMiddle
from jingu.data.mixture import Mixture
from jingu.data.packing import PackedDataset, RowArrays, document_ids
from jingu.data.permutation import Int64Array, masks_by_value
from jingu.data.window_dataset import WindowDataset


@dataclass(frozen=True)
class MixtureDataset:
    """The training samples of a run: sample j comes from the source that the mixture names, in that source's order.

    Step n takes the samples [n·global_batch_size, (n + 1)·global_batch_size).
    """

    sources: tuple[WindowDataset | PackedDataset, ...]
    mixture: Mixture
    global_batch_size: int
    # Whether attention stays inside each document, and positions restart with it.
    document_mask: bool = False
    dropped: DroppedDocuments | None = None
    fill_in_the_middle: FillInTheMiddle | None = None
    # Whether a batch is only as long as its longest row, rounded up to an eighth of a sequence.
    trim_padding: bool = False

    def locate(self, step: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return `locate_samples` of the global batch of `step` (0-based)."""
        start = step * self.global_batch_size
        return self.locate_samples(np.arange(start, start + self.global_batch_size, dtype=np.int64))

    def locate_samples(self, samples: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return for each sample its source, its number among that source's samples, and what the source reads it by.

        Samples are numbered over the run. A source reads windows by the offset of their first token, packed rows by
        their number.
        """
        source_ids, numbers = self.mixture.locate(samples)
        locations = np.empty_like(numbers)
        for source_id, mask in masks_by_value(source_ids):
            locations[mask] = self.sources[source_id].locate(numbers[mask])
        return source_ids, numbers, locations

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Return rows [first, first + count) of the global batch of `step` (0-based)."""
        if not 0 <= first <= first + count <= self.global_batch_size:
            raise ValueError(f"rows {first} to {first + count} of a global batch of {self.global_batch_size}")
        start = step * self.global_batch_size + first
        samples = np.arange(start, start + count, dtype=np.int64)
        source_ids, _, locations = self.locate_samples(samples)
        # Read the rows of each source together, then put all rows into the order of their samples.
        parts = []
        for source_id in range(len(self.sources)):
            mask = source_ids == source_id
            parts.append(self._read_source(source_id, locations[mask], samples[mask], step))
        rows = parts[0]
        if len(parts) > 1:
            rows = _interleave(parts, source_ids)
        batch = rows.to_batch()
        if self.trim_padding and batch.documents is not None:
            length = self._used_length(batch.documents.numpy())
            batch = map_tensors(batch, lambda x_BT: x_BT[:, :length].contiguous())
        return batch

    def _read_source(self, source_id: int, locations: Int64Array, samples: Int64Array, step: int) -> RowArrays:
        """Read rows of one source: drop documents, then fill in the middle, then number the documents."""
        source = self.sources[source_id]
        eos_token_id = source.dataset.eos_token_id
        rows = source.read(locations)
        tokens, labels, documents = rows.tokens, rows.labels, rows.documents
        if self.dropped is not None and step in self.dropped:
            offsets = source.token_offsets(locations)
            label_offsets = (offsets + 1) % source.dataset.tokens
            tokens = np.where(self.dropped.contains(source_id, offsets), eos_token_id, tokens)
            labels = np.where(self.dropped.contains(source_id, label_offsets), IGNORE_INDEX, labels)
        if self.fill_in_the_middle is not None:
            tokens, labels = self.fill_in_the_middle.transform(tokens, labels, samples)
        if not self.document_mask:
            documents = None
        elif documents is None:
            documents = document_ids(tokens, eos_token_id)
        return replace(rows, tokens=tokens, labels=labels, documents=documents)

    def _used_length(self, documents_BT: Int64Array) -> int:
        """Return the length of the longest row without padding, rounded up to an eighth of a sequence."""
        eighth = -(-documents_BT.shape[1] // 8)
        longest = int((documents_BT >= 0).sum(1).max(initial=1))
        return -(-longest // eighth) * eighth


def _interleave(parts: list[RowArrays], source_ids: Int64Array) -> RowArrays:
    """Put rows, listed source by source, where their source occurs in `source_ids`."""
    # argsort lists the rows source by source; its inverse says where the list has each row.
    order = np.argsort(np.argsort(source_ids, kind="stable"))

    def merge(name: str) -> Any:
        arrays = [vars(part)[name] for part in parts]
        return None if arrays[0] is None else np.concatenate(arrays)[order]

    return RowArrays(merge("tokens"), merge("labels"), merge("documents"), merge("weights"))
