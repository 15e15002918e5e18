"""Layouts of parameters without ranks: a mesh that only knows its shape and a coordinate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jingu.parallel.sharding import ParameterSharding, TensorBlock


@dataclass(frozen=True)
class StubMesh:
    """What `ParameterSharding` asks a DeviceMesh for."""

    shape: tuple[int, ...]
    coordinate: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def get_local_rank(self, axis: int) -> int:
        return self.coordinate[axis]

    # The mesh is the same one on all its ranks.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, StubMesh) and self.shape == other.shape

    def __hash__(self) -> int:
        return hash(self.shape)


def sharding_at(
    shape: Sequence[int],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    dims: Sequence[int | None],
    last_axis: int = -1,
) -> ParameterSharding:
    """Return the layout that divides dim `dims[i]` along axis i of a mesh; `last_axis` divides what the others left."""
    stub: Any = StubMesh(tuple(mesh), tuple(coordinate))
    return ParameterSharding(torch.Size(shape), stub, tuple(dims), last_axis)


def block_at(
    whole: Tensor, mesh: Sequence[int], coordinate: Sequence[int], dims: Sequence[int | None], last_axis: int = -1
) -> TensorBlock:
    """Return the block of a tensor that the rank at a coordinate has; a view."""
    sharding = sharding_at(whole.shape, mesh, coordinate, dims, last_axis)
    return sharding.block(sharding.cut(whole))
