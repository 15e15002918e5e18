"""The rows of a run: which source each comes from, and the batch of any step as a pure function of data, seed and step.

The batch does not depend on ranks, workers or earlier steps. Every rank can therefore read its own rows without
communication, and a resumed run needs only the step number.

Within a stage the sources alternate in a pattern of at most `MAX_PERIOD` samples that repeats. The pattern is that of
R. Tijdeman ("The chairman assignment problem", 1980): after any number of samples, each source has contributed its
share to within one sample. A source that reaches its maximum of epochs ends a segment, and the others continue in
their ratio.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from jingu.data.batch import IGNORE_INDEX, Batch, map_tensors
from jingu.data.dropped_documents import DroppedDocuments
from jingu.data.fill_in_the_middle import FillInTheMiddle
from jingu.data.permutation import Int64Array, masks_by_value
from jingu.data.row_sources import PackedDataset, RowArrays, WindowDataset

# Maximum sum of the integers that represent shares. Shares that need a larger sum are rounded.
MAX_PERIOD = 1 << 16


@dataclass(frozen=True)
class Segment:
    """A part of the run with fixed shares."""

    # The index of its first sample in the run.
    start: int
    # Number of samples of each source before the segment.
    before: tuple[int, ...]
    # Number of samples of each source in a period; their sum is the period.
    shares: tuple[int, ...]


@dataclass(frozen=True)
class Mixture:
    """The sources of the samples [0, end)."""

    segments: tuple[Segment, ...]
    # Number of samples until every source with a weight has reached its maximum; None if the mixture has no end.
    end: int | None

    def locate(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the source of each sample, and the sample's index among those of its source.

        Raises:
            ValueError: a sample is past the end.
        """
        if self.end is not None and len(samples) and int(samples.max()) >= self.end:
            raise ValueError(f"sample {int(samples.max())} of a mixture that ends after {self.end}")
        source_ids = np.zeros_like(samples)
        numbers = np.empty_like(samples)
        indices = np.searchsorted([segment.start for segment in self.segments], samples, side="right") - 1
        for index, mask in masks_by_value(indices):
            segment = self.segments[index]
            turns, ranks = interleaving_pattern(segment.shares)
            periods, positions = np.divmod(samples[mask] - segment.start, len(turns))
            ids = turns[positions].astype(np.int64)
            source_ids[mask] = ids
            # Add the samples of the source before the segment, in full periods, and in the current period.
            numbers[mask] = np.array(segment.before)[ids] + periods * np.array(segment.shares)[ids] + ranks[positions]
        return source_ids, numbers

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples of the run come from each source."""
        starts = [segment.start for segment in self.segments]
        return _counts_before(self.segments[bisect.bisect_right(starts, samples) - 1], samples)


def plan_mixture(stages: Sequence[tuple[int, Sequence[float]]], max_samples: Sequence[int | None]) -> Mixture:
    """Divide the run into segments of fixed shares.

    Args:
        stages: the first sample of each stage, and a weight for each source.
        max_samples: maximum number of samples of each source; None for no limit. If all sources of a stage have
            reached their maximum, the mixture ends.
    """
    segments: list[Segment] = []
    before = tuple(0 for _ in max_samples)
    for number, (start, stage_weights) in enumerate(stages):
        stage_end = stages[number + 1][0] if number + 1 < len(stages) else None
        while start != stage_end:
            # Sources that have reached their maximum have the weight 0 from now on.
            weights = [
                0.0 if limit is not None and count >= limit else weight
                for weight, limit, count in zip(stage_weights, max_samples, before, strict=True)
            ]
            if not any(weights):
                return Mixture(tuple(segments), start)
            segment = Segment(start, before, integer_shares(weights))
            segments.append(segment)
            # The segment ends with the stage, or as soon as another source reaches its maximum.
            ends = [] if stage_end is None else [stage_end]
            for source_id, limit in enumerate(max_samples):
                if limit is not None and weights[source_id]:
                    ends.append(_sample_after(segment, source_id, limit))
            if not ends:
                return Mixture(tuple(segments), None)
            start = min(ends)
            before = tuple(_counts_before(segment, start))
    return Mixture(tuple(segments), None)


def integer_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest integers in the ratio of the weights.

    If their sum exceeds `MAX_PERIOD`, return the nearest integers of that sum, at least 1 for each weight above 0.
    """
    # str() gives the shortest decimal that reads back as the number: what the user wrote.
    exact = [Fraction(str(weight)) for weight in weights]
    denominator = math.lcm(*(weight.denominator for weight in exact))
    shares = [int(weight * denominator) for weight in exact]
    divisor = math.gcd(*shares)
    shares = [share // divisor for share in shares]
    if sum(shares) <= MAX_PERIOD:
        return tuple(shares)
    total = sum(exact)
    ideal = [weight * MAX_PERIOD / total for weight in exact]
    whole_shares = [max(math.floor(share), 1 if share else 0) for share in ideal]
    # Rounding down makes the sum too small; raising tiny shares to 1 can make it too large. Correct it step by step.
    while sum(whole_shares) != MAX_PERIOD:
        change = 1 if sum(whole_shares) < MAX_PERIOD else -1
        errors = [(share - count) * change for share, count in zip(ideal, whole_shares, strict=True)]
        candidates = [source_id for source_id, count in enumerate(whole_shares) if change > 0 or count > 1]
        whole_shares[max(candidates, key=errors.__getitem__)] += change
    return tuple(whole_shares)


@lru_cache(maxsize=64)
def interleaving_pattern(shares: tuple[int, ...]) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int32]]:
    """Return the source of each sample of a period, and how many earlier samples of the period that source has; both
    [period]."""
    period = sum(shares)
    source_ids = [source_id for source_id, share in enumerate(shares) if share]
    slack = max(2 * len(source_ids) - 2, 1)
    turns = np.empty(period, dtype=np.int16)
    ranks = np.empty(period, dtype=np.int32)
    counts = [0] * len(shares)
    for position in range(period):
        # Among the sources that may have the next sample, take the one with the earliest deadline (Tijdeman).
        behind = [s for s in source_ids if ((position + 1) * shares[s] - counts[s] * period) * slack >= period]
        source_id = min(behind or source_ids, key=lambda s: ((counts[s] + 1) * slack - 1) / shares[s])
        turns[position] = source_id
        ranks[position] = counts[source_id]
        counts[source_id] += 1
    return turns, ranks


