"""Compare the planner with published runs: seconds per step, and memory of the fullest GPU.

`python -m bench planning` judges the rows in bench/planning/; `python -m bench planning=PATH` those of a CSV file or of
a folder. Each training system is predicted with constants that were fitted to the rows of the other systems here
(leave-one-system-out), with those of `jingu plan`, and with constants calibrated on at most 20 of its own rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from bench.planning_rows import FOLDER, Case, read_cases
from jingu.model.count import flops_per_token
from jingu.model.decoder import parameter_shapes
from jingu.plan.calibration import Measurement, fit_efficiency, prediction_errors
from jingu.plan.intervals import memory_margin, plan_interval
from jingu.plan.machine import Efficiency
from jingu.plan.memory import fullest_stage, stage_memory

# Most rows of a table to which an efficiency is fitted.
MAX_FIT = 20


def measurements(cases: Sequence[Case]) -> list[Measurement]:
    """Return the timed rows in the form that calibration expects."""
    return [Measurement(case.work, case.machine, case.seconds) for case in cases if case.seconds is not None]


def split_key(case: Case) -> tuple[int, ...]:
    """Return the key by which rows are sorted, so that every n-th row is a sample of all sizes and layouts."""
    work = case.work
    return (work.spec.hidden_size, work.sizes.tensor, work.micro_batch, *work.sizes.shape, work.accumulation)


def sample(cases: Sequence[Case], number: int = MAX_FIT) -> list[Case]:
    """Return at most this many rows of each table, of all sizes and layouts."""
    chosen: list[Case] = []
    for table in dict.fromkeys(case.table for case in cases):
        rows = sorted((case for case in cases if case.table == table and case.seconds), key=split_key)
        chosen += rows[:: -(-len(rows) // number)] if rows else []
    return chosen


def fit_without(system: str | None) -> Efficiency:
    """Return the constants fitted to the rows here of all systems but one."""
    cases = [case for case in sample(read_cases(FOLDER)) if case.system != system]
    return fit_efficiency(measurements(cases))


def time_errors(cases: Sequence[Case], efficiency: Efficiency) -> list[float]:
    """Return planned over measured seconds, minus 1, of the rows that were timed."""
    return prediction_errors(measurements(cases), efficiency)


def memory_error(case: Case) -> float | None:
    """Return planned over measured memory, minus 1; None: not measured."""
    return None if case.gib is None else fullest_stage(case.work)[1].total / 2**30 / case.gib - 1


def constant_mfu(cases: Sequence[Case]) -> list[float]:
    """Return the errors of a baseline that predicts every row with the same MFU, the median of all rows."""
    shares = []
    for case in cases:
        if case.seconds is not None:
            work = case.work
            flops = flops_per_token(work.spec, parameter_shapes(work.spec), work.sequence) * work.tokens_per_step
            shares.append(flops / (case.machine.peak_tflops * 1e12 * work.ranks * case.seconds))
    return [share / median(shares) - 1 for share in shares]


def calibrated(cases: Sequence[Case], start: Efficiency, seed: int | None = None) -> list[float]:
    """Return the errors on rows that a calibration on at most 20 other rows of the table has not seen.

    With fewer than 40 rows, six-fold cross-validation.

    Args:
        seed: seed of a random choice of the rows to fit; None: every n-th row.
    """
    rows = measurements(sorted((case for case in cases if case.seconds), key=split_key))
    if seed is not None:
        random.Random(seed).shuffle(rows)
    stride = len(rows) // MAX_FIT if len(rows) >= 2 * MAX_FIT else 6
    errors = []
    for fold in range(1 if len(rows) >= 2 * MAX_FIT else 6):
        one = rows[fold::stride][:MAX_FIT] if len(rows) >= 2 * MAX_FIT else None
        fit = one or [row for number, row in enumerate(rows) if number % 6 != fold]
        tried = [row for row in rows if row not in fit]
        errors += prediction_errors(tried, fit_efficiency(fit, start)) if fit and tried else []
    return errors


def summary(errors: Sequence[float]) -> list[str]:
    """Return mean, worst and bias as cells."""
    if not errors:
        return ["–", "–", "–"]
    worst = max(errors, key=abs)
    return [f"{fmean(map(abs, errors)):.1%}", f"{worst:+.0%}", f"{median(errors):+.1%}"]


def predict_fit(case: Case) -> bool:
    """Return whether the planner says that a step fits into memory."""
    usable = case.machine.usable_bytes / memory_margin(case.machine)
    return max(stage_memory(case.work, stage).total for stage in case.work.stages) <= usable


def coverage(cases: Sequence[Case], efficiency: Efficiency) -> tuple[list[bool], list[bool]]:
    """Return for each measured time and each measured memory whether the interval of the plan holds it."""
    times, memories = [], []
    timed = [case for case in cases if case.seconds is not None]
    for case, error in zip(timed, time_errors(cases, efficiency), strict=True):
        low, high = plan_interval(case.work, case.machine).seconds
        times.append(low <= 1 / (1 + error) <= high)
    for case in cases:
        error_of_memory = memory_error(case)
        if error_of_memory is not None:
            low, high = plan_interval(case.work, case.machine).memory
            memories.append(low <= 1 / (1 + error_of_memory) <= high)
    return times, memories


def run(argument: str = "") -> str:
    """Return the errors of all tables as a table.

    Args:
        argument: CSV file or folder of the rows to judge; empty or `tiny`: those here.
    """
    cases = read_cases(FOLDER if argument in ("", "tiny") else Path(argument))
    lines = [
        "| rows | number | time: mean | worst | bias | the command: mean | worst "
        "| calibrated: mean | worst | spread | constant MFU "
        "| memory: number | mean | worst | bias | wrong fits |",
        f"|{'---|' * 16}",
    ]
    fits: dict[str, Efficiency] = {}
    inside: tuple[list[bool], list[bool]] = ([], [])
    for table in dict.fromkeys(case.table for case in cases):
        rows = [case for case in cases if case.table == table]
        system = rows[0].system
        if system not in fits:
            fits[system] = fit_without(system)
        errors = time_errors(rows, fits[system])
        memory_errors = [error for case in rows if (error := memory_error(case)) is not None]
        for total, part in zip(inside, coverage(rows, fits[system]), strict=True):
            total += part
        # Several random choices of the rows that are fitted.
        seeds = (0, 1, 2) if len(errors) >= 2 * MAX_FIT else ()
        means = [fmean(map(abs, calibrated(rows, fits[system], seed))) for seed in seeds]
        cells = [
            table,
            str(len(rows)),
            *summary(errors),
            *summary(time_errors(rows, Efficiency()))[:2],
            *summary(calibrated(rows, fits[system]) if len(errors) > 1 else [])[:2],
            f"{min(means):.1%} to {max(means):.1%}" if means else "–",
            summary(constant_mfu(rows) if errors else [])[0],
            str(len(memory_errors)),
            *summary(memory_errors),
            str(sum(case.fits is False and predict_fit(case) for case in rows)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    parts = ("seconds", "memories")
    shares = [
        f"{fmean(values):.0%} of {len(values)} {name}" for values, name in zip(inside, parts, strict=True) if values
    ]
    refused = [case for case in cases if case.fits is True and not predict_fit(case)]
    lines.append(f"\nThe intervals of the plan hold {' and '.join(shares) or 'nothing'}.")
    lines.append(f"Steps that ran, and are said not to fit: {len(refused)}.")
    return "\n".join(lines)
