"""Which source each sample of a run comes from: exact shares, as a pure function of the sample's number.

Within a stage the sources take turns in a pattern of at most `LARGEST_PERIOD` samples that repeats. The pattern is the
one of R. Tijdeman ("The chairman assignment problem", 1980): after any number of samples, each source has had its
share to within one sample. A source that reaches its cap of epochs ends a stage, and the others share on.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from jingu.data.order import Numbers, groups

LARGEST_PERIOD = 1 << 16
"""Shares are exact where whole numbers up to this sum have their ratio, else to the nearest such numbers."""


@dataclass(frozen=True)
class Segment:
    """A stretch of the run with fixed shares."""

    start: int
    """Its first sample, numbered over the run."""
    before: tuple[int, ...]
    """Samples that each source has given before it."""
    shares: tuple[int, ...]
    """Turns of each source a period; their sum is the period."""


@dataclass(frozen=True)
class Mixture:
    """The sources of all samples in [0, end)."""

    segments: tuple[Segment, ...]
    end: int | None
    """Samples until every source that has a weight has reached its cap; None: there is no end."""

    def locate(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """The source of each sample, and the sample's number among those of its source.

        Raises ValueError for samples past the end.
        """
        if self.end is not None and len(samples) and int(samples.max()) >= self.end:
            raise ValueError(f"sample {int(samples.max())} of a mixture that ends after {self.end}")
        sources, numbers = np.zeros_like(samples), np.empty_like(samples)
        segments = np.searchsorted([segment.start for segment in self.segments], samples, side="right") - 1
        for index, inside in groups(segments):
            segment = self.segments[index]
            turns, ranks = pattern(segment.shares)
            rounds, places = np.divmod(samples[inside] - segment.start, len(turns))
            which = turns[places].astype(np.int64)
            sources[inside] = which
            numbers[inside] = np.array(segment.before)[which] + rounds * np.array(segment.shares)[which] + ranks[places]
        return sources, numbers

    def counts(self, samples: int) -> list[int]:
        """Samples that each source has given after so many samples of the run."""
        starts = [segment.start for segment in self.segments]
        return _counts_after(self.segments[bisect.bisect_right(starts, samples) - 1], samples)


def plan_mixture(stages: Sequence[tuple[int, Sequence[float]]], caps: Sequence[int | None]) -> Mixture:
    """The mixture of `stages`, (first sample, a weight for each source), with at most `caps` samples of each source.

    A stage whose every source has reached its cap ends the run there.
    """
    segments: list[Segment] = []
    before = tuple(0 for _ in caps)
    for number, (start, weights) in enumerate(stages):
        stage_end = stages[number + 1][0] if number + 1 < len(stages) else None
        while True:
            left = [
                0.0 if cap is not None and cap <= count else w
                for w, cap, count in zip(weights, caps, before, strict=True)
            ]
            if not any(left):
                return Mixture(tuple(segments), start)
            segment = Segment(start, before, whole_shares(left))
            segments.append(segment)
            ends = [
                _sample_after(segment, source, cap)
                for source, cap in enumerate(caps)
                if cap is not None and left[source]
            ]
            end = min((end for end in [*ends, stage_end] if end is not None), default=None)
            if end is None:
                return Mixture(tuple(segments), None)
            before, start = tuple(_counts_after(segment, end)), end
            if end == stage_end:
                break
    return Mixture(tuple(segments), None)


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the ratio of the weights, with the smallest sum; where that sum would be above

    `LARGEST_PERIOD`, those of that sum that come nearest (at least 1 for a weight above 0).
    """
    # The shortest decimal that reads back as the number is what a person wrote.
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    whole = [share // math.gcd(*whole) for share in whole]
    if sum(whole) <= LARGEST_PERIOD:
        return tuple(whole)
    total = sum(exact)
    ideal = [weight * LARGEST_PERIOD / total for weight in exact]
    rounded = [max(math.floor(share), 1 if share else 0) for share in ideal]
    while (missing := LARGEST_PERIOD - sum(rounded)) != 0:
        # Too many only where shares near 0 were made 1: the largest shares give those turns.
        sign = 1 if missing > 0 else -1
        furthest = max(
            range(len(ideal)),
            key=lambda source: (
                (ideal[source] - rounded[source]) * sign if rounded[source] > 1 or sign > 0 else -math.inf
            ),
        )
        rounded[furthest] += sign
    return tuple(rounded)


@lru_cache(maxsize=64)
def pattern(shares: tuple[int, ...]) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int32]]:
    """[period] the source whose turn it is, and how many turns that source had before it in the period."""
    period, sources = sum(shares), [source for source, share in enumerate(shares) if share]
    slack = max(2 * len(sources) - 2, 1)
    turns, ranks = np.empty(period, dtype=np.int16), np.empty(period, dtype=np.int32)
    counts = [0] * len(shares)
    for place in range(period):
        # Of the sources that are far enough behind their share, the one that would soonest be too far behind.
        behind = [s for s in sources if ((place + 1) * shares[s] - counts[s] * period) * slack >= period]
        source = min(behind or sources, key=lambda s: ((counts[s] + 1) * slack - 1) / shares[s])
        turns[place], ranks[place] = source, counts[source]
        counts[source] += 1
    return turns, ranks


def _counts_after(segment: Segment, end: int) -> list[int]:
    rounds, place = divmod(end - segment.start, sum(segment.shares))
    turns, _ = pattern(segment.shares)
    inside = np.bincount(turns[:place], minlength=len(segment.shares)).tolist()
    return [
        before + rounds * share + more
        for before, share, more in zip(segment.before, segment.shares, inside, strict=True)
    ]


def _sample_after(segment: Segment, source: int, count: int) -> int:
    """The sample after the one with which the source has given `count` samples in all."""
    share = segment.shares[source]
    rounds, rank = divmod(count - segment.before[source] - 1, share)
    turns, _ = pattern(segment.shares)
    return segment.start + rounds * len(turns) + int(np.flatnonzero(turns == source)[rank]) + 1
