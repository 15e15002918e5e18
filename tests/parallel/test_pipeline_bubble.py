"""Tests of the pipeline bubble: simulations of the schedules' own lists of actions with fixed times."""

from __future__ import annotations

from itertools import product

import pytest

from bench.pipeline_bubble import Action, bubble_fraction, relative_bubble, schedule_actions
from jingu.config.sections.parallel import ParallelSettings
from jingu.parallel.scheduled_stage import SCHEDULES

EVEN = {"F": 1.0, "I": 1.0, "W": 1.0}
UNEVEN = {"F": 1.0, "I": 1.2, "W": 0.8}
RANKS, TIMES = (2, 4, 8), (2, 4)


@pytest.mark.parametrize(("ranks", "times", "seconds"), list(product(RANKS, TIMES, (EVEN, UNEVEN))))
def test_1f1b_has_the_minimal_bubble_and_zero_bubble_half_of_it(ranks, times, seconds):
    number = ranks * times
    one = relative_bubble("1f1b", ranks, number, seconds)
    assert one <= 1.05 and relative_bubble("gpipe", ranks, number, seconds) == pytest.approx(one)
    assert relative_bubble("interleaved", ranks, number, seconds) <= 0.6 * one
    assert relative_bubble("zero_bubble", ranks, number, seconds) <= 0.5 * one
    assert relative_bubble("zbv", ranks, number, seconds) <= 0.5 * one


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_runs_every_micro_batch_once(schedule):
    order = schedule_actions(ParallelSettings(pipeline_schedule=schedule), 3, 6)
    actions = [action for rank in order for action in rank]
    assert len(actions) == len(set(actions))
    stages = 3 if schedule in ("gpipe", "1f1b") else 6
    for stage, number in product(range(stages), range(6)):
        assert Action("F", stage, number) in actions
        halves = {Action(kind, stage, number) for kind in "IW"} <= set(actions)
        assert halves != (Action("B", stage, number) in actions)


def test_the_simulation_waits_for_dependencies():
    """Two stages, one micro-batch: each waits while the other works, except for the last weight gradients."""
    order = [[Action("F", 0, 0), Action("B", 0, 0)], [Action("F", 1, 0), Action("I", 1, 0), Action("W", 1, 0)]]
    assert bubble_fraction(order, {"F": 2.0, "I": 3.0, "W": 4.0}) == pytest.approx(1 - 18 / (2 * 14))
