"""Metrics: values of single documents, their aggregation over documents, and standard errors.

Shapes: N documents; leading dimensions (...) are bootstrap samples.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from jingu.errors import JinguError, join_words
from jingu.evaluate import statistics, text_metrics
from jingu.evaluate.prompts import EvaluationSample
from jingu.evaluate.task_file import Options, OutputType, TaskSettings, describe_failure, function_name
from jingu.evaluate.task_templates import TEMPLATE_ERRORS
from jingu.formatting import format_score
from jingu.tables import read_table
from jingu.text.corpus_file import import_optional

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Answer:
    """The model's output for one request.

    Attributes:
        logprob: log-probability of a continuation or a text.
        is_greedy: whether greedy decoding would generate the continuation.
        num_tokens: tokens of the continuation or text.
        text: generated text.
    """

    logprob: float = 0.0
    is_greedy: bool = False
    num_tokens: int = 0
    text: str = ""


_LABEL_METRICS = ("acc", "acc_norm", "acc_bytes", "acc_tokens", "acc_mutual_info", "f1", "mcc")
# Metrics by output type of tasks. The first ones are the defaults, as many as in `_NUM_DEFAULTS`, else all of them.
METRICS: dict[OutputType, list[str]] = {
    "multiple_choice": [*_LABEL_METRICS, "brier_score", "calibration_error", "exact_match"],
    "loglikelihood": ["perplexity", "acc"],
    "loglikelihood_rolling": [
        "word_perplexity",
        "byte_perplexity",
        "bits_per_byte",
        "bits_per_character",
        "bits_per_word",
    ],
    "generate_until": [
        *("exact_match", "bleu", "chrf", "chrf++", "ter", *text_metrics.OVERLAPS.built_in, *text_metrics.ROUGE),
        *(*text_metrics.DISTINCT, "multilabel_f1", "pearson", "spearman", "pass@k"),
    ],
}
_NUM_DEFAULTS = {"multiple_choice": 2, "loglikelihood_rolling": 3, "generate_until": 1}
_PROPERTIES: dict[str, dict[str, Any]] = read_table(__file__, "metrics.toml")
_METRIC_KEYS = ("metric", "aggregation", "higher_is_better", "hf_evaluate")
# Metrics of a whole corpus instead of single documents: those of sacrebleu, and diversity.
_SACREBLEU = ("bleu", "chrf", "chrf++", "ter")
CORPUS_METRICS = (*_SACREBLEU, *text_metrics.DISTINCT)


def name_of(metric: Options) -> str:
    """Return the name of a metric, or of the function that a task uses as one."""
    name = metric["metric"]
    return function_name(name) if callable(name) else str(name)


# Metrics of a document


def measure(
    task: TaskSettings, sample: EvaluationSample, answers: Sequence[Answer], results: list[Any] | None = None
) -> dict[str, Any]:
    """Return the metrics of a document.

    Args:
        answers: the model's outputs for the requests of the document. For generated text, the first one is the output
            of a filter, followed by the unfiltered answers if a metric runs code.
        results: all outputs of a filter that does not take the first one. A task's own functions get them as a list, as
            in lm-evaluation-harness; metrics by name measure the first one.
    """
    if task.process_results is not None:
        # The task's own function receives the same arguments as from lm-evaluation-harness.
        converters: dict[OutputType, Callable[[Answer], Any]] = {
            "generate_until": lambda answer: answer.text,
            "loglikelihood_rolling": lambda answer: answer.logprob,
        }
        convert = converters.get(task.output_type, lambda answer: (answer.logprob, answer.is_greedy))
        outputs = [results] if results is not None else [convert(answer) for answer in answers]
        return dict(task.call("process_results", task.process_results, sample.row, outputs))
    first = answers[0]
    text = sample.pairs[0][1]
    if task.output_type == "multiple_choice":
        values = _measure_choices(sample, answers)
    elif task.output_type == "loglikelihood":
        values = {"acc": float(first.is_greedy), "perplexity": first.logprob}
    elif task.output_type == "loglikelihood_rolling":
        by_bytes = (first.logprob, count_bytes(text))
        by_words = (first.logprob, len(re.split(r"\s+", text)))
        values = {
            "word_perplexity": by_words,
            "byte_perplexity": by_bytes,
            "bits_per_byte": by_bytes,
            "bits_per_character": (first.logprob, len(text)),
            "bits_per_word": by_words,
        }
    else:
        return _measure_generated(task, sample, answers, first.text if results is None else results)
    return {name_of(metric): values[name_of(metric)] for metric in metrics_of(task)}


def _measure_generated(
    task: TaskSettings, sample: EvaluationSample, answers: Sequence[Answer], result: Any
) -> dict[str, Any]:
    """Return the metrics of a generated text; see `measure`. A task's own function may return several.

    Args:
        result: the text or list of texts that a task's own functions get.
    """
    values: dict[str, Any] = {}
    for metric in metrics_of(task):
        if callable(metric["metric"]):
            values |= _measure_own(task, sample, result, metric)
        elif metric["metric"] in _LABEL_METRICS:
            values[name_of(metric)] = float(sample.is_list) or (sample.gold[0], result)
        elif is_pass_at_k(metric):
            values[name_of(metric)] = _measure_code(sample, answers[1:], metric)
        else:
            values[name_of(metric)] = _measure_text(sample.gold, answers[0].text, metric)
    return values


def _measure_own(task: TaskSettings, sample: EvaluationSample, answer: Any, metric: Options) -> dict[str, Any]:
    """Return what a task's own metric gives. As in the harness, of a list of right answers each one is scored, and the
    result is 1 if any of these scores is not 0."""
    name = name_of(metric)
    options = {key: value for key, value in metric.items() if key not in _METRIC_KEYS}

    def score(gold: str) -> Any:
        try:
            value = metric["metric"](references=[gold], predictions=[answer], **options)
        except TypeError:
            # The harness's other form of a metric: a function of a right answer and the text.
            value = metric["metric"]([gold, answer])
        return value

    scores = [task.call(f"the metric {name}", score, gold) for gold in sample.gold]
    if sample.is_list:
        values = [score[name] if isinstance(score, dict) else score for score in scores]
        return {name: float(any(values))}
    return dict(scores[0]) if isinstance(scores[0], dict) else {name: scores[0]}


def is_pass_at_k(metric: Options) -> bool:
    """Return whether a metric runs code: pass@1, pass@10 ..."""
    return name_of(metric).startswith("pass@")


def _measure_code(sample: EvaluationSample, answers: Sequence[Answer], metric: Options) -> float:
    # The filter `map` gives None for unknown texts, which pass no test.
    texts = [answer.text for answer in answers if answer.text is not None]
    num_right = text_metrics.count_passes(sample.row, texts, metric)
    return text_metrics.pass_at_k(len(answers), num_right, int(name_of(metric).removeprefix("pass@")))


def _measure_text(gold: tuple[str, ...], answer: Any, metric: Options) -> Any:
    """Return a metric of a generated text; for metrics of a whole corpus, the right texts and the generated text.

    Args:
        answer: the text. The filter `map` may give another value: its constants are measured as texts, and None, for
            an unknown text, matches nothing.
    """
    name = metric["metric"]
    text = "" if answer is None else str(answer)
    if name in CORPUS_METRICS:
        return gold, text
    if name in text_metrics.OVERLAPS:
        return 0.0 if answer is None else max(text_metrics.OVERLAPS[name](right, text) for right in gold)
    if name in text_metrics.ROUGE:
        return text_metrics.rouge(gold, text, metric)
    if name == "multilabel_f1":
        return text_metrics.count_labels(gold, text, metric)
    if name in ("pearson", "spearman"):
        return text_metrics.parse_number(gold[0]), text_metrics.parse_number(text)
    return float(answer is not None and _normalize(text, metric) in [_normalize(right, metric) for right in gold])


def _measure_choices(sample: EvaluationSample, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return all metrics of a document with choices. Of choices with equal scores, the first one wins."""
    # 1. Accuracies, with log-probabilities divided by different lengths.
    choices = sample.choices
    gold = sample.gold
    logprobs = np.array([answer.logprob for answer in answers[: len(choices)]])
    lengths = {
        "acc": [1] * len(choices),
        "acc_norm": [len(choice) for choice in choices],
        "acc_bytes": [count_bytes(choice) for choice in choices],
        "acc_tokens": [answer.num_tokens for answer in answers[: len(choices)]],
    }
    values: dict[str, Any] = {
        # The log-probability of an empty choice is not normalized.
        name: float(int(np.argmax(logprobs / np.maximum(length, 1))) in gold)
        for name, length in lengths.items()
    }
    # 2. Mutual information: subtract the log-probabilities of the choices without the context.
    if len(answers) > len(choices):
        alone = np.array([answer.logprob for answer in answers[len(choices) :]])
        values["acc_mutual_info"] = float(int(np.argmax(logprobs - alone)) in gold)
    # 3. Metrics of the probabilities, normalized over the choices.
    probabilities = np.exp(logprobs - logprobs.max())
    probabilities /= probabilities.sum()
    best = int(np.argmax(probabilities))
    values["calibration_error"] = (float(probabilities[best]), float(best in gold))
    probabilities[gold[0]] -= 1
    values["brier_score"] = float((probabilities**2).sum())
    # 4. Pairs (right class, predicted class), for metrics over all documents.
    values["f1"] = values["mcc"] = (gold[0], int(np.argmax(logprobs)))
    values["exact_match"] = float(any(answers[number].is_greedy for number in gold))
    return values


