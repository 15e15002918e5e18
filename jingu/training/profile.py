"""Profile some steps of a run: a trace for each rank, and the operators that take most of the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.profiler

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
        folder: where the traces are written, `step-S-rank-R.json`, which begins after step S.
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
        log_info(f"The profile is {path}.\n{summarize(profiler)}")
        activity.enter("between steps")

    # The first step compiles and allocates: it counts as warmup. Only one trace is written.
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)
    activities = torch.profiler.supported_activities()
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write) as profiler:
        yield profiler.step


def summarize(profiler: torch.profiler.profile) -> str:
    """Return a table of the operators with the most self time, on the accelerator if there is one."""
    events = [event for event in profiler.key_averages() if not event.key.startswith("ProfilerStep")]
    on_device = any(event.self_device_time_total for event in events)
    times = {id(event): event.self_device_time_total if on_device else event.self_cpu_time_total for event in events}
    total = sum(times.values()) or 1.0
    lines = [f"{'self time (ms)':>14} {'share':>6} {'calls':>7}  operator"]
    for event in sorted(events, key=lambda event: -times[id(event)])[:_NUM_OPERATORS]:
        time = times[id(event)]  # µs
        lines.append(f"{time / 1000:>14,.2f} {time / total:>6.1%} {event.count:>7,}  {event.key}")
    return "\n".join(lines)
