"""A rank's block of a whole tensor: what checkpoints write and fill, whatever layout a model has."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

Extent = tuple[int, ...]


@dataclass(frozen=True)
class TensorBlock:
    """One rank's block of a whole tensor, and which ranks hold equal copies of it.

    Attributes:
        local: this rank's values; empty where the rank holds nothing.
        shape: shape of the whole tensor.
        offset: first index of the block in each dim.
        replica: which of the equal copies of the block this one is.
        replicas: number of equal copies.
        group: equal for blocks that are copied among the same ranks in the same order.
    """

    local: Tensor
    shape: Extent
    offset: Extent
    replica: int = 0
    replicas: int = 1
    group: Hashable = None

    @property
    def size(self) -> Extent:
        """Shape of the block."""
        return tuple(self.local.shape)


def whole_block(tensor: Tensor, rank: int = 0, ranks: int = 1) -> TensorBlock:
    """Return the block of a plain tensor that is equal on all ranks."""
    if isinstance(tensor, DTensor):
        raise TypeError("a DTensor has no block here: ask the ShardingPlan of its model for it")
    return TensorBlock(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim(), rank, ranks, "plain")


def subblock(tensor: Tensor, begin: Extent, offset: Extent, size: Extent) -> Tensor:
    """Return a view of `size` at `offset` of the whole tensor, given a block of it that begins at `begin`."""
    for dim, (first, start, extent) in enumerate(zip(begin, offset, size, strict=True)):
        tensor = tensor.narrow(dim, start - first, extent)
    return tensor