def count_bytes(text: str) -> int:
    """Return the size of a text in UTF-8."""
    return len(text.encode("utf-8", "surrogatepass"))


def _normalize(text: str, options: Options) -> str:
    """Return a text without the parts that an exact match is set to ignore."""
    for pattern in options.get("regexes_to_ignore") or ():
        text = re.sub(pattern, "", text)
    text = text.lower() if options.get("ignore_case") else text
    removed_characters = string.punctuation if options.get("ignore_punctuation") else ""
    removed_characters += string.digits if options.get("ignore_numbers") else ""
    return text.translate(str.maketrans("", "", removed_characters))


# Aggregations over documents: of values [..., N], or of pairs [..., N, 2]


def _f1(pairs: Array, average: str = "binary") -> Array:
    """F1 as in scikit-learn: of class 1 (binary), the mean over classes (macro), their mean weighted by size
    (weighted), or over all documents together (micro)."""
    if average == "micro":  # with one class per document, this is accuracy
        return _mean((pairs[..., 0] == pairs[..., 1]).astype(np.float64))
    labels = [1] if average == "binary" else np.unique(pairs)
    gold = np.stack([pairs[..., 0] == label for label in labels])
    predicted_labels = np.stack([pairs[..., 1] == label for label in labels])
    total = gold.sum(-1) + predicted_labels.sum(-1)
    scores = np.divide(2 * (gold & predicted_labels).sum(-1), total, out=np.zeros(total.shape), where=total > 0)
    weights = gold.sum(-1) if average == "weighted" else (total > 0).astype(np.float64)
    # A draw of the bootstrap may lack a class, which then does not count.
    result: Array = (scores * weights).sum(0) / np.maximum(weights.sum(0), 1)
    return result


