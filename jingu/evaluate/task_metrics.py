"""Metrics: what is measured for a document, how documents are aggregated, and the errors of the results.

Shapes: N documents, ... draws of the bootstrap.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jingu.errors import JinguError, join_words
from jingu.evaluate import statistics
from jingu.evaluate.prompts import EvaluationSample
from jingu.evaluate.task_file import MetricSettings, OutputType, TaskSettings

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Answer:
    """What the model gives for one request.

    Attributes:
        logprob: of a continuation or a text.
        is_greedy: whether greedy decoding gives the continuation.
        num_tokens: of the continuation or text.
        text: that was generated.
    """

    logprob: float = 0.0
    is_greedy: bool = False
    num_tokens: int = 0
    text: str = ""


Measure = Callable[[EvaluationSample, Sequence[Answer], dict[str, Any]], Any]


# What is measured for a document


def _predict(answers: Sequence[Answer], lengths: Sequence[float]) -> int:
    """Return the choice with the highest log-probability per length; the first of equal ones."""
    scores = [answer.logprob / length for answer, length in zip(answers, lengths, strict=True)]
    return int(np.argmax(scores))


def _accuracy(length: Callable[[str, Answer], float]) -> Measure:
    """Return a measure of whether the best choice, by its log-probability per length, is right."""

    def measure(sample: EvaluationSample, answers: Sequence[Answer], options: dict[str, Any]) -> float:
        answers = answers[: len(sample.choices)]
        lengths = [length(choice, answer) for choice, answer in zip(sample.choices, answers, strict=True)]
        return float(_predict(answers, lengths) in sample.gold)

    return measure


def _mutual_information(sample: EvaluationSample, answers: Sequence[Answer], options: dict[str, Any]) -> float:
    count = len(sample.choices)
    gains = [answer.logprob - alone.logprob for answer, alone in zip(answers[:count], answers[count:], strict=True)]
    return float(int(np.argmax(gains)) in sample.gold)


def _label(sample: EvaluationSample, answers: Sequence[Answer], options: dict[str, Any]) -> tuple[int, int]:
    return sample.gold[0], _predict(answers[: len(sample.choices)], [1.0] * len(sample.choices))


def _brier(sample: EvaluationSample, answers: Sequence[Answer], options: dict[str, Any]) -> float:
    logprobs = np.array([answer.logprob for answer in answers[: len(sample.choices)]])
    shares = np.exp(logprobs - logprobs.max())
    shares /= shares.sum()
    shares[sample.gold[0]] -= 1
    return float((shares**2).sum())


def _greedy_choice(sample: EvaluationSample, answers: Sequence[Answer], options: dict[str, Any]) -> float:
    return float(any(answers[number].is_greedy for number in sample.gold))


def _exact_match(sample: EvaluationSample, answers: Sequence[Answer], options: dict[str, Any]) -> float:
    def normalize(text: str) -> str:
        for pattern in options.get("regexes_to_ignore") or ():
            text = re.sub(pattern, "", text)
        if options.get("ignore_case"):
            text = text.lower()
        removed = string.punctuation if options.get("ignore_punctuation") else ""
        removed += string.digits if options.get("ignore_numbers") else ""
        return text.translate(str.maketrans("", "", removed))

    answer = normalize(answers[0].text)
    return float(any(answer == normalize(str(gold)) for gold in sample.gold))


def _logprob_of(count: Callable[[str], int]) -> Measure:
    """Return a measure of the text's log-probability and of its length."""

    def measure(sample: EvaluationSample, answers: Sequence[Answer], options: dict[str, Any]) -> tuple[float, int]:
        return answers[0].logprob, count(sample.pairs[0][1])

    return measure


def _count_words(text: str) -> int:
    return len(re.split(r"\s+", text))


def _count_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


# Aggregations of values [N, ...]; the axis of the documents is the last but those of a value.


def _f1(pairs: Array) -> Array:
    gold, predicted = pairs[..., 0] == 1, pairs[..., 1] == 1
    both = (gold & predicted).sum(-1)
    total = gold.sum(-1) + predicted.sum(-1)
    return np.divide(2 * both, total, out=np.zeros(total.shape), where=total > 0)


