"""Evaluation of a task: from documents to samples, to answers, and to metrics and files."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jingu.chat.templates import ChatTemplate
from jingu.evaluate import task_metrics
from jingu.evaluate.answer_filters import check_choices, filter_answers, filters_of, first_of, gives_list
from jingu.evaluate.prompts import EvaluationSample, PromptRenderer
from jingu.evaluate.result_files import RESULT_SUFFIX, SAMPLES_SUFFIX, SPREAD_SUFFIX, Spread
from jingu.evaluate.scoring import Scorer, generation_request
from jingu.evaluate.task_data import TaskData, describe_value, fingerprint_of, load_data
from jingu.evaluate.task_file import Options, TaskGroup, TaskSettings, find_task_files
from jingu.evaluate.task_metrics import Answer, MetricResult
from jingu.runtime.checksums import digest_records, record_file
from jingu.runtime.files import write_text_atomically


@dataclass(frozen=True)
class PreparedTask:
    """A task whose prompts are rendered and checked, ready to be evaluated.

    Attributes:
        clusters: cluster label of each document, for standard errors; None if documents are independent.
    """

    settings: TaskSettings
    data: TaskData
    samples: list[EvaluationSample]
    num_shots: int
    clusters: list[str] | None


def prepare_task(task: TaskSettings, num_shots: int | None = None, limit: int | None = None) -> PreparedTask:
    """Read a task's documents and render them.

    Args:
        num_shots: shots in each prompt; None takes the number in the task.
        limit: take only the first documents; None: all.

    Raises:
        JinguError: the task or its data is invalid.
    """
    task_metrics.metrics_of(task)
    filters_of(task)
    generation_request(task)
    count = task.num_fewshot if num_shots is None else num_shots
    data = load_data(task, needs_shots=count > 0)
    samples = PromptRenderer(task, data, count).render_all(limit)
    task_metrics.check_samples(task, samples)
    check_choices(task, (sample.row for sample in samples))
    column = task.metadata.get("cluster")
    if column is not None and column not in data.columns:
        raise task.error(f"its metadata.cluster is {column}, which the data do not have.", "Name one of its columns.")
    clusters = None if column is None else [str(sample.row.get(column)) for sample in samples]
    return PreparedTask(task, data, samples, count, clusters)


def apply_chat_template(prepared_task: PreparedTask, template: ChatTemplate) -> PreparedTask:
    """Return a task whose prompts are messages: the description as the system message, then the shots as turns of user
    and assistant, then the question.

    Continuations become the assistant's answers. Texts without a context stay unchanged. As in the harness, the
    description is left out if the template refuses a system message.

    Raises:
        JinguError: the template refuses a prompt.
    """
    task = prepared_task.settings
    renderer = PromptRenderer(task, prepared_task.data, prepared_task.num_shots, template)
    samples = renderer.render_all(len(prepared_task.samples))
    if renderer.refusals:
        print(f"{task.task}: the description is left out of the prompts: {renderer.refusals[0]}", file=sys.stderr)
    return replace(prepared_task, samples=samples)


@dataclass(frozen=True)
class TaskResult:
    """The results of a task.

    Attributes:
        metrics: results by name and filter, such as `acc,none`.
        records: one record per sample, with prompts, answers and metrics.
        counts: numbers of truncated contexts, of continuations without a token, and of documents that were left out.
        evidence: "held out", or the reason why this is not proved; empty if it was not checked.
        precision: of the computation, such as fp32; empty if it is not known.
    """

    prepared: PreparedTask
    metrics: dict[str, MetricResult]
    records: list[dict[str, Any]]
    counts: dict[str, int]
    evidence: str = ""
    precision: str = ""


def evaluate_task(prepared_task: PreparedTask, scorer: Scorer) -> TaskResult:
    """Return the results of a model on a task."""
    task = prepared_task.settings
    counts_before = dict(scorer.counts)
    records: list[dict[str, Any]] = []
    for sample, answers in zip(prepared_task.samples, _answer(prepared_task, scorer), strict=True):
        sample_values: dict[str, Any] = {}
        for name, steps in filters_of(task).items():
            filtered_answers = answers
            results: list[Any] | None = None
            if task.output_type == "generate_until":
                texts = [answer.text for answer in answers]
                apply = partial(filter_answers, task, name, steps)
                results = apply(texts, sample.row)
                filtered_answers = [Answer(text=first_of(results))]
                if any(map(task_metrics.is_pass_at_k, task_metrics.metrics_of(task))):
                    filtered_answers += [Answer(text=first_of(apply([text], sample.row))) for text in texts]
                results = results if gives_list(steps) else None
            sample_values |= {
                f"{metric},{name}": value
                for metric, value in task_metrics.measure(task, sample, filtered_answers, results).items()
            }
        records.append(
            {
                "index": sample.index,
                "hash": fingerprint_of([sample.index, sample.row]),
                "cluster": prepared_task.clusters and prepared_task.clusters[len(records)],
                "pairs": sample.pairs,
                "gold": sample.gold,
                "answers": [asdict(answer) for answer in answers],
                "metrics": sample_values,
            }
        )
    metrics = aggregate_records(records, task_metrics.metrics_of(task))
    counts = {what: count - counts_before[what] for what, count in scorer.counts.items()}
    counts["left_out"] = len(prepared_task.data.rows) - len(records) + prepared_task.data.num_left_out
    return TaskResult(prepared_task, metrics, records, counts)


def aggregate_records(records: Sequence[Mapping[str, Any]], metric_list: Sequence[Options]) -> dict[str, MetricResult]:
    """Return the metrics of documents by name and filter, each over the documents that have it.

    Args:
        metric_list: of the task.
    """
    options = {task_metrics.name_of(metric): metric for metric in metric_list}
    results = {}
    for key in dict.fromkeys(key for record in records for key in record["metrics"]):
        members = [record for record in records if key in record["metrics"]]
        name = key.rpartition(",")[0]
        clusters = [member["cluster"] for member in members]
        results[key] = task_metrics.aggregate(
            options.get(name, {"metric": name}),
            # An unknown value is null in files.
            [math.nan if (value := member["metrics"][key]) is None else value for member in members],
            None if clusters[0] is None else clusters,
        )
    return results


def _answer(prepared_task: PreparedTask, scorer: Scorer) -> list[list[Answer]]:
    """Return the answers of each sample."""
    task = prepared_task.settings
    samples = prepared_task.samples
    if task.output_type == "generate_until":
        contexts = [sample.pairs[0][0] for sample in samples]
        return scorer.generate(contexts, generation_request(task), task.repeats)
    if task.output_type == "loglikelihood_rolling":
        return [[answer] for answer in scorer.score_texts([sample.pairs[0][1] for sample in samples])]
    answers = iter(scorer.score([pair for sample in samples for pair in sample.pairs]))
    return [[next(answers) for _ in sample.pairs] for sample in samples]


def aggregate_group(group: TaskGroup, results: Mapping[str, TaskResult]) -> dict[str, MetricResult]:
    """Return a group's metrics, which are means over its tasks."""
    metrics = {}
    members = [results[name] for name in group.members]
    for metric in group.metrics:
        filters = metric.get("filter_list")
        filters = [filters] if isinstance(filters, str) else filters
        for key in dict.fromkeys(key for member in members for key in member.metrics):
            name, _, filter_name = key.rpartition(",")
            if name == metric["metric"] and (filters is None or filter_name in filters):
                parts = [member.metrics[key] for member in members if key in member.metrics]
                metrics[key] = task_metrics.average_results(parts, metric.get("weight_by_size", True))
    return metrics


