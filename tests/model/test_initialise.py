"""First weights: by name and seed, whatever the precision, the order or the layout."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from jingu.config.sections.model import ModelSettings
from jingu.config.sections.parallel import ParallelSettings
from jingu.model.decoder import Decoder
from jingu.model.resolve import spec_from_settings
from jingu.model.spec import ModelSpec
from jingu.model.weight_init import init_weights
from jingu.parallel.layout import Layout, Precision
from jingu.parallel.materialize import materialize
from jingu.parallel.mesh import build_mesh, resolve_axis_sizes


def tiny(family: str = "llama", width: int = 30) -> ModelSpec:
    return spec_from_settings(ModelSettings(family=family, hidden_size=width, num_heads=3, num_layers=2), 101, 16)


def made(spec: ModelSpec, seed: int = 7, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Decoder(spec).to(dtype)
    init_weights(model, spec, seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_every_precision_starts_from_the_same_numbers() -> None:
    base = made(tiny())
    for dtype in (torch.float64, torch.bfloat16):
        other = made(tiny(), dtype=dtype)
        assert all(torch.equal(other[name], value.to(dtype)) for name, value in base.items())


def test_values_depend_on_name_and_seed_only() -> None:
    spec = tiny("gpt2")
    base = made(spec)
    model = Decoder(spec)  # in memory already, holding anything
    backwards = nn.Module()
    for name, child in reversed(list(model.named_children())):
        backwards.add_module(name, child)
    torch.manual_seed(99)
    init_weights(backwards, spec, 7)
    assert all(torch.equal(p, base[name]) for name, p in backwards.named_parameters())
    other = made(spec, seed=8)
    assert not torch.equal(other["embedding.weight"], base["embedding.weight"])
    assert not torch.equal(base["blocks.0.attention.q.weight"], base["blocks.0.attention.k.weight"])


def test_kinds_of_parameters() -> None:
    spec = tiny("gpt2", width=192)
    for name, value in made(spec).items():
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" in name:
            assert bool((value == 1).all()), name
        else:
            residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
            std = spec.initializer_range / math.sqrt(2 * spec.num_layers) if residual else spec.initializer_range
            # Five standard errors of the sample's standard deviation and mean.
            assert abs(float(value.std()) / std - 1) < 5 / math.sqrt(2 * value.numel()), name
            assert abs(float(value.mean())) < 5 * std / math.sqrt(value.numel()), name


def test_shards_hold_their_piece_of_the_whole() -> None:
    """The last of seven ranks, in a group without peers: filling needs no communication."""
    rank, world = 6, 7
    spec = tiny()  # 101 rows leave it a shorter piece, and width 30 none at all
    whole, settings = made(spec), ParallelSettings(zero_stage=3)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        mesh = build_mesh(resolve_axis_sizes(settings, world, spec), torch.device("cpu"))
        model = materialize(spec, mesh, Layout(settings), Precision.uniform(torch.float32), 7)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            pieces = whole[name].chunk(world)
            expected = pieces[rank] if rank < len(pieces) else whole[name][:0]
            assert torch.equal(parameter.to_local(), expected), name
        assert model.stages[0].norm.weight.to_local().numel() == 0
    finally:
        dist.destroy_process_group()