def _matthews(pairs: Array) -> Array:
    """Matthews' correlation of any number of classes, as scikit-learn computes it."""
    gold, predicted = pairs[..., 0], pairs[..., 1]
    size = pairs.shape[-2]
    labels = np.unique(pairs)
    golds = [(gold == label).sum(-1) for label in labels]
    predictions = [(predicted == label).sum(-1) for label in labels]
    covariance = (gold == predicted).sum(-1) * float(size)
    variance_gold = np.full(covariance.shape, float(size) ** 2)
    variance_predicted = variance_gold.copy()
    for of_gold, of_predicted in zip(golds, predictions, strict=True):
        covariance = covariance - of_gold * of_predicted
        variance_gold -= of_gold.astype(float) ** 2
        variance_predicted -= of_predicted.astype(float) ** 2
    product = variance_gold * variance_predicted
    return np.divide(covariance, np.sqrt(product), out=np.zeros(product.shape), where=product > 0)


def _weighted_mean(pairs: Array) -> Array:
    mean: Array = pairs[..., 0].sum(-1) / pairs[..., 1].sum(-1)
    return mean


def _median(values: Array) -> Array:
    """The upper one of two in the middle."""
    size = values.shape[-1]
    median: Array = np.partition(values, size // 2, axis=-1)[..., size // 2]
    return median


AGGREGATIONS: dict[str, Callable[[Array], Array]] = {
    "mean": lambda values: values.mean(-1),
    "nanmean": lambda values: np.nanmean(values, -1),
    "median": _median,
    "perplexity": lambda values: np.exp(-values.mean(-1)),
    "weighted_perplexity": lambda pairs: np.exp(-_weighted_mean(pairs)),
    "bits_per_byte": lambda pairs: -_weighted_mean(pairs) / math.log(2),
    "f1": _f1,
    "matthews_corrcoef": _matthews,
    "brier_score": lambda values: values.mean(-1),
}


@dataclass(frozen=True)
class Metric:
    """A metric.

    Attributes:
        measure: a value of a document, from its answers and the metric's options.
        output_types: of the tasks that it fits.
    """

    measure: Measure
    output_types: tuple[OutputType, ...]
    aggregation: str = "mean"
    higher_is_better: bool = True


_CHOICE: tuple[OutputType, ...] = ("multiple_choice",)
_ROLLING: tuple[OutputType, ...] = ("loglikelihood_rolling",)
METRICS: dict[tuple[str, OutputType], Metric] = {
    (name, output_type): metric
    for name, metric in (
        ("acc", Metric(_accuracy(lambda choice, answer: 1.0), _CHOICE)),
        ("acc", Metric(lambda sample, answers, options: float(answers[0].is_greedy), ("loglikelihood",))),
        ("acc_norm", Metric(_accuracy(lambda choice, answer: len(choice)), _CHOICE)),
        ("acc_bytes", Metric(_accuracy(lambda choice, answer: _count_bytes(choice)), _CHOICE)),
        ("acc_tokens", Metric(_accuracy(lambda choice, answer: answer.num_tokens), _CHOICE)),
        ("acc_mutual_info", Metric(_mutual_information, _CHOICE)),
        ("f1", Metric(_label, _CHOICE, "f1")),
        ("mcc", Metric(_label, _CHOICE, "matthews_corrcoef")),
        ("brier_score", Metric(_brier, _CHOICE, "brier_score", higher_is_better=False)),
        ("exact_match", Metric(_greedy_choice, _CHOICE)),
        ("exact_match", Metric(_exact_match, ("generate_until",))),
        (
            "perplexity",
            Metric(lambda sample, answers, options: answers[0].logprob, ("loglikelihood",), "perplexity", False),
        ),
        ("word_perplexity", Metric(_logprob_of(_count_words), _ROLLING, "weighted_perplexity", False)),
        ("byte_perplexity", Metric(_logprob_of(_count_bytes), _ROLLING, "weighted_perplexity", False)),
        ("bits_per_byte", Metric(_logprob_of(_count_bytes), _ROLLING, "bits_per_byte", False)),
    )
    for output_type in metric.output_types
}
_DEFAULTS: dict[OutputType, tuple[str, ...]] = {
    "multiple_choice": ("acc", "acc_norm"),
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "generate_until": ("exact_match",),
}
# Aggregations whose error the harness takes from the bootstrap; for the others that are no mean it has none.
_BOOTSTRAPPED = ("median", "nanmean", "f1", "matthews_corrcoef", "perplexity")


def metrics_of(task: TaskSettings) -> list[MetricSettings]:
    """Return the metrics of a task, its own or those of its output type. Raises JinguError if one does not fit."""
    if task.metric_list is None:
        return [MetricSettings(metric=name) for name in _DEFAULTS[task.output_type]]
    if task.process_results is not None:
        return task.metric_list
    for settings in task.metric_list:
        name = settings.metric
        if (name, task.output_type) not in METRICS:
            fitting = sorted(metric for metric, output_type in METRICS if output_type == task.output_type)
            what = f"the metric {name} does not fit tasks of type {task.output_type}."
            fix = f"Those that do: {join_words(fitting, 'and')}."
            raise JinguError(what, where=f"{task.task} ({task.file})", fix=fix)
        if settings.aggregation not in (None, *AGGREGATIONS):
            what = f"there is no aggregation {settings.aggregation}."
            fix = f"Use {join_words([*AGGREGATIONS])}."
            raise JinguError(what, where=f"{task.task} ({task.file})", fix=fix)
    return task.metric_list


def aggregation_of(task: TaskSettings, settings: MetricSettings) -> str:
    """Return the name of a metric's aggregation."""
    metric = METRICS.get((settings.metric, task.output_type))
    return settings.aggregation or (metric.aggregation if metric else "mean")


def check_samples(task: TaskSettings, samples: Sequence[EvaluationSample]) -> None:
    """Raise JinguError if a metric does not fit the documents."""
    names = {metric.metric for metric in metrics_of(task)}
    if "f1" in names and any(len(sample.choices) != 2 for sample in samples):
        what = "the metric f1 is for tasks with two choices, the second of which is the class that is sought."
        raise JinguError(what, where=f"{task.task} ({task.file})", fix="Use acc or mcc.")
    if "acc_norm" in names and any("" in sample.choices for sample in samples):
        what = "a document has an empty choice, which has no length."
        raise JinguError(what, where=f"{task.task} ({task.file})", fix="Correct doc_to_choice, or leave out acc_norm.")


@dataclass(frozen=True)
class MetricResult:
    """A metric of a task.

    Attributes:
        stderr: its standard error; by the harness's formula where it has one.
        method: how the error was estimated.
        interval: of 95%.
        size: number of documents.
    """

    value: float
    stderr: float
    method: str
    interval: tuple[float, float]
    size: int
    higher_is_better: bool


def aggregate(
    name: str, values: Sequence[Any], higher_is_better: bool, clusters: Sequence[Hashable] | None = None
) -> MetricResult:
    """Return a metric of a task with its error.

    Args:
        name: of the aggregation.
        values: of the documents.
        clusters: labels of the documents; equal ones belong together.
    """
    array = np.array(values, np.float64)
    statistic = AGGREGATIONS[name]
    value = float(statistic(array))
    size = len(array)
    if name in ("mean", "brier_score"):
        method = "mean" if clusters is None else "clustered"
        stderr = statistics.mean_stderr(array) if clusters is None else statistics.clustered_stderr(array, clusters)
        interval = statistics.mean_interval(array, clusters)
    else:
        method = "bootstrap"
        draws = statistics.BOOTSTRAP_DRAWS if name in _BOOTSTRAPPED else statistics.BOOTSTRAP_DRAWS // 10
        values_of_draws = _bootstrap(statistic, array, draws, clusters)
        stderr = float(values_of_draws.std(ddof=1))
        low, high = np.quantile(values_of_draws, (0.025, 0.975))
        interval = (float(low), float(high))
    return MetricResult(value, stderr, method, interval, size, higher_is_better)


def _bootstrap(
    statistic: Callable[[Array], Array], array: Array, draws: int, clusters: Sequence[Hashable] | None
) -> Array:
    """Return a statistic of samples of documents, or of clusters of them."""
    if clusters is None:
        return statistics.bootstrap_values(lambda indices: statistic(array[indices]), len(array), draws)
    groups: dict[Hashable, list[int]] = {}
    for index, cluster in enumerate(clusters):
        groups.setdefault(cluster, []).append(index)
    members = [np.array(group) for group in groups.values()]

    def of_clusters(indices: npt.NDArray[np.intp]) -> Array:
        samples = [np.concatenate([members[index] for index in row]) for row in indices]
        return np.array([float(statistic(array[sample])) for sample in samples])

    return statistics.bootstrap_values(of_clusters, len(members), 2_000)


def pool_stderr(results: Sequence[MetricResult], weight_by_size: bool) -> float:
    """Return the standard error of the mean over tasks, pooled as the harness does."""
    if not weight_by_size:
        return math.sqrt(sum(result.stderr**2 for result in results)) / len(results)
    total = sum(result.size for result in results)
    pooled = sum((result.size - 1) * result.stderr**2 * result.size for result in results) / (total - len(results))
    return math.sqrt(pooled / total)
