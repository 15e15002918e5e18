"""Render the report of a run as one self-contained HTML file. Its layout is in page.html."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, stdev
from typing import Literal

from markupsafe import Markup

from jingu.evaluate.smooth_measures import TASKS_PREFIX, compare_with_chance
from jingu.formatting import format_number, format_rounded, memory_unit
from jingu.report.bars import draw_bars
from jingu.report.charts import Chart, Point, Series, draw_chart, is_drawable
from jingu.report.record import Row, RunRecord, get_number, parse_line, read_warnings
from jingu.report.rollout_answers import read_answers
from jingu.report.template import cut_text, render_document, spread

MAX_TABLE_ROWS = 20
NOISE_EVALUATIONS = 5  # last evaluations whose standard deviation is shown as noise
MAX_SAMPLES_PER_PROMPT = 6
MAX_PROMPTS = 12
MAX_WARNINGS = 12
NUM_COLOURS = 6
_SIDES = ("planned", "actual")


def render_page(record: RunRecord, status: str = "") -> str:
    """Return the text of the HTML file. All text from the run is escaped, because a model's output is not trusted.

    Args:
        status: lines about the current state of the run; empty for a page that is not live.
    """
    rate, share, memory = run_figures(record)
    unit = memory_unit(memory)
    plan_memory, plan_memory_unit = compare_memory(record.plan)
    charts = "".join(draw_chart(chart, record.resumes, record.stages) for chart in run_charts(record, *unit))
    return render_document(
        "page.html",
        record=record,
        status=status,
        start=record.starts[-1] if record.starts else {},
        last=last_row(record.train),
        evaluation=last_row(record.evaluations),
        rate=rate,
        share=share,
        memory=memory,
        memory_size=unit[0],
        memory_name=unit[1],
        predicts_text=_predicts_text(record),
        counts_bytes=_counts_bytes(record),
        best=_best(record),
        resumes=", ".join(f"{step:,}" for step in spread(record.resumes, 12)),
        charts=Markup(charts),
        coders=_coders(record),
        tasks=_tasks(record),
        samples=_samples(record),
        most_prompts=MAX_PROMPTS,
        answers=read_answers(record.folder) if record.folder else [],
        warnings=spread(read_warnings(record.folder), MAX_WARNINGS) if record.folder else [],
        profile=read_profile(record.folder) if record.folder else None,
        plan_terms=compare_with_plan(record.plan),
        plan_memory=plan_memory,
        plan_memory_unit=plan_memory_unit,
        table_steps=_table_steps(record),
    )


def _points(rows: dict[int, Row], key: str) -> list[Point]:
    """Return the steps and values of a key, in the order of steps; NaN where a row does not have it."""
    return [(step, get_number(row, key)) for step, row in sorted(rows.items())]


def run_figures(record: RunRecord) -> tuple[float, float, float]:
    """Return the median tokens per second, the median share of peak, and the peak memory in bytes; NaN if unknown."""
    rate, share, memory = (
        _finite(record.train.values(), key) or [math.nan] for key in ("tokens_per_second", "peak_share", "memory_bytes")
    )
    return median(rate), median(share), max(memory)


def _finite(rows: Iterable[Row], key: str) -> list[float]:
    """Return the finite values of a key."""
    return [value for row in rows if math.isfinite(value := get_number(row, key))]


def last_row(rows: dict[int, Row]) -> Row:
    """Return the row of the last step; empty if there is none."""
    return rows[max(rows)] if rows else {}


def compare_with_plan(plan: Row) -> list[tuple[str, float, float, float]]:
    """Compare the planned with the actual time of each term of a step, and of the whole step.

    Returns:
        Name, planned and actual milliseconds per step, and their difference as a share of the actual step. Terms that
        take no time are left out. Actual terms are NaN if steps were only timed as a whole.
    """
    seconds = get_number(plan, "actual_seconds")
    if not seconds > 0:
        return []
    planned_values, actual = (value if isinstance(value := plan.get(key), dict) else {} for key in _SIDES)
    rows = []
    for term in {**planned_values, **actual}:
        before = get_number({term: 0.0, **planned_values}, term)
        after = get_number({term: 0.0, **actual} if actual else {}, term)
        if before > 0 or after > 0:
            rows.append((term, before, after))
    rows.append(("step", get_number(plan, "planned_seconds"), seconds))
    return [(term, 1000 * before, 1000 * after, (after - before) / seconds) for term, before, after in rows]


def compare_memory(plan: Row) -> tuple[list[tuple[str, float, float, float]], str]:
    """Compare the planned with the actual memory of tensors on the first rank, by part and as a whole.

    Returns:
        Name, planned and actual size, and their difference as a share of the actual total; and the unit of the sizes.
        Empty if the memory of tensors was not measured, as by earlier versions.
    """
    plan_parts, run_parts = (value if isinstance(value := plan.get(f"{side}_memory"), dict) else {} for side in _SIDES)
    total = get_number(plan, "actual_memory_bytes")
    if not run_parts or not total > 0:
        return [], ""
    size, unit = memory_unit(total)
    rows = [(part, get_number(plan_parts, part), get_number(run_parts, part)) for part in run_parts]
    rows.append(("peak", get_number(plan, "planned_memory_bytes"), total))
    return [(part, before / size, after / size, (after - before) / total) for part, before, after in rows], unit


def _predicts_text(record: RunRecord) -> bool:
    """Return whether the loss is the cross-entropy of tokens. Tasks with preferences or rewards have other losses."""
    return last_row(record.train).keys().isdisjoint(("reward", "margin"))


def _counts_bytes(record: RunRecord) -> bool:
    """Return whether evaluations predict whole texts, so bits per byte exist. Span corruption counts no bytes."""
    counts = [row.get("bytes", 0) for row in record.evaluations.values()] or [0]
    return _predicts_text(record) and any(count is not None for count in counts)


def _best(record: RunRecord) -> str:
    """Return a note that compares the bits per byte of the last evaluation with comparable earlier ones."""
    groups = record.alike or [{}]
    values = [(value, step) for step, value in _points(groups[-1], "bits_per_byte") if math.isfinite(value)]
    if not values:
        return "no evaluation yet"
    if len(groups) > 1 and len(groups[-1]) == 1:
        return f"of {_tokens_read(groups[-1])}"
    best, step = min(values)
    return "validation, the best" if step == max(groups[-1]) else f"best {format_number(best)}, step {step:,}"


def run_charts(record: RunRecord, size: float, unit: str) -> list[Chart]:
    """Return the charts of a run.

    Args:
        size: number of bytes in a unit of memory.
        unit: name of this unit.
    """
    train = record.train
    memory = [(step, value / size) for step, value in _points(train, "memory_bytes")]
    levels = [(name, get_number(row, "bits_per_byte")) for name, row in record.baselines.items()]
    levels = [(name, value) for name, value in levels if is_drawable(value)]

    def one(label: str, key: str) -> list[Series]:
        return [Series(label, _points(train, key))]

    return [
        Chart(
            "Loss",
            "nats per token" if _predicts_text(record) else "of the task",
            [*one("training", "loss"), *_validation_series(record, "loss")],
            logarithmic_beyond=3,
        ),
        *[Chart("Bits per byte", "validation split", _validation_series(record, "bits_per_byte"), levels=levels)]
        * _counts_bytes(record),
        *_source_charts(record),
        *_task_charts(record),
        *_rollout_charts(train),
        *_expert_charts(train),
        Chart("Learning rate", "", one("rate", "lr"), from_zero=True),
        Chart("Gradient norm", "before clipping", one("norm", "grad_norm"), from_zero=True, logarithmic_beyond=10),
        Chart("Throughput", "tokens per second", one("rate", "tokens_per_second"), from_zero=True),
        Chart("Memory", f"{unit}, peak of one rank", [Series("memory", memory)], from_zero=True),
    ]


def _validation_series(record: RunRecord, key: str) -> list[Series]:
    """Return a series of a key for each group of comparable evaluations."""
    groups = record.alike
    names = [f"validation, {_tokens_read(rows)}" if len(groups) > 1 else "validation" for rows in groups]
    return [
        Series(name, _points(rows, key), "dots", min(colour, 2))
        for colour, (name, rows) in enumerate(zip(names, groups, strict=True), 1)
    ]


def _name_series(rows: dict[int, Row], keys: dict[str, str], kind: Literal["line", "dots"] = "line") -> list[Series]:
    """Return a series for each key, each in a different color.

    Args:
        keys: keys of the rows, by label.
    """
    return [
        Series(label, _points(rows, key), kind, number % NUM_COLOURS)
        for number, (label, key) in enumerate(keys.items())
    ]


def _source_charts(record: RunRecord) -> list[Chart]:
    """Return a chart of the validation loss of each source, if there are several."""
    series = _name_series(record.evaluations, {name: f"loss/{name}" for name in record.sources}, "dots")
    return [Chart("Validation loss by source", "nats per token", series)] if len(series) > 1 else []


def _task_charts(record: RunRecord) -> list[Chart]:
    """Return a chart of the bits per byte of the right answers in each task, if there are tasks."""
    keys = {name: f"{TASKS_PREFIX}{name}/bits_per_byte" for name in record.tasks}
    series = _name_series(record.evaluations, keys, "dots")
    return [Chart("Tasks", "bits per byte of the right answer", series)] if series else []


def _rollout_charts(train: dict[int, Row]) -> list[Chart]:
    """Return the charts of a run that learns from rewards; none for other runs."""
    last = last_row(train)
    rewards = [name for name in last if name == "reward" or name.startswith("rewards/")]
    if not rewards:
        return []

    def chart(title: str, unit: str, keys: Sequence[str]) -> Chart:
        labels = {key.removeprefix("rewards/").replace("_", " "): key for key in keys if key in last}
        return Chart(title, unit, _name_series(train, labels))

    return [
        chart("Rewards", "means over the answers of a step", rewards),
        chart("Length", "tokens of an answer", ("length", "length_better", "length_worse")),
        chart("Answers and groups", "shares", ("truncated", "dead_groups", "clipped", "unscored", "timeouts")),
        chart("Entropy and KL", "nats per token", ("entropy", "kl")),
        chart("Mismatch of generation and training", "nats per token", ("mismatch_mean", "mismatch_max")),
    ]


def _expert_charts(train: dict[int, Row]) -> list[Chart]:
    """Return the charts of a mixture of experts; none for other models."""
    last = last_row(train)
    if "max_expert_load" not in last:
        return []
    loads = {"most loaded expert": "max_expert_load", "least loaded expert": "min_expert_load"}
    charts = [Chart("Loads of experts", "relative to the mean of a layer", _name_series(train, loads), from_zero=True)]
    if get_number(last, "max_correction") >= 0:
        series = [Series("largest", _points(train, "max_correction"))]
        charts.append(Chart("Corrections of routers", "largest absolute value", series, from_zero=True))
    if any(get_number(row, "dropped") > 0 for row in train.values()):
        charts.append(Chart("Dropped choices", "share", [Series("dropped", _points(train, "dropped"))], from_zero=True))
    return charts


def _tasks(record: RunRecord) -> list[tuple[str, dict[str, float], float, str]]:
    """Return a row of the table for each task.

    Returns:
        Name, measures of the last evaluation, standard deviation of the bits per byte over the last
        `NOISE_EVALUATIONS` evaluations, and a comparison of the accuracy with chance in words.
    """
    rows = []
    for name in record.tasks:
        prefix = f"{TASKS_PREFIX}{name}/"
        steps = [step for step, row in sorted(record.evaluations.items()) if f"{prefix}bits_per_byte" in row]
        last = record.evaluations[steps[-1]]
        measures = {key.removeprefix(prefix): get_number(last, key) for key in last if key.startswith(prefix)}
        values = [get_number(record.evaluations[step], f"{prefix}bits_per_byte") for step in steps[-NOISE_EVALUATIONS:]]
        noise = stdev(values) if len(values) > 1 else math.nan
        rows.append((name, measures, noise, compare_with_chance(measures) if "acc" in measures else ""))
    return rows


def _tokens_read(rows: dict[int, Row]) -> str:
    """Return the number of tokens that each evaluation of a group read, as text."""
    return f"{format_rounded(get_number(last_row(rows), 'tokens'))} tokens"


def _samples(record: RunRecord) -> list[tuple[str, list[tuple[str, str]], int]]:
    """Return for each prompt its text, the steps and texts of some samples, and the number of all samples."""
    steps_by_prompt: dict[str, list[int]] = {}
    for step, prompt in sorted(record.samples, key=lambda key: key[0]):
        steps_by_prompt.setdefault(prompt, []).append(step)

    def texts(prompt: str, steps: list[int]) -> list[tuple[str, str]]:
        shown_steps = spread(steps, MAX_SAMPLES_PER_PROMPT)
        return [(f"{step:,}", cut_text(str(record.samples[step, prompt].get("text", "")))) for step in shown_steps]

    return [(cut_text(prompt), texts(prompt, steps), len(steps)) for prompt, steps in steps_by_prompt.items()]


def _table_steps(record: RunRecord) -> list[int]:
    """Return the steps for the table of figures: evaluations, and steps spread over the run from first to last."""
    steps = sorted(record.train.keys() | record.evaluations.keys())
    evaluations = spread(sorted(record.evaluations), MAX_TABLE_ROWS)
    other_steps = spread(steps, max(2, MAX_TABLE_ROWS - len(evaluations)))
    return sorted({*evaluations, *other_steps})


def _coders(record: RunRecord) -> list[tuple[float, str, bool]]:
    """Return the compressors and this model, by descending bits per byte; empty if there are no baselines.

    Returns:
        Bits per byte, name, and whether it is this model.
    """
    values = [(get_number(row, "bits_per_byte"), name, False) for name, row in record.baselines.items()]
    values.append((get_number(last_row(record.evaluations), "bits_per_byte"), "this model", True))
    values = [value for value in values if math.isfinite(value[0]) and value[0] >= 0]
    return sorted(values, key=lambda value: -value[0]) if record.baselines else []


# Read the profile of a run (`train.profile`): the time of operators in a step on each rank.

# Kinds of operators: the number of their color in page.css, and a pattern for their names in lower case. The first
# pattern that matches applies.
_KINDS = {
    "optimizer": (5, r"adam|optimizer|_foreach|muon|lion"),
    "attention": (1, r"attention|sdpa|flash|fmha"),
    "matmuls": (0, r"(^|::|_)(add|b|baddb|grouped_)?mm$|gemm|matmul|linear|cutlass|mkldnn|onednn"),
    "communication": (
        3,
        r"gloo|nccl|c10d|fsdp|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|send|recv",
    ),
    "copies": (4, r"copy|memcpy|memset|clone|::cat|_to_copy|contiguous|index|gather|scatter|fill|zero"),
    "elementwise": (
        2,
        r"(add|sub|mul|div|neg|exp|log|silu|gelu|relu|sigmoid|softmax|pow|r?sqrt|sum|mean|norm|where)_?$",
    ),
    "other": (9, ""),
}
# The number of the color of each kind, in the order of the bars' parts.
_COLOURS = {kind: colour for colour, kind in sorted((colour, kind) for kind, (colour, _) in _KINDS.items())}
_NUM_OPERATORS = 10
_MAX_RANKS = 16


@dataclass(frozen=True)
class StepProfile:
    """The last profile of a run.

    Attributes:
        step: step after which the profile begins.
        steps: number of profiled steps.
        bars: figure with a bar per rank: milliseconds of self time per step, by kind of operator.
        slowest: the rank with the most self time.
        operators: the slowest operators of this rank: name, milliseconds per step, share of the self time, and calls
            per step.
    """

    step: int
    steps: int
    bars: Markup
    slowest: int
    operators: list[tuple[str, float, float, float]]


def read_profile(folder: Path) -> StepProfile | None:
    """Return the last profile in the folder of a run; None if there is none."""
    summaries: dict[int, dict[int, Row]] = {}
    for file in folder.glob("profile/step-*-rank-*.summary.json"):
        numbers = re.fullmatch(r"step-(\d+)-rank-(\d+)\.summary\.json", file.name)
        summary = parse_line(file.read_text(encoding="utf-8", errors="replace"))
        if numbers and summary and get_number(summary, "steps") >= 1:
            summaries.setdefault(int(numbers[1]), {})[int(numbers[2])] = summary
    if not summaries:
        return None
    step, by_rank = max(summaries.items())
    times = {rank: _operators(summary) for rank, summary in sorted(by_rank.items())}
    slowest = max(times, key=lambda rank: sum(milliseconds for _, milliseconds, _ in times[rank]))
    total = sum(milliseconds for _, milliseconds, _ in times[slowest]) or 1.0
    rows = [(f"rank {rank}", _sum_by_kind(times[rank])) for rank in spread(list(times), _MAX_RANKS)]
    return StepProfile(
        step,
        int(get_number(by_rank[slowest], "steps")),
        draw_bars("Time of operators by rank", "ms per step", _COLOURS, rows),
        slowest,
        [(name, time, time / total, calls) for name, time, calls in times[slowest][:_NUM_OPERATORS]],
    )


def _operators(summary: Row) -> list[tuple[str, float, float]]:
    """Return name, milliseconds per step and calls per step of each operator in the summary of a rank."""
    steps = get_number(summary, "steps")
    rows = [row for row in summary.get("operators", []) if isinstance(row, dict)]
    return [
        (str(row.get("name", "")), 1000 * get_number(row, "seconds") / steps, get_number(row, "calls") / steps)
        for row in rows
    ]


def _sum_by_kind(operators: list[tuple[str, float, float]]) -> dict[str, float]:
    """Return the milliseconds per step of each kind of operator, without kinds that take no time."""
    sums = dict.fromkeys(_COLOURS, 0.0)
    for name, milliseconds, _ in operators:
        kind = next(kind for kind, (_, pattern) in _KINDS.items() if re.search(pattern, name.lower()))
        sums[kind] += milliseconds
    return {kind: milliseconds for kind, milliseconds in sums.items() if milliseconds > 0}
