"""Errors, intervals and tests against scipy's and the harness's, and whether intervals cover."""

from __future__ import annotations

import math
from itertools import product
from random import Random

import numpy as np
import pytest
import scipy.stats
from scipy.stats import binomtest

from jingu.evaluate import statistics
from jingu.evaluate.task_metrics import AGGREGATIONS, aggregate, average_results

VALUES = np.random.default_rng(3).normal(size=37)


def test_student_is_scipys() -> None:
    for degrees in (1, 2, 3, 4, 11, 29, 30, 999):
        for t in (0.0, 0.3, 1.0, 2.7, 9.0):
            assert statistics.student_tail(t, degrees) == pytest.approx(scipy.stats.t.sf(t, degrees), abs=1e-13)
        expected = scipy.stats.t.ppf(0.975, degrees)
        assert statistics.student_quantile(0.975, degrees) == pytest.approx(expected, rel=1e-9)


def test_paired_tests_are_scipys() -> None:
    differences = VALUES + 0.3
    expected = scipy.stats.ttest_1samp(differences, 0).pvalue
    assert statistics.paired_p(differences) == pytest.approx(expected, rel=1e-9)
    assert statistics.paired_p(np.zeros(5)) == 1
    assert statistics.mean_stderr(differences) == pytest.approx(scipy.stats.sem(differences), rel=1e-12)
    low, high = scipy.stats.t.interval(0.95, 36, differences.mean(), scipy.stats.sem(differences))
    assert statistics.mean_interval(differences) == pytest.approx((low, high), rel=1e-9)
    for first, second in ((0, 0), (3, 9), (9, 3), (5, 5), (40, 71), (700, 803)):
        expected = binomtest(first, first + second).pvalue if first + second else 1.0
        assert statistics.mcnemar_p(first, second) == pytest.approx(expected, rel=1e-9)


def test_wilson_is_scipys() -> None:
    for successes, trials in ((0, 7), (3, 10), (10, 10), (41, 230)):
        interval = binomtest(successes, trials).proportion_ci(method="wilson")
        assert statistics.wilson_interval(successes, trials) == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_holm_by_hand() -> None:
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.6, 0.9]) == [1.0, 1.0] and statistics.holm([]) == []


def test_clusters_of_one_are_no_clusters_and_copies_add_nothing() -> None:
    plain = statistics.mean_stderr(VALUES)
    assert statistics.mean_stderr(VALUES, list(range(37))) == pytest.approx(plain, rel=1e-12)
    # Each value five times: the naive error is too small by √5, and that over clusters is that of the values.
    copies = np.repeat(VALUES, 5)
    assert statistics.mean_stderr(copies, [str(index // 5) for index in range(185)]) == pytest.approx(plain, rel=1e-9)


def test_bootstrap_draws_what_the_harness_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "BOOTSTRAP_DRAWS", 3_000)
    monkeypatch.setattr(statistics, "_MAX_INDICES", 37 * 300)
    draws = statistics.bootstrap(lambda indices: VALUES[indices].mean(-1), 37)
    expected = [np.mean(Random(seed).choices(VALUES.tolist(), k=37)) for seed in range(3)]
    assert draws[::1000] == pytest.approx(expected, rel=1e-12) and len(draws) == 3_000
    generator = Random(2)
    expected = [float(np.mean(generator.choices(VALUES.tolist(), k=37))) for _ in range(1000)]
    assert draws[2000:] == pytest.approx(expected, rel=1e-12)


def test_f1_and_matthews_are_scikit_learns() -> None:
    import sklearn.metrics

    pairs = np.random.default_rng(1).integers(0, 2, (6, 41, 2)).astype(float)
    for batch in pairs:
        gold, predicted = batch.T
        assert AGGREGATIONS["f1"](batch) == pytest.approx(sklearn.metrics.f1_score(gold, predicted))
        expected = sklearn.metrics.matthews_corrcoef(gold, predicted)
        assert AGGREGATIONS["matthews_corrcoef"](batch) == pytest.approx(expected)
    many = np.random.default_rng(1).integers(0, 4, (29, 2)).astype(float)
    expected = sklearn.metrics.matthews_corrcoef(*many.T)
    assert AGGREGATIONS["matthews_corrcoef"](many) == pytest.approx(expected)
    assert AGGREGATIONS["matthews_corrcoef"](np.array([[1.0, 1.0], [1.0, 0.0]])) == 0
    assert AGGREGATIONS["f1"](np.zeros((3, 2))) == 0


def test_the_error_of_clustered_perplexity_is_that_of_whole_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "BOOTSTRAP_DRAWS", 100_000)
    plain = aggregate({"metric": "perplexity"}, VALUES[:20])
    copies = aggregate({"metric": "perplexity"}, np.repeat(VALUES[:20], 3).tolist(), [n // 3 for n in range(60)])
    assert copies.value == pytest.approx(plain.value)
    assert copies.stderr == pytest.approx(plain.stderr, rel=0.1)
    # As the logarithm is smooth, the delta method is near: value times the error of the mean.
    assert plain.stderr == pytest.approx(plain.value * statistics.mean_stderr(VALUES[:20]), rel=0.15)


SIMULATIONS = [*product((30, 1000), ("shares", "numbers", "clusters", "shares of clusters"))]


@pytest.mark.parametrize(("size", "kind"), SIMULATIONS)
def test_intervals_cover(size: int, kind: str) -> None:
    """Of 2,000 simulations 93% to 97% of the intervals contain the truth."""
    generator = np.random.default_rng(7)
    covered = 0
    for _ in range(2_000):
        clusters = None
        if kind == "shares":
            values = (generator.random(size) < 0.37).astype(float)
            truth = 0.37
        elif kind == "numbers":
            values = generator.normal(size=size)
            truth = 0.0
        else:
            # Three documents share most of their difficulty.
            values = np.repeat(generator.normal(size=-(-size // 3)), 3)[:size] + 0.3 * generator.normal(size=size)
            clusters = [index // 3 for index in range(size)]
            truth = 0.0
            if kind == "shares of clusters":
                values = (values > 0).astype(float)
                truth = 0.5
        low, high = statistics.mean_interval(values, clusters)
        covered += low <= truth <= high
    assert 0.93 <= covered / 2_000 <= 0.97
    assert math.isfinite(high)


def test_the_detectable_difference_is_detected_in_four_of_five_simulations() -> None:
    generator = np.random.default_rng(11)
    detected = 0
    for _ in range(2_000):
        values = generator.normal(size=400)
        values += statistics.detectable_difference(1 / math.sqrt(400))
        detected += statistics.paired_p(values) < 0.05
    assert 0.77 <= detected / 2_000 <= 0.83


@pytest.mark.parametrize("weight_by_size", [True, False])
def test_errors_of_groups_are_the_harnesss(weight_by_size: bool) -> None:
    """A task with a single document has no standard error there ("N/A"), and then its group has none."""
    from lm_eval.api.metrics import pooled_sample_stderr, unweighted_mean_stderr

    parts = [aggregate({"metric": "acc"}, values) for values in ([0.0, 1.0, 1.0], [1.0, 0.0], [0.0])]
    stderrs = [part.stderr for part in parts[:2]]
    expected = pooled_sample_stderr(stderrs, [3, 2]) if weight_by_size else unweighted_mean_stderr(stderrs)
    assert average_results(parts[:2], weight_by_size).stderr == pytest.approx(expected)
    for group in (parts, parts[2:], [parts[2]] * 3):
        mean = average_results(group, weight_by_size)
        assert math.isnan(mean.stderr) and math.isfinite(mean.value)
