"""Waiting in a pipeline, in a simulation of the schedules' own lists of actions with given times."""

from __future__ import annotations

from itertools import product

import pytest

from bench.pipeline_idle import Action, actions, idle, ratio
from jingu.config.sections.parallel import ParallelSettings
from jingu.parallel.pipeline import SCHEDULES

EVEN = {"F": 1.0, "I": 1.0, "W": 1.0}
UNEVEN = {"F": 1.0, "I": 1.2, "W": 0.8}
RANKS, TIMES = (2, 4, 8), (2, 4)


@pytest.mark.parametrize(("ranks", "times", "seconds"), list(product(RANKS, TIMES, (EVEN, UNEVEN))))
def test_1f1b_waits_as_little_as_it_can_and_zero_bubble_half_of_that(ranks, times, seconds):
    number = ranks * times
    one = ratio("1f1b", ranks, number, seconds)
    assert one <= 1.05 and ratio("gpipe", ranks, number, seconds) == pytest.approx(one)
    assert ratio("interleaved", ranks, number, seconds) <= 0.6 * one
    assert ratio("zero_bubble", ranks, number, seconds) <= 0.5 * one
    assert ratio("zbv", ranks, number, seconds) <= 0.5 * one


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_does_every_micro_batch_once(schedule):
    order = actions(ParallelSettings(schedule=schedule), 3, 6)
    done = [action for rank in order for action in rank]
    assert len(done) == len(set(done))
    stages = 3 if schedule in ("gpipe", "1f1b") else 6
    for stage, number in product(range(stages), range(6)):
        assert Action("F", stage, number) in done
        halves = {Action(kind, stage, number) for kind in "IW"} <= set(done)
        assert halves != (Action("B", stage, number) in done)


def test_the_simulation_waits_for_what_is_needed():
    """Two stages, one micro-batch: each waits while the other works, but for the last weights."""
    order = [[Action("F", 0, 0), Action("B", 0, 0)], [Action("F", 1, 0), Action("I", 1, 0), Action("W", 1, 0)]]
    assert idle(order, {"F": 2.0, "I": 3.0, "W": 4.0}) == pytest.approx(1 - 18 / (2 * 14))
