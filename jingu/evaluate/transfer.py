"""`jingu evaluate transfer`: evaluate tuned prompts on other tasks than those they were tuned on (Vu et al., 2022)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jingu.errors import JinguError, join_words
from jingu.evaluate.commands import TaskOptions, evaluate_model, prepare_tasks
from jingu.evaluate.comparison import (
    DIFFERENCE_COLUMNS,
    Difference,
    compare_metric,
    format_p,
    match_records,
    mean_metrics,
)
from jingu.evaluate.evaluation import TaskResult, write_json
from jingu.evaluate.held_out import training_tasks
from jingu.evaluate.statistics import holm
from jingu.evaluate.task_metrics import MetricResult
from jingu.formats.models import open_adapter_run
from jingu.formats.provenance import read_provenance, run_of
from jingu.formatting import format_score, print_table
from jingu.infer.distributed import inference_ranks
from jingu.infer.generate import InferenceOptions
from jingu.infer.inference_model import model_name


@dataclass(frozen=True)
class Cell:
    """The result of a tuned prompt on a task.

    Attributes:
        source: name of the run that tuned the prompt, or of the base model, which has no prompt.
        target: name of the task.
        metric: the first metric of the task.
        is_own: whether the prompt was tuned on this task, according to the run's provenance.
        difference: difference from the base model; None for the base model itself, and if the metric is not a mean.
        precision: of the computation.
        p_holm: p-value of the difference with Holm's correction for the number of cells.
    """

    source: str
    target: str
    metric: str
    result: MetricResult
    is_own: bool
    difference: Difference | None
    precision: str = ""
    p_holm: float | None = None


def transfer(runs: Sequence[Path], inference: InferenceOptions, options: TaskOptions) -> None:
    """Evaluate the prompts (or other adapters) of several runs on tasks, print a table, and write all results to a
    folder: by default `evaluations/transfer`.

    Args:
        runs: runs, or steps of them, that started from one model.
    """
    folder = options.output or Path("evaluations") / "transfer"
    with inference_ranks(inference.device) as ranks:
        # 1. Open all runs first, so that errors appear early. The longest prompt leaves the least room for the tasks.
        models, longest = _open_runs(runs)
        prepared_tasks = prepare_tasks(longest, options, options.index())
        # 2. Evaluate one model after another, first the base model.
        results = {
            name: evaluate_model(path, prepared_tasks, inference, folder / name, ranks) for name, path in models.items()
        }
        if ranks is None or ranks.is_first:
            cells = _make_cells(models, results)
            _print_cells(cells)
            write_json([asdict(cell) for cell in cells], folder / "transfer.json")
            print(f"\nwritten to {folder}")


def _open_runs(runs: Sequence[Path]) -> tuple[dict[str, Path], Path]:
    """Return the models by name, first the base model of all runs; and the run with the longest prompt.

    Raises:
        JinguError: a run trained no adapter, the runs have different base models, or two have the same name.
    """
    open_runs = [(run, *open_adapter_run(run)) for run in runs]
    bases = {base_path.resolve(): base_path for _, _, _, base_path in open_runs}
    if len(bases) > 1:
        what = f"these runs started from different models: {join_words([*map(str, bases.values())], 'and')}."
        raise JinguError(what, where=", ".join(map(str, runs)), fix="Compare prompts of one model.")
    paths = [*bases.values(), *runs]
    # A run that started from another one started from a checkpoint of it.
    models = {model_name(run_of(path)): path for path in paths}
    if len(models) < len(paths):
        where = ", ".join(map(str, paths))
        raise JinguError("two of the models have the same name.", where=where, fix="Give runs with different names.")
    return models, max(open_runs, key=lambda item: item[1].spec.prompts[0])[0]


def _make_cells(models: Mapping[str, Path], results: Mapping[str, Mapping[str, TaskResult]]) -> list[Cell]:
    """Return the cells of the table, row by row; the first row is the base model."""
    first = next(iter(models))
    cells = []
    for source, path in models.items():
        own_tasks = set() if source == first else training_tasks(read_provenance(path))
        for target, result in results[source].items():
            metric = next(iter(result.metrics))
            pairs = match_records(results[first][target].records, result.records)
            difference = None
            if source != first and metric in mean_metrics(pairs):
                difference = compare_metric(pairs, metric)
            is_own = target.partition("@")[0] in own_tasks
            cells.append(Cell(source, target, metric, result.metrics[metric], is_own, difference, result.precision))
    adjusted_values = iter(holm([cell.difference.p for cell in cells if cell.difference is not None]))
    return [cell if cell.difference is None else replace(cell, p_holm=next(adjusted_values)) for cell in cells]


def _print_cells(cells: Sequence[Cell]) -> None:
    """Print a table of prompts and tasks, and the differences from the base model."""
    metrics = {cell.target: f"{cell.target} {cell.metric.removesuffix(',none')}" for cell in cells}
    table: dict[str, list[str]] = {}
    for cell in cells:
        value = f"{format_score(cell.result.value)} ± {format_score(cell.result.stderr)}{'*' if cell.is_own else ''}"
        table.setdefault(cell.source, []).append(value)
    print_table(("prompt of", *metrics.values()), [[name, *row] for name, row in table.items()], right=())
    print(f"\ncomputed in {', '.join(dict.fromkeys(cell.precision for cell in cells))}")
    if any(cell.is_own for cell in cells):
        print("\n* tuned on this task")
    rows = [
        [
            cell.source,
            metrics[cell.target],
            *cell.difference.columns(),
            format_p(cell.difference.p),
            format_p(math.nan if cell.p_holm is None else cell.p_holm),
        ]
        for cell in cells
        if cell.difference is not None
    ]
    if rows:
        print(f"\nDifferences from {cells[0].source} without a prompt, document by document:\n")
        header = ("prompt of", "task", *DIFFERENCE_COLUMNS, "p", "p (Holm)")
        print_table(header, rows, right=(2, 3, 4, 5, 7, 8))
