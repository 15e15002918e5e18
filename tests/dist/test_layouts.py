"""Every layout equals one process: loss and gradient norm of each of 2 steps, and the weights after them, in fp64."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jingu.checkpoint import store
from jingu.checkpoint.save_folder import tensor_names
from jingu.config.batch_plan import plan_batch
from jingu.config.schema import RunConfig
from jingu.config.sections.optimizers import AdamWSettings
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import BatchSettings
from jingu.data.batch import Batch, EncoderInputs
from jingu.formats.huggingface import open_hf
from jingu.model.decoder import parameter_shapes
from jingu.model.feed_forward_specs import BalancedRouter
from jingu.model.resolve import find_family
from jingu.model.spec import ModelSpec, repeat_pattern, replace_fields
from jingu.model.weight_init import initial_tensor
from jingu.parallel.layout import Layout, Precision
from jingu.parallel.materialize import materialize
from jingu.parallel.mesh import build_mesh, num_data_ranks, resolve_axis_sizes
from jingu.runtime.ranks import gather_from_all
from jingu.training.optimizer import build_optimizer
from jingu.training.pretraining import Pretraining
from jingu.training.step import train_step

ROWS, TOKENS, STEPS = 8, 13, 2
"""Rows of 13 tokens, which no number of ranks divides."""


def tiny(
    family: str, *, heads: int = 4, kv_heads: int | None = None, size: int = 22, layers: int = 2, **others: Any
) -> ModelSpec:
    """Return the spec of a few blocks of awkward sizes: a vocabulary of 41, an intermediate size of 22."""
    template = find_family(family).template
    attention: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads or heads, "head_dim": 8}
    if template.attention.latent is not None:
        query_rank = template.attention.latent.query_rank and 10
        sizes = {"rank": 12, "query_rank": query_rank, "rotary_dim": 4}
        attention |= {"num_kv_heads": heads, "latent": template.attention.latent.model_copy(update=sizes)}
    if template.attention.value_dim is not None:
        attention["value_dim"] = 6
    part = template.feed_forward.model_copy(update={"intermediate_size": size, **others.pop("feed_forward", {})})
    return replace_fields(
        template,
        vocab_size=41,
        hidden_size=24,
        num_layers=layers,
        layer_pattern=repeat_pattern(template.layer_pattern, layers),
        max_position_embeddings=16,
        attention=template.attention.model_copy(update=attention),
        feed_forward=part,
        **others,
    )


@dataclass
class Result:
    losses: list[Tensor] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, tuple[tuple[int, ...], tuple[int, ...], Tensor]] = field(default_factory=dict)
    """Shape of the full tensor, offset and values of the part that a rank stores."""


def batch_of(step: int, first: int, count: int, documents: bool, encoder: bool, vocab_size: int = 41) -> Batch:
    """Return rows of a step with some untrained labels, and optionally two or three documents per row."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(vocab_size, (ROWS, TOKENS + 1), generator=generator)
    labels = ids[:, 1:].masked_fill(torch.rand(ROWS, TOKENS, generator=generator) < 0.2, -100)
    ends = (torch.rand(ROWS, TOKENS, generator=generator) < 0.15).cumsum(1)
    rows = slice(first, first + count)
    source = torch.randint(41, (ROWS, 10), generator=generator)
    encoder_inputs = EncoderInputs(
        source[rows], torch.arange(10).div(4).long().expand(ROWS, -1)[rows] if documents else None
    )
    return Batch(
        ids[rows, :-1],
        labels[rows],
        documents=ends[rows] if documents else None,
        source=encoder_inputs if encoder else None,
    )


def few_steps(
    rank: int,
    world: int,
    spec: ModelSpec,
    layouts: list[dict[str, Any]],
    documents: bool,
    weights: Path | None = None,
) -> list[Result]:
    """Train on each of the layouts, one after another."""
    return [_few_steps(world, spec, ParallelSettings(**layout), documents, weights) for layout in layouts]


