"""The timeline of a pipeline: when each rank computes which micro-batch in a step, and how long it waits.

The passes have the order of the schedule that training runs (`jingu/parallel/scheduled_stage.py:SCHEDULES`) and the
durations of `jingu/plan/step_time.py:stage_time`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

from jingu.parallel.stages import rank_of_stage, splits_backward, stages_per_rank
from jingu.plan.machine import Machine
from jingu.plan.step_time import StageTime, boundary_seconds, stage_time
from jingu.plan.workload import Workload

Kind = Literal["forward", "backward", "weights"]
# A schedule may split the backward pass: gradients of inputs then count as "backward", those of weights as "weights".
_KINDS: dict[str, Kind] = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "backward",
    "BACKWARD_WEIGHT": "weights",
}
# Pass, stage and micro-batch.
Step = tuple[Kind, int, int]


@dataclass(frozen=True)
class Pass:
    """A pass of a micro-batch through a stage; seconds from the beginning of the step."""

    kind: Kind
    stage: int
    batch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The passes of each rank of a pipeline.

    Attributes:
        ranks: passes of each rank, in their order.
        batches: number of simulated micro-batches: those of the step, or fewer if these already fill the pipeline.
        idle: share of a whole step in which each rank waits.
    """

    ranks: list[list[Pass]]
    batches: int
    idle: list[float]

    @property
    def seconds(self) -> float:
        return max(passes[-1].end for passes in self.ranks)


def simulate_pipeline(work: Workload, machine: Machine) -> Timeline:
    """Return the timeline of a step, of at most two micro-batches for each rank of the pipeline."""
    ranks = work.sizes.pipeline
    batches = min(work.accumulation, 2 * ranks)
    times = [stage_time(work, stage, machine) for stage in work.rank_stages]
    passes = _run_steps(
        work, rank_orders(work, batches), _durations(work, times, machine), boundary_seconds(work, machine)
    )
    # Each further micro-batch extends the step by the time of the slowest rank, which is always busy by then.
    busy = [time.forward + time.backward for time in times]
    step = max(rank_passes[-1].end for rank_passes in passes) + (work.accumulation - batches) * max(busy)
    return Timeline(passes, batches, [1 - work.accumulation * seconds / step for seconds in busy])


def _durations(work: Workload, times: Sequence[StageTime], machine: Machine) -> list[dict[Kind, float]]:
    """Return the seconds of each kind of pass of a micro-batch through each stage.

    Args:
        times: those of all stages of each rank.
    """
    singles = [(stage.rank, stage_time(work, stage, machine)) for stage in work.single_stages]
    sums = [[0.0, 0.0] for _ in times]
    for rank, time in singles:
        sums[rank][0] += time.forward
        sums[rank][1] += time.backward
    # The gradients of inputs and of weights take half of the backward pass each.
    parts = 2 if splits_backward(work.parallel, work.sizes.pipeline) else 1
    durations: list[dict[Kind, float]] = []
    for rank, time in singles:
        forward = times[rank].forward * time.forward / sums[rank][0]
        backward = times[rank].backward * time.backward / sums[rank][1] / parts
        durations.append({"forward": forward, "backward": backward, "weights": backward})
    return durations


def rank_orders(work: Workload, batches: int) -> list[list[Step]]:
    """Return the passes of each rank of the pipeline in the order of the schedule."""
    ranks, name = work.sizes.pipeline, work.parallel.pipeline_schedule
    if name in ("gpipe", "1f1b"):
        orders = []
        for rank in range(ranks):
            # Number of warm-up forward passes before the first backward pass.
            ahead = batches if name == "gpipe" else min(batches, ranks - rank)
            order: list[Step] = [("forward", rank, batch) for batch in range(ahead)]
            for batch in range(batches):
                order.append(("backward", rank, batch))
                order += [("forward", rank, batch + ahead)] * (batch + ahead < batches)
            orders.append(order)
        return orders
    # PyTorch's other schedules compute the orders of all ranks in their constructor. They need the stages of one rank
    # (here the first), but only read these attributes, so stand-ins are enough.
    count = ranks * stages_per_rank(work.parallel)
    stages = [
        SimpleNamespace(
            num_stages=count,
            group_size=ranks,
            group_rank=0,
            stage_index=stage,
            is_first=stage == 0,
            is_last=stage == count - 1,
            device="cpu",
            group=None,
            has_backward=True,
            submod=None,
        )
        for stage in range(count)
        if rank_of_stage(work.parallel, ranks, stage) == 0
    ]
    # PyTorch's schedules are slow to import.
    from jingu.parallel.scheduled_stage import SCHEDULES

    schedule = SCHEDULES[name](stages, batches, loss_fn=len)
    return [
        [
            (_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in schedule.pipeline_order[rank]
            if action is not None and action.computation_type.name in _KINDS
        ]
        for rank in range(ranks)
    ]


def _run_steps(
    work: Workload, orders: list[list[Step]], durations: list[dict[Kind, float]], travel: float
) -> list[list[Pass]]:
    """Simulate the passes of each rank: a pass starts when its rank is free and its input has arrived.

    Args:
        durations: seconds of the passes of each stage.
        travel: seconds to send hidden states to the next rank.
    """
    last = work.sizes.pipeline * stages_per_rank(work.parallel) - 1
    ends: dict[Step, float] = {}
    passes: list[list[Pass]] = [[] for _ in orders]
    while any(len(rank_passes) < len(order) for rank_passes, order in zip(passes, orders, strict=True)):
        for rank, (rank_passes, order) in enumerate(zip(passes, orders, strict=True)):
            # Run passes until one needs a result that another rank has not computed yet.
            while len(rank_passes) < len(order):
                kind, stage, batch = order[len(rank_passes)]
                source = _source(kind, stage, batch, last)
                if source is not None and source not in ends:
                    break
                start = rank_passes[-1].end if rank_passes else 0.0
                if source is not None:
                    is_near = rank_of_stage(work.parallel, len(orders), source[1]) == rank
                    start = max(start, ends[source] + travel * (not is_near))
                end = start + durations[stage][kind]
                ends[kind, stage, batch] = end
                rank_passes.append(Pass(kind, stage, batch, start, end))
    return passes


def _source(kind: Kind, stage: int, batch: int, last: int) -> Step | None:
    """Return the pass whose result a pass needs; None for the first forward pass of a micro-batch."""
    if kind == "weights":
        return ("backward", stage, batch)
    if kind == "forward":
        return ("forward", stage - 1, batch) if stage else None
    return ("backward", stage + 1, batch) if stage < last else ("forward", stage, batch)
