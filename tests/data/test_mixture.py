"""Mixtures: exact shares at any time, caps, stages, and a pattern that never changes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jingu.data.mixture import MAX_PERIOD, Mixture, integer_shares, interleaving_pattern, plan_mixture

WEIGHTS = st.lists(
    st.one_of(st.integers(1, 40).map(float), st.integers(1, 99).map(lambda n: n / 100)), min_size=1, max_size=8
)


def counted(mixture: Mixture, samples: int) -> np.ndarray:
    """Count the samples of each source after each sample of the run: [samples + 1, sources]."""
    sources, numbers = mixture.locate(np.arange(samples))
    kinds = len(mixture.segments[0].shares)
    counts = np.concatenate([np.zeros((1, kinds), int), np.cumsum(sources[:, None] == np.arange(kinds), axis=0)])
    assert np.array_equal(numbers, counts[np.arange(samples), sources])  # each source's own, without a gap
    return counts


@settings(max_examples=40)
@given(WEIGHTS)
def test_each_source_has_its_share_to_within_one_sample_at_any_time(weights: list[float]) -> None:
    samples = 1000
    counts = counted(plan_mixture([(0, weights)], [None] * len(weights)), samples)
    ideal = np.arange(samples + 1)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(counts - ideal).max() < 1


@settings(max_examples=40)
@given(WEIGHTS, st.integers(0, 10**12))
def test_locating_any_sample_takes_constant_time(weights: list[float], start: int) -> None:
    mixture = plan_mixture([(0, weights)], [None] * len(weights))
    sources, numbers = mixture.locate(np.arange(start, start + 50))
    before, after = mixture.counts(start), mixture.counts(start + 50)
    assert [end - begin for begin, end in zip(before, after, strict=True)] == np.bincount(
        sources, minlength=len(weights)
    ).tolist()
    for source in set(sources.tolist()):
        assert numbers[sources == source].tolist() == list(range(before[source], after[source]))
    total = sum(map(Fraction, map(str, weights)))
    for count, weight in zip(before, weights, strict=True):
        assert abs(count - start * Fraction(str(weight)) / total) < 1


def test_round_weights_are_exact() -> None:
    assert integer_shares([1.0, 2.0]) == (1, 2)
    assert integer_shares([0.1, 0.25, 0.65]) == (2, 5, 13)
    assert integer_shares([0.7, 0.0, 0.3]) == (7, 0, 3)
    assert integer_shares([1 / 3] * 3) == (1, 1, 1)


@settings(max_examples=40)
@given(st.lists(st.floats(1e-9, 1e9), min_size=2, max_size=9))
def test_other_weights_are_rounded(weights: list[float]) -> None:
    shares = integer_shares(weights)
    assert min(shares) >= 1 and sum(shares) <= MAX_PERIOD
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share / sum(shares) - weight / sum(weights)) <= len(weights) / MAX_PERIOD


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=3, max_size=3)),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=3, max_size=3),
)
def test_stages_and_caps(drawn: list[tuple[int, list[float]]], caps: list[int | None]) -> None:
    stages, start = [], 0
    for length, weights in drawn:
        stages.append((start, weights if any(weights) else [1.0, 1.0, 1.0]))
        start += length
    mixture = plan_mixture(stages, caps)
    samples = start + 50 if mixture.end is None else mixture.end
    counts = counted(mixture, samples)
    for cap, column in zip(caps, counts.T, strict=True):
        assert cap is None or column[-1] <= cap
    for (begin, weights), end in zip(stages, [*(begin for begin, _ in stages[1:]), samples], strict=True):
        used = counts[min(end, samples)] - counts[min(begin, samples)]
        for source, weight in enumerate(weights):
            assert weight or not used[source]  # a weight of 0 is none at all
        # Within a stage, until the first cap is reached, shares are those of the weights.
        for at in range(begin, min(end, samples)):
            if any(cap is not None and count >= cap for cap, count in zip(caps, counts[at], strict=True)):
                break
            ideal = (at - begin) * np.array(weights) / sum(weights)
            assert np.abs(counts[at] - counts[begin] - ideal).max() < 1
    if mixture.end is not None:
        last = [weights for begin, weights in stages if begin <= mixture.end][-1]
        assert all(not w or (c is not None and n == c) for w, c, n in zip(last, caps, counts[-1], strict=True))
        with pytest.raises(ValueError, match="of a mixture that ends after"):
            mixture.locate(np.array([mixture.end]))
    assert mixture.counts(samples) == counts[-1].tolist()


def test_the_pattern_never_changes() -> None:
    """Resuming a run needs the same pattern in every later version."""
    turns, ranks = interleaving_pattern((2, 5, 13))
    assert turns.tolist() == [2, 2, 1, 2, 2, 1, 2, 0, 2, 2, 1, 2, 2, 1, 2, 2, 0, 2, 1, 2]
    assert ranks.tolist() == [0, 1, 0, 2, 3, 1, 4, 0, 5, 6, 2, 7, 8, 3, 9, 10, 1, 11, 4, 12]
