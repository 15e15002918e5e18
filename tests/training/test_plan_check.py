"""Each run writes its plan beside what it measured."""

from __future__ import annotations

import pytest

from jingu.plan.step_time import TERMS


def test_the_plan_and_the_steps_stand_side_by_side(tiny_run, train_on, done):
    config = tiny_run({"train.steps": 7, "train.log_every": 1})
    train_on(1, config)
    first, last = done(config).lines("plan")
    assert (first["step"], last["step"]) == (4, 7)
    assert set(last["planned"]) == set(TERMS) >= set(last["actual"])
    assert {"matmuls", "attention", "elementwise", "optimizer", "launch"} == set(last["actual"])
    assert last["planned_seconds"] == pytest.approx(sum(last["planned"].values()))
    assert last["actual_seconds"] == pytest.approx(sum(last["actual"].values()))
    assert min(last["planned_memory_bytes"], last["actual_memory_bytes"]) > 0


@pytest.mark.slow
def test_collectives_are_timed_by_their_axes(tiny_run, train_on, done):
    config = tiny_run({"train.steps": 5, "parallel.tensor": 2, "parallel.pipeline": 2})
    train_on(4, config)
    actual = done(config).lines("plan")[-1]["actual"]
    assert min(actual["tensor"], actual["pipeline"], actual["data"]) > 0
    assert "bubble" in actual and "launch" not in actual


def test_an_exchange_of_all_ranks_is_that_of_experts(tiny_run, train_on, done):
    experts = {"model.family": "mixtral", "model.intermediate_size": 24, "model.experts.num_experts": 4}
    config = tiny_run({**experts, "train.steps": 5, "parallel.expert": 2})
    train_on(2, config)
    actual = done(config).lines("plan")[-1]["actual"]
    assert min(actual["expert"], actual["data"]) > 0


def test_timed_steps_compute_the_same(tiny_run, train_on, done, monkeypatch):
    timed, plain = (tiny_run({"train.steps": 5, "parallel.zero_stage": 3}, name=name) for name in ("timed", "plain"))
    train_on(1, timed)
    monkeypatch.setattr("jingu.training.plan_check.TIMED_STEP", 99)
    train_on(1, plain)
    assert done(timed).lines("plan") and not done(plain).lines("plan")
    assert done(timed).column("loss") == done(plain).column("loss")
