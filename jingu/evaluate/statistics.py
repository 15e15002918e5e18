"""Errors of scores, and tests of differences between them.

Shapes: N values (of documents), ... draws of the bootstrap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from random import Random
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
# Draws of the bootstrap, as the harness takes them, and how many of them share a seed.
BOOTSTRAP_DRAWS = 100_000
_DRAWS_PER_SEED = 1_000
# Indices of the bootstrap in memory at a time.
_MAX_INDICES = 1 << 22


def mean_stderr(values: Array) -> float:
    """Return the standard error of a mean; 0 for a single value."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def clustered_stderr(values: Array, clusters: Sequence[Hashable]) -> float:
    """Return the standard error of a mean of values that belong together in clusters (Miller, 2024), corrected for
    few clusters."""
    labels = {cluster: index for index, cluster in enumerate(dict.fromkeys(clusters))}
    indices = np.array([labels[cluster] for cluster in clusters])
    sums = np.bincount(indices, weights=values - values.mean())
    count = len(sums)
    if count < 2:
        return 0.0
    return math.sqrt(count / (count - 1) * float((sums**2).sum())) / len(values)


def bootstrap_values(statistic: Callable[[npt.NDArray[np.intp]], Array], size: int, draws: int) -> Array:
    """Return a statistic of samples with replacement, drawn with the random numbers of the harness.

    Args:
        statistic: of indices [..., N] of the values that a sample consists of.
        size: number of values.
        draws: number of samples; a multiple of 1,000, or at most 1,000.
    """
    results = []
    per_seed = min(_DRAWS_PER_SEED, draws)
    step = max(1, _MAX_INDICES // size)
    for seed in range(draws // per_seed):
        # The generator that `random.Random(seed).choices` uses, but for many draws at once.
        _, state, _ = Random(seed).getstate()
        generator = np.random.RandomState()
        generator.set_state(("MT19937", np.array(state[:-1], np.uint32), state[-1], 0, 0.0))
        for first in range(0, per_seed, step):
            uniform = generator.random_sample((min(step, per_seed - first), size))
            results.append(statistic((uniform * size).astype(np.intp)))
    return np.concatenate(results)


def wilson_interval(successes: float, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Return the interval of a proportion (Wilson, 1927), which holds for few trials too."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    share = successes / trials
    center = share + z * z / (2 * trials)
    width = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return (center - width) / scale, (center + width) / scale


def mean_interval(values: Array, clusters: Sequence[Hashable] | None = None) -> tuple[float, float]:
    """Return the 95% interval of a mean: Wilson's for values of 0 and 1, else Student's; over clusters if there are."""
    if clusters is None and np.isin(values, (0, 1)).all():
        return wilson_interval(float(values.sum()), len(values))
    stderr = mean_stderr(values) if clusters is None else clustered_stderr(values, clusters)
    degrees = (len(values) if clusters is None else len(set(clusters))) - 1
    width = student_quantile(0.975, degrees) * stderr if degrees > 0 else math.inf
    return float(values.mean()) - width, float(values.mean()) + width


# Student's distribution


def student_tail(t: float, degrees: float) -> float:
    """Return the probability that Student's t is at least `t`, which is not negative."""
    return 0.5 * _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


def student_quantile(probability: float, degrees: float) -> float:
    """Return the t that Student's distribution stays below with a probability above 1/2."""
    low = 0.0
    high = 2.0
    while student_tail(high, degrees) > 1 - probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if student_tail(middle, degrees) > 1 - probability:
            low = middle
        else:
            high = middle
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function, by its continued fraction (Lentz)."""
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    if x <= 0:
        return 0.0
    tiny = 1e-300
    c = 1.0
    d = 1 / (1 - (a + b) * x / (a + 1) or tiny)
    fraction = d
    for m in range(1, 10_000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) * fraction / a


# Comparisons


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value of McNemar's test: documents that only one of two models has right."""
    trials = only_first + only_second
    tail = sum(math.comb(trials, count) for count in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**trials)


def paired_p(differences: Array, clusters: Sequence[Hashable] | None = None) -> float:
    """Return the two-sided p-value of Student's test that the mean of paired differences is 0."""
    stderr = mean_stderr(differences) if clusters is None else clustered_stderr(differences, clusters)
    degrees = (len(differences) if clusters is None else len(set(clusters))) - 1
    if stderr == 0:
        return 1.0 if differences.mean() == 0 else 0.0
    return 2 * student_tail(abs(float(differences.mean())) / stderr, degrees)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for the number of tests (Holm, 1979)."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def detectable_difference(stderr: float) -> float:
    """Return the smallest difference that a two-sided test at 5% finds with a probability of 80%."""
    return (NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8)) * stderr
