"""Memory in closed form against the model itself, laid out on fake ranks, and against what a forward pass keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from jingu.compat.torch_distributed import pretend_ranks
from jingu.config.schema import RunConfig
from jingu.model.count import count_parameters, layer_costs
from jingu.model.decoder import build_model
from jingu.model.inputs import Inputs
from jingu.model.parameter_table import parameter_sizes
from jingu.model.resolve import spec_from_settings
from jingu.model.spec import ModelSpec, replace_fields
from jingu.parallel.layout import Layout, Precision
from jingu.parallel.materialize import materialize
from jingu.parallel.mesh import build_mesh
from jingu.parallel.sharding import local_tensor
from jingu.parallel.stages import plan_layout
from jingu.plan.activations import saved_bytes
from jingu.plan.forecast import run_software, run_workload
from jingu.plan.memory import fullest_stage, stage_memory
from jingu.plan.serving import cache_bytes
from jingu.plan.workload import Workload
from jingu.training.optimizer import build_optimizer

BF16 = Precision("bf16", torch.bfloat16, torch.float32, torch.float32)
LLAMA = {
    "num_layers": 7,
    "hidden_size": 48,
    "num_heads": 6,
    "num_kv_heads": 2,
    "intermediate_size": 70,
    "vocab_size": 131,
    "max_position_embeddings": 32,
}
GPT2 = {
    "family": "gpt2",
    "num_layers": 4,
    "hidden_size": 16,
    "num_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 8,
}
MIXTURE = {
    **LLAMA,
    "family": "mixtral",
    "experts": {"num_experts": 4, "num_experts_per_token": 2},
}


def settings(
    model: dict[str, Any], parallel: dict[str, Any] | None = None, **others: Any
) -> tuple[RunConfig, ModelSpec]:
    """Return a run of a small model, and its spec."""
    length = model.get("max_position_embeddings", 32)
    tree = {
        "model": model,
        "batch": {"sequence_length": length, "global_batch_size": 16, "micro_batch_size": 1},
        "parallel": parallel or {},
        "precision": {"type": "bf16"},
    }
    config = RunConfig.model_validate(tree | others)
    return config, spec_from_settings(config.model, model.get("vocab_size", 320), length)


def workload(config: RunConfig, spec: ModelSpec, ranks: int, precision: Precision = BF16) -> Workload:
    return run_workload(config, spec, *plan_layout(config, ranks, spec), run_software(precision))


def bytes_on_fake_ranks(config: RunConfig, spec: ModelSpec, ranks: int, rank: int) -> dict[str, int]:
    """Lay the model out on the meta device over ranks that do not exist, and count what one of them owns."""
    sizes, _ = plan_layout(config, ranks, spec)
    pretend_ranks(rank, ranks)
    try:
        mesh = build_mesh(sizes, torch.device("cpu"))
        layout = Layout(config.parallel, config.train.activation_checkpointing)
        model = materialize(spec, mesh, layout, BF16, weights=None)
        optimizer = build_optimizer(config.optimizer, model)
        parameters = [parameter for stage in model.stages for parameter in stage.parameters()]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        states = [tensor for state in optimizer.state.values() for tensor in state.values()]
        return {
            name: sum(local_tensor(tensor).nbytes for tensor in tensors)
            for name, tensors in (("weights", parameters), ("gradients", trained), ("optimizer state", states))
        }
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("model", "ranks", "parallel", "optimizer"),
    [
        (LLAMA, 1, {}, "adamw"),
        (LLAMA, 6, {"zero_stage": 3}, "adamw"),
        (LLAMA, 6, {"zero_stage": 2, "shard": 3}, "lion"),
        (LLAMA, 4, {"zero_stage": 2, "tensor": 2}, "sgd"),
        (LLAMA, 8, {"tensor": 2, "pipeline": 2}, "adamw"),
        (LLAMA, 4, {"tensor": 2, "context": 2, "context_method": "ring"}, "adafactor"),
        (LLAMA, 6, {"tensor": 6}, "muon"),
        (LLAMA, 6, {"pipeline": 3, "pipeline_schedule": "interleaved"}, "adamw"),
        (LLAMA, 3, {"pipeline": 3, "pipeline_schedule": "zbv"}, "adamw"),
        (GPT2, 5, {"zero_stage": 1, "pipeline": 1, "shard": 5}, "adamw"),
        (GPT2, 4, {"pipeline": 2}, "adamw"),
        (MIXTURE, 8, {"expert": 4, "tensor": 2}, "adamw"),
        (MIXTURE, 8, {"expert": 2, "zero_stage": 3}, "adafactor"),
    ],
)
def test_what_a_rank_owns_equals_the_layout_on_fake_ranks(
    model: dict[str, Any], ranks: int, parallel: dict[str, Any], optimizer: str
) -> None:
    batch = {"sequence_length": model["max_position_embeddings"], "global_batch_size": 30 * 8, "micro_batch_size": 1}
    config, spec = settings(model, parallel, optimizer={"type": optimizer}, batch=batch)
    work = workload(config, spec, ranks)
    # Gradients that ZeRO 1 keeps whole until the last micro-batch are counted below.
    once = work if work.parallel.zero_stage > 1 else Workload(**vars(work) | {"accumulation": 1})
    for stage in work.stages:
        first = stage.rank * (ranks // work.sizes.pipeline)
        expected = bytes_on_fake_ranks(config, spec, ranks, first)
        device = stage_memory(once, stage).device
        assert {name: device[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("ranks", "parallel"), [(8, {"expert": 2, "tensor": 4}), (6, {"pipeline": 3, "zero_stage": 1, "tensor": 2})]
)
def test_layers_that_differ_are_counted(ranks: int, parallel: dict[str, Any]) -> None:
    """Dense layers among experts, and other key-value heads: memory per rank, parameters, FLOPs and cache."""
    config, spec = settings(MIXTURE, parallel)
    kinds: dict[str, Any] = {
        "dense": {"feed_forward": {"type": "gated", "intermediate_size": 210}, "attention.sliding_window": 4},
        "experts": {"attention.num_kv_heads": 4, "position": {"type": "none"}},
    }
    kinds["dense"]["attention.num_heads"], kinds["experts"]["attention.num_heads"] = 8, 12
    pattern = ("dense", "experts", "experts", "dense", "dense", "experts", "dense")
    spec = replace_fields(spec, layer_kinds=kinds, layer_pattern=pattern)
    work = workload(config, spec, ranks)
    once = Workload(**vars(work) | {"accumulation": 1})
    for stage in work.stages:
        expected = bytes_on_fake_ranks(config, spec, ranks, stage.rank * (ranks // work.sizes.pipeline))
        device = stage_memory(once, stage).device
        assert {name: device[name] for name in expected if name != "gradients"} == {
            name: size for name, size in expected.items() if name != "gradients"
        }
    # The parts of the sum are those of models of one kind.
    shapes = parameter_sizes(spec)
    alone = [spec.uniform(layer) for layer in spec.layers]
    ends = count_parameters(spec, {name: shape for name, shape in shapes.items() if "blocks" not in name})
    assert count_parameters(spec, shapes).active == ends.active + sum(
        count_parameters(one, parameter_sizes(one)).active - ends.active for one in alone
    )
    costs = layer_costs(spec, shapes, 32)
    assert costs[1:-1] == [layer_costs(one, parameter_sizes(one), 32)[1] for one in alone]
    assert cache_bytes(spec, 1) == 4.0 * 8 * (4 * 2 + 3 * 4)


def test_frozen_layers_and_adapters_are_counted() -> None:
    tune = {"type": "full", "num_trainable_layers": 2}
    config, spec = settings(LLAMA, {"zero_stage": 3}, tune=tune)
    spec = spec.model_copy(update={"frozen_parameters": ("embedding*", *(f"blocks.{n}.*" for n in range(5)))})
    expected = bytes_on_fake_ranks(config, spec, 2, 0)
    device = fullest_stage(workload(config, spec, 2))[1].device
    assert {name: device[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("ranks", "parallel", "expected"),
    [
        (2, {"zero_stage": 0}, (4.0, 4.0, 8.0, 2.0)),
        (2, {"zero_stage": 1}, (2.0, 4.0, 4.0, 2.0)),
        (2, {"zero_stage": 2}, (2.0, 2.0, 4.0, 2.0)),
        (2, {"zero_stage": 3}, (2.0, 2.0, 4.0, 2.0)),
    ],
)
def test_bytes_of_a_parameter_equal_a_count_by_hand(
    ranks: int, parallel: dict[str, Any], expected: tuple[float, ...]
) -> None:
    """Bytes a number of the model, all of which two ranks can halve: fp32 but for what is gathered."""
    config, spec = settings(GPT2, parallel)
    with torch.device("meta"):
        sizes = {name: parameter.numel() for name, parameter in build_model(spec).named_parameters()}
    numbers = sum(sizes.values())
    of_block = sum(size for name, size in sizes.items() if name.startswith("blocks.0."))
    device = fullest_stage(workload(config, spec, ranks))[1].device
    steps = 4 * len(sizes)  # AdamW counts them for each parameter
    assert device["optimizer state"] - steps == expected[2] * numbers
    assert (device["weights"], device["gradients"]) == (expected[0] * numbers, expected[1] * numbers)
    gathered = numbers - (2 * of_block if parallel["zero_stage"] == 3 else 0)  # two blocks of four at a time
    assert device["compute weights"] == expected[3] * gathered


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("length", [33, 128])
def test_activations_are_those_that_a_forward_pass_keeps(family: str, length: int) -> None:
    """On the CPU itself, with its kernel of attention."""
    model = {"family": family, "num_layers": 2, "hidden_size": 64, "num_heads": 4, "max_position_embeddings": 256}
    config, spec = settings(model)

    def count(layers: int) -> int:
        decoder = build_model(spec.model_copy(update={"num_layers": layers}))
        storages: dict[int, torch.Tensor] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = decoder(Inputs(torch.zeros(2, length, dtype=torch.int64)))
        assert out.requires_grad
        weights = {parameter.data_ptr() for parameter in decoder.parameters()}
        return sum(tensor.untyped_storage().nbytes() for at, tensor in storages.items() if at not in weights)

    per_token = (count(2) - count(1)) / (2 * length)
    work = workload(config, spec, 1, Precision("fp32", *3 * (torch.float32,)))
    assert saved_bytes(work.model.blocks[0], work, is_compiled=False) == pytest.approx(per_token, rel=0.01)


def test_activations_of_micro_batches_in_flight_are_counted() -> None:
    counts = {}
    for kind in ("none", "full", "selective"):
        train = {"activation_checkpointing": {"type": kind}}
        config, spec = settings({**LLAMA, "num_layers": 4}, {"pipeline": 2}, train=train)
        work = workload(config, spec, 2)
        counts[kind] = [stage_memory(work, stage).device["activations"] for stage in work.stages]
    of_block = 32 * saved_bytes(work.model.blocks[0], work, is_compiled=False)
    # 1f1b: two micro-batches on the first rank, one on the last; with two blocks each.
    assert counts["none"] == pytest.approx([2 * 2 * of_block, 2 * of_block])
    assert counts["full"] == [2 * 2 * 32 * 48 * 2, 2 * 32 * 48 * 2]
    assert counts["full"][0] < counts["selective"][0] < counts["none"][0]
