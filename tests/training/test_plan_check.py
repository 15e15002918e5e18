"""Each run writes its plan beside what it measured."""

from __future__ import annotations

import pytest

from jingu.parallel.stages import plan_layout
from jingu.plan.actual import StepSeconds, complete_terms
from jingu.plan.step_time import TERMS
from jingu.training.reference_steps import reference_runs
from tests.plan.test_memory import settings


def test_the_plan_and_the_steps_stand_side_by_side(tiny_run, train_on, done):
    config = tiny_run({"train.steps": 7, "train.log_every": 1})
    train_on(1, config)
    first, last = done(config).lines("plan")
    assert (first["step"], last["step"]) == (4, 7)
    assert set(last["planned"]) == set(TERMS) >= set(last["actual"])
    assert {"matmuls", "attention", "elementwise", "optimizer", "launch"} == set(last["actual"])
    assert last["planned_seconds"] == pytest.approx(sum(last["planned"].values()))
    assert last["actual_seconds"] == pytest.approx(sum(last["actual"].values()))
    # Tensors are counted on both sides, and weights and optimizer state exactly.
    planned, actual = last["planned_memory"], last["actual_memory"]
    assert set(planned) == set(actual) == {"weights", "optimizer state", "gradients and activations"}
    assert actual["weights"] == planned["weights"] > 0
    assert actual["optimizer state"] == pytest.approx(planned["optimizer state"], rel=0.01)
    assert last["actual_memory_bytes"] == pytest.approx(last["planned_memory_bytes"], rel=0.1)
    assert last["actual_memory_bytes"] == sum(actual.values())


@pytest.mark.slow
def test_collectives_are_timed_by_their_axes(tiny_run, train_on, done):
    config = tiny_run({"train.steps": 5, "parallel.tensor": 2, "parallel.pipeline": 2})
    train_on(4, config)
    actual = done(config).lines("plan")[-1]["actual"]
    assert min(actual["tensor"], actual["pipeline"], actual["data"]) > 0
    assert "bubble" in actual


def test_an_exchange_of_all_ranks_is_that_of_experts(tiny_run, train_on, done):
    experts = {"model.family": "mixtral", "model.intermediate_size": 24, "model.experts.num_experts": 4}
    config = tiny_run({**experts, "train.steps": 5, "parallel.expert": 2})
    train_on(2, config)
    actual = done(config).lines("plan")[-1]["actual"]
    assert min(actual["expert"], actual["data"]) > 0


def test_timed_steps_compute_the_same(tiny_run, train_on, done, monkeypatch):
    timed, plain = (tiny_run({"train.steps": 5, "parallel.zero_stage": 3}, name=name) for name in ("timed", "plain"))
    train_on(1, timed)
    monkeypatch.setattr("jingu.training.loop.TIMED_STEP", 99)
    train_on(1, plain)
    assert done(timed).lines("plan") and not done(plain).lines("plan")
    assert done(timed).column("loss") == done(plain).column("loss")


def test_waiting_counts_where_no_rank_computes() -> None:
    """Two ranks on one core: each computes 0.3 s of a step of a second, and waits while the other one computes."""
    ranks = [
        StepSeconds({"matmuls": seconds}, {"tensor": 0.6, "data": 0.2}, busy_waiting=0.1) for seconds in (0.2, 0.1)
    ]
    terms = complete_terms(ranks, 0.4, 1.0, ranks_per_core=2.0, is_pipeline=False)
    assert terms == pytest.approx({"matmuls": 0.3, "launch": 0.3, "tensor": 0.3, "data": 0.1})
    # In a pipeline, what the collectives do not explain is idle time.
    ranks = [StepSeconds({"matmuls": 0.3}, {"tensor": 0.1})]
    terms = complete_terms(ranks, 0.4, 1.0, ranks_per_core=1.0, is_pipeline=True)
    assert terms == pytest.approx({"matmuls": 0.3, "launch": 0.1, "tensor": 0.1, "bubble": 0.5})


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 8, 64])
def test_reference_runs_can_be_divided(world: int) -> None:
    for run in reference_runs(world):
        config, spec = settings(run["model"], run["parallel"], batch=run["batch"])
        sizes, _ = plan_layout(config, world, spec)
        assert all(getattr(sizes, axis) == size for axis, size in run["parallel"].items() if axis != "zero_stage")
