"""Which part of a logical tensor a rank holds."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from jingu.parallel.sharing import share

Extent = tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """The block of a logical tensor that one rank holds, and who else holds the same block."""

    shape: Extent
    """Shape of the logical tensor."""
    offset: Extent
    """First index of the block in each dim."""
    size: Extent
    """Shape of the block; a 0 where the rank holds nothing."""
    replica: int = 0
    """Which of the equal copies of the block this is."""
    replicas: int = 1
    """Number of equal copies of the block."""
    group: Hashable = None
    """Tensors of equal group are copied among the same ranks in the same order."""


def slice_of(tensor: Tensor, rank: int = 0, ranks: int = 1) -> Slice | None:
    """What this rank holds of `tensor`; a plain tensor is held whole by every rank.

    Returns:
        None where the rank is outside the tensor's mesh.

    Raises:
        ValueError: a placement that names no block: partial sums, or strides that do not come from FSDP over
            tensor parallelism.
    """
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return Slice(shape, (0,) * len(shape), shape, rank, ranks, "plain")
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    found = local_slice(
        tuple(tensor.shape), tensor.device_mesh.shape, coordinate, tensor.placements, tensor.device_mesh
    )
    if found.size != tuple(tensor.to_local().shape):
        raise ValueError(
            f"a tensor of shape {list(tensor.shape)} in layout {tensor.placements} should leave {list(found.size)} "
            f"on this rank, which holds {list(tensor.to_local().shape)}"
        )
    return found


def local_slice(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    group: Hashable = None,
) -> Slice:
    """What the rank at `coordinate` of a mesh holds of a tensor with these placements, one for each mesh axis.

    The axes split the tensor from left to right, except for FSDP over tensor parallelism on the same dim: there FSDP's
    axis stands to the left but splits what tensor parallelism left over, which PyTorch writes as a `_StridedShard`
    whose split factor is the number of parts that the axes to its right have already made.
    """
    offset, size = [0] * len(shape), list(shape)
    replica, replicas, copied = 0, 1, []
    for axis in sorted(range(len(placements)), key=lambda axis: isinstance(placements[axis], _StridedShard)):
        placement, ranks, rank = placements[axis], mesh_shape[axis], coordinate[axis]
        if isinstance(placement, Replicate):
            replica, replicas = replica * ranks + rank, replicas * ranks
            copied.append(axis)
        elif isinstance(placement, Shard | _StridedShard):
            dim = placement.dim
            if isinstance(placement, _StridedShard):
                right = range(axis + 1, len(placements))
                made = prod(mesh_shape[other] for other in right if placements[other] == Shard(dim))
                if placement.split_factor != made:
                    raise ValueError(f"the layout {tuple(placements)} leaves no single block on a rank")
            begin, size[dim] = share(size[dim], ranks, rank)
            offset[dim] += begin
        else:
            raise ValueError(f"the layout {tuple(placements)} holds partial sums, not values")
    return Slice(tuple(shape), tuple(offset), tuple(size), replica, replicas, (group, tuple(copied)))


def overlap(offset_a: Extent, size_a: Extent, offset_b: Extent, size_b: Extent) -> tuple[Extent, Extent] | None:
    """Offset and size of what two blocks share; None where that is empty."""
    begins = tuple(max(a, b) for a, b in zip(offset_a, offset_b, strict=True))
    ends = (min(a + n, b + m) for a, n, b, m in zip(offset_a, size_a, offset_b, size_b, strict=True))
    size = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return (begins, size) if all(extent > 0 for extent in size) else None


def cut(tensor: Tensor, begin: Extent, offset: Extent, size: Extent) -> Tensor:
    """The block of `size` at `offset`, as a view of a block that begins at `begin`."""
    for dim, (first, start, extent) in enumerate(zip(begin, offset, size, strict=True)):
        tensor = tensor.narrow(dim, start - first, extent)
    return tensor


def boxes(offset: Extent, size: Extent, most: int) -> Iterator[tuple[Extent, Extent]]:
    """Offsets and sizes of a block's parts of at most so many elements that lie one after another in memory."""
    if not size or prod(size) <= most:
        yield offset, size
        return
    rows = max(1, most // prod(size[1:]))
    for first in range(0, size[0], rows):
        for inner_offset, inner_size in boxes(offset[1:], size[1:], most):
            yield (offset[0] + first, *inner_offset), (min(rows, size[0] - first), *inner_size)
