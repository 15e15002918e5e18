"""Errors of scores, and tests of differences between them.

Shapes: N values (of documents), ... draws of the bootstrap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache
from random import Random
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Clusters = Sequence[Hashable] | None
"""The cluster label of each value; None if all values are independent."""

# Half the width of the 95% interval of a normal distribution, in standard deviations.
Z = NormalDist().inv_cdf(0.975)
# Draws of the bootstrap, as the harness takes them, and how many of them share a seed.
BOOTSTRAP_DRAWS = 100_000
_DRAWS_PER_SEED = 1_000
# Indices of the bootstrap in memory at a time.
_MAX_INDICES = 1 << 22
# The interval of a value about which nothing is known.
UNKNOWN_INTERVAL = (-math.inf, math.inf)


def count_units(size: int, clusters: Clusters = None) -> int:
    """Return the number of independent units: clusters, or values."""
    return size if clusters is None else len(set(clusters))


def mean_stderr(values: Array, clusters: Clusters = None) -> float:
    """Return the standard error of a mean, clustered (Miller, 2024) and corrected for few clusters.

    It is not a number if it is unknown: for a single value or cluster.
    """
    labels = list(range(len(values))) if clusters is None else list(clusters)
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    sums = np.bincount([numbers[label] for label in labels], weights=values - values.mean())
    count = len(sums)
    return math.sqrt(count / (count - 1) * float((sums**2).sum())) / len(values) if count > 1 else math.nan


def ratio_stderr(numerators: Array, denominators: Array, clusters: Clusters = None) -> float:
    """Return the standard error of a ratio of sums, by the delta method."""
    ratio = numerators.sum() / denominators.sum()
    return mean_stderr((numerators - ratio * denominators) / denominators.mean(), clusters)


def draw_clusters(clusters: Sequence[Hashable], count: int) -> Iterator[list[int]]:
    """Yield samples of whole clusters with replacement, as indices of values."""
    members: dict[Hashable, list[int]] = {}
    for index, label in enumerate(clusters):
        members.setdefault(label, []).append(index)
    random = Random(0)
    groups = list(members.values())
    for _ in range(count):
        yield [index for group in random.choices(groups, k=len(groups)) for index in group]


def bootstrap(statistic: Callable[[npt.NDArray[np.intp]], Array], size: int, clusters: Clusters = None) -> Array:
    """Return a statistic of samples with replacement, drawn with the random numbers of the harness.

    Args:
        statistic: computes the statistic [...] of samples, given the indices [..., N] of their values.
        size: number of values.
        clusters: cluster labels; whole clusters are drawn.
    """
    results = []
    if clusters is not None:
        samples = draw_clusters(clusters, BOOTSTRAP_DRAWS // 50)
        return np.concatenate([statistic(np.array([sample])) for sample in samples])
    step = max(1, _MAX_INDICES // size)
    for seed in range(BOOTSTRAP_DRAWS // _DRAWS_PER_SEED):
        # The generator that `Random(seed).choices` uses, but for many draws at once.
        _, state, _ = Random(seed).getstate()
        generator = np.random.RandomState()
        generator.set_state(("MT19937", np.array(state[:-1], np.uint32), state[-1], 0, 0.0))
        for first in range(0, _DRAWS_PER_SEED, step):
            uniform = generator.random_sample((min(step, _DRAWS_PER_SEED - first), size))
            results.append(statistic((uniform * size).astype(np.intp)))
    return np.concatenate(results)


def spread_of(draws: Array, units: int) -> tuple[float, tuple[float, float]]:
    """Return the standard error and the 95% interval that draws of the bootstrap give.

    Draws without a value do not count. One unit has no error. Draws that are all equal have an error of 0, as in the
    harness, but say nothing about the interval.

    Args:
        units: number of values or clusters that were drawn from.
    """
    draws = draws[~np.isnan(draws)]
    if units < 2 or len(draws) < 2:
        return math.nan, UNKNOWN_INTERVAL
    stderr = float(draws.std(ddof=1))
    if _is_zero(stderr, float(np.abs(draws).max())):
        return 0.0, UNKNOWN_INTERVAL
    return stderr, (float(np.quantile(draws, 0.025)), float(np.quantile(draws, 0.975)))


def _is_zero(stderr: float, scale: float) -> bool:
    """Return whether a standard error is 0 up to the rounding of values of a size."""
    return stderr <= 1e-12 * scale


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """Return the 95% interval of a proportion (Wilson, 1927), which is also valid for few trials."""
    share = successes / trials
    center = share + Z * Z / (2 * trials)
    width = Z * math.sqrt(share * (1 - share) / trials + Z * Z / (4 * trials * trials))
    scale = 1 + Z * Z / trials
    return (center - width) / scale, (center + width) / scale


def mean_interval(values: Array, clusters: Clusters = None) -> tuple[float, float]:
    """Return the 95% interval of a mean: Wilson's for independent values of 0 and 1, else Student's.

    Where all values or all clusters are equal, it is Wilson's for as many units: no distribution between 0 and 1 has a
    wider one. It has no limits if it is unknown: for one cluster, and for equal values outside of 0 to 1.
    """
    mean = float(values.mean())
    if clusters is None and np.isin(values, (0, 1)).all():
        return wilson_interval(float(values.sum()), len(values))
    units = count_units(len(values), clusters)
    stderr = mean_stderr(values, clusters)
    if units < 2 or math.isnan(stderr):
        return UNKNOWN_INTERVAL
    if _is_zero(stderr, float(np.abs(values).max())):
        is_bounded = values.min() >= 0 and values.max() <= 1
        return wilson_interval(mean * units, units) if is_bounded else UNKNOWN_INTERVAL
    width = student_quantile(0.975, units - 1) * stderr
    return mean - width, mean + width


# Student's distribution


def student_tail(t: float, degrees: int) -> float:
    """Return the probability that Student's t is at least `t` (t >= 0), by its finite series."""
    angle = math.atan(t / math.sqrt(degrees))
    is_odd = degrees % 2
    k = np.arange(2 + is_odd, degrees - 1, 2)
    factors = np.cumprod((k - 1) / k * math.cos(angle) ** 2)
    total = (1 + float(factors.sum())) * (math.cos(angle) if is_odd else 1.0) if degrees > 1 else 0.0
    inside = math.sin(angle) * total
    return (1 - (2 / math.pi * (angle + inside) if is_odd else inside)) / 2


