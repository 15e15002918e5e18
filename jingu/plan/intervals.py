"""Intervals of planned figures, from the errors on published runs, and how far a run is from these runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from jingu.plan.machine import Machine
from jingu.plan.workload import Workload
from jingu.tables import read_table


@dataclass(frozen=True)
class Interval:
    """Bounds of measured over planned figures for 9 of 10 runs.

    Attributes:
        reasons: why the run is far from those that were measured, so that its bounds are wider.
    """

    seconds: tuple[float, float]
    memory: tuple[float, float]
    reasons: tuple[str, ...] = ()


@cache
def _table() -> dict[str, Any]:
    return read_table(__file__, "intervals.toml")


def memory_margin(machine: Machine) -> float:
    """Return the memory that a layout must be able to take in order to fit, relative to what is planned."""
    return float(_table()["memory"]["shared" if machine.is_shared else "gpu"][1])


def plan_interval(work: Workload, machine: Machine) -> Interval:
    """Return the interval of the figures of a step on a machine."""
    table = _table()
    seconds = table["seconds"]["experts" if work.spec.experts else "dense"]
    if machine.is_shared:
        seconds = table["seconds"]["shared"]
    memory = table["memory"]["shared" if machine.is_shared else "gpu"]
    reasons = () if machine.is_shared else tuple(_distance(work, machine, table["ground"]))
    if machine.interval is not None:
        # The runs of a calibration are nearer than any published one.
        return Interval(machine.interval, tuple(memory), ())
    wider = table["ground"]["wider"] if reasons else 1.0
    low, high = seconds
    return Interval((1 - (1 - low) * wider, 1 + (high - 1) * wider), tuple(memory), reasons)


def _distance(work: Workload, machine: Machine, ground: dict[str, Any]) -> list[str]:
    """Return what distinguishes a run from all published ones."""
    reasons = []
    if not machine.name.startswith(tuple(ground["machines"])):
        reasons.append(f"no run on {machine.name} was measured")
    if work.ranks > ground["ranks"]:
        reasons.append(f"no run on more than {ground['ranks']:,} GPUs was measured")
    hidden, sequence = ground["hidden_size"], ground["sequence"]
    if not hidden[0] <= work.spec.hidden_size <= hidden[1]:
        reasons.append(f"hidden sizes from {hidden[0]:,} to {hidden[1]:,} were measured")
    if not sequence[0] <= work.sequence <= sequence[1]:
        reasons.append(f"sequences of {sequence[0]:,} to {sequence[1]:,} tokens were measured")
    if work.sizes.expert > 1 and work.sizes.context > 1:
        reasons.append("experts and context parallelism were not measured together")
    return reasons
