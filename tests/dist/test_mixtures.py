"""Training mixtures of experts: micro-batches, ranks and ZeRO change nothing, including the auxiliary losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

EXPERTS = {"model.family": "mixtral", "model.intermediate_size": 24, "model.experts.num_experts": 5}
MODELS: dict[str, dict[str, Any]] = {
    "top-2": {
        "model.experts.aux_loss_coef": 0.02,
        "model.experts.z_loss_coef": 0.01,
        "model.experts.capacity_factor": 1.25,
    },
    "balanced": {
        "model.experts.router": "balanced",
        "model.experts.num_experts_per_token": 1,
        "model.experts.num_experts": 4,
    }
    | {"model.experts.shared_intermediate_size": 16},
    "projection": {"model.experts.router": "random_projection", "model.experts.num_experts_per_token": 1},
}


@pytest.mark.parametrize("model", [pytest.param("top-2", marks=pytest.mark.slow), "balanced", "projection"])
def test_every_layout_equals_one_process(model, tiny_run, train_on, done):
    settings = {**EXPERTS, **MODELS[model], "train.steps": 8, "evaluation.every": 8, "evaluation.num_sequences": 5}
    alone = tiny_run(settings, name="alone")
    train_on(1, alone)
    one = done(alone)
    columns = ("loss", "grad_norm", "balance_loss", "z_loss", "dropped")
    expected = {column: one.column(column) for column in columns}
    assert expected["loss"][-1] < expected["loss"][0] - 0.3
    assert (min(expected["dropped"]) > 0) == (model == "top-2")
    assert min(expected["z_loss"]) > 0
    frozen = [f"blocks.{layer}.feed_forward.router.weight" for layer in (0, 1)]
    weights = one.tensors()
    if model == "balanced":  # an even load makes the loss that of even probabilities: 1
        assert expected["balance_loss"] == pytest.approx([1.0] * 8, abs=0.05)
    stages = (0, 2, 3) if model == "top-2" else (3,)
    settings |= {"batch.micro_batch_size": 2, "parallel.expert": 2 if model == "balanced" else 1}
    configs = [tiny_run({**settings, "parallel.zero_stage": zero}, name=f"zero-{zero}") for zero in stages]
    train_on(2, *configs)
    for config in configs:
        many = done(config)
        for column in columns:
            assert many.column(column) == pytest.approx(expected[column], rel=1e-9), (config.name, column)
        held_out = many.column("loss", "evaluation")
        assert held_out and held_out == pytest.approx(one.column("loss", "evaluation"), rel=1e-9)
        theirs = many.tensors()
        for name, tensor in weights.items():
            torch.testing.assert_close(theirs[name], tensor, rtol=1e-7, atol=1e-10, msg=f"{config.name} {name}")
            if model == "projection" and any(name.endswith(router) for router in frozen):
                assert torch.equal(theirs[name], tensor)
