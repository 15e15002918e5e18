"""Runs of models whose layers keep a state: they resume to the last bit, keep their rates in fp32, and count memory."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from jingu.config.sections.optimizers import AdamWSettings
from jingu.config.sections.parallel import ParallelSettings
from jingu.errors import JinguError
from jingu.model.attention import BlockContext
from jingu.model.decoder import build_model
from jingu.model.inputs import Inputs
from jingu.model.layers import Vector
from jingu.model.spec import ModelSpec, replace_fields
from jingu.model.weight_init import init_weights
from jingu.parallel.layout import Layout, Precision
from jingu.parallel.materialize import materialize
from jingu.parallel.mesh import build_mesh, resolve_axis_sizes
from jingu.plan.workload import layer_bytes
from jingu.training.commands import train
from jingu.training.optimizer import build_optimizer
from tests.dist.test_layouts import MODELS, STATES

MODEL = {"model.family": "qwen3_5_text", "model.num_layers": 4, "model.head_dim": 8}
EACH = pytest.mark.parametrize("mixer", STATES)


def hybrid(mixer: str) -> ModelSpec:
    kinds = {"state": {"mixer": STATES[mixer]}, "full": {}}
    return replace_fields(MODELS["llama"], layer_kinds=kinds, layer_pattern=("state", "full"))


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_a_run_that_was_cut_off_equals_one_that_was_not(family: str, tiny_run: Any, done: Any) -> None:
    changes = {**MODEL, "model.family": family, "data.document_mask": True, "train.steps": 4, "checkpoint.every": 2}
    whole, parts = tiny_run(changes, name="whole"), tiny_run(changes, name="parts")
    assert train(whole) == 0
    assert train(parts) == 0
    shutil.rmtree(done(parts).folder / "checkpoints" / "step-00000004")
    assert train(parts) == 0
    assert done(parts).column("resumed_from", "start") == [None, 2]
    tensors = done(parts).tensors()
    for name, tensor in done(whole).tensors().items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"data.objective": {"type": "prefix_lm"}}, "data.objective"),
        ({"train.steps": 4, "tune": {"type": "prefix", "num_virtual_tokens": 3}}, "tune.type"),
    ],
)
def test_settings_that_need_attention_in_all_layers(changes: dict[str, Any], where: str, tiny_run: Any) -> None:
    with pytest.raises(JinguError, match=where):
        train(tiny_run({**MODEL, **changes}))


@EACH
def test_kernels_of_convolutions_do_not_decay(mixer: str) -> None:
    model = build_model(hybrid(mixer))
    groups = build_optimizer(AdamWSettings(weight_decay=0.3), model).param_groups
    decayed = {id(parameter) for group in groups if group["weight_decay"] for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() == 2 and not name.endswith("conv.weight")
        assert (id(parameter) in decayed) is is_matrix, name
    assert any(name.endswith("conv.weight") for name, _ in model.named_parameters())


def test_heads_start_with_different_rates() -> None:
    """From 1 to 16, and with lengths of steps from 0.001 to 0.1."""
    spec = hybrid("gated delta")
    model = build_model(spec)
    init_weights(model, spec, 1)
    mixer = model.blocks[0].mixer
    rates, steps = mixer.log_rate.weight.detach().exp(), torch.nn.functional.softplus(mixer.decay_bias.weight.detach())  # type: ignore[union-attr]
    assert rates[0] == pytest.approx(1.0) and rates[-1] == pytest.approx(16.0) and bool((rates.diff() > 0).all())
    assert steps[0] == pytest.approx(0.001, rel=1e-4) and steps[-1] == pytest.approx(0.1, rel=1e-4)


def dtypes_in_forward(_rank: int, world: int, zero_stage: int) -> set[tuple[str, str]]:
    """Return the names and dtypes of the vectors that the forward pass of a rank uses."""
    spec = hybrid("gated delta")
    settings = ParallelSettings(zero_stage=zero_stage)
    mesh = build_mesh(resolve_axis_sizes(settings, world, spec), torch.device("cpu"))
    precision = Precision("bf16", torch.bfloat16, torch.float32, torch.float32)
    model = materialize(spec, mesh, Layout(settings), precision, 1)
    seen = set()
    for stage in model.stages:
        for name, module in stage.named_modules():
            if isinstance(module, Vector):
                module.register_forward_hook(
                    lambda _module, _inputs, output, name=name: seen.add((name.rpartition(".")[2], str(output.dtype)))
                )
        stage(Inputs(torch.tensor([[1, 2, 3]])))
    return seen


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_rates_keep_fp32_in_bf16(zero_stage: int, ranks: Any) -> None:
    expected = {("log_rate", "torch.float32"), ("decay_bias", "torch.float32")}
    assert ranks.run(dtypes_in_forward, 2, zero_stage) == [expected] * 2


@EACH
@pytest.mark.parametrize("size", [4, 2])
def test_saved_bytes_grow_with_the_tokens(mixer: str, size: int) -> None:
    """The plan's bytes per token are those that autograd saves in a row of many chunks."""
    spec = hybrid(mixer)
    planned = layer_bytes(spec, spec.layers[0], size, is_causal=True)
    longer, shorter = (saved(spec.uniform(spec.layers[0]), size, tokens) for tokens in (768, 320))
    assert planned == pytest.approx((longer - shorter) / 448, rel=0.02)


def saved(spec: ModelSpec, size: int, tokens: int) -> int:
    """Return the bytes that autograd saves in one block."""
    dtype = torch.float32 if size == 4 else torch.bfloat16
    model = build_model(spec)
    init_weights(model, spec, 1)
    model = model.to(dtype)
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    states = torch.randn(1, tokens, spec.hidden_size, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        model.blocks[0](states, BlockContext())
    return sum(storage.nbytes() for storage in storages.values())
