"""Every layout is the run of one process: loss and gradient norm of each of 3 steps, and the weights after, in fp64."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jingu.checkpoint import store
from jingu.checkpoint.files import names
from jingu.checkpoint.slices import slice_of
from jingu.config.batch import plan_batch
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings, AdamWSettings, BatchSettings
from jingu.data.batch import Batch, Source
from jingu.model.build import find_family
from jingu.model.decoder import make_model, parameter_shapes
from jingu.model.initialise import initial_values
from jingu.model.spec import Balanced, ModelSpec, replaced
from jingu.parallel.apply import parallelize
from jingu.parallel.mesh import axis_sizes, build_mesh, data_ranks
from jingu.parallel.pipeline import Pipeline
from jingu.parallel.sharing import sharing_of
from jingu.runtime.ranks import all_agree
from jingu.train.optimizer import build_optimizer
from jingu.train.step import train_step
from jingu.train.task import Pretraining

ROWS, TOKENS, STEPS = 8, 13, 3
"""13 tokens a row, which no number of ranks divides."""


def tiny(family: str, *, heads: int = 4, kv_heads: int | None = None, size: int = 22, **others: Any) -> ModelSpec:
    """Two blocks of odd sizes: a vocabulary of 41, inner dims of 22."""
    template = find_family(family).template
    attention = {"heads": heads, "kv_heads": kv_heads or heads, "head_size": 8}
    part = template.feed_forward.model_copy(update={"size": size, **others.pop("feed_forward", {})})
    return replaced(
        template,
        vocabulary=41,
        width=24,
        layers=2,
        context=16,
        attention=template.attention.model_copy(update=attention),
        feed_forward=part,
        **others,
    )


@dataclass
class Result:
    losses: list[Tensor] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, tuple[tuple[int, ...], tuple[int, ...], Tensor]] = field(default_factory=dict)
    """Shape of the whole, offset and values of the part that a rank holds."""


def batch_of(step: int, first: int, count: int, documents: bool, encoder: bool) -> Batch:
    """Rows of a step, with some labels that are not trained; and two or three documents a row."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(41, (ROWS, TOKENS + 1), generator=generator)
    labels = ids[:, 1:].masked_fill(torch.rand(ROWS, TOKENS, generator=generator) < 0.2, -100)
    ends = (torch.rand(ROWS, TOKENS, generator=generator) < 0.15).cumsum(1)
    rows = slice(first, first + count)
    source = torch.randint(41, (ROWS, 10), generator=generator)
    given = Source(source[rows], torch.arange(10).div(4).long().expand(ROWS, -1)[rows] if documents else None)
    return Batch(
        ids[rows, :-1], labels[rows], documents=ends[rows] if documents else None, source=given if encoder else None
    )


def few_steps(rank: int, world: int, spec: ModelSpec, layouts: list[dict[str, Any]], documents: bool) -> list[Result]:
    """Train on each of the layouts, one after another."""
    return [_few_steps(world, spec, ParallelSettings(**layout), documents) for layout in layouts]


def made(world: int, spec: ModelSpec, settings: ParallelSettings) -> tuple[Any, Any]:
    """A model with its first weights, laid out over a mesh."""
    device = torch.device("cpu")
    mesh = build_mesh(axis_sizes(settings, world, spec), device)
    with torch.device("meta"):
        whole = make_model(spec).double()
    model = parallelize(
        whole,
        mesh,
        settings,
        compute=torch.float64,
        reduce=torch.float64,
        activation_checkpointing=ActivationCheckpointingSettings(),
        compile=False,
    )
    model.to_empty(device=device)
    sharing_of(model).initialise(model, spec, 3)
    if isinstance(model, Pipeline):
        model.refresh_copies()
    return model, mesh