def write_result(result: TaskResult, folder: Path, model: Mapping[str, str]) -> None:
    """Write a task's results, and its samples, to a folder.

    Args:
        model: its name, its fingerprint, and how it computed.
    """
    task = result.prepared
    settings = task.settings.model_dump(exclude={"file"}, exclude_unset=True)
    file = task.settings.file
    code = [part for part in find_task_files(file) if part.suffix == ".py"] if file.is_file() else []
    content = {
        "task": task.settings.task,
        "file": str(task.settings.file),
        "version": task.settings.metadata.get("version"),
        "num_fewshot": task.num_shots,
        "results": {key: asdict(metric) for key, metric in result.metrics.items()},
        "counts": result.counts,
        "evidence": result.evidence,
        "model": model,
        "hashes": {
            "data": fingerprint_of([task.data.rows, task.data.pool]),
            "templates": fingerprint_of(settings),
            "prompts": fingerprint_of([sample.pairs for sample in task.samples]),
            **({"code": digest_records(map(record_file, code))} if code else {}),
        },
        "settings": settings,
    }
    folder.mkdir(parents=True, exist_ok=True)
    name = _file_name(task.settings.task)
    lines = [_to_json(record) for record in result.records]
    # The results are written last. If this process is killed before, those of an earlier evaluation must not remain
    # beside the new samples.
    (folder / f"{name}{RESULT_SUFFIX}").unlink(missing_ok=True)
    write_text_atomically(folder / f"{name}{SAMPLES_SUFFIX}", "".join(f"{line}\n" for line in lines))
    write_json(content, folder / f"{name}{RESULT_SUFFIX}")


def _file_name(task: str) -> str:
    return task.replace("/", "_")


def _to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON, in which an unknown number is null. Functions are named."""
    return json.dumps(_replace_unknown(value), ensure_ascii=False, indent=indent, default=describe_value)


def _replace_unknown(value: Any) -> Any:
    """Return a value with None in place of numbers that JSON lacks: those that are infinite, or not a number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _replace_unknown(item) for key, item in value.items()}
    return [*map(_replace_unknown, value)] if isinstance(value, list | tuple) else value


def write_json(content: Any, file: Path) -> None:
    """Write plain values to a JSON file, in which an unknown number is null."""
    write_text_atomically(file, _to_json(content, indent=2) + "\n")


def measure_spread(results: Mapping[str, TaskResult]) -> dict[str, dict[str, Spread]]:
    """Return the spread of each metric by task, for tasks with several evaluated variants."""
    variants: dict[str, dict[str, dict[str, float]]] = {}
    for name, result in results.items():
        for metric, value in result.metrics.items():
            variants.setdefault(name.partition("@")[0], {}).setdefault(metric, {})[name] = value.value
    spreads: dict[str, dict[str, Spread]] = {}
    for task, metrics in variants.items():
        for metric, values in metrics.items():
            numbers = list(values.values())
            if len(numbers) > 1:
                deviation = float(np.std(numbers, ddof=1))
                precision = ", ".join(dict.fromkeys(results[name].precision for name in values))
                spread = Spread(float(np.mean(numbers)), deviation, min(numbers), max(numbers), values, precision)
                spreads.setdefault(task, {})[metric] = spread
    return spreads


def write_spread(spreads: Mapping[str, Mapping[str, Spread]], folder: Path) -> None:
    """Write the spread of each task as a JSON file to a folder."""
    for task, metrics in spreads.items():
        content = {"task": task, "results": {metric: asdict(spread) for metric, spread in metrics.items()}}
        write_json(content, folder / f"{_file_name(task)}{SPREAD_SUFFIX}")