@cache
def student_quantile(probability: float, degrees: int) -> float:
    """Return the t that Student's distribution stays below with a probability above 1/2."""
    low = 0.0
    high = 1e6
    for _ in range(100):
        middle = (low + high) / 2
        if student_tail(middle, degrees) > 1 - probability:
            low = middle
        else:
            high = middle
    return high


# Comparisons


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value of McNemar's test, from counts of documents that only one model has right."""
    trials = only_first + only_second
    smaller = min(only_first, only_second)
    # Logarithms of the binomial coefficients: each follows from the one before it.
    k = np.arange(1, smaller + 1, dtype=np.float64)
    logs = np.concatenate([[0.0], np.cumsum(np.log((trials + 1 - k) / k))])
    return float(min(1.0, 2 * np.exp(logs - trials * math.log(2)).sum()))


def paired_p(differences: Array, clusters: Clusters = None) -> float:
    """Return the two-sided p-value of Student's test that the mean of paired differences is 0.

    It is not a number for a single difference or cluster. Where all differences (or clusters) are equal, Student's
    test would be certain, so the p-value is that of the sign test.
    """
    stderr = mean_stderr(differences, clusters)
    mean = abs(float(differences.mean()))
    units = count_units(len(differences), clusters)
    if math.isnan(stderr) or math.isnan(mean):
        return math.nan
    if _is_zero(stderr, float(np.abs(differences).max())):
        return 1.0 if _is_zero(mean, 1.0) else 2.0 ** (1 - units)
    return 2 * student_tail(mean / stderr, units - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for the number of tests (Holm, 1979). Unknown ones, not a number, are no tests."""
    adjusted_values = list(p_values)
    known_indices = [index for index, p in enumerate(p_values) if not math.isnan(p)]
    largest = 0.0
    for rank, index in enumerate(sorted(known_indices, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(known_indices) - rank) * p_values[index]))
        adjusted_values[index] = largest
    return adjusted_values


def detectable_difference(stderr: float) -> float:
    """Return the smallest difference that a two-sided test at 5% finds with a probability of 80%.

    It is unknown, not a number, without an error: equal values do not tell how much others would vary.
    """
    return (Z + NormalDist().inv_cdf(0.8)) * stderr if stderr > 1e-12 else math.nan
