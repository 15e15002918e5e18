"""Mean errors of the planner's model of time without each of its terms, on published runs (`bench/planning.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import ModuleType
from unittest.mock import patch

from bench.planning import measurements, sample, summary, time_errors
from bench.planning_rows import FOLDER, Case, read_cases
from jingu.plan import collectives, step_time
from jingu.plan.calibration import fit_efficiency
from jingu.plan.step_time import StageTime
from jingu.plan.workload import Stage


def _on(case: Case, **machine: object) -> Case:
    return replace(case, machine=case.machine.model_copy(update=machine))


def _by(case: Case, **software: object) -> Case:
    return replace(case, work=replace(case.work, software=replace(case.work.software, **software)))  # type: ignore[arg-type]


# Terms of the model of time: what stands in the place of each, as a change of the rows or of functions of a module.
TERMS: dict[str, tuple[Callable[[Case], Case] | None, dict[tuple[ModuleType, str], object]]] = {
    "all terms": (None, {}),
    "no waves of tiles": (lambda case: _on(case, multiprocessors=0), {}),
    "no shortest time of kernels, no launches": (lambda case: _by(case, kernels=0.0, expert_kernels=0.0), {}),
    "no limit of power": (lambda case: _on(case, sustained=1.0), {}),
    "a loss that moves each logit a few times": (lambda case: _by(case, logit_traffic=16.0), {}),
    "whole hidden states between stages": (lambda case: _by(case, splits_sends=False), {}),
    "no contention of overlapping communication": (None, {(step_time, "CONTENTION"): 0.0}),
    "rings without latency": (None, {(collectives, "_ring_latency"): lambda group, machine: 0.0}),
    "stages of equal length": (
        None,
        {(step_time, "_idle_seconds"): lambda times, time, travel: _even_idle(times, travel)},
    ),
}


def _even_idle(times: Sequence[tuple[Stage, StageTime]], travel: float) -> float:
    """Return the bubble of a 1F1B pipeline whose stages all take the mean."""
    ranks = sum(stage.count for stage, _ in times)
    mean = sum(stage.count * (time.forward + time.backward) for stage, time in times) / ranks
    return (ranks - 1) * (mean + travel)


def run(_argument: str = "") -> str:
    """Return the mean errors of all tables without each term, with constants fitted to 20 rows of every table."""
    cases = read_cases(FOLDER)
    tables = list(dict.fromkeys(case.table for case in cases))
    lines = [f"| | {' | '.join(tables)} |", f"|{'---|' * (len(tables) + 1)}"]
    for name, (change, patches) in TERMS.items():
        changed = [change(case) if change else case for case in cases]
        with ExitStack() as stack:
            for (module, attribute), value in patches.items():
                stack.enter_context(patch.object(module, attribute, value))
            _forget()
            efficiency = fit_efficiency(measurements(sample(changed)))
            means = [summary(time_errors([c for c in changed if c.table == table], efficiency))[0] for table in tables]
        _forget()
        lines.append(f"| {name} | {' | '.join(means)} |")
    return "\n".join(lines)


def _forget() -> None:
    """Clear the caches of `step_time`, whose results depend on the functions that have been replaced."""
    for function in vars(step_time).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
