"""Profiles of some steps of a run: a trace of each rank, and the operators that take the most time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.profiler

from jingu.runtime.files import write_text_atomically
from jingu.runtime.log import log_info
from jingu.watch.activity import Activity

# Number of operators in the table of the log.
_NUM_OPERATORS = 10


@contextmanager
def profile_steps(
    folder: Path, steps: int, rank: int, first_step: int, activity: Activity
) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step. It writes a trace after one warmup step and `steps` profiled steps.

    The trace is in Chrome's JSON format, for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

    Args:
        folder: folder for `step-S-rank-R.json`, the trace of the steps after step S, and `step-S-rank-R.summary.json`,
            the times of all operators for the report.
        steps: number of steps to profile; 0: none.
        first_step: number of steps that the run took before this start.
        activity: what this rank does, for the watchdog.
    """
    if not steps:
        yield lambda: None
        return
    path = folder / f"step-{first_step + 1}-rank-{rank}.json"

    def write(profiler: torch.profiler.profile) -> None:
        # Writing a large trace takes long. The phase `save` keeps the watchdog from taking it for a hang.
        activity.enter("save")
        folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(path))
        operators = measure_operators(profiler)
        summary = {"steps": profiler.step_num - 1, "operators": [asdict(operator) for operator in operators]}
        write_text_atomically(path.with_suffix(".summary.json"), json.dumps(summary) + "\n")
        log_info(f"The profile is {path}.\n{summarize(operators)}")
        activity.enter("between steps")

    # The first step is warmup, because it compiles and allocates. Write only one trace.
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)
    activities = torch.profiler.supported_activities()
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write) as profiler:
        yield profiler.step


@dataclass(frozen=True)
class Operator:
    """Total time and number of calls of an operator in all profiled steps.

    Attributes:
        seconds: self time in seconds, on the accelerator if there is one, else on the CPU.
    """

    name: str
    seconds: float
    calls: int


def measure_operators(profiler: torch.profiler.profile) -> list[Operator]:
    """Return all operators, sorted by self time in descending order."""
    events = [event for event in profiler.key_averages() if not event.key.startswith("ProfilerStep")]
    on_device = any(event.self_device_time_total for event in events)
    operators = []
    for event in events:
        microseconds = event.self_device_time_total if on_device else event.self_cpu_time_total
        operators.append(Operator(event.key, microseconds / 1e6, event.count))
    return sorted(operators, key=lambda operator: -operator.seconds)


def summarize(operators: list[Operator]) -> str:
    """Return a table of the operators with the most self time, as text."""
    total = sum(operator.seconds for operator in operators) or 1.0
    lines = [f"{'self time (ms)':>14} {'share':>6} {'calls':>7}  operator"]
    for operator in operators[:_NUM_OPERATORS]:
        share = operator.seconds / total
        lines.append(f"{operator.seconds * 1000:>14,.2f} {share:>6.1%} {operator.calls:>7,}  {operator.name}")
    return "\n".join(lines)