def build_model_and_mesh(
    world: int, spec: ModelSpec, settings: ParallelSettings, weights: Path | None = None
) -> tuple[Any, Any]:
    """Return a model with its initial weights, or those of a Hugging Face folder, laid out over a mesh."""
    device = torch.device("cpu")
    mesh = build_mesh(resolve_axis_sizes(settings, world, spec), device)
    source = 3 if weights is None else open_hf(weights).read
    return materialize(spec, mesh, Layout(settings), Precision.uniform(torch.float64), source), mesh


def _few_steps(
    world: int, spec: ModelSpec, settings: ParallelSettings, documents: bool, weights: Path | None
) -> Result:
    model, mesh = build_model_and_mesh(world, spec, settings, weights)
    optimizer = build_optimizer(AdamWSettings(lr=1e-2), model)
    kind = documents, bool(spec.num_encoder_layers), spec.vocab_size
    source: Any = type("Source", (), {"batch": staticmethod(lambda *where: batch_of(*where, *kind))})
    task = Pretraining(source, spec, mesh, RunConfig())
    micro_size = max(1, ROWS // num_data_ranks(mesh) // 2)
    settings_of_batch = BatchSettings(sequence_length=TOKENS, global_batch_size=ROWS, micro_batch_size=micro_size)
    plan = plan_batch(settings_of_batch, num_data_ranks(mesh))
    result = Result()
    for step in range(STEPS):
        outcome = train_step(model, optimizer, task, plan, step=step, max_grad_norm=1.0)
        result.losses.append(torch.stack([outcome.loss, *outcome.metrics.values()]))
        result.norms.append(float(outcome.grad_norm))
    for name, parameter in model.named_parameters():
        block = model.sharding.block(name, parameter)
        result.weights[name] = (block.shape, block.offset, block.local.clone())
    return result


def assemble(results: list[Result]) -> dict[str, Tensor]:
    """Assemble full weights from the parts of all ranks; ranks that store the same part must agree bitwise."""
    whole: dict[str, Tensor] = {}
    for result in results:
        for name, (shape, offset, values) in result.weights.items():
            target = whole.setdefault(name, torch.full(shape, torch.nan, dtype=values.dtype))
            for dim, start in enumerate(offset):
                target = target.narrow(dim, start, values.shape[dim])
            assert torch.equal(target, values) or bool(target.isnan().all()), name
            target.copy_(values)
    assert not any(bool(tensor.isnan().any()) for tensor in whole.values())
    return whole


def check(
    ranks: Any,
    spec: ModelSpec,
    world: int,
    layouts: list[dict[str, Any]],
    documents: bool = False,
    weights: Path | None = None,
) -> None:
    """Compare all layouts with one process.

    Args:
        weights: a Hugging Face folder with the weights; None: initial weights.
    """
    [one] = ranks.run(few_steps, 1, spec, [{}], documents, weights)[0]
    expected = assemble([one])
    by_rank = ranks.run(few_steps, world, spec, layouts, documents, weights)
    for number, layout in enumerate(layouts):
        results = [outcome[number] for outcome in by_rank]
        same = partial(torch.testing.assert_close, rtol=1e-9)
        for result in results:
            assert result.norms == pytest.approx(one.norms, rel=1e-9), layout
            same(result.losses, one.losses, atol=0, msg=partial("{}: {}".format, layout))
        weights = assemble(results)
        assert weights.keys() == expected.keys()
        for name, tensor in weights.items():
            same(tensor, expected[name], atol=1e-10, msg=partial("{} {}: {}".format, layout, name))


EXPERTS = {
    "num_experts": 6,
    "num_experts_per_token": 2,
    "capacity_factor": 1.25,
    "aux_loss_coef": 0.02,
    "z_loss_coef": 0.01,
}
MODELS = {
    "gpt2": tiny("gpt2"),
    "llama": tiny("llama", kv_heads=2),
    "llama-one-kv-head": tiny("llama", kv_heads=1, tie_word_embeddings=True),
    "qwen3": tiny("qwen3", kv_heads=2),
    "baichuan2": tiny("baichuan2"),
    "chatglm3": tiny("chatglm3", kv_heads=2),
    "bloom": tiny("bloom"),
    "t5": tiny("t5", num_encoder_layers=2),
    "mixtral": tiny("mixtral", kv_heads=2, feed_forward=EXPERTS),
    "mixtral-shared": tiny(
        "mixtral",
        kv_heads=2,
        feed_forward={**EXPERTS, "shared_intermediate_size": 10, "shared_expert_gate": True, "aux_loss_scope": "model"},
    ),
    "mixtral-balanced": tiny(
        "mixtral", feed_forward={**EXPERTS, "num_experts_per_token": 1, "router": BalancedRouter()}
    ),
}
# A dense layer with a window before experts without positions, and other numbers of key-value heads.
DIFFERENT = {
    "dense": {"attention.sliding_window": 5, "feed_forward": {"type": "gated", "intermediate_size": 30}},
    "experts": {"position": {"type": "none"}, "attention.num_kv_heads": 4},
}
MODELS["mixtral-different"] = replace_fields(
    MODELS["mixtral"], num_layers=3, layer_kinds=DIFFERENT, layer_pattern=("dense", "experts", "dense")
)
# Norms behind the branches and over all heads, queries scaled by position, trained numbers of the activation.
MODELS["behind"] = replace_fields(
    MODELS["llama"],
    **{
        "attention.qk_norm": True,
        "attention.qk_norm_width": "all_heads",
        "attention.query_scaling": {"beta": 0.3, "length": 3},
        "feed_forward": {"type": "plain", "intermediate_size": 22, "activation": "xielu"},
        "norm_placement": "behind",
        "residual_scale": 0.7,
    },
)
# Norms on both sides whose weights are stored minus one, soft caps, chunks and a window, scales.
MODELS["around"] = replace_fields(
    MODELS["llama"],
    num_layers=3,
    norm={"type": "rms", "offset": True},
    norm_placement="around",
    embedding_scale=4.9,
    logit_scale=1.7,
    logit_softcap=2.0,
    layer_kinds={
        "window": {"attention.sliding_window": 5, "position.theta": 50.0},
        "chunk": {"attention.chunk_size": 4, "attention.softcap": 1.5, "attention.scale": 0.5},
        "full": {"position": {"type": "none"}, "attention.softcap": 1.5},
    },
    layer_pattern=("window", "chunk", "full"),
)
# Sinks, gates and scales of attention, values of another size than keys, experts with biases and clamped gates.
GATED = {
    "attention.sinks": True,
    "attention.output_gate": True,
    "attention.value_dim": 6,
    "attention.value_scale": 0.7,
    "attention.output_bias": True,
}
MODELS["mixtral-gated"] = replace_fields(
    MODELS["mixtral"],
    **{
        **GATED,
        "feed_forward.bias": True,
        "feed_forward.capacity_factor": None,
        "feed_forward.clamped_gate": {"limit": 0.2},
        "feed_forward.router": {"type": "top_k", "softmax": "after", "bias": True, "weights_inputs": True},
        "layer_kinds": {"window": {"attention.sliding_window": 5, "attention.sinks": False}, "full": {}},
        "layer_pattern": ("window", "full"),
    },
)
# Latent attention, and a router with groups whose corrections follow the loads.
MODELS["latent"] = replace_fields(
    MODELS["mixtral"],
    **{
        "attention.num_kv_heads": 4,
        "attention.head_dim": 10,
        "attention.value_dim": 6,
        "attention.qkv_bias": True,
        "attention.latent": {"rank": 7, "rotary_dim": 4, "query_rank": 9},
        "attention.query_scaling": {"beta": 0.3, "length": 3},
        "feed_forward.shared_intermediate_size": 10,
        "feed_forward.router": {
            "type": "top_k",
            "scores": "sigmoid",
            "correction": True,
            "correction_rate": 0.05,
            "num_groups": 3,
            "num_groups_per_token": 2,
            "scaling_factor": 1.7,
        },
    },
)


def models(*quick: str) -> Any:
    """Parametrize over all models; those not listed are slow tests."""
    marks = {name: [] if name in quick else [pytest.mark.slow] for name in MODELS}
    return pytest.mark.parametrize("model", [pytest.param(name, marks=marks[name]) for name in MODELS])


@models("gpt2", "llama", "t5")
def test_tensor(model, ranks):
    check(ranks, MODELS[model], 4, [{"tensor": 4}, {"tensor": 2, "zero_stage": 3}])


@models("bloom")
def test_context(model, ranks):
    layouts = [{"context": 4}, {"context": 2, "tensor": 2}, {"context": 2, "zero_stage": 0}]
    check(ranks, MODELS[model], 4, layouts, documents=True)


@models("llama")
def test_context_in_a_ring(model, ranks):
    """More context-parallel ranks than heads: a ring without documents, gathered keys with them."""
    spec = MODELS[model]
    # Latent attention has a key for each head, and the layers of a kind may have heads of their own.
    heads = {"num_heads": 2, "num_kv_heads": 2 if spec.attention.latent else 1}
    kinds = {kind: {k: v for k, v in fields.items() if "heads" not in k} for kind, fields in spec.layer_kinds.items()}
    spec = replace_fields(spec, attention=spec.attention.model_copy(update=heads), layer_kinds=kinds)
    layouts = [
        {"context": 4},
        {"context": 2, "tensor": 2, "zero_stage": 3},
        {"context": 2, "pipeline": 2, "zero_stage": 2},
    ]
    layouts = [{**layout, "context_method": "ring"} for layout in layouts]
    check(ranks, spec, 4, layouts)
    check(ranks, spec, 4, layouts[:2], documents=True)


@models("llama")
def test_pipeline_of_divided_stages(model, ranks):
    layouts = [{"pipeline": 2, "tensor": 2}, {"pipeline": 2, "context": 2, "zero_stage": 2}]
    check(ranks, MODELS[model], 4, layouts, documents=True)


MIXTURES = [
    name for name in MODELS if name.startswith("mixtral") and name not in ("mixtral-different", "mixtral-gated")
]


@pytest.mark.parametrize("model", [MIXTURES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in MIXTURES[1:])])
def test_experts(model, ranks):
    """6 experts on 2 ranks: with data, tensor and context parallelism, and with ZeRO."""
    layouts = [{"expert": 2}, {"expert": 2, "zero_stage": 3}, {"expert": 2, "tensor": 2}, {"expert": 2, "context": 4}]
    check(ranks, MODELS[model], 4, [*layouts, {"expert": 2, "replicate": 2}])


