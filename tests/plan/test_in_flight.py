"""The micro-batches in flight against the orders of PyTorch's schedules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jingu.config.sections.parallel import ParallelSettings
from jingu.parallel.stages import SPLIT_BACKWARD_SCHEDULES, rank_of_stage
from jingu.plan.in_flight import InFlight, moments_in_flight
from jingu.plan.timeline import Step, rank_orders

SCHEDULES = [
    *(("gpipe", 1), ("1f1b", 1), ("zbv", 2)),
    *((name, stages) for name in ("interleaved", "zero_bubble") for stages in (2, 3)),
    ("zero_bubble", 1),
]


def count_in_flight(order: list[Step], stages: list[int], splits: bool) -> list[InFlight]:
    """Return the moments of an order with the most micro-batches in flight, by walking through it."""
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
            activations = tuple(first - last for first, last in zip(forward, complete, strict=True))
            weight_passes = tuple(splits * (first - last) for first, last in zip(backward, complete, strict=True))
            moments.add(InFlight(place, activations, weight_passes, tuple(forward)))
            complete[place] += not splits
    return sorted(one for one in moments if not any(one.is_below(other) for other in moments))


@pytest.mark.parametrize(("schedule", "stages"), SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_moments_are_those_of_the_schedule(schedule: Any, stages: int, ranks: int) -> None:
    settings = ParallelSettings(pipeline_schedule=schedule, stages_per_rank=2 if schedule == "zbv" else stages)
    compared = 0
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
            if schedule in ("gpipe", "1f1b"):
                # Nothing that a plan counts depends on the number of forward passes.
                expected = [max(expected, key=lambda one: (one.activations, one.forward))]
                expected = [InFlight(0, expected[0].activations, (0,), (batches,))]
            assert list(moments_in_flight(work, stage)) == expected, (batches, rank)
            compared += 1
    assert compared >= 3 * ranks