def _counts_before(segment: Segment, end: int) -> list[int]:
    """Return the samples of each source before sample `end`, which is in or right after the segment."""
    periods, position = divmod(end - segment.start, sum(segment.shares))
    turns, _ = interleaving_pattern(segment.shares)
    in_last_period = np.bincount(turns[:position], minlength=len(segment.shares))
    counts = np.array(segment.before) + periods * np.array(segment.shares) + in_last_period
    return [int(count) for count in counts]


def _sample_after(segment: Segment, source_id: int, count: int) -> int:
    """Return the sample after the one with which the source has contributed `count` samples in all."""
    periods, rank = divmod(count - segment.before[source_id] - 1, segment.shares[source_id])
    turns, _ = interleaving_pattern(segment.shares)
    return segment.start + periods * len(turns) + int(np.flatnonzero(turns == source_id)[rank]) + 1


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
        """Return `locate_samples` of the global batch of `step` (0-based); nothing where there are no sources."""
        if not self.sources:
            nothing = np.empty(0, dtype=np.int64)
            return nothing, nothing, nothing
        start = step * self.global_batch_size
        return self.locate_samples(np.arange(start, start + self.global_batch_size, dtype=np.int64))

    def locate_samples(self, samples: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return for each sample its source, its index among that source's samples, and its location in the source.

        Sample indices count over the run. The location of a window is the offset of its first token, and that of a
        packed row is its index.
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
        return self.trim(rows.to_batch())

    def trim(self, batch: Batch) -> Batch:
        """Return a batch that is only as long as its longest row, if batches of the run are trimmed."""
        if not self.trim_padding or batch.documents is None:
            return batch
        length = self._used_length(batch.documents.numpy())
        return map_tensors(batch, lambda x_BT: x_BT[:, :length].contiguous())

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
        if documents is None and (self.document_mask or self.fill_in_the_middle is not None):
            # The documents of the tokens, and of the last label.
            documents = source.dataset.document_ids(locations, tokens.shape[1] + 1)
            if self.fill_in_the_middle is not None:
                tokens, labels, documents = self.fill_in_the_middle.transform(tokens, labels, documents, samples)
            documents = documents[:, : tokens.shape[1]]
        if not self.document_mask:
            documents = None
        return replace(rows, tokens=tokens, labels=labels, documents=documents)

    def _used_length(self, documents_BT: Int64Array) -> int:
        """Return the length of the longest row without padding, rounded up to an eighth of a sequence."""
        eighth = -(-documents_BT.shape[1] // 8)
        longest = int((documents_BT >= 0).sum(1).max(initial=1))
        return -(-longest // eighth) * eighth


def _interleave(parts: list[RowArrays], source_ids: Int64Array) -> RowArrays:
    """Put rows, listed source by source, where their source occurs in `source_ids`."""
    # argsort lists the rows source by source; the inverse permutation is the place of each row in that list.
    order = np.argsort(np.argsort(source_ids, kind="stable"))

    def merge(name: str) -> Any:
        arrays = [vars(part)[name] for part in parts]
        return None if arrays[0] is None else np.concatenate(arrays)[order]

    return RowArrays(merge("tokens"), merge("labels"), merge("documents"), merge("weights"))