def _few_steps(world: int, spec: ModelSpec, settings: ParallelSettings, documents: bool) -> Result:
    model, mesh = made(world, spec, settings)
    optimizer = build_optimizer(AdamWSettings(lr=1e-2), model)
    source: Any = type(
        "Source", (), {"batch": staticmethod(lambda *where: batch_of(*where, documents, bool(spec.encoder_layers)))}
    )
    task = Pretraining(source, None, spec, mesh, RunConfig())
    micro_size = max(1, ROWS // data_ranks(mesh) // 2)
    settings_of_batch = BatchSettings(sequence_length=TOKENS, global_size=ROWS, micro_size=micro_size)
    plan = plan_batch(settings_of_batch, data_ranks(mesh))
    result = Result()
    for step in range(STEPS):
        found = train_step(model, optimizer, task, plan, step=step, zero=settings.zero, clip_norm=1.0)
        result.losses.append(torch.stack([found.loss, *found.others.values()]))
        result.norms.append(float(found.grad_norm))
    for name, parameter in model.named_parameters():
        tensor = sharing_of(model).logical(name, parameter)
        held = slice_of(tensor)
        result.weights[name] = (held.shape, held.offset, tensor.to_local().clone())
    return result


def put_together(results: list[Result]) -> dict[str, Tensor]:
    """Whole weights from the parts of all ranks; ranks that hold the same must agree to the last bit."""
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


def check(ranks: Any, spec: ModelSpec, world: int, layouts: list[dict[str, Any]], documents: bool = False) -> None:
    """All of the layouts against one process."""
    [one] = ranks.run(few_steps, 1, spec, [{}], documents)[0]
    expected = put_together([one])
    by_rank = ranks.run(few_steps, world, spec, layouts, documents)
    for number, layout in enumerate(layouts):
        results = [found[number] for found in by_rank]
        same = partial(torch.testing.assert_close, rtol=1e-9)
        for result in results:
            assert result.norms == pytest.approx(one.norms, rel=1e-9), layout
            same(result.losses, one.losses, atol=0, msg=partial("{}: {}".format, layout))
        weights = put_together(results)
        assert weights.keys() == expected.keys()
        for name, tensor in weights.items():
            same(tensor, expected[name], atol=1e-10, msg=partial("{} {}: {}".format, layout, name))


EXPERTS = {"number": 6, "active": 2, "capacity": 1.25, "balance": 0.02, "z": 0.01}
MODELS = {
    "gpt2": tiny("gpt2"),
    "llama": tiny("llama", kv_heads=2),
    "llama-one-kv-head": tiny("llama", kv_heads=1, tied_embeddings=True),
    "qwen3": tiny("qwen3", kv_heads=2),
    "baichuan2": tiny("baichuan2"),
    "chatglm3": tiny("chatglm3", kv_heads=2),
    "bloom": tiny("bloom"),
    "t5": tiny("t5", encoder_layers=2),
    "mixtral": tiny("mixtral", kv_heads=2, feed_forward=EXPERTS),
    "mixtral-shared": tiny(
        "mixtral", kv_heads=2, feed_forward={**EXPERTS, "shared": 10, "shared_gated": True, "balance_over": "model"}
    ),
    "mixtral-balanced": tiny("mixtral", feed_forward={**EXPERTS, "active": 1, "router": Balanced()}),
}


def models(*quick: str) -> Any:
    """All models, those that are not quick for the long set."""
    marks = {name: [] if name in quick else [pytest.mark.slow] for name in MODELS}
    return pytest.mark.parametrize("model", [pytest.param(name, marks=marks[name]) for name in MODELS])


@models("gpt2", "llama", "t5")
def test_tensor(model, ranks):
    check(ranks, MODELS[model], 4, [{"tensor": 4}, {"tensor": 2, "zero": 3}])


@models("bloom", "mixtral-shared")
def test_context(model, ranks):
    layouts = [{"context": 4}, {"context": 2, "tensor": 2}, {"context": 2, "zero": 0}]
    check(ranks, MODELS[model], 4, layouts, documents=True)


@models("llama", "t5")
def test_context_in_a_ring(model, ranks):
    """More ranks of `context` than heads: in a ring without documents, by gathered keys with them."""
    spec = replaced(MODELS[model], attention=MODELS[model].attention.model_copy(update={"heads": 2, "kv_heads": 1}))
    layouts = [{"context": 4}, {"context": 2, "tensor": 2, "zero": 3}, {"context": 2, "pipeline": 2, "zero": 2}]
    layouts = [{**layout, "context_by": "ring"} for layout in layouts]
    check(ranks, spec, 4, layouts)
    check(ranks, spec, 4, layouts[:2], documents=True)


@models("llama")
def test_pipeline_of_divided_stages(model, ranks):
    layouts = [{"pipeline": 2, "tensor": 2}, {"pipeline": 2, "context": 2, "zero": 2}]
    check(ranks, MODELS[model], 4, layouts, documents=True)


MIXTURES = [name for name in MODELS if name.startswith("mixtral")]


@pytest.mark.parametrize("model", [MIXTURES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in MIXTURES[1:])])
def test_experts(model, ranks):
    """6 experts on 2 ranks: of rows, of tokens, beside tensor parallelism, and with what ZeRO shards besides."""
    layouts = [{"expert": 2}, {"expert": 2, "zero": 3}, {"expert": 2, "tensor": 2}, {"expert": 2, "context": 4}]
    check(ranks, MODELS[model], 4, [*layouts, {"expert": 2, "replicate": 2}])