def test_layers_that_differ(ranks):
    spec = MODELS["mixtral-different"]
    layouts = [
        {"tensor": 4},
        {"context": 2, "tensor": 2, "zero_stage": 3},
        {"context": 4, "context_method": "ring"},
        {"expert": 2, "tensor": 2},
        {"pipeline": 2, "expert": 2},
    ]
    check(ranks, spec, 4, layouts, documents=True)
    check(ranks, spec, 3, [{"pipeline": 3, "pipeline_schedule": "gpipe"}])


@pytest.mark.parametrize("model", ["behind", "around"])
def test_components(model, ranks):
    layouts = [
        {"tensor": 4},
        {"context": 2, "tensor": 2, "zero_stage": 3},
        {"context": 4},
        {"context": 2, "context_method": "ring", "tensor": 2},
        {"pipeline": 2, "tensor": 2},
    ]
    check(ranks, MODELS[model], 4, layouts, documents=model == "around")


@pytest.mark.parametrize("model", ["mixtral-gated", "latent"])
def test_components_with_experts(model, ranks):
    layouts = [
        {"tensor": 4},
        {"context": 2, "tensor": 2, "zero_stage": 3},
        {"context": 4},
        {"context": 2, "context_method": "ring", "tensor": 2},
        {"context": 2, "context_method": "ring", "expert": 2},
        {"expert": 2, "tensor": 2, "zero_stage": 3},
        {"pipeline": 2, "expert": 2},
    ]
    check(ranks, MODELS[model], 4, layouts, documents=model == "latent")


