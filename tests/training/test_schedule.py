"""Schedules against the formulas they are named after."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jingu.config.sections.schedules import (
    ConstantSettings,
    CosineRestartsSettings,
    CosineSettings,
    ExponentialSettings,
    InverseSqrtSettings,
    LinearSettings,
    WsdSettings,
    resolve_steps,
)
from jingu.errors import JinguError
from jingu.training.plan_commands import show_config
from jingu.training.run import open_run
from jingu.training.schedule import learning_rate

PEAK = 3e-4
ALL = [
    ConstantSettings(warmup=10),
    LinearSettings(warmup=10, min_lr=1e-5),
    CosineSettings(warmup=10, min_lr=1e-5),
    InverseSqrtSettings(warmup=10, min_lr=1e-5),
    ExponentialSettings(warmup=10, min_lr=1e-5),
    WsdSettings(warmup=10, min_lr=1e-5),
]


@pytest.mark.parametrize("schedule", ALL, ids=lambda s: s.type)
def test_warmup_is_a_line_that_reaches_the_peak(schedule):
    rates = [learning_rate(schedule, PEAK, step, 100) for step in range(10)]
    assert rates == pytest.approx([PEAK * (step + 1) / 10 for step in range(10)])


@pytest.mark.parametrize("schedule", ALL, ids=lambda s: s.type)
@given(steps=st.integers(1, 3000))
def test_never_above_the_peak_nor_below_the_minimum_once_warm(schedule, steps):
    rates = [learning_rate(schedule, PEAK, step, steps) for step in range(0, steps, max(1, steps // 50))]
    assert all(0 < rate <= PEAK * (1 + 1e-12) for rate in rates)
    warm = [learning_rate(schedule, PEAK, step, steps) for step in range(min(10, steps), steps)]
    assert all(rate >= schedule.min_lr for rate in warm)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(warm))


def test_cosine_equals_torch():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=PEAK)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200, eta_min=2e-5)
    schedule = CosineSettings(warmup=0, min_lr=2e-5)
    for step in range(200):
        optimizer.step()
        reference.step()  # torch counts the end of the step: its rate after n steps is ours at step n - 1
        assert learning_rate(schedule, PEAK, step, 200) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)


def test_noam_equals_the_paper_up_to_its_constant():
    """Vaswani et al. (2017), equation 3: d^-0.5 · min(step^-0.5, step · warmup^-1.5), scaled to our peak."""
    for step in range(1, 500):
        paper = min(step**-0.5, step * 40**-1.5) / 40**-0.5
        assert learning_rate(InverseSqrtSettings(warmup=40), PEAK, step - 1, 500) == pytest.approx(
            PEAK * paper, rel=1e-12
        )


def test_ends():
    assert learning_rate(LinearSettings(warmup=0, min_lr=1e-5), PEAK, 99, 100) == pytest.approx(1e-5)
    assert learning_rate(CosineSettings(warmup=0, min_lr=1e-5), PEAK, 99, 100) == pytest.approx(1e-5)
    assert learning_rate(ExponentialSettings(warmup=0, decay=0.1), PEAK, 99, 100) == pytest.approx(PEAK / 10)
    stable = WsdSettings(warmup=0.1, decay=0.2, min_lr=1e-6)
    assert [learning_rate(stable, PEAK, step, 100) for step in (9, 50, 79)] == [PEAK] * 3
    assert learning_rate(stable, PEAK, 89, 100) == pytest.approx((PEAK + 1e-6) / 2)
    assert learning_rate(stable, PEAK, 99, 100) == pytest.approx(1e-6)


@pytest.mark.parametrize("schedule", [LinearSettings(), CosineSettings(), WsdSettings()], ids=lambda s: s.type)
@pytest.mark.parametrize("steps", [1, 3, 100])
def test_no_step_has_rate_zero(schedule, steps):
    """A decay to zero arrives there one step after the run, as in transformers."""
    rates = [learning_rate(schedule, PEAK, step, steps) for step in range(steps + 1)]
    assert 0 < rates[-2] <= PEAK and rates[-1] == pytest.approx(0.0, abs=1e-12)


def test_linear_and_cosine_equal_transformers():
    """Its rate of the step after the last of warmup is the peak, which is ours at the last step of warmup."""
    transformers = pytest.importorskip("transformers")
    names = {"linear": LinearSettings(warmup=7), "cosine": CosineSettings(warmup=7)}
    for name, schedule in names.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
        reference = transformers.get_scheduler(name, optimizer, num_warmup_steps=7, num_training_steps=54)
        for step in range(53):
            optimizer.step()
            reference.step()
            theirs = optimizer.param_groups[0]["lr"]
            assert learning_rate(schedule, PEAK, step, 53) == pytest.approx(theirs, rel=1e-9, abs=1e-15), step


@pytest.mark.parametrize("cycles", [1, 2, 3, 7])
def test_restarts_equal_transformers(cycles):
    transformers = pytest.importorskip("transformers")
    schedule = CosineRestartsSettings(warmup=7, cycles=cycles)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    options = {"num_warmup_steps": 7, "num_training_steps": 54, "num_cycles": cycles}
    reference = transformers.get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, **options)
    for step in range(53):
        optimizer.step()
        reference.step()
        theirs = optimizer.param_groups[0]["lr"]
        assert learning_rate(schedule, PEAK, step, 53) == pytest.approx(theirs, rel=1e-9, abs=1e-15), step


def test_the_last_cycle_ends_at_the_minimum():
    schedule = CosineRestartsSettings(warmup=0, min_lr=1e-5, cycles=4)
    assert learning_rate(schedule, PEAK, 99, 100) == pytest.approx(1e-5)
    assert learning_rate(schedule, PEAK, 24, 100) == pytest.approx(PEAK)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule.min_lr": 0.1}, r"schedule.min_lr: the lowest rate, 0.1, is above the peak \(optimizer.lr\), 0.0"),
        ({"schedule.warmup": 21}, r"schedule.warmup: 21 steps of warmup are more than the run's 20"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(changes, words, tiny_run):
    with pytest.raises(JinguError, match=words):
        open_run(tiny_run(changes))
    with pytest.raises(JinguError, match=words):
        show_config(tiny_run(changes))
    open_run(tiny_run({"schedule.min_lr": 1e-4, "schedule.warmup": 20}))


def test_a_whole_number_is_steps_and_a_decimal_a_fraction():
    assert resolve_steps(1, 500) == 1
    assert resolve_steps(1.0, 500) == 500
    assert resolve_steps(0.02, 500) == 10
    assert math.isclose(learning_rate(ConstantSettings(warmup=0.5), 1.0, 0, 10), 0.2)
