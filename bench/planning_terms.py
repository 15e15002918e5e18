"""Mean errors of the planner without each term of time and of memory, on published runs (`bench/planning.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import ModuleType
from unittest.mock import patch

from bench.planning import measurements, memory_error, sample, summary, time_errors
from bench.planning_rows import FOLDER, Case, read_cases
from jingu.plan import activations, collectives, data_parallel, step_time
from jingu.plan.calibration import fit_efficiency
from jingu.plan.data_parallel import DataLoad, data_loads
from jingu.plan.step_time import StageTime
from jingu.plan.workload import Stage


def _on(case: Case, **machine: object) -> Case:
    return replace(case, machine=case.machine.model_copy(update=machine))


def _by(case: Case, **software: object) -> Case:
    return replace(case, work=replace(case.work, software=replace(case.work.software, **software)))  # type: ignore[arg-type]


# Terms: what stands in the place of each, as a change of the rows or of functions of a module.
Terms = dict[str, tuple[Callable[[Case], Case] | None, dict[tuple[ModuleType, str], object]]]
TIME_TERMS: Terms = {
    "all terms": (None, {}),
    "no waves of tiles": (lambda case: _on(case, multiprocessors=0), {}),
    "no shortest time of kernels, no launches": (lambda case: _by(case, kernels=0.0, expert_kernels=0.0), {}),
    "no limit of power": (lambda case: _on(case, sustained=1.0), {}),
    "a loss that moves each logit a few times": (lambda case: _by(case, logit_traffic=16.0), {}),
    "whole hidden states between stages": (lambda case: _by(case, splits_sends=False), {}),
    "no contention of overlapping communication": (None, {(data_parallel, "CONTENTION"): 0.0}),
    "experts shared by all data-parallel ranks": (
        None,
        {(step_time, "data_loads"): lambda *arguments: tuple(_share_all(load) for load in data_loads(*arguments))},
    ),
    "rings without latency": (None, {(collectives, "_ring_latency"): lambda group, machine: 0.0}),
    "stages of equal length": (
        None,
        {(step_time, "_idle_seconds"): lambda times, time, travel: _even_idle(times, travel)},
    ),
}

MEMORY_TERMS: Terms = {
    "all terms": (None, {}),
    "an allocator that reuses all memory": (lambda case: _by(case, allocator_reuse=1.0), {}),
    "nothing reserved beside tensors": (lambda case: _by(case, reserved=1.0), {}),
    "no driver, libraries and groups": (lambda case: _by(case, context_gib=0.0, group_gib=0.0), {}),
    "no compiled blocks": (lambda case: _by(case, compiles_blocks=False), {}),
    "no logits": (lambda case: _by(case, logit_bytes=0.0), {}),
    "no scores of attention": (lambda case: _by(case, saved_scores=0.0), {}),
    "no buffers between stages": (lambda case: _by(case, keeps_buffers=False), {}),
    "no gradients of activations": (None, {(activations, "backward_bytes"): lambda block, work: 0.0}),
    "no gradients that wait for those of weights": (
        None,
        {(activations, "_gradients_of_results"): lambda block, work: 0.0},
    ),
}


def _share_all(load: DataLoad) -> DataLoad:
    """Return what all data-parallel ranks exchange."""
    return replace(load, group="fsdp")


def _even_idle(times: Sequence[tuple[Stage, StageTime]], travel: float) -> float:
    """Return the bubble of a 1F1B pipeline whose stages all take the mean."""
    ranks = sum(stage.count for stage, _ in times)
    mean = sum(stage.count * (time.forward + time.backward) for stage, time in times) / ranks
    return (ranks - 1) * (mean + travel)


def run(_argument: str = "") -> str:
    """Return the mean errors of all tables without each term.

    Those of time are with constants fitted to 20 rows of every table.
    """
    cases = read_cases(FOLDER)
    timed = [case for case in cases if case.seconds is not None]
    weighed = [case for case in cases if case.gib is not None]
    return f"{_compare(timed, TIME_TERMS, _time_means)}\n\nMemory:\n\n{_compare(weighed, MEMORY_TERMS, _memory_means)}"


def _compare(cases: list[Case], terms: Terms, means: Callable[[list[list[Case]]], list[str]]) -> str:
    """Return a table of the errors of each table of rows without each term."""
    tables = list(dict.fromkeys(case.table for case in cases))
    lines = [f"| | {' | '.join(tables)} |", f"|{'---|' * (len(tables) + 1)}"]
    for name, (change, patches) in terms.items():
        changed = [change(case) if change else case for case in cases]
        with ExitStack() as stack:
            for (module, attribute), value in patches.items():
                stack.enter_context(patch.object(module, attribute, value))
            _forget()
            cells = means([[case for case in changed if case.table == table] for table in tables])
        _forget()
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _time_means(tables: list[list[Case]]) -> list[str]:
    efficiency = fit_efficiency(measurements(sample([case for table in tables for case in table])))
    return [summary(time_errors(table, efficiency))[0] for table in tables]


def _memory_means(tables: list[list[Case]]) -> list[str]:
    return [summary([error for case in table if (error := memory_error(case)) is not None])[0] for table in tables]


def _forget() -> None:
    """Clear the caches of modules whose results depend on the functions that have been replaced."""
    for module in (activations, step_time):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
