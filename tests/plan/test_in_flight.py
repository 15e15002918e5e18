"""The micro-batches in flight against the orders of PyTorch's schedules."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from jingu.config.sections.parallel import ParallelSettings
from jingu.parallel.stages import SPLIT_BACKWARD_SCHEDULES, rank_of_stage
from jingu.plan.in_flight import moments_in_flight
from jingu.plan.timeline import Step, rank_orders

SCHEDULES = [
    *(("gpipe", 1), ("1f1b", 1), ("zbv", 2)),
    *((name, stages) for name in ("interleaved", "zero_bubble") for stages in (2, 3)),
    ("zero_bubble", 1),
]


# The stage of a backward pass, and of each stage the activations, passes of weights, and forward passes.
Moment = tuple[int, tuple[int, ...]]


def count_in_flight(order: list[Step], stages: list[int], splits: bool) -> set[Moment]:
    """Return the moments of an order, by walking through it."""
    forward, backward, complete = ([0] * len(stages) for _ in range(3))
    moments = set()
    for kind, stage, _ in order:
        place = stages.index(stage)
        if kind == "forward":
            forward[place] += 1
        elif kind == "weights":
            complete[place] += 1
        else:
            backward[place] += 1
            activations = [first - last for first, last in zip(forward, complete, strict=True)]
            weight_passes = [splits * (first - last) for first, last in zip(backward, complete, strict=True)]
            moments.add((place, (*activations, *weight_passes, *forward)))
            complete[place] += not splits
    return moments


def most(moments: set[Moment], stage: int, sizes: list[float]) -> float:
    """Return the largest sum of sizes in the backward passes of a stage."""
    sums = (
        sum(count * size for count, size in zip(counts, sizes, strict=True))
        for place, counts in moments
        if place == stage
    )
    return max(sums, default=0.0)


@pytest.mark.parametrize(("schedule", "stages"), SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_moments_are_those_of_the_schedule(schedule: Any, stages: int, ranks: int) -> None:
    settings = ParallelSettings(pipeline_schedule=schedule, stages_per_rank=2 if schedule == "zbv" else stages)
    compared, generator = 0, random.Random(0)
    for batches in sorted({1, 2, ranks - 1, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks, 4 * ranks + 3}):
        if schedule == "1f1b" and batches < ranks:
            continue  # refused
        if schedule in ("interleaved", "zero_bubble") and batches % max(1, batches // ranks):
            continue  # refused
        work: Any = SimpleNamespace(
            sizes=SimpleNamespace(pipeline=ranks),
            parallel=settings,
            accumulation=batches,
            software=SimpleNamespace(buffers_per_stage=0),
        )
        for rank, order in enumerate(rank_orders(work, batches)):
            own = [number for number in range(ranks * stages) if rank_of_stage(settings, ranks, number) == rank]
            expected = count_in_flight(order, own, schedule in SPLIT_BACKWARD_SCHEDULES)
            stage: Any = SimpleNamespace(rank=rank)
            flight = moments_in_flight(work, stage)
            columns = zip(flight.num_activations, flight.num_weight_passes, flight.num_forward, strict=True)
            counts = (tuple(int(number) for part in row for number in part) for row in columns)
            moments = set(zip(map(int, flight.stage), counts, strict=True))
            if schedule not in ("gpipe", "1f1b"):
                assert moments <= expected
            for _ in range(20):
                # Stages may be of any size; forward passes count for what they send, which these two do not keep.
                sizes = [generator.choice([0.0, 1.0, generator.random()]) for _ in range(3 * stages)]
                if schedule in ("gpipe", "1f1b"):
                    sizes[-1] = 0.0
                for number in range(stages):
                    assert most(moments, number, sizes) == pytest.approx(most(expected, number, sizes)), (batches, rank)
            compared += 1
    assert compared >= 3 * ranks
