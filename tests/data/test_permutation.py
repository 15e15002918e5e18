"""The computed order is a permutation and looks random."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jingu.data.permutation import MAX_SIZE, BlockPermutation, Permutation


@given(st.integers(1, 5000), st.integers(0, 2**64), st.integers(0, 1000))
@example(1, 0, 0)
@example(2, 0, 0)
@example(3, 0, 0)
@example(255, 1, 0)
@example(256, 1, 0)
@example(257, 1, 0)
@example(4097, 1, 2)
def test_it_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    order = Permutation(n, seed, epoch)(np.arange(n))
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(n))


@given(st.integers(1, MAX_SIZE), st.integers(0, 99), st.data())
def test_any_range_is_within_bounds_and_distinct(n: int, seed: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), unique=True, min_size=1, max_size=30))
    order = Permutation(n, seed, 0)
    images = order(np.array(positions))
    assert images.min() >= 0 and images.max() < n
    assert len(set(images.tolist())) == len(positions)
    assert order(np.array(positions[:1]))[0] == images[0]  # each place on its own


def test_it_depends_only_on_seed_and_epoch() -> None:
    n = 10_000
    first = Permutation(n, 3, 4)(np.arange(n))
    assert np.array_equal(first, Permutation(n, 3, 4)(np.arange(n)))
    for seed, epoch in ((4, 3), (3, 5), (34, 4), (3, 44)):
        same = (Permutation(n, seed, epoch)(np.arange(n)) == first).sum()
        assert same < 8  # of unrelated permutations about one place agrees


def test_the_numbers_never_change() -> None:
    """Resuming a run needs the same order in every later version."""
    assert Permutation(9, 1, 2)(np.arange(9)).tolist() == [0, 4, 1, 8, 7, 3, 6, 5, 2]
    assert Permutation(1000, 0, 0)(np.arange(5)).tolist() == [301, 942, 323, 373, 634]
    assert Permutation(MAX_SIZE, 7, 3)(np.array([0, 1, MAX_SIZE - 1])).tolist() == [
        77009887747249,
        1573871198616,
        142900310727146,
    ]


def chi_square(values: np.ndarray, bins: int) -> float:
    counts = np.bincount(values, minlength=bins)
    expected = len(values) / bins
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("n", [1 << 16, 99_991, 1_000_003])
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_distances_of_neighbours_look_random(n: int, seed: int) -> None:
    order = Permutation(n, seed, 0)(np.arange(n))
    for step in (1, 2, 64):
        distance = (order[step:] - order[:-step]) % n
        bins = 100
        value = chi_square(distance * bins // n, bins)
        # 99 degrees of freedom: mean 99, deviation 14; five deviations on either side.
        assert 40 < value < 170


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_small_sizes_take_every_order_evenly(n: int) -> None:
    draws = 6000
    seen: dict[tuple[int, ...], int] = {}
    for epoch in range(draws):
        key = tuple(Permutation(n, 1, epoch)(np.arange(n)).tolist())
        seen[key] = seen.get(key, 0) + 1
    kinds = {2: 2, 3: 6, 4: 24, 5: 120}[n]
    assert len(seen) == kinds
    expected = draws / kinds
    value = sum((count - expected) ** 2 / expected for count in seen.values())
    assert value < (kinds - 1) + 5 * (2 * (kinds - 1)) ** 0.5 + 5


def test_invalid_sizes_and_positions_are_refused() -> None:
    for n in (0, MAX_SIZE + 1):
        with pytest.raises(ValueError, match="a permutation must have"):
            Permutation(n, 0, 0)
    for place in (10, -1):
        with pytest.raises(ValueError, match=r"outside \[0, 10\)"):
            Permutation(10, 0, 0)(np.array([place]))


@settings(max_examples=50)
@given(st.integers(1, 3000), st.integers(1, 400), st.integers(1, 7), st.integers(0, 99), st.integers(0, 9))
@example(12, 4, 2, 0, 0)
@example(3, 4, 1, 0, 0)
def test_an_order_in_blocks_is_a_bijection(n: int, block: int, opened: int, seed: int, epoch: int) -> None:
    order = BlockPermutation(n, block, opened, seed, epoch)
    whole = order(np.arange(n))
    assert np.array_equal(np.sort(whole), np.arange(n))
    some = np.random.default_rng(seed).integers(0, n, 9)
    assert np.array_equal(order(some), whole[some])
    with pytest.raises(ValueError, match="a position outside"):
        order(np.array([n]))


@pytest.mark.parametrize("n", [64 * 100, 64 * 100 + 17])
def test_an_order_in_blocks_reads_few_of_them_at_a_time_and_mixes_them(n: int) -> None:
    block, opened = 64, 5
    for epoch in range(5):
        order = BlockPermutation(n, block, opened, 1, epoch)(np.arange(n))
        read = order // block
        # A stretch a block shorter than the open ones touches those of at most two groups, and each block once.
        stretch = block * (opened - 1)
        assert max(len(set(read[at : at + stretch].tolist())) for at in range(0, n, 7)) <= 2 * opened
        first = {number: int(np.flatnonzero(read == number)[0]) for number in set(read.tolist())}
        last = {number: int(np.flatnonzero(read == number)[-1]) for number in first}
        assert max(last[number] - first[number] for number in first) < block * opened
        # Within them, windows follow one another by chance, and so do the blocks.
        assert (np.diff(order) == 1).mean() < 0.02
        groups = sorted(first, key=first.__getitem__)
        assert (np.abs(np.diff(groups)) == 1).mean() < 0.1
    assert BlockPermutation(n, block, opened, 1, 0)(np.arange(n)).tolist() != order.tolist()


def test_an_order_in_blocks_never_changes() -> None:
    assert BlockPermutation(10, 3, 2, 1, 2)(np.arange(10)).tolist() == [8, 6, 7, 9, 4, 5, 3, 1, 0, 2]