def _pearson(pairs: Array) -> Array:
    """Pearson's correlation; not a number where one side is constant, as in SciPy."""
    centered_pairs = pairs - pairs.mean(-2, keepdims=True)
    product = np.sqrt((centered_pairs**2).sum(-2).prod(-1))
    return np.divide(centered_pairs.prod(-1).sum(-1), product, out=np.full(product.shape, np.nan), where=product > 0)


def _rank(values: Array) -> Array:
    """Return the ranks of values [..., N] along the last axis; equal values have the mean of their ranks."""
    distinct, codes = np.unique(values, return_inverse=True)
    flat = codes.reshape(-1, values.shape[-1])
    offsets = np.arange(len(flat))[:, None] * len(distinct)
    counts = np.bincount((flat + offsets).ravel(), minlength=len(flat) * len(distinct)).reshape(len(flat), -1)
    ranks = counts.cumsum(-1) - (counts - 1) / 2
    result: Array = np.take_along_axis(ranks, flat, -1).reshape(values.shape)
    return result


def _spearman(pairs: Array) -> Array:
    return _pearson(np.stack([_rank(pairs[..., 0]), _rank(pairs[..., 1])], -1))


def _calibration_error(pairs: Array) -> Array:
    """Expected calibration error (Guo et al., 2017) of pairs (confidence, is right), with ten bins of equal width."""
    bins = np.minimum(pairs[..., 0] * 10, 9).astype(int)
    gaps = np.stack([((pairs[..., 0] - pairs[..., 1]) * (bins == number)).sum(-1) for number in range(10)])
    error: Array = np.abs(gaps).sum(0) / pairs.shape[-2]
    return error


