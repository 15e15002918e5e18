"""`jingu evaluate`: scores of a model on tasks, a list of tasks, and a comparison of two models."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jingu import __version__
from jingu.errors import JinguError, pluralize
from jingu.evaluate import statistics
from jingu.evaluate.evaluation import (
    RESULT_SUFFIX,
    SAMPLES_SUFFIX,
    aggregate_group,
    evaluate_task,
    prepare_task,
    write_result,
)
from jingu.evaluate.scoring import AnswerCache, Scorer, check_generation_fits, fingerprint
from jingu.evaluate.task_file import TaskIndex
from jingu.evaluate.task_metrics import MetricResult
from jingu.formats.models import open_model
from jingu.formatting import print_table
from jingu.infer.generate import InferenceOptions
from jingu.infer.inference_model import model_name

_HEADER = ("task", "shots", "documents", "metric", "value", "stderr", "95% interval")


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
    names = list(dict.fromkeys(name for task in tasks for name in index.load(task)))
    stored = open_model(model)
    for name in names:
        if index.tasks[name].output_type == "generate_until":
            check_generation_fits(index.tasks[name], stored.spec)
    prepared = [prepare_task(index.tasks[name], num_fewshot, limit) for name in names]
    # 2. Load the model, and what is known of its answers.
    how = InferenceOptions(**compute)
    inference_model = how.load(model)
    digest = fingerprint(stored, inference_model.tokenizer, how.precision)
    folder = output or _default_folder(model)
    cache = AnswerCache(folder / f"cache-{digest[:16]}.jsonl")
    about = {"name": inference_model.name, "fingerprint": digest, "precision": how.precision, "jingu": __version__}
    # 3. Evaluate task by task; the results of each are written at once.
    scorer = Scorer(how.make_engine(inference_model), cache)
    results = {}
    rows: list[list[str]] = []
    with cache.open():
        for task in prepared:
            result = evaluate_task(task, scorer)
            write_result(result, folder, about)
            results[result.name] = result
            rows += _table_rows(result.name, str(task.num_shots), result.metrics)
            for what, count in result.counts.items():
                if count and (what != "left_out" or limit is None):
                    print(f"{result.name}: {what.replace('_', ' ')}: {count:,}", file=sys.stderr)
    for group in index.groups.values():
        rows += _table_rows(group.group, "", aggregate_group(group, results))
    print_table(_HEADER, rows, right=(1, 2, 4, 5))
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
        low, high = metric.interval
        interval = f"{low:.4f} to {high:.4f}"
        label = key.removesuffix(",none")
        rows.append([name, shots, f"{metric.size:,}", label, f"{metric.value:.4f}", f"{metric.stderr:.4f}", interval])
    return rows


def list_tasks(include: Sequence[str] | None = None) -> None:
    """Print the tasks of the catalogue and of other folders."""
    index = TaskIndex([Path(folder) for folder in include or ()])
    rows = []
    for name, file in sorted(index.files.items()):
        # A task that runs code is listed without being read.
        try:
            index.load(name)
        except JinguError:
            rows.append([name, "", "", str(file)])
            continue
        if name in index.groups:
            members = index.groups[name].members
            rows.append([name, "group", "", pluralize(len(members), "task")])
        else:
            task = index.tasks[name]
            rows.append([name, task.output_type, task.metadata.licence or "", task.metadata.description or ""])
    print_table(("name", "type", "licence", "description"), rows, right=())


# Comparison


def compare(first: Path, second: Path) -> None:
    """Compare the results of two models, document by document."""
    both = _results(first).keys() & _results(second).keys()
    if not both:
        what = "the two folders have no task in common."
        raise JinguError(what, where=f"{first}, {second}", fix="Evaluate both models on the same tasks.")
    comparisons = []
    for name in sorted(both):
        comparisons += _compare_task(name, _results(first)[name], _results(second)[name])
    adjusted = statistics.holm([comparison["p"] for comparison in comparisons])
    rows = []
    for comparison, p in zip(comparisons, adjusted, strict=True):
        rows.append(
            [
                comparison["task"],
                comparison["metric"].removesuffix(",none"),
                f"{comparison['size']:,}",
                f"{comparison['difference']:+.4f}",
                f"{comparison['stderr']:.4f}",
                comparison["test"],
                f"{comparison['p']:.3g}",
                f"{p:.3g}",
                f"{statistics.detectable_difference(comparison['stderr']):.4f}",
            ]
        )
    header = ("task", "metric", "documents", "difference", "stderr", "test", "p", "p (Holm)", "detectable")
    print_table(header, rows, right=(2, 3, 4, 6, 7, 8))
    print(f"\nA difference above 0 means that {second} has the higher value.")


def _results(folder: Path) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return the results and samples of a folder by task."""
    results = {}
    for file in sorted(folder.glob(f"*{SAMPLES_SUFFIX}")):
        name = file.name.removesuffix(SAMPLES_SUFFIX)
        result = json.loads((folder / f"{name}{RESULT_SUFFIX}").read_text(encoding="utf-8"))
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        results[result["task"]] = (result, records)
    if not results:
        fix = "Give the folder that `jingu evaluate` has written to."
        raise JinguError("there are no results of an evaluation here.", where=folder, fix=fix)
    return results


def _compare_task(
    name: str,
    first: tuple[dict[str, Any], list[dict[str, Any]]],
    second: tuple[dict[str, Any], list[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """Return the comparisons of all metrics that are means, over the documents that both have."""
    comparisons = []
    records = {record["hash"]: record for record in first[1]}
    pairs = [(records[record["hash"]], record) for record in second[1] if record["hash"] in records]
    for metric, result in first[0]["results"].items():
        if result["method"] not in ("mean", "clustered") or metric not in second[0]["results"] or not pairs:
            continue
        values = np.array([[record["metrics"][metric] for record in pair] for pair in pairs], np.float64)
        differences = values[:, 1] - values[:, 0]
        clusters = [pair[0].get("cluster") for pair in pairs] if result["method"] == "clustered" else None
        if clusters is None and np.isin(values, (0, 1)).all():
            test = "McNemar"
            p = statistics.mcnemar_p(int((differences < 0).sum()), int((differences > 0).sum()))
        else:
            test = "paired t"
            p = statistics.paired_p(differences, clusters)
        stderr = statistics.mean_stderr(differences)
        if clusters is not None:
            stderr = statistics.clustered_stderr(differences, clusters)
        comparisons.append(
            {
                "task": name,
                "metric": metric,
                "size": len(pairs),
                "difference": float(differences.mean()),
                "stderr": stderr,
                "test": test,
                "p": p,
            }
        )
    return comparisons
