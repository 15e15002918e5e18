"""Profile some steps of a run: a trace for each rank, and the operators that take most of the time."""

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

_NUM_OPERATORS = 10


@contextmanager
def profile_steps(
    folder: Path, steps: int, rank: int, first_step: int, activity: Activity
) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step; after `steps` steps and a first one it writes their trace.

    The trace is in Chrome's JSON format, for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

    Args:
        folder: where the traces are written, `step-S-rank-R.json`, which begins after step S, and with `.summary.json`
            the times of all operators, for the report.
        steps: 0: profile nothing.
        first_step: steps that the run has taken before.
        activity: the rank's record for the watchdog.
    """
    if not steps:
        yield lambda: None
        return
    path = folder / f"step-{first_step + 1}-rank-{rank}.json"

    def write(profiler: torch.profiler.profile) -> None:
        # A large trace takes long to write, which is no hang.
        activity.enter("save")
        folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(path))
        operators = measure_operators(profiler)
        summary = {"steps": profiler.step_num - 1, "operators": [asdict(operator) for operator in operators]}
        write_text_atomically(path.with_suffix(".summary.json"), json.dumps(summary) + "\n")
        log_info(f"The profile is {path}.\n{summarize(operators)}")
        activity.enter("between steps")

    # The first step compiles and allocates: it counts as warmup. Only one trace is written.
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)
    activities = torch.profiler.supported_activities()
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write) as profiler:
        yield profiler.step


@dataclass(frozen=True)
class Operator:
    """An operator in all profiled steps; `seconds` are of self time, on the accelerator if there is one."""

    name: str
    seconds: float
    calls: int


def measure_operators(profiler: torch.profiler.profile) -> list[Operator]:
    """Return all operators, those with the most self time first."""
    events = [event for event in profiler.key_averages() if not event.key.startswith("ProfilerStep")]
    on_device = any(event.self_device_time_total for event in events)
    operators = []
    for event in events:
        microseconds = event.self_device_time_total if on_device else event.self_cpu_time_total
        operators.append(Operator(event.key, microseconds / 1e6, event.count))
    return sorted(operators, key=lambda operator: -operator.seconds)


def summarize(operators: list[Operator]) -> str:
    """Return a table of the operators with the most self time."""
    total = sum(operator.seconds for operator in operators) or 1.0
    lines = [f"{'self time (ms)':>14} {'share':>6} {'calls':>7}  operator"]
    for operator in operators[:_NUM_OPERATORS]:
        share = operator.seconds / total
        lines.append(f"{operator.seconds * 1000:>14,.2f} {share:>6.1%} {operator.calls:>7,}  {operator.name}")
    return "\n".join(lines)