# Mixers with a state beside attention.
STATES: dict[str, dict[str, Any]] = {
    "gated delta": {
        "type": "gated_delta",
        "num_heads": 8,
        "num_key_heads": 2,
        "key_head_dim": 5,
        "value_head_dim": 6,
        "num_taps": 3,
    },
    "state space": {"type": "state_space", "num_heads": 4, "num_groups": 2, "head_dim": 5, "state_size": 6},
    "short convolution": {"type": "short_conv", "num_taps": 3, "bias": True},
}


def spec_with_state(mixer: str) -> ModelSpec:
    kinds = {"state": {"mixer": STATES[mixer]}, "full": {}}
    return replace_fields(MODELS["llama"], num_layers=3, layer_kinds=kinds, layer_pattern=("state", "full", "state"))


@pytest.mark.parametrize("mixer", STATES)
def test_layers_with_a_state(mixer, ranks):
    """Documents start anywhere in a row; with 4 ranks of `tensor`, two share a head of the keys."""
    spec = spec_with_state(mixer)
    layouts = [{"tensor": 4 if mixer != "state space" else 2, "zero_stage": 3}, {"pipeline": 2, "tensor": 2}]
    check(ranks, spec, 4, layouts, documents=True)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", STATES)
def test_layers_with_a_state_in_more_layouts(mixer, ranks):
    spec = spec_with_state(mixer)
    layouts = [{"tensor": 2, "zero_stage": 3}, {"zero_stage": 2}, {"zero_stage": 3}]
    layouts += [{"tensor": 4}] if mixer != "state space" else []
    check(ranks, spec, 4, layouts, documents=True)
    # Split backward passes: the convolutions' kernels are used transposed.
    check(ranks, spec, 2, [{"pipeline": 2, "pipeline_schedule": "zero_bubble", "stages_per_rank": 1}], documents=True)


