"""Rollouts that are generated beside training, by weights of earlier steps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.align.commands import train
from jingu.config.schema import RunConfig
from tests.align.test_policy_learning import make, prompts, rollout, train_here
from tests.conftest import Done, MakeRun
from tests.rank_pool import RankPool

pytestmark = pytest.mark.usefixtures("peak")
__all__ = ["make", "prompts"]


def assert_equal_runs(first: Done, second: Done) -> None:
    tensors = second.tensors()
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor, tensors[name]), name


def processes(staleness: int, **settings: Any) -> dict[str, Any]:
    return {"task.asynchronous": {"type": "processes", "staleness": staleness, **settings}}


def test_without_staleness_the_run_equals_a_synchronous_one(
    make: MakeRun, done: Callable[[RunConfig], Done]
) -> None:
    ordinary = make({"task.importance_cap": 2.0}, name="synchronous")
    assert train(ordinary) == 0
    beside = make(processes(0), name="beside")
    assert beside.task.importance_cap == 2.0
    assert train(beside) == 0
    assert_equal_runs(done(ordinary), done(beside))
    assert rollout(done(ordinary), 3) == rollout(done(beside), 3)
    assert done(beside).column("staleness") == [0, 0, 0]
    assert done(beside).column("importance_max") == pytest.approx([1.0] * 3, abs=1e-9)
