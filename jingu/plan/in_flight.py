"""The micro-batches in flight on a rank of a pipeline: those whose activations it stores.

The counts are those of the orders of `jingu/plan/timeline.py:rank_orders`, in closed form: PyTorch takes seconds to
compute the orders of a large pipeline.

Dims: M moments, C stages of the rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from jingu.parallel.stages import SPLIT_BACKWARD_SCHEDULES, stages_per_rank
from jingu.plan.workload import Stage, Workload, stages_by_rank

Counts = NDArray[np.int64]
# Floats, because they are multiplied by bytes.
MicroBatches = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class InFlight:
    """The micro-batches in flight at the ends of backward passes, by stage of the rank.

    Attributes:
        stage: [M] the stage of the rank whose backward pass it is.
        num_activations: [M, C] micro-batches whose activations the rank stores, with the current one.
        num_weight_passes: [M, C] those of them that have gradients of inputs, but not yet those of weights, with the
            current one. Only schedules that split backward passes have such micro-batches.
        num_forward: [M, C] forward passes of the step so far.
    """

    stage: Counts
    num_activations: MicroBatches
    num_weight_passes: MicroBatches
    num_forward: MicroBatches

    @cached_property
    def current(self) -> MicroBatches:
        """Whether a backward pass is of each stage, [M, C]."""
        return (self.stage[:, None] == np.arange(self.num_activations.shape[1])).astype(float)


# Stage, then activations, passes of weights and forward passes of each stage.
_Row = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def moments_in_flight(work: Workload, stage: Stage) -> InFlight:
    """Return moments of a rank's backward passes, of which one has the most memory, whatever a stage needs.

    Between two of them, counts change by the same number of micro-batches in each pass.
    """
    settings, batches, ranks = work.parallel, work.accumulation, work.sizes.pipeline
    if ranks == 1:
        return _single_moment(1, 1, batches)
    stages = stages_per_rank(settings)
    if work.software.buffers_per_stage:
        buffers = int(min(batches, work.software.buffers_per_stage * ranks + 4))
        return _single_moment(stages, buffers, batches)
    return _moments(settings.pipeline_schedule, ranks, stage.rank, stages, batches)


def end_of_step(stages: int, batches: int) -> InFlight:
    """Return the moment after the last backward pass."""
    return _single_moment(stages, 0, batches)


@lru_cache(maxsize=1024)
def _single_moment(stages: int, in_flight: int, batches: int) -> InFlight:
    """Return the moment after the last forward pass with so many micro-batches in flight in each stage of a rank."""
    return _make_moments([(stages - 1, (in_flight,) * stages, (0,) * stages, (batches,) * stages)])


def _make_moments(rows: Iterable[_Row]) -> InFlight:
    stage, *counts = zip(*rows, strict=True)
    return InFlight(np.array(stage), *(np.array(column, float) for column in counts))


@lru_cache(maxsize=16384)
def _moments(schedule: str, ranks: int, rank: int, stages: int, batches: int) -> InFlight:
    match schedule:
        case "gpipe":
            return _single_moment(1, batches, batches)
        case "1f1b":
            return _single_moment(1, min(batches, ranks - rank), batches)
        case "zbv":
            return _make_moments(_moments_of_zbv(ranks, rank, batches))
    return _moments_of_rounds(ranks, rank, stages, batches, schedule in SPLIT_BACKWARD_SCHEDULES)


def _moments_of_rounds(ranks: int, rank: int, stages: int, batches: int, splits: bool) -> InFlight:
    """Return the moments of schedules that pass rounds of micro-batches through each stage of a rank in turn.

    They are interleaved 1F1B (Narayanan et al., 2021) and, if the backward pass is split, its zero-bubble variant (Qi
    et al., 2023), in which a rank computes the gradients of weights as many passes later as its number.
    """
    size = batches // max(1, batches // ranks)
    total = stages * batches
    ahead = (stages - 1) * size + (1 if splits else 2) * (ranks - 1 - rank)
    lag = rank * splits
    # Earlier rounds have as many micro-batches in flight as the last before forward passes end. Within a round of each
    # kind of pass, counts change evenly, so its first and last passes are enough.
    first = max(0, total - ahead - stages * size)
    starts = np.arange(first // size * size, total + size, size)
    ends = np.concatenate((starts, starts - ahead - 1, starts + lag, (first, total, total - ahead - 1)))
    numbers_M = np.unique(np.concatenate((ends - 1, ends)))
    numbers_M = numbers_M[(numbers_M >= first) & (numbers_M < total)]

    def count(passes_M: Counts) -> Counts:
        """Return how many of the first passes are of each stage, [M, C]."""
        rounds, remainder = np.divmod(passes_M[:, None], stages * size)
        return rounds * size + np.clip(remainder - np.arange(stages) * size, 0, size)

    forward_MC = count(np.minimum(total, ahead + numbers_M + 1))
    # Backward passes begin with the last stage.
    complete_MC = count(np.maximum(0, numbers_M - lag))[:, ::-1]
    weight_passes_MC = splits * (count(numbers_M + 1)[:, ::-1] - complete_MC)
    counts = (forward_MC - complete_MC, weight_passes_MC, forward_MC)
    return InFlight(stages - 1 - numbers_M // size % stages, *(numbers.astype(float) for numbers in counts))


def _moments_of_zbv(ranks: int, rank: int, batches: int) -> set[_Row]:
    """Return the moments of the V schedule (Qi et al., 2023), which has two stages per rank."""
    moments = set()

    def add(stage: int, forward: tuple[int, int], backward: tuple[int, int], complete: tuple[int, int]) -> None:
        """Add a moment after these numbers of passes of each stage, of which only the first `batches` are real."""
        passes = list(zip(forward, backward, complete, strict=True))
        activations = tuple(min(batches, first) - min(batches, last) for first, _, last in passes)
        weight_passes = tuple(min(batches, first) - min(batches, last) for _, first, last in passes)
        if backward[stage] <= batches:
            moments.add((stage, activations, weight_passes, tuple(min(batches, first) for first in forward)))

    def ends(numbers: range) -> Iterable[int]:
        """Return the first and last number, between which counts change evenly; all if some passes are not real."""
        return numbers if count > batches else {*numbers[:1], *numbers[-1:]}

    count = max(2 * ranks - 1, batches)
    # Warm-up: the first backward passes of the second stage.
    for number in ends(range(ranks - rank)):
        add(1, (2 * ranks - rank - 1, rank + 1 + number), (0, number + 1), (0, number))
    # Steady state: a forward and a backward pass of each stage in turn, until there are no more forward passes of the
    # first stage. Earlier passes have as many in flight.
    last = max(0, count - 2 * ranks + rank)
    for number in {*ends(range(max(0, count - 3 * ranks), last + 1)), *ends(range(last, count - ranks))}:
        second = ranks - rank + number
        first = min(count, 2 * ranks - rank + number)
        add(0, (first, ranks + number), (number + 1, second), (number, second))
        add(1, (first, ranks + number + 1), (number + 1, second + 1), (number + 1, second))
    # Cool-down: gradients of weights wait while there are gradients of inputs to compute.
    complete = (count - ranks, count - rank)
    for number in ends(range(rank)):
        add(0, (count, count), (complete[0] + number + 1, complete[1] + number), complete)
        add(1, (count, count), (complete[0] + number + 1, complete[1] + number + 1), complete)
    add(0, (count, count), (complete[0] + rank + 1, count), complete)
    return moments


def micro_batches_in_flight(work: Workload, stage: Stage) -> float:
    """Return the maximum number of micro-batches in flight, in units of all blocks of the rank."""
    return _mean_in_flight(moments_in_flight(work, stage), stages_of_rank(work, stage))


@lru_cache(maxsize=65536)
def _mean_in_flight(moments: InFlight, stages: tuple[Stage, ...]) -> float:
    counts_C = [single.num_blocks for single in stages]
    if len(stages) == 1:
        return float(moments.num_activations.max())
    return float((moments.num_activations @ counts_C).max() / max(1, sum(counts_C)))


def stages_of_rank(work: Workload, stage: Stage) -> tuple[Stage, ...]:
    """Return the single stages of the rank of a stage, in the order of the pipeline."""
    if work.sizes.pipeline == 1 or stages_per_rank(work.parallel) == 1:
        return (stage,)
    return stages_by_rank(work.model, work.sizes.pipeline, work.stage_key)[stage.rank]
