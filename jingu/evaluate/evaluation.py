"""Evaluate a task: documents to samples, samples to answers, answers to metrics and files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jingu.errors import JinguError
from jingu.evaluate.filters import Step, apply_filter, build_filters
from jingu.evaluate.prompts import EvaluationSample, PromptRenderer
from jingu.evaluate.scoring import GenerationSettings, Scorer, generation_settings
from jingu.evaluate.task_data import TaskData, load_data
from jingu.evaluate.task_file import MetricSettings, TaskGroup, TaskSettings
from jingu.evaluate.task_metrics import (
    METRICS,
    Answer,
    MetricResult,
    aggregate,
    aggregation_of,
    check_samples,
    metrics_of,
    pool_stderr,
)
from jingu.runtime.files import write_text_atomically

RESULT_SUFFIX = ".json"
SAMPLES_SUFFIX = ".samples.jsonl"


@dataclass(frozen=True)
class PreparedTask:
    """A task that is ready to be evaluated: all that can be wrong with it would have been reported.

    Attributes:
        clusters: by document, labels of those that belong together; None: each is by itself.
    """

    settings: TaskSettings
    data: TaskData
    samples: list[EvaluationSample]
    num_shots: int
    metrics: list[MetricSettings]
    filters: dict[str, list[Step]]
    generation: GenerationSettings
    clusters: list[str] | None


def prepare_task(task: TaskSettings, num_shots: int | None = None, limit: int | None = None) -> PreparedTask:
    """Read a task's documents and render them.

    Args:
        num_shots: shots in each prompt; None: as many as the task says.
        limit: the first documents only; None: all.

    Raises:
        JinguError: what is wrong with the task or its data.
    """
    metrics = metrics_of(task)
    filters = build_filters(task)
    generation = generation_settings(task)
    count = (task.num_fewshot or 0) if num_shots is None else num_shots
    data = load_data(task, needs_shots=count > 0)
    samples = PromptRenderer(task, data, count).render_all(limit)
    check_samples(task, samples)
    column = task.metadata.cluster
    if column is not None and column not in data.columns:
        what = f"its metadata.cluster is {column}, which the data do not have."
        raise JinguError(what, where=f"{task.task} ({task.file})", fix="Name one of its columns.")
    clusters = None if column is None else [str(sample.row.get(column)) for sample in samples]
    return PreparedTask(task, data, samples, count, metrics, filters, generation, clusters)


@dataclass(frozen=True)
class TaskResult:
    """The results of a task.

    Attributes:
        metrics: by name and filter, as `acc,none`.
        records: of the samples.
        counts: of what is remarkable, such as contexts that were truncated.
    """

    prepared: PreparedTask
    metrics: dict[str, MetricResult]
    records: list[dict[str, Any]]
    counts: dict[str, int]

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.prepared.settings.task


def evaluate_task(prepared: PreparedTask, scorer: Scorer) -> TaskResult:
    """Return the results of a model on a task."""
    truncated_before = scorer.num_truncated
    empty_before = scorer.num_empty
    samples = prepared.samples
    answers = _answer(prepared, scorer)
    values: dict[str, list[Any]] = {}
    records = []
    for position, (sample, given) in enumerate(zip(samples, answers, strict=True)):
        record: dict[str, Any] = {
            "index": sample.index,
            "hash": _hash([sample.index, sample.row]),
            "cluster": None if prepared.clusters is None else prepared.clusters[position],
            "pairs": sample.pairs,
            "gold": sample.gold,
            "answers": [asdict(answer) for answer in given],
            "metrics": {},
        }
        for name, steps in prepared.filters.items():
            for metric, value in _measure(prepared, sample, given, steps).items():
                record["metrics"][f"{metric},{name}"] = value
                values.setdefault(f"{metric},{name}", []).append(value)
        records.append(record)
    settings = {metric.metric: metric for metric in prepared.metrics}
    results = {}
    for key, column in values.items():
        own = settings.get(key.rpartition(",")[0], MetricSettings(metric=key))
        standard = METRICS.get((own.metric, prepared.settings.output_type))
        better = own.higher_is_better
        if better is None:
            better = standard is None or standard.higher_is_better
        results[key] = aggregate(aggregation_of(prepared.settings, own), column, better, prepared.clusters)
    counts = {
        "truncated": scorer.num_truncated - truncated_before,
        "empty": scorer.num_empty - empty_before,
        "left_out": len(prepared.data.rows) - len(samples),
    }
    return TaskResult(prepared, results, records, counts)


def _answer(prepared: PreparedTask, scorer: Scorer) -> list[list[Answer]]:
    """Return the answers of each sample."""
    samples = prepared.samples
    output_type = prepared.settings.output_type
    if output_type == "generate_until":
        contexts = [sample.pairs[0][0] for sample in samples]
        return scorer.generate(contexts, prepared.generation, prepared.settings.repeats)
    if output_type == "loglikelihood_rolling":
        return [[answer] for answer in scorer.score_texts([sample.pairs[0][1] for sample in samples])]
    answers = iter(scorer.score([pair for sample in samples for pair in sample.pairs]))
    return [[next(answers) for _ in sample.pairs] for sample in samples]


def _measure(
    prepared: PreparedTask, sample: EvaluationSample, answers: Sequence[Answer], steps: list[Step]
) -> dict[str, Any]:
    """Return the metrics of a sample."""
    task = prepared.settings
    if task.output_type == "generate_until":
        text = apply_filter(steps, [answer.text for answer in answers])
        answers = [Answer(text=text)]
    if task.process_results is not None:
        # The task's own function receives what the harness would give it.
        results: list[Any] = [(answer.logprob, answer.is_greedy) for answer in answers]
        if task.output_type == "generate_until":
            results = [answer.text for answer in answers]
        elif task.output_type == "loglikelihood_rolling":
            results = [answer.logprob for answer in answers]
        return dict(task.process_results(sample.row, results))
    return {
        metric.metric: METRICS[metric.metric, task.output_type].measure(sample, answers, metric.options)
        for metric in prepared.metrics
    }


def aggregate_group(group: TaskGroup, results: dict[str, TaskResult]) -> dict[str, MetricResult]:
    """Return a group's metrics: means over its tasks."""
    metrics = {}
    members = [results[name] for name in group.members]
    for metric in group.metrics:
        names = metric.filter_list
        keys = {key for member in members for key in member.metrics if key.rpartition(",")[0] == metric.metric}
        if names is not None:
            keys &= {f"{metric.metric},{name}" for name in ([names] if isinstance(names, str) else names)}
        for key in sorted(keys):
            parts = [member.metrics[key] for member in members if key in member.metrics]
            weights = [part.size if metric.weight_by_size else 1 for part in parts]
            value = sum(part.value * weight for part, weight in zip(parts, weights, strict=True)) / sum(weights)
            stderr = pool_stderr(parts, metric.weight_by_size)
            interval = (value - 1.96 * stderr, value + 1.96 * stderr)
            size = sum(part.size for part in parts)
            metrics[key] = MetricResult(value, stderr, "pooled", interval, size, parts[0].higher_is_better)
    return metrics


