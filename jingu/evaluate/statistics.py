"""Errors of scores, and tests of differences between them.

Shapes: N values (of documents), ... draws of the bootstrap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
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


def mean_stderr(values: Array, clusters: Clusters = None) -> float:
    """Return the standard error of a mean, clustered (Miller, 2024) and corrected for few clusters."""
    labels = list(range(len(values))) if clusters is None else list(clusters)
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    sums = np.bincount([numbers[label] for label in labels], weights=values - values.mean())
    count = len(sums)
    return math.sqrt(count / (count - 1) * float((sums**2).sum())) / len(values) if count > 1 else 0.0


def ratio_stderr(numerators: Array, denominators: Array, clusters: Clusters = None) -> float:
    """Return the standard error of a ratio of sums, by the delta method."""
    ratio = numerators.sum() / denominators.sum()
    return mean_stderr((numerators - ratio * denominators) / denominators.mean(), clusters)


def bootstrap(statistic: Callable[[npt.NDArray[np.intp]], Array], size: int, clusters: Clusters = None) -> Array:
    """Return a statistic of samples with replacement, drawn with the random numbers of the harness.

    Args:
        statistic: computes the statistic [...] of samples, given the indices [..., N] of their values.
        size: number of values.
        clusters: cluster labels; whole clusters are drawn.
    """
    results = []
    if clusters is not None:
        members: dict[Hashable, list[int]] = {}
        for index, label in enumerate(clusters):
            members.setdefault(label, []).append(index)
        random = Random(0)
        groups = list(members.values())
        for _ in range(BOOTSTRAP_DRAWS // 50):
            sample = [index for group in random.choices(groups, k=len(groups)) for index in group]
            results.append(statistic(np.array([sample])))
        return np.concatenate(results)
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


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """Return the 95% interval of a proportion (Wilson, 1927), which is also valid for few trials."""
    share = successes / trials
    center = share + Z * Z / (2 * trials)
    width = Z * math.sqrt(share * (1 - share) / trials + Z * Z / (4 * trials * trials))
    scale = 1 + Z * Z / trials
    return (center - width) / scale, (center + width) / scale


def mean_interval(values: Array, clusters: Clusters = None) -> tuple[float, float]:
    """Return the 95% interval of a mean: Wilson's for independent values of 0 and 1, else Student's."""
    if clusters is None and np.isin(values, (0, 1)).all():
        return wilson_interval(float(values.sum()), len(values))
    degrees = len(values if clusters is None else set(clusters)) - 1
    width = student_quantile(0.975, degrees) * mean_stderr(values, clusters) if degrees else math.inf
    return float(values.mean()) - width, float(values.mean()) + width


# Student's distribution


def student_tail(t: float, degrees: int) -> float:
    """Return the probability that Student's t is at least `t` (t >= 0), by its finite series."""
    angle = math.atan(t / math.sqrt(degrees))
    is_odd = degrees % 2
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for k in range(2 + is_odd, degrees + 1, 2):
        total += term
        term *= (k - 1) / k * math.cos(angle) ** 2
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
    tail = sum(math.comb(trials, count) for count in range(min(only_first, only_second) + 1))
    return float(min(1, 2 * tail / 2**trials))


def paired_p(differences: Array, clusters: Clusters = None) -> float:
    """Return the two-sided p-value of Student's test that the mean of paired differences is 0."""
    stderr = mean_stderr(differences, clusters)
    mean = abs(float(differences.mean()))
    if stderr == 0:
        return float(mean == 0)
    return 2 * student_tail(mean / stderr, len(differences if clusters is None else set(clusters)) - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for the number of tests (Holm, 1979)."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def detectable_difference(stderr: float) -> float:
    """Return the smallest difference that a two-sided test at 5% finds with a probability of 80%."""
    return (Z + NormalDist().inv_cdf(0.8)) * stderr
