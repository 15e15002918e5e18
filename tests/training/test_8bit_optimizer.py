"""Moments of 8 bits: those of bitsandbytes, in every layout, and gone on with from a checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from jingu.checkpoint.resume import step_folder
from jingu.config.schema import RunConfig
from jingu.config.sections.optimizers import AdamWSettings
from jingu.errors import JinguError
from jingu.training.optimizer import build_optimizer
from jingu.training.run import open_run
from tests.conftest import Done, MakeRun


def test_updates_equal_bitsandbytes() -> None:
    """A matrix whose rows are whole blocks; others have moments in fp32, as torch's."""
    from bitsandbytes.optim import AdamW8bit

    generator = torch.Generator().manual_seed(1)
    shapes = {"wide": (20, 512), "narrow": (300, 20), "bias": (512,)}
    ours = nn.ParameterDict({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})
    theirs = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in ours.items()}
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    eight = AdamW8bit([theirs["wide"]], **settings)
    plain = torch.optim.AdamW(
        [{"params": [theirs["narrow"]]}, {"params": [theirs["bias"]], "weight_decay": 0.0}], **settings
    )
    optimizer = build_optimizer(AdamWSettings(lr=0.01, beta2=0.95, weight_decay=0.1, state_dtype="int8"), ours)
    for _ in range(5):
        for name, parameter in ours.items():
            parameter.grad = torch.randn(shapes[name], generator=generator)
            theirs[name].grad = parameter.grad.clone()
        optimizer.step()
        eight.step()
        plain.step()
    assert torch.equal(ours["wide"], theirs["wide"])
    torch.testing.assert_close(dict(ours), theirs, rtol=1e-6, atol=1e-7)
    held = sum(each.nbytes for name, each in optimizer.state[ours["wide"]].items() if name != "step")
    assert held == ours["wide"].numel() * (2 + 8 / 256)


@pytest.fixture
def run(tiny_run: MakeRun) -> Callable[..., RunConfig]:
    def make(changes: dict[str, Any] | None = None) -> RunConfig:
        plain = {
            "model.hidden_size": 256,
            "optimizer.state_dtype": "int8",
            "precision.type": "fp32",
            "train.steps": 4,
            "optimizer.lr": 1e-3,
        }
        return tiny_run({**plain, "checkpoint": {"every": 2, "keep_last": 3}, **(changes or {})})

    return make


@pytest.mark.slow
def test_8bit_moments_resume_in_another_layout(
    run: Callable[..., RunConfig], train_on: Callable[..., None], done: Callable[[RunConfig], Done]
) -> None:
    config = run()
    train_on(1, config)
    whole = done(config)
    losses, weights = whole.column("loss"), whole.tensors()
    assert losses[-1] < losses[0]
    name = "blocks.0.attention.q.weight"
    assert weights[f"optimizer/exp_avg/{name}"].dtype == torch.uint8
    assert weights[f"optimizer/exp_avg_scale/{name}"].shape == (256, 1)
    for ranks, changes in ((1, {}), (2, {"parallel.zero_stage": 3}), (2, {"parallel.zero_stage": 1})):
        shutil.rmtree(step_folder(whole.folder / "checkpoints", 4))
        train_on(ranks, run(changes))
        found = done(config)
        assert found.column("loss") == pytest.approx(losses, rel=1e-12 if ranks == 1 else 1e-4)
        if ranks == 1:
            assert all(torch.equal(tensor, weights[name]) for name, tensor in found.tensors().items())


def test_mistakes(run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JinguError, match="need weights in fp32"):
        open_run(run({"precision.type": "fp64"}))
    monkeypatch.setattr("jingu.model.quantized_weight.find_spec", lambda name: None)
    with pytest.raises(JinguError, match="kept in 8 bits by the bitsandbytes package"):
        open_run(run())
