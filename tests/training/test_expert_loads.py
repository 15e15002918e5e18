"""Corrections of router scores by the loads of experts: balance, restarts, narrow formats, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.formats.huggingface import open_hf
from jingu.training.commands import train
from jingu.tune.publish import export

ROUTER: dict[str, Any] = {
    "model.family": "glm4_moe",
    "model.intermediate_size": 16,
    "model.experts.num_experts": 16,
    "model.experts.num_experts_per_token": 2,
    "model.experts.shared_intermediate_size": 16,
}


def corrections(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.endswith("correction.weight")}


@pytest.mark.slow
def test_corrections_balance_a_run_that_collapses_without_them(tiny_run, train_on, done):
    """The most loaded of 16 experts has at most 1.5 times the mean, of any layer, on average over 20 steps."""
    batch = {"batch.sequence_length": 64, "batch.global_batch_size": 32, "batch.micro_batch_size": 8}
    changes = {**ROUTER, **batch, "train.steps": 200, "precision.type": "fp32", "optimizer.lr": 3e-3}
    free = tiny_run(changes, name="free")
    balanced = tiny_run({**changes, "model.experts.correction_rate": 0.005}, name="balanced")
    train_on(1, free, balanced)
    assert min(done(free).column("max_expert_load")[-20:]) > 5
    assert sum(done(balanced).column("max_expert_load")[-20:]) / 20 < 1.5
    # It costs no quality.
    assert done(balanced).column("loss")[-1] < done(free).column("loss")[-1] + 0.02


def test_corrections_follow_the_loads_and_survive_a_restart_and_an_export(tiny_run, train_on, done, tmp_path: Path):
    """In bf16, with ZeRO, whose weights would round them away; they are saved and exported in fp32."""
    changes = {**ROUTER, "model.experts.correction_rate": 1e-3, "precision.type": "bf16", "train.steps": 6}
    changes["schedule"] = {"type": "constant", "warmup": 0}
    whole, part = tiny_run(changes, name="whole"), tiny_run({**changes, "train.steps": 4}, name="part")
    train_on(2, whole, part)
    moved = corrections(done(whole).tensors())
    assert len(moved) == 2 and all(tensor.dtype == torch.float32 for tensor in moved.values())
    for tensor in moved.values():
        steps = (tensor.double() / 1e-3).round()
        assert tensor.count_nonzero() > 8 and steps.abs().max() <= 6
        torch.testing.assert_close(tensor.double(), steps * 1e-3, rtol=0, atol=1e-7)
    longer = part.model_copy(update={"train": part.train.model_copy(update={"steps": 6})})
    train_on(1, longer)
    assert corrections(done(longer).tensors()).keys() == moved.keys()
    assert done(whole).column("max_correction")[-1] <= 6e-3 + 1e-7
    # An export in a narrow dtype keeps their own.
    export(done(whole).folder, tmp_path / "hf", "bf16")
    model = open_hf(tmp_path / "hf")
    for name, tensor in moved.items():
        assert torch.equal(model.read(name.removeprefix("model/")), tensor)


def test_stages_of_a_pipeline_report_the_largest_correction_of_all(tiny_run, train_on, done):
    """Corrections of the first stage, which writes the log, are frozen."""
    changes = {**ROUTER, "model.experts.correction_rate": 1e-3, "train.steps": 3}
    changes |= {"tune.type": "full", "tune.freeze": ["blocks.0.feed_forward.correction.*"]}
    one, two = tiny_run(changes, name="one"), tiny_run({**changes, "parallel.pipeline": 2}, name="two")
    train_on(1, one)
    train_on(2, two)
    assert done(two).column("max_correction") == done(one).column("max_correction")
    assert done(one).column("max_correction")[-1] > 0


def test_adapters_leave_corrections_alone(tiny_run, done):
    config = tiny_run({**ROUTER, "model.experts.correction_rate": 1e-2, "train.steps": 2}, name="full")
    assert train(config) == 0
    frozen = tiny_run(
        {**ROUTER, "model.experts.correction_rate": 1e-2, "train.steps": 2, "tune.type": "lora"}
        | {"initialize.from": str(done(config).folder)},
        name="tuned",
    )
    assert train(frozen) == 0
    assert "max_correction" not in done(frozen).lines("train")[-1]