def passed_on(rank: int, world: int, spec: ModelSpec, layout: dict[str, Any], source: Path | None, to: Path) -> None:
    """Save a model in one layout: first weights, or those of a checkpoint of another one."""
    settings = ParallelSettings(**layout)
    model, _ = made(world, spec, settings)
    tensors = {name: sharing_of(model).logical(name, p) for name, p in model.named_parameters()}
    if source is not None:
        for tensor in tensors.values():
            tensor.to_local().zero_()
        store.load(source, tensors, agree=all_agree)
    store.save(to, tensors, {}, rank=rank, ranks=world, agree=all_agree)


def test_what_one_layout_saves_another_loads_to_the_last_bit(tmp_path, ranks):
    spec = MODELS["mixtral-shared"]
    layouts = [{}, {"tensor": 4}, {"expert": 2, "tensor": 2}, {"expert": 2, "context": 2, "zero": 3}, {"tensor": 2}]
    before = None
    for number, layout in enumerate(layouts):
        folder = tmp_path / str(number)
        ranks.run(passed_on, 4 if layout else 1, spec, layout, before, folder)
        before = folder
    first, last = tmp_path / "0", tmp_path / str(len(layouts) - 1)
    shapes = parameter_shapes(spec)
    assert sorted(names(last)) == sorted(shapes)
    for name, shape in shapes.items():
        found = store.Reader(last).read(name)
        assert torch.equal(found, store.Reader(first).read(name)) and found.shape == shape
        assert torch.equal(found, initial_values(name, shape, spec, 3).double())


EIGHT: list[tuple[str, list[dict[str, Any]]]] = [
    ("llama", [{"pipeline": 2, "tensor": 2, "shard": 2}, {"replicate": 2, "shard": 2, "tensor": 2, "zero": 3}]),
    ("gpt2", [{"tensor": 2, "context": 2, "zero": 2}, {"pipeline": 2, "context": 2, "tensor": 2, "zero": 3}]),
    ("bloom", [{"tensor": 4, "zero": 0}, {"context": 4, "replicate": 2}]),
    ("t5", [{"tensor": 2, "context": 2, "zero": 3}, {"tensor": 4}]),
    (
        "mixtral-shared",
        [{"expert": 2, "tensor": 2, "context": 2}, {"expert": 2, "pipeline": 2, "tensor": 2, "zero": 2}],
    ),
]


@pytest.mark.parametrize(
    ("model", "layouts"), [EIGHT[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in EIGHT[1:])]
)
def test_eight_ranks(model, layouts, ranks):
    check(ranks, MODELS[model], 8, layouts, documents=model != "t5")