def _hash(value: Any) -> str:
    content = json.dumps(value, sort_keys=True, default=_describe)
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _describe(value: Any) -> str:
    """Return what stands for a value that JSON does not have; functions by their names."""
    return value.__qualname__ if callable(value) else str(value)


def write_result(result: TaskResult, folder: Path, model: dict[str, str]) -> None:
    """Write a task's results, and its samples, to a folder.

    Args:
        model: its name and fingerprint, and versions.
    """
    prepared = result.prepared
    settings = prepared.settings.model_dump(mode="json", exclude_none=True, exclude={"file"}, fallback=_describe)
    content = {
        "task": result.name,
        "file": str(prepared.settings.file),
        "version": prepared.settings.metadata.version,
        "num_fewshot": prepared.num_shots,
        "results": {key: asdict(metric) for key, metric in result.metrics.items()},
        "counts": result.counts,
        "model": model,
        "hashes": {
            "data": prepared.data.fingerprint(),
            "templates": _hash(settings),
            "prompts": _hash([sample.pairs for sample in prepared.samples]),
        },
        "settings": settings,
    }
    folder.mkdir(parents=True, exist_ok=True)
    name = result.name.replace("/", "_")
    lines = [json.dumps(record, ensure_ascii=False, default=_describe) for record in result.records]
    write_text_atomically(folder / f"{name}{SAMPLES_SUFFIX}", "".join(f"{line}\n" for line in lines))
    text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
    write_text_atomically(folder / f"{name}{RESULT_SUFFIX}", text)
