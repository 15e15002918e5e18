"""Experts that are fewer than the ranks: each rank holds its share of every matrix."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from jingu.compat.torch_distributed import pretend_ranks
from jingu.config.sections.model import ModelSettings
from jingu.config.sections.parallel import ParallelSettings
from jingu.model.resolve import spec_from_settings
from jingu.parallel.layout import Layout, Precision
from jingu.parallel.materialize import materialize
from jingu.parallel.mesh import build_mesh, resolve_axis_sizes
from jingu.parallel.sharding import local_tensor
from jingu.runtime.ranks import clear_mesh_caches


@pytest.mark.parametrize("layout", [{"expert": 1}, {"expert": 8}, {"expert": 8, "tensor": 2}, {"expert": 4}])
@pytest.mark.parametrize("rank", [0, 17, 63])
def test_8_experts_on_64_ranks(layout, rank):
    """With shards along the experts alone, eight ranks held one whole expert each, and others none."""
    settings = ParallelSettings(**layout, zero_stage=3)
    experts = {"num_experts": 8, "num_experts_per_token": 2}
    model_settings = ModelSettings(
        family="mixtral", hidden_size=128, intermediate_size=192, num_layers=2, num_heads=4, experts=experts
    )
    spec = spec_from_settings(model_settings, 197, 32)
    pretend_ranks(rank, 64)
    try:
        mesh = build_mesh(resolve_axis_sizes(settings, 64, spec), torch.device("cpu"))
        precision = Precision.uniform(torch.float32)
        model = materialize(spec, mesh, Layout(parallel=settings), precision, None)
        local = {name: local_tensor(parameter) for name, parameter in model.named_parameters()}
        parts = model.sharding.parts
        names = [name for name, part in parts.items() if len(part.shape) == 3]
        assert names
        for name in names:
            assert local[name].numel() * 64 == parts[name].shape.numel(), name
            assert model.sharding.block(name, local[name]).size == local[name].shape
    finally:
        dist.destroy_process_group()
        clear_mesh_caches()
