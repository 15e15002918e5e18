"""The micro-batches in flight on a rank of a pipeline: those whose activations it stores.

The counts are those of the orders of `jingu/plan/timeline.py:rank_orders`, in closed form: PyTorch takes seconds to
compute the orders of a large pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from jingu.parallel.stages import SPLIT_BACKWARD_SCHEDULES, stages_per_rank
from jingu.plan.workload import Stage, Workload


@dataclass(frozen=True, order=True)
class InFlight:
    """The micro-batches in flight at the end of a backward pass, by stage of the rank.

    Attributes:
        stage: the stage of the rank whose backward pass it is.
        activations: micro-batches whose activations the rank stores, with the current one.
        weight_passes: those of them whose backward pass lacks only the gradients of weights, with the current one. Only
            schedules that split backward passes have such micro-batches.
        forward: forward passes of the step so far.
    """

    stage: int
    activations: tuple[int, ...]
    weight_passes: tuple[int, ...]
    forward: tuple[int, ...]

    def is_below(self, limit: InFlight) -> bool:
        """Return whether another moment of the same stage has at least as many micro-batches of each stage."""
        mine, theirs = ((*one.activations, *one.weight_passes, *one.forward) for one in (self, limit))
        counts = zip(mine, theirs, strict=True)
        return self != limit and self.stage == limit.stage and all(count <= most for count, most in counts)


def moments_in_flight(work: Workload, stage: Stage) -> tuple[InFlight, ...]:
    """Return the moments of a rank's backward passes with the most micro-batches in flight."""
    settings, batches = work.parallel, work.accumulation
    if work.sizes.pipeline == 1:
        return (InFlight(0, (1,), (0,), (batches,)),)
    chunks = stages_per_rank(settings)
    if work.software.buffers_per_stage:
        buffers = int(min(batches, work.software.buffers_per_stage * work.sizes.pipeline + 4))
        return (InFlight(chunks - 1, (buffers,) * chunks, (0,) * chunks, (batches,) * chunks),)
    return _moments(settings.pipeline_schedule, work.sizes.pipeline, stage.rank, chunks, batches)


@lru_cache(maxsize=4096)
def _moments(schedule: str, ranks: int, rank: int, chunks: int, batches: int) -> tuple[InFlight, ...]:
    match schedule:
        case "gpipe":
            return (InFlight(0, (batches,), (0,), (batches,)),)
        case "1f1b":
            return (InFlight(0, (min(batches, ranks - rank),), (0,), (batches,)),)
        case "zbv":
            moments = _moments_of_zbv(ranks, rank, batches)
        case _:
            moments = _moments_of_rounds(ranks, rank, chunks, batches, schedule in SPLIT_BACKWARD_SCHEDULES)
    return tuple(sorted(one for one in moments if not any(one.is_below(other) for other in moments)))


def _moments_of_rounds(ranks: int, rank: int, chunks: int, batches: int, splits: bool) -> set[InFlight]:
    """Return the moments of schedules that pass rounds of micro-batches through each stage of a rank in turn.

    They are interleaved 1F1B (Narayanan et al., 2021) and, if the backward pass is split, its zero-bubble variant (Qi
    et al., 2023), in which a rank computes the gradients of weights as many passes later as its number.
    """
    size = batches // max(1, batches // ranks)
    total = chunks * batches
    ahead = (chunks - 1) * size + (1 if splits else 2) * (ranks - 1 - rank)

    def count(passes: int, chunk: int) -> int:
        """Return how many of the first passes are of a stage."""
        rounds, remainder = divmod(passes, chunks * size)
        return rounds * size + min(size, max(0, remainder - chunk * size))

    moments = set()
    # Earlier rounds have as many micro-batches in flight as the last before forward passes end.
    for number in range(max(0, total - ahead - chunks * size), total):
        forward, complete = min(total, ahead + number + 1), max(0, number - rank * splits)
        # Backward passes begin with the last stage.
        orders = [(chunk, chunks - 1 - chunk) for chunk in range(chunks)]
        forwards = tuple(count(forward, chunk) for chunk in range(chunks))
        activations = tuple(forwards[chunk] - count(complete, place) for chunk, place in orders)
        weight_passes = tuple(
            count((number + 1) * splits, place) - count(complete * splits, place) for _, place in orders
        )
        moments.add(InFlight(chunks - 1 - number // size % chunks, activations, weight_passes, forwards))
    return moments


def _moments_of_zbv(ranks: int, rank: int, batches: int) -> set[InFlight]:
    """Return the moments of the V schedule (Qi et al., 2023), which has two stages per rank."""
    moments = set()

    def add(stage: int, forward: tuple[int, int], backward: tuple[int, int], complete: tuple[int, int]) -> None:
        """Add a moment after these numbers of passes of each stage, of which only the first `batches` are real."""
        passes = list(zip(forward, backward, complete, strict=True))
        activations = tuple(min(batches, first) - min(batches, last) for first, _, last in passes)
        weight_passes = tuple(min(batches, first) - min(batches, last) for _, first, last in passes)
        if backward[stage] <= batches:
            moments.add(InFlight(stage, activations, weight_passes, tuple(min(batches, first) for first in forward)))

    count = max(2 * ranks - 1, batches)
    # Warm-up: the first backward passes of the second stage.
    for number in range(ranks - rank):
        add(1, (2 * ranks - rank - 1, rank + 1 + number), (0, number + 1), (0, number))
    # Steady state: a forward and a backward pass of each stage in turn. Earlier passes have as many in flight.
    for number in range(max(0, count - 3 * ranks), count - ranks):
        second = ranks - rank + number
        first = min(count, 2 * ranks - rank + number)
        add(0, (first, ranks + number), (number + 1, second), (number, second))
        add(1, (first, ranks + number + 1), (number + 1, second + 1), (number + 1, second))
    # Cool-down: gradients of weights wait while there are gradients of inputs to compute.
    complete = (count - ranks, count - rank)
    for number in range(rank):
        add(0, (count, count), (complete[0] + number + 1, complete[1] + number), complete)
        add(1, (count, count), (complete[0] + number + 1, complete[1] + number + 1), complete)
    add(0, (count, count), (complete[0] + rank + 1, count), complete)
    return moments


def micro_batches_in_flight(work: Workload, stage: Stage) -> float:
    """Return the maximum number of micro-batches in flight, in units of all blocks of the rank."""
    chunks = rank_chunks(work, stage)
    counts = [chunk.num_blocks for chunk in chunks]
    if not sum(counts):
        return 1.0
    moments = moments_in_flight(work, stage)
    return max(sum(n * size for n, size in zip(one.activations, counts, strict=True)) for one in moments) / sum(counts)


def rank_chunks(work: Workload, stage: Stage) -> tuple[Stage, ...]:
    """Return the single stages of the rank of a stage, in the order of the pipeline."""
    if work.sizes.pipeline == 1 or stages_per_rank(work.parallel) == 1:
        return (stage,)
    return tuple(single for single in work.single_stages if single.rank == stage.rank)
