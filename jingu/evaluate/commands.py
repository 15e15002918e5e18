"""`jingu evaluate` and `jingu evaluate list`: scores of a model on tasks, and a list of all tasks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jingu.chat.template_sources import load_template
from jingu.errors import JinguError, pluralize
from jingu.evaluate.evaluation import (
    PreparedTask,
    TaskResult,
    aggregate_group,
    apply_chat_template,
    evaluate_task,
    measure_spread,
    prepare_task,
    write_result,
    write_spread,
)
from jingu.evaluate.held_out import describe_evidence
from jingu.evaluate.result_files import Spread
from jingu.evaluate.scoring import (
    AnswerCache,
    Scorer,
    check_continuations_fit,
    check_generation_fits,
    evaluation_precision,
    model_fingerprint,
    precision_name,
)
from jingu.evaluate.task_file import TaskGroup, TaskIndex
from jingu.evaluate.task_metrics import MetricResult, format_result
from jingu.formats.models import open_model
from jingu.formats.provenance import read_provenance
from jingu.formatting import format_score, print_table
from jingu.infer.distributed import inference_ranks
from jingu.infer.generate import InferenceOptions
from jingu.infer.inference_model import model_name
from jingu.runtime.ranks import RankInfo
from jingu.text.tokenizer import Tokenizer
from jingu.version import __version__

# Keys of `metadata` in the list of tasks.
_LISTED_KEYS = ("language", "task_cluster", "licence", "description")
# Capacity of the KV cache on CPUs in tokens, in addition to one full context.
CPU_CACHE_TOKENS = 16_384


@dataclass(frozen=True)
class TaskOptions:
    """The documents and tasks to evaluate; several commands have these options.

    Attributes:
        tasks: names of tasks, groups or tags, or task files.
        output: folder for the results; None: the command's own default.
        num_fewshot: shots in each prompt; None takes the number in each task.
        limit: evaluate only the first documents of each task; None: all.
        include: folders with further tasks.
        trust: Python files that tasks may run.
    """

    tasks: Sequence[str]
    output: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    include: Sequence[str] = ()
    trust: Sequence[str] = ()

    def index(self) -> TaskIndex:
        """Return the index of all known tasks."""
        return TaskIndex([Path(folder) for folder in self.include], [Path(file) for file in self.trust])


def evaluate(model: Path, inference: InferenceOptions, options: TaskOptions) -> None:
    """Evaluate a model on tasks, print the results, and write them to a folder: by default `evaluations` in the run,
    or `evaluations/MODEL` in the current folder."""
    with inference_ranks(inference.device) as ranks:
        index = options.index()
        prepared = prepare_tasks(model, options, index)
        folder = options.output or _default_folder(model)
        results = evaluate_model(model, prepared, inference, folder, ranks)
        if ranks is None or ranks.is_first:
            spreads = measure_spread(results)
            write_spread(spreads, folder)
            _print_results(results, index.groups.values())
            _print_spread(spreads)
            _print_evidence(results.values())
            print(f"\nwritten to {folder}")


def prepare_tasks(model: Path, options: TaskOptions, index: TaskIndex) -> list[PreparedTask]:
    """Return tasks with their prompts rendered. Errors in them are reported before a model is loaded."""
    names = dict.fromkeys(name for task in options.tasks for name in index.load(task))
    stored = open_model(model)
    for name in names:
        if index.tasks[name].output_type == "generate_until":
            check_generation_fits(index.tasks[name], stored.spec)
    prepared = [prepare_task(index.tasks[name], options.num_fewshot, options.limit) for name in names]
    tokenizer = Tokenizer.load(stored.tokenizer())
    if any(task.settings.metadata.get("chat") for task in prepared):
        template = load_template("auto", tokenizer, where=str(model))
        prepared = [
            apply_chat_template(task, template) if task.settings.metadata.get("chat") else task for task in prepared
        ]
    for task in prepared:
        if task.settings.output_type in ("loglikelihood", "multiple_choice"):
            pairs = (pair for sample in task.samples for pair in sample.pairs)
            check_continuations_fit(task.settings, pairs, tokenizer, stored.spec)
    return prepared


def evaluate_model(
    model: Path,
    tasks: Sequence[PreparedTask],
    inference: InferenceOptions,
    folder: Path,
    ranks: RankInfo | None,
) -> dict[str, TaskResult]:
    """Return the results of a model by task, and write those of each task as soon as they are complete.

    Args:
        ranks: this rank among those that divide the requests, of which the first one writes; None for one process.
    """
    # 1. Load the whole model on each rank, and the answers that an earlier evaluation has cached.
    stored = open_model(model)
    inference = replace(inference, precision=evaluation_precision(inference.precision, stored))
    inference_model = inference.load(model)
    parameter = inference_model.parameter
    precision = precision_name(inference.precision, parameter.dtype)
    place = parameter.device.type
    digest = model_fingerprint(stored, inference_model.tokenizer, f"{precision}, {place}")
    cache = AnswerCache(folder / f"cache-{digest[:16]}.jsonl")
    about = {"name": inference_model.name, "fingerprint": digest, "precision": precision, "device": place}
    about["jingu"] = __version__
    record = read_provenance(model)
    # 2. Evaluate task by task.
    # On CPUs a larger cache would take memory without making the evaluation faster.
    tokens = stored.spec.max_position_embeddings + CPU_CACHE_TOKENS if parameter.device.type == "cpu" else None
    scorer = Scorer(inference.make_engine(inference_model, kv_cache_tokens=tokens), cache, ranks)
    results = {}
    for task in tasks:
        evidence = describe_evidence(record, task.settings, task.data.rows)
        result = replace(evaluate_task(task, scorer), evidence=evidence, precision=precision)
        results[task.settings.task] = result
        if ranks is None or ranks.is_first:
            write_result(result, folder, about)
    return results


def _print_results(results: Mapping[str, TaskResult], groups: Iterable[TaskGroup]) -> None:
    """Print the metrics of tasks and groups as a table, and counts of truncated or omitted inputs to stderr."""
    rows: list[list[str]] = []
    for name, result in results.items():
        rows += _table_rows(name, str(result.prepared.num_shots), result.precision, result.metrics)
        for what, count in result.counts.items():
            if count:
                print(f"{name}: {what.replace('_', ' ')}: {count:,}", file=sys.stderr)
    for group in groups:
        precisions = dict.fromkeys(results[name].precision for name in group.members)
        rows += _table_rows(group.name, "", ", ".join(precisions), aggregate_group(group, results))
    header = ("task", "shots", "documents", "metric", "precision", "value", "stderr", "95% interval")
    print_table(header, rows, right=(1, 2, 5, 6))


def _print_spread(spreads: Mapping[str, Mapping[str, Spread]]) -> None:
    """Print the variation of results over the templates and numbers of shots of a task."""
    rows = [
        [name, metric.removesuffix(",none"), str(len(spread.values)), *map(format_score, numbers), spread.precision]
        for name, metrics in spreads.items()
        for metric, spread in metrics.items()
        for numbers in [(spread.mean, spread.standard_deviation, spread.lowest, spread.highest)]
    ]
    if rows:
        print()
        header = ("task", "metric", "templates and shots", "mean", "standard deviation", "lowest", "highest")
        print_table((*header, "precision"), rows, right=(2, 3, 4, 5, 6))


def _print_evidence(results: Iterable[TaskResult]) -> None:
    """Print which tasks are held out, and why the others are not."""
    names: dict[str, list[str]] = {}
    for result in results:
        names.setdefault(result.evidence, []).append(result.prepared.settings.task)
    print()
    for evidence, members in names.items():
        print(f"{', '.join(members)}: {evidence}")


def _default_folder(model: Path) -> Path:
    """Return the default folder for results: in the run, or in the current folder for other models."""
    for folder in (model, model.absolute().parent.parent):
        if (folder / "model.json").is_file():
            return folder / "evaluations"
    return Path("evaluations") / model_name(model)


def _table_rows(name: str, shots: str, precision: str, metrics: dict[str, MetricResult]) -> list[list[str]]:
    rows = []
    for key, metric in metrics.items():
        rows.append([name, shots, f"{metric.size:,}", key.removesuffix(",none"), precision, *format_result(metric)])
    return rows


def list_tasks(include: Sequence[str] | None = None) -> None:
    """Print the tasks of the catalogue and of other folders."""
    index = TaskIndex([Path(folder) for folder in include or ()])
    rows = []
    for name, file in sorted(index.files.items()):
        try:
            index.load(name)
        except JinguError as error:
            rows.append([name, *[""] * len(_LISTED_KEYS), f"{file}: {error.what}"])
            continue
        if name in index.groups:
            members = pluralize(len(index.groups[name].members), "task")
            rows.append([name, "group", *[""] * (len(_LISTED_KEYS) - 1), members])
        else:
            metadata = index.tasks[name].metadata
            rows.append([name, index.tasks[name].output_type, *(str(metadata.get(key, "")) for key in _LISTED_KEYS)])
    header = ("name", "type", *(key.replace("_", " ") for key in _LISTED_KEYS))
    print_table(header, rows, right=())
