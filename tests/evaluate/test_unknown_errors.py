"""What a single document, a single cluster or equal scores do not tell is unknown, and never 0."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from jingu.evaluate import statistics
from jingu.evaluate.comparison import compare, compare_metric, describe_settings, mean_metrics, read_evaluations
from jingu.evaluate.contamination import compare_clean
from jingu.evaluate.evaluation import aggregate_records, evaluate_task, prepare_task, write_result
from jingu.evaluate.scoring import AnswerCache, Scorer
from jingu.evaluate.task_metrics import AGGREGATIONS, aggregate, average_results
from jingu.infer.engine import Engine
from jingu.infer.inference_model import InferenceModel
from jingu.report.evaluations import render_evaluations
from tests.evaluate.conftest import ROWS, WriteTask, load_task

Record = dict[str, Any]


def record(index: int, value: Any, cluster: str | None = None, name: str = "m,none") -> Record:
    return {"index": index, "hash": str(index), "cluster": cluster, "pairs": [["", ""]], "metrics": {name: value}}


def pairs_of(first: list[Any], second: list[Any], clusters: list[str] | None = None) -> list[tuple[Record, Record]]:
    labels = clusters or [None] * len(first)
    return [
        (record(number, one, label), record(number, two, label))
        for number, (one, two, label) in enumerate(zip(first, second, labels, strict=True))
    ]


@pytest.mark.parametrize(
    "values",
    [[0.2], [1.0], [-3.5], [0.0]],
)
def test_a_single_document_has_no_error(values: list[float]) -> None:
    array = np.array(values)
    assert math.isnan(statistics.mean_stderr(array)) and math.isnan(statistics.paired_p(array))
    assert math.isnan(statistics.detectable_difference(statistics.mean_stderr(array)))
    for metric in ("acc", "perplexity", "nanmean"):
        assert math.isnan(aggregate({"metric": "x", "aggregation": metric}, values).stderr)
    difference = compare_metric(pairs_of(values, [values[0] + 0.3]), "m,none")
    assert all(map(math.isnan, (difference.stderr, difference.detectable, difference.p)))
    assert difference.columns()[2:4] == ["N/A", "N/A"]


@pytest.mark.parametrize("aggregation", ["mean", "perplexity", "median"])
def test_a_single_cluster_has_no_error(aggregation: str) -> None:
    result = aggregate({"metric": "x", "aggregation": aggregation}, [0.1, 0.7, 0.4], ["a"] * 3)
    assert math.isnan(result.stderr) and not any(map(math.isfinite, result.interval))
    assert math.isnan(statistics.paired_p(np.array([0.1, 0.2, 0.4]), ["a"] * 3))


def test_equal_scores_make_nothing_certain() -> None:
    # Nothing differs: a difference may still exist, and how large one would show is unknown.
    same = compare_metric(pairs_of([1, 0] * 5, [1, 0] * 5), "m,none")
    assert same.p == 1 and math.isnan(same.detectable)
    # All documents differ by as much: the sign test in place of a t without an error.
    for count in (2, 5, 10):
        shifted = compare_metric(pairs_of([0.2] * count, [0.5] * count), "m,none")
        assert shifted.p == pytest.approx(scipy.stats.binomtest(count, count).pvalue)
    clustered = compare_metric(pairs_of([0.2] * 9, [0.5] * 9, ["a", "b", "c"] * 3), "m,none")
    assert clustered.p == pytest.approx(0.25)


@pytest.mark.parametrize(("value", "size", "count"), [(1.0, 20, 5), (0.0, 12, 3), (1.0, 8, 2), (0.5, 16, 4)])
def test_intervals_of_equal_clusters_have_a_width(value: float, size: int, count: int) -> None:
    values = np.array([1.0, 0.0] * (size // 2)) if value == 0.5 else np.full(size, value)
    clusters = [str(index * count // size) for index in range(size)]
    low, high = statistics.mean_interval(values, clusters)
    wide = statistics.wilson_interval(value * count, count)
    assert low <= wide[0] + 1e-12 and high >= wide[1] - 1e-12
    assert statistics.mean_interval(np.full(6, 3.5)) == statistics.UNKNOWN_INTERVAL
    group = average_results([aggregate({"metric": "acc"}, [1.0] * size)] * 3, weight_by_size=True)
    assert group.interval[0] < 1 and group.stderr == 0


@pytest.mark.parametrize("labels", [[0, 0, 0, 1, 2], [0, 1, 1, 1, 1, 1, 3], [0, 0, 2, 2, 2, 2, 5, 5]])
@pytest.mark.parametrize("average", ["macro", "weighted"])
def test_f1_in_draws_without_a_class_is_scikit_learns(labels: list[int], average: str) -> None:
    assert aggregate({"metric": "f1", "average": average}, [(label, label) for label in labels]).stderr == 0
    predicted = [*labels[1:], labels[0]]
    pairs = np.array([*zip(labels, predicted, strict=True)], np.float64)
    draws = np.random.default_rng(1).integers(0, len(labels), (50, len(labels)))
    metric = {"metric": "f1", "average": average}
    own = statistics.bootstrap
    seen: list[Any] = []

    def collect(statistic: Callable[[Any], Any], size: int, clusters: Any = None) -> Any:
        seen.append((statistic(draws), np.concatenate([statistic(draw[None]) for draw in draws])))
        return own(statistic, size, clusters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "BOOTSTRAP_DRAWS", 1_000)
        patch.setattr(statistics, "bootstrap", collect)
        aggregate(metric, pairs.tolist())
    expected = [sklearn.metrics.f1_score(*pairs[draw].T, average=average, zero_division=0) for draw in draws]
    # Many draws at once, and one draw as for clusters.
    assert seen[0][0] == pytest.approx(expected) and seen[0][1] == pytest.approx(expected)


def test_ranks_are_those_of_each_draw() -> None:
    pairs = np.random.default_rng(2).integers(0, 4, (30, 9, 2)).astype(float)
    expected = [scipy.stats.spearmanr(*draw.T).statistic for draw in pairs]
    assert AGGREGATIONS["spearman"](pairs) == pytest.approx(np.nan_to_num(expected))


@pytest.mark.parametrize("metric", ["chrf", "bleu", "own", "spearman", "f1"])
def test_clusters_reach_every_metric(metric: str) -> None:
    words = ["a b c d", "e f g h", "a b x y", "k l m n", "o p q r", "s t u v"]
    texts: list[Any] = [(("a b c d",), words[number // 8]) for number in range(48)]
    options: dict[str, Any] = {"metric": metric}
    if metric == "own":
        options["aggregation"] = lambda values: float(np.mean([len(text) for _, text in values]))
        texts = [(gold, "w" * (number // 8 + 1)) for number, (gold, _) in enumerate(texts)]
    if metric in ("spearman", "f1"):
        texts = [(number // 8 % 3 % 2, [0, 1, 1, 0, 1, 0][number // 8]) for number in range(48)]
    clusters = [str(number // 8) for number in range(48)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "BOOTSTRAP_DRAWS", 20_000)
        alone = aggregate(options, texts)
        clustered = aggregate(options, texts, clusters)
    assert clustered.stderr > 1.5 * alone.stderr > 0 and clustered.value == alone.value


def test_a_p_value_that_is_no_number_spoils_no_other() -> None:
    nan = math.nan
    assert statistics.holm([nan, 0.01, 0.04]) == pytest.approx([nan, 0.02, 0.04], nan_ok=True)
    assert statistics.holm([0.04, nan, 0.01, nan]) == pytest.approx([0.04, nan, 0.02, nan], nan_ok=True)
    assert statistics.holm([nan]) == pytest.approx([nan], nan_ok=True)


@pytest.mark.parametrize(("first", "second"), [(6_000, 6_100), (0, 12_100), (50_000, 51_000), (1, 9_999)])
def test_mcnemar_of_many_documents(first: int, second: int) -> None:
    start = time.process_time()
    p = statistics.mcnemar_p(first, second)
    assert p == pytest.approx(scipy.stats.binomtest(first, first + second).pvalue, rel=1e-9, abs=1e-300)
    assert time.process_time() - start < 60


def test_a_metric_of_some_documents() -> None:
    records = [record(number, number / 8, "ab"[number % 2]) for number in range(8)]
    for number in (1, 2, 5, 6):
        records[number]["metrics"]["odd,none"] = float(number)
    del records[0]["metrics"]["m,none"]
    results = aggregate_records(records, [])
    assert results["odd,none"].size == 4 and results["odd,none"].value == 3.5
    assert results["m,none"].size == 7 and results["odd,none"].method == "clustered"
    pairs = [(one, {**one, "metrics": {key: value + 1 for key, value in one["metrics"].items()}}) for one in records]
    assert set(mean_metrics(pairs)) == {"m,none", "odd,none"}
    assert compare_metric(pairs, "odd,none").size == 4 and compare_metric(pairs, "odd,none").value == 1


def test_files_and_pages_say_what_is_unknown(
    tiny: InferenceModel, write_task: WriteTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = prepare_task(load_task(write_task(ROWS[:1], metric_list=[{"metric": "brier_score"}])))
    result = evaluate_task(prepared, Scorer(Engine(tiny), AnswerCache(None)))
    for name in "ab":
        write_result(result, tmp_path / name, {"precision": "fp32"})
    text = (tmp_path / "a" / "sums.json").read_text(encoding="utf-8")
    stored = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert stored["results"]["brier_score,none"]["stderr"] is None
    assert stored["results"]["brier_score,none"]["interval"] == [None, None]
    assert "N/A" in (render_evaluations(tmp_path / "a") or "")
    compare(tmp_path / "a", [tmp_path / "b"])
    printed = capsys.readouterr().out
    assert "sums  brier_score          1  fp32          +0.0000     N/A         N/A  paired t  N/A       N/A" in printed
    contamination = tmp_path / "contamination"
    contamination.mkdir()
    (contamination / "contamination.json").write_text('{"tasks": {"sums": {}}}', encoding="utf-8")
    (contamination / "dirty.jsonl").write_text("", encoding="utf-8")
    compare_clean(tmp_path / "a", contamination)
    assert "N/A" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_shots": 3}, r"shots differs \(0 and 3\)"),
        ({"limit": 4}, "only 4 documents are in both, of 7 and 4"),
        ({"precision": "bf16"}, r"precision differs \(fp32 and bf16\)"),
        ({"metadata": {"version": 2.0}}, r"version of the task differs \(None and 2.0\)|version of the task"),
        ({"doc_to_text": "{{question}}?"}, "doc_to_text differs"),
        ({"metric_list": [{"metric": "acc"}], "target_delimiter": "\n"}, "the prompts of 7 documents differ"),
    ],
)
def test_unequal_settings_are_not_compared_in_silence(
    changes: dict[str, Any],
    words: str,
    tiny: InferenceModel,
    write_task: WriteTask,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scorer = Scorer(Engine(tiny), AnswerCache(None))
    base = {"metadata": {"version": 1.0}, "metric_list": [{"metric": "acc"}]}
    write_result(
        evaluate_task(prepare_task(load_task(write_task(**base))), scorer), tmp_path / "a", {"precision": "fp32"}
    )
    compare(tmp_path / "a", [tmp_path / "a"])
    assert "not the same question" not in capsys.readouterr().out
    options = {key: changes.pop(key) for key in ("num_shots", "limit", "precision") if key in changes}
    precision = options.pop("precision", "fp32")
    prepared = prepare_task(load_task(write_task(**{**base, **changes})), **options)
    write_result(evaluate_task(prepared, scorer), tmp_path / "b", {"precision": precision})
    compare(tmp_path / "a", [tmp_path / "b"])
    printed = capsys.readouterr().out
    assert "b, sums: not the same question: " in printed and re.search(words, printed)
    first, second = (read_evaluations(tmp_path / name)["sums"] for name in "ab")
    assert describe_settings(first, first, []) != describe_settings(first, second, [])
