"""Optimizers that use whole matrices give the same results in every layout, and resume."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.checkpoint.resume import step_folder
from jingu.config.schema import RunConfig
from tests.conftest import Done, MakeRun

MIXTURE = {"model.family": "mixtral", "model.experts": {"num_experts": 4, "num_experts_per_token": 2}}


@pytest.mark.parametrize("kind", ["adafactor", "muon"])
@pytest.mark.parametrize(
    "cases",
    [
        [(2, {"parallel.zero_stage": 3}), (2, {"parallel.tensor": 2}), (2, {"parallel.pipeline": 2})],
        pytest.param(
            [
                (4, {"parallel.tensor": 2, "parallel.zero_stage": 2}),
                (2, {"parallel.zero_stage": 0}),
                (2, {"parallel.offload": {"type": "disk"}}),
                (8, {"parallel.tensor": 2, "parallel.pipeline": 2, "parallel.zero_stage": 3}),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["two", "many"],
)
def test_the_same_numbers_in_every_layout(
    kind: str,
    cases: list[tuple[int, dict[str, Any]]],
    tiny_run: MakeRun,
    train_on: Callable[..., None],
    done: Callable[[RunConfig], Done],
) -> None:
    settings = {
        "train.steps": 5,
        "optimizer": {"type": kind, "param_groups": [{"match": "*.down.*", "lr_multiplier": 0.5}]},
    }
    config = tiny_run(settings)
    train_on(1, config)
    alone = done(config)
    for number, (ranks, layout) in enumerate(cases):
        other = tiny_run({**settings, **layout}, name=f"layout-{number}")
        train_on(ranks, other)
        assert done(other).column("loss") == pytest.approx(alone.column("loss"), rel=1e-9)
        result = done(other).tensors()
        for name, tensor in alone.tensors().items():
            torch.testing.assert_close(result[name], tensor, rtol=1e-7, atol=1e-10, msg=f"{layout} {name}")


@pytest.mark.parametrize("kind", ["adafactor", "muon"])
def test_experts_resume_in_another_layout(
    kind: str, tiny_run: MakeRun, train_on: Callable[..., None], done: Callable[[RunConfig], Done]
) -> None:
    """Saved by one rank, resumed by two that share the experts."""
    settings = {**MIXTURE, "train.steps": 4, "optimizer": {"type": kind}, "checkpoint.every": 2}
    config = tiny_run(settings)
    train_on(1, config)
    alone = done(config)
    losses, weights = alone.column("loss"), alone.tensors()
    shutil.rmtree(step_folder(Path(config.runs_dir) / config.name / "checkpoints", 4))
    train_on(2, tiny_run({**settings, "parallel.zero_stage": 3, "parallel.expert": 2}))
    assert done(config).column("loss") == pytest.approx(losses, rel=1e-9)
    result = done(config).tensors()
    for name, tensor in weights.items():
        torch.testing.assert_close(result[name], tensor, rtol=1e-7, atol=1e-10, msg=name)
