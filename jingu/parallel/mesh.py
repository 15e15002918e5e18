"""The mesh: the grid of ranks, built once and passed as an argument."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from jingu.config.schema import ParallelSettings
from jingu.runtime.ranks import Ranks


def build_mesh(settings: ParallelSettings, ranks: Ranks) -> DeviceMesh:
    """The mesh with the axes `replicate` and `shard`; ZeRO 0 replicates over all ranks, 1 to 3 shard over them."""
    shape = (ranks.world, 1) if settings.zero == 0 else (1, ranks.world)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicate", "shard"))


def data_ranks(mesh: DeviceMesh) -> int:
    """Number of ranks that see different rows of the batch."""
    return mesh.size()


def data_rank(mesh: DeviceMesh) -> int:
    """Which share of the rows this rank sees, counted from 0."""
    return dist.get_rank()