def _matthews(pairs: Array) -> Array:
    """Matthews' correlation coefficient of any number of classes, as in scikit-learn."""
    size = float(pairs.shape[-2])
    counts = np.stack([(pairs == label).sum(-2) for label in np.unique(pairs)]).astype(float)
    covariance = (pairs[..., 0] == pairs[..., 1]).sum(-1) * size - counts.prod(-1).sum(0)
    product = (size**2 - (counts**2).sum(0)).prod(-1)
    return np.divide(covariance, np.sqrt(product), out=np.zeros(product.shape), where=product > 0)


def _mean(values: Array) -> Array:
    mean: Array = values.mean(-1)
    return mean


def _weighted_mean(pairs: Array) -> Array:
    totals = pairs[..., 1].sum(-1)
    # Empty texts have no size; without any other text the mean is not a number.
    mean: Array = np.divide(pairs[..., 0].sum(-1), totals, out=np.full(totals.shape, np.nan), where=totals != 0)
    return mean


def _nanmean(values: Array) -> Array:
    return _weighted_mean(np.stack([np.nan_to_num(values), ~np.isnan(values)], -1))


def _median(values: Array) -> Array:
    # As in the harness: of an even number of values, the upper one of the middle pair, in their order.
    middle: Array = np.sort(values, -1)[..., values.shape[-1] // 2]
    return middle


AGGREGATIONS: dict[str, Callable[[Array], Array]] = {
    "mean": _mean,
    "nanmean": _nanmean,
    "median": _median,
    "brier_score": _mean,
    "perplexity": lambda values: np.exp(-values.mean(-1)),
    "weighted_perplexity": lambda pairs: np.exp(-_weighted_mean(pairs)),
    "bits_per_byte": lambda pairs: -_weighted_mean(pairs) / math.log(2),
    "f1": _f1,
    "multilabel_f1": lambda pairs: np.nan_to_num(_weighted_mean(pairs)),
    "pearson": _pearson,
    "spearman": _spearman,
    "calibration_error": _calibration_error,
    "matthews_corrcoef": _matthews,
}
# Bootstrap samples for metrics of a whole corpus, as many as lm-evaluation-harness takes.
_CORPUS_DRAWS = 100


def metrics_of(task: TaskSettings) -> list[Options]:
    """Check and return the metrics of a task: its own, or the defaults of its output type.

    Raises:
        JinguError: a metric does not fit the output type, or its options are not valid.
    """
    names = METRICS[task.output_type]
    if task.output_type == "generate_until":
        names = list(dict.fromkeys([*names, *text_metrics.OVERLAPS]))
    for metric in task.metric_list if task.process_results is None else ():
        name = metric.get("metric")
        aggregation = metric.get("aggregation")
        if is_pass_at_k(metric) and task.output_type == "generate_until":
            _check_pass_at_k(task, metric)
        elif name not in names and not (task.output_type == "generate_until" and _gives_texts(metric)):
            what = f"the metric {name} does not fit tasks of type {task.output_type}."
            raise task.error(what, f"Those that do: {join_words(names, 'and')}.")
        if not callable(aggregation):
            _check_aggregation(task, metric)
        if name in _SACREBLEU:
            import_optional("sacrebleu", f"the metric {name}", task.task)
        if name in text_metrics.ROUGE:
            text_metrics.rouge_scorer(name, metric.get("tokenize"))
        if metric.get("average", "binary") not in ("binary", "macro", "micro", "weighted"):
            what = f"the metric {name} has an average {metric['average']}."
            raise task.error(what, "Use binary, macro, micro or weighted.")
    return task.metric_list or [{"metric": name} for name in names[: _NUM_DEFAULTS.get(task.output_type)]]


def _gives_texts(metric: Options) -> bool:
    """Return whether a metric of generated text is the task's own: a function, or a name whose aggregation is one. In
    the harness, such a name only passes on the right answer and the text."""
    return callable(metric["metric"]) or (metric["metric"] in _LABEL_METRICS and callable(metric.get("aggregation")))


def _read_kind(name: str) -> str:
    """Return what a metric gives for each document, or what an aggregation reads."""
    kind: str = _PROPERTIES.get(name, {}).get("gives", "numbers")
    return kind


def _check_aggregation(task: TaskSettings, metric: Options) -> None:
    """Raise JinguError if the aggregation of a metric does not exist, or reads other values than the metric gives."""
    name = metric["metric"]
    aggregation = metric.get("aggregation")
    if aggregation is None:
        return
    known_names = [*AGGREGATIONS, *CORPUS_METRICS]
    if not isinstance(aggregation, str) or aggregation not in known_names:
        raise task.error(f"there is no aggregation {aggregation}.", f"Use {join_words(known_names)}.")
    # What a task's own metric gives is known only when it runs.
    if callable(name):
        return
    result_kind, input_kind = (_read_kind(key) for key in (name, aggregation))
    if result_kind != input_kind or (aggregation in CORPUS_METRICS and aggregation != name):
        fits = [key for key in known_names if _read_kind(key) == result_kind and (key in AGGREGATIONS or key == name)]
        what = f"the aggregation {aggregation} does not fit the metric {name}, which gives {result_kind}."
        raise task.error(what, f"Leave it out, or use {join_words(fits)}.")


def _check_pass_at_k(task: TaskSettings, metric: Options) -> None:
    k = name_of(metric).removeprefix("pass@")
    if not k.isdigit() or not 1 <= int(k) <= task.repeats:
        what = f"the metric {name_of(metric)} needs at least as many answers, and repeats is {task.repeats}."
        raise task.error(what, "Name it pass@1, or set repeats to more.")
    if "program" not in metric:
        fix = 'Such as program: "{{prompt}}{{answer}}\\n{{test}}", with the columns of a document.'
        raise task.error(f"the metric {name_of(metric)} has no program.", fix)


def _check_options(task: TaskSettings, sample: EvaluationSample) -> None:
    """Raise JinguError if an option of a metric of generated text is wrong: measure a text with each metric."""
    for metric in metrics_of(task):
        try:
            if is_pass_at_k(metric):
                text_metrics.render_program(sample.row, "", metric)
                float(metric.get("timeout", 0))
            elif not _gives_texts(metric):
                _measure_text(("1",), "1", metric)
            if metric["metric"] in _SACREBLEU:
                text_metrics.corpus_scorer(metric)
        except TEMPLATE_ERRORS as error:
            raise task.error(f"an option of the metric {name_of(metric)} is wrong: {error}.", "Correct it.") from None


def check_samples(task: TaskSettings, samples: Sequence[EvaluationSample]) -> None:
    """Raise JinguError if a metric does not fit the documents."""
    # A task's own function defines its metrics.
    if task.process_results is not None:
        return
    if task.output_type == "generate_until":
        _check_options(task, samples[0])
    if task.output_type == "loglikelihood_rolling" and not any(text for sample in samples for _, text in sample.pairs):
        raise task.error("all of its texts are empty, and an empty text has no likelihood.", "Check doc_to_target.")
    names = [metric["metric"] for metric in metrics_of(task) if not callable(metric.get("aggregation"))]
    for sample in samples if not {"pearson", "spearman"}.isdisjoint(names) else ():
        if not sample.gold or not text_metrics.has_number(str(sample.gold[0])):
            what = f"a correlation needs numbers, and the right answer of a document is {str(sample.gold)[:100]}."
            raise task.error(what, "Check doc_to_target, or leave the document out with metadata.leave_out.")
    if "acc_mutual_info" in names and any(len(sample.pairs) != 2 * len(sample.choices) for sample in samples):
        raise task.error("the metric acc_mutual_info is for choices after one context.", "Use acc.")
    for name in (metric["metric"] for metric in metrics_of(task) if "tokenize" not in metric):
        is_chinese = any(text_metrics.has_chinese(str(text)) for sample in samples for text in sample.gold)
        if name in ("bleu", *text_metrics.ROUGE) and is_chinese:
            what = f"the metric {name} splits words at spaces, and there are Chinese answers."
            raise task.error(what, f"Add `tokenize: {'zh' if name == 'bleu' else 'char'}` to the metric.")
    is_binary = any(
        metric["metric"] == "f1" and "average" not in metric and not callable(metric.get("aggregation"))
        for metric in metrics_of(task)
    )
    if is_binary and any(len(sample.choices) != 2 for sample in samples):
        what = "the metric f1 is for tasks with two choices, the second of which is the class that is sought."
        raise task.error(what, "Set average to macro, micro or weighted.")


# Results


@dataclass(frozen=True)
class MetricResult:
    """A metric of a task.

    Attributes:
        stderr: standard error, by the formula of lm-evaluation-harness if it has one; not a number if it is unknown.
        method: method of estimating the error.
        interval: 95% confidence interval.
        size: number of documents.
        signature: settings that the value depends on, such as the version of the metric's library and its tokenization.
    """

    value: float
    stderr: float
    method: str
    interval: tuple[float, float]
    size: int
    higher_is_better: bool
    signature: str = ""


def format_result(result: MetricResult) -> list[str]:
    """Return value, standard error and interval as cells of a table."""
    interval = "{:.4g} to {:.4g}".format(*result.interval)
    if not all(map(math.isfinite, result.interval)):
        interval = "N/A"
    return [format_score(result.value), format_score(result.stderr), interval]


def aggregate(metric: Options, values: Sequence[Any], clusters: Sequence[Hashable] | None = None) -> MetricResult:
    """Aggregate a metric over the documents of a task, with its standard error.

    Args:
        metric: name and options, as in the task file.
        values: the metric's values of the documents.
        clusters: cluster labels of the documents, for clustered standard errors; None: documents are independent.

    Raises:
        JinguError: the aggregation does not fit the values.
    """
    try:
        return _aggregate(metric, values, clusters)
    except JinguError:
        raise
    except (Exception, SystemExit) as error:  # the values and the function may be the task's own
        name = name_of(metric)
        what = f"the metric {name} cannot be aggregated over documents: {describe_failure(error)}."
        raise JinguError(what, where=f"metric_list, {name}", fix="Check its aggregation and values.") from None


def _aggregate(metric: Options, values: Sequence[Any], clusters: Sequence[Hashable] | None) -> MetricResult:
    name = name_of(metric)
    properties = _PROPERTIES.get(name, {})
    aggregation = metric.get("aggregation") or properties.get("aggregation", name)
    better = metric.get("higher_is_better", not properties.get("lower_is_better"))
    size = len(values)
    signature = ""
    # 1. Functions of all documents are bootstrapped sample by sample.
    if callable(aggregation) or aggregation in CORPUS_METRICS:
        function = aggregation if callable(aggregation) else lambda pairs: text_metrics.score_corpus(metric, pairs)[0]
        value = float(function(values))
        if not callable(aggregation):
            signature = text_metrics.score_corpus(metric, values)[1]
        draws = np.array([_score_draw(function, sample) for sample in _draw(values, clusters)], np.float64)
    # 2. The other aggregations are vectorized. The error of a mean has a formula, and the others are bootstrapped.
    else:
        array = np.array(values, np.float64)
        statistic = AGGREGATIONS.get(aggregation, _mean)
        if statistic is _f1:
            statistic = partial(_f1, average=metric.get("average", "binary"))
        value = float(statistic(array))
        if statistic is _mean:
            stderr = statistics.mean_stderr(array, clusters)
            method = "mean" if clusters is None else "clustered"
            return MetricResult(value, stderr, method, statistics.mean_interval(array, clusters), size, better)
        draws = statistics.bootstrap(lambda indices: statistic(array[indices]), size, clusters)
    units = statistics.count_units(size, clusters)
    stderr, interval = statistics.spread_of(draws, units)
    method = "bootstrap" if clusters is None else "clustered bootstrap"
    return MetricResult(value, stderr, method, interval, size, better, signature)


def _draw(values: Sequence[Any], clusters: Sequence[Hashable] | None) -> Iterator[list[Any]]:
    """Yield bootstrap samples of values, of whole clusters if there are any."""
    if clusters is not None:
        for indices in statistics.draw_clusters(clusters, _CORPUS_DRAWS):
            yield [values[index] for index in indices]
        return
    generator = Random(0)
    for _ in range(_CORPUS_DRAWS):
        yield generator.choices(values, k=len(values))


def _score_draw(function: Callable[[Sequence[Any]], float], sample: Sequence[Any]) -> float:
    """Return a function of a bootstrap sample; not a number where it has no value, as without one of the classes."""
    try:
        return float(function(sample))
    except (ArithmeticError, ValueError, LookupError):
        return math.nan


def average_results(results: Sequence[MetricResult], weight_by_size: bool) -> MetricResult:
    """Return the mean of a metric over tasks, with the pooled standard error of lm-evaluation-harness.

    The error is unknown if a task has a single document.
    """
    sizes = [result.size for result in results]
    total = sum(sizes)
    stderr = math.nan
    if weight_by_size:
        value = sum(result.value * result.size for result in results) / total
        if min(sizes) > 1:
            pooled_variance = sum(
                (size - 1) * result.stderr**2 * size for size, result in zip(sizes, results, strict=True)
            )
            stderr = math.sqrt(pooled_variance / (total - len(results)) / total)
    else:
        value = sum(result.value for result in results) / len(results)
        if min(sizes) > 1:
            stderr = math.sqrt(sum(result.stderr**2 for result in results)) / len(results)
    weights = [result.size / total if weight_by_size else 1 / len(results) for result in results]
    interval = (value - statistics.Z * stderr, value + statistics.Z * stderr)
    if math.isnan(stderr):
        interval = statistics.UNKNOWN_INTERVAL
    elif stderr == 0:
        # Combine the limits of the tasks (Zou and Donner, 2008): equal scores have an error of 0, but are not certain.
        widths = [
            math.hypot(
                *(w * (result.value - result.interval[side]) for w, result in zip(weights, results, strict=True))
            )
            for side in (0, 1)
        ]
        interval = (value - widths[0], value + widths[1])
    return MetricResult(value, stderr, "pooled", interval, total, results[0].higher_is_better)
