"""`jingu evaluate`: scores of a model on tasks, a list of tasks, and a comparison of two models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jingu import __version__
from jingu.errors import JinguError, pluralize
from jingu.evaluate import statistics
from jingu.evaluate.evaluation import aggregate_group, evaluate_task, prepare_task, read_results, write_result
from jingu.evaluate.scoring import AnswerCache, Scorer, check_generation_fits, model_fingerprint
from jingu.evaluate.task_file import TaskIndex
from jingu.evaluate.task_metrics import MetricResult
from jingu.formats.models import open_model
from jingu.formatting import print_table
from jingu.infer.generate import InferenceOptions
from jingu.infer.inference_model import model_name


def evaluate(
    model: Path,
    tasks: Sequence[str],
    num_fewshot: int | None = None,
    limit: int | None = None,
    output: Path | None = None,
    include: Sequence[str] | None = None,
    trust: Sequence[str] | None = None,
    **compute: Any,
) -> None:
    """Evaluate a model on tasks, print the results, and write them.

    Args:
        tasks: names of tasks, groups or tags, or task files.
        num_fewshot: shots in each prompt; None: as many as each task says.
        limit: the first documents of each task only; None: all.
        output: folder for the results; None: `evaluations` in the run, or `evaluations/MODEL` here.
        include: folders with further tasks.
        trust: Python files that tasks may run.
        compute: as of `InferenceOptions`.
    """
    # 1. Find out what is wrong with the tasks while that costs nothing.
    index = TaskIndex([Path(folder) for folder in include or ()], [Path(file) for file in trust or ()])
    names = dict.fromkeys(name for task in tasks for name in index.load(task))
    stored = open_model(model)
    for name in names:
        if index.tasks[name].output_type == "generate_until":
            check_generation_fits(index.tasks[name], stored.spec)
    prepared = [prepare_task(index.tasks[name], num_fewshot, limit) for name in names]
    # 2. Load the model, and what is known of its answers.
    how = InferenceOptions(**compute)
    inference_model = how.load(model)
    parameter = inference_model.parameter
    computes = f"{how.precision}, {parameter.dtype}, {parameter.device.type}"
    digest = model_fingerprint(stored, inference_model.tokenizer, computes)
    folder = output or _default_folder(model)
    cache = AnswerCache(folder / f"cache-{digest[:16]}.jsonl")
    about = {"name": inference_model.name, "fingerprint": digest, "precision": computes, "jingu": __version__}
    # 3. Evaluate task by task; the results of each are written at once.
    scorer = Scorer(how.make_engine(inference_model), cache)
    results = {}
    rows: list[list[str]] = []
    for task in prepared:
        name = task.settings.task
        results[name] = result = evaluate_task(task, scorer)
        write_result(result, folder, about)
        rows += _table_rows(name, str(task.num_shots), result.metrics)
        for what, count in result.counts.items():
            if count:
                print(f"{name}: {what.replace('_', ' ')}: {count:,}", file=sys.stderr)
    for group in index.groups.values():
        rows += _table_rows(group.name, "", aggregate_group(group, results))
    header = ("task", "shots", "documents", "metric", "value", "stderr", "95% interval")
    print_table(header, rows, right=(1, 2, 4, 5))
    print(f"\nwritten to {folder}")


def _default_folder(model: Path) -> Path:
    """Return the folder for results: of a run, or beside the other results here."""
    for folder in (model, model.absolute().parent.parent):
        if (folder / "model.json").is_file():
            return folder / "evaluations"
    return Path("evaluations") / model_name(model)


def _table_rows(name: str, shots: str, metrics: dict[str, MetricResult]) -> list[list[str]]:
    rows = []
    for key, metric in metrics.items():
        numbers = [
            f"{number:.4g}" if abs(number) > 1e4 else f"{number:.4f}" for number in (metric.value, metric.stderr)
        ]
        interval = "{:.4g} to {:.4g}".format(*metric.interval)
        rows.append([name, shots, f"{metric.size:,}", key.removesuffix(",none"), *numbers, interval])
    return rows


def list_tasks(include: Sequence[str] | None = None) -> None:
    """Print the tasks of the catalogue and of other folders."""
    index = TaskIndex([Path(folder) for folder in include or ()])
    rows = []
    for name, file in sorted(index.files.items()):
        try:
            index.load(name)
        except JinguError as error:
            rows.append([name, "", "", f"{file}: {error.what}"])
            continue
        if name in index.groups:
            rows.append([name, "group", "", pluralize(len(index.groups[name].members), "task")])
        else:
            task = index.tasks[name]
            rows.append(
                [name, task.output_type, *(str(task.metadata.get(key, "")) for key in ("licence", "description"))]
            )
    print_table(("name", "type", "licence", "description"), rows, right=())


def compare(first: Path, second: Path) -> None:
    """Compare the results of two models, document by document."""
    results = [read_results(folder) for folder in (first, second)]
    rows: list[list[str]] = []
    p_values: list[float] = []
    for task in sorted(results[0].keys() & results[1].keys()):
        (one, one_records), (other, other_records) = (result[task] for result in results)
        by_hash = {record["hash"]: record for record in one_records}
        pairs = [(by_hash[record["hash"]], record) for record in other_records if record["hash"] in by_hash]
        clusters = [pair[0]["cluster"] for pair in pairs] if pairs and pairs[0][0]["cluster"] is not None else None
        for metric, result in one["results"].items() if pairs else ():
            # Metrics such as perplexity are no means over documents.
            if result["method"] not in ("mean", "clustered") or metric not in other["results"]:
                continue
            values = np.array([[record["metrics"][metric] for record in pair] for pair in pairs], np.float64)
            differences = values[:, 1] - values[:, 0]
            if clusters is None and np.isin(values, (0, 1)).all():
                test = "McNemar"
                p_values.append(statistics.mcnemar_p(int((differences < 0).sum()), int((differences > 0).sum())))
            else:
                test = "paired t"
                p_values.append(statistics.paired_p(differences, clusters))
            stderr = statistics.mean_stderr(differences, clusters)
            detectable = statistics.detectable_difference(stderr)
            numbers = [f"{differences.mean():+.4f}", f"{stderr:.4f}", f"{detectable:.4f}", test]
            rows.append([task, metric.removesuffix(",none"), f"{len(pairs):,}", *numbers])
    if not rows:
        fix = "Give folders that `jingu evaluate` has written to, of the same tasks."
        raise JinguError("the two folders have no results in common.", where=f"{first}, {second}", fix=fix)
    for row, p, adjusted in zip(rows, p_values, statistics.holm(p_values), strict=True):
        row += [f"{p:.3g}", f"{adjusted:.3g}"]
    header = ("task", "metric", "documents", "difference", "stderr", "detectable", "test", "p", "p (Holm)")
    print_table(header, rows, right=(2, 3, 4, 5, 7, 8))
    print(f"\nA difference above 0 means that {second} has the higher value.")