def load_and_save(
    rank: int, world: int, spec: ModelSpec, layout: dict[str, Any], source: Path | None, to: Path
) -> None:
    """Save a model in one layout: initial weights, or those of a checkpoint of another layout."""
    settings = ParallelSettings(**layout)
    model, _ = build_model_and_mesh(world, spec, settings)
    tensors = {name: model.sharding.block(name, p) for name, p in model.named_parameters()}
    if source is not None:
        for tensor in tensors.values():
            tensor.local.zero_()
        store.load(source, tensors, gather=gather_from_all)
    store.save(to, tensors, {}, rank=rank, ranks=world, gather=gather_from_all)


def test_checkpoints_load_bitwise_in_other_layouts(tmp_path, ranks):
    spec = MODELS["mixtral-shared"]
    layouts = [
        {},
        {"tensor": 4},
        {"expert": 2, "tensor": 2},
        {"expert": 2, "context": 2, "zero_stage": 3},
        {"tensor": 2},
    ]
    before = None
    for number, layout in enumerate(layouts):
        folder = tmp_path / str(number)
        ranks.run(load_and_save, 4 if layout else 1, spec, layout, before, folder)
        before = folder
    first, last = tmp_path / "0", tmp_path / str(len(layouts) - 1)
    shapes = parameter_shapes(spec)
    assert sorted(tensor_names(last)) == sorted(shapes)
    for name, shape in shapes.items():
        outcome = store.CheckpointReader(last).read(name)
        assert torch.equal(outcome, store.CheckpointReader(first).read(name)) and outcome.shape == shape
        assert torch.equal(outcome, initial_tensor(name, shape, spec, 3).double())


EIGHT: list[tuple[str, list[dict[str, Any]]]] = [
    ("llama", [{"pipeline": 2, "tensor": 2, "shard": 2}, {"replicate": 2, "shard": 2, "tensor": 2, "zero_stage": 3}]),
    (
        "gpt2",
        [{"tensor": 2, "context": 2, "zero_stage": 2}, {"pipeline": 2, "context": 2, "tensor": 2, "zero_stage": 3}],
    ),
    ("bloom", [{"tensor": 4, "zero_stage": 0}, {"context": 4, "replicate": 2}]),
    ("t5", [{"tensor": 2, "context": 2, "zero_stage": 3}, {"tensor": 4}]),
    (
        "mixtral-shared",
        [{"expert": 2, "tensor": 2, "context": 2}, {"expert": 2, "pipeline": 2, "tensor": 2, "zero_stage": 2}],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layouts"), EIGHT)
def test_eight_ranks(model, layouts, ranks):
    check(ranks, MODELS[model], 8, layouts, documents=model != "t5")
