"""Which shard of each parameter a rank holds, in every layout.

Parameters are divided twice: first along the dims that the sharding tables name, over the ranks of `tensor` (and
experts over those of `expert`); then what is left along the first dim, or along the rows of experts' matrices, by
ZeRO. FSDP knows only the second division. Checkpoints, initial weights and gradient norms need whole tensors: here the
two divisions are combined. A `TensorBlock` is what checkpoints write and fill, whatever layout a model has.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jingu.compat.torch_distributed import is_dtensor, join_meshes, split_axis
from jingu.model.sharding_table import ShardedDim, sharded_dims
from jingu.model.spec import ModelSpec
from jingu.model.weight_init import initial_tensor
from jingu.parallel.mesh import fsdp_mesh, split_expert_mesh

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
    if is_dtensor(tensor):
        raise TypeError("a DTensor has no block here: ask the ShardingPlan of its model for it")
    return TensorBlock(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim(), rank, ranks, "plain")


def subblock(tensor: Tensor, begin: Extent, offset: Extent, size: Extent) -> Tensor:
    """Return a view of `size` at `offset` of the whole tensor, given a block of it that begins at `begin`."""
    for dim, (first, start, extent) in enumerate(zip(begin, offset, size, strict=True)):
        tensor = tensor.narrow(dim, start - first, extent)
    return tensor


@dataclass(frozen=True)
class ParameterSharding:
    """How one parameter is divided.

    Attributes:
        shape: of the whole.
        mesh: `replicate`, ZeRO's axis, and the axes that divide what the table names.
        dims: the dim that each axis of the mesh divides; None where its ranks hold copies.
    """

    shape: torch.Size
    mesh: DeviceMesh
    dims: tuple[int | None, ...]
    zero_axis: int = 1

    @classmethod
    def undivided(cls, shape: torch.Size) -> ParameterSharding:
        """Return the sharding of a parameter that one rank holds whole, without a mesh."""
        return cls(shape, cast(DeviceMesh, None), ())

    @property
    def order(self) -> list[int]:
        """The axes that divide the parameter, in the order of division: ZeRO's comes last."""
        axes = [axis for axis, dim in enumerate(self.dims) if dim is not None]
        return sorted(axes, key=lambda axis: axis == self.zero_axis)

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same shard."""
        return prod(self.mesh.size(axis) for axis, dim in enumerate(self.dims) if dim is None)

    def has_turn(self, number: int) -> bool:
        """Return whether `number` is this rank's turn, among the ranks that together hold the parameter."""
        ranks, place = 1, 0
        for axis in self.order:
            size = self.mesh.size(axis)
            ranks, place = ranks * size, place * size + self.mesh.get_local_rank(axis)
        return number % ranks == place

    def whole(self, shard: Tensor) -> Tensor:
        """Gather the whole tensor on every rank, from the shards of all."""
        whole = shard.new_zeros(self.shape)
        self.cut(whole).copy_(shard)
        all_reduce_shards([(self, whole)])
        return whole

    def cut(self, whole: Tensor, *, zero: bool = True) -> Tensor:
        """Return this rank's shard of a whole tensor, or what ZeRO will divide further."""
        offset, size = block_region(whole.shape, self._splits(self.order if zero else self.order[:-1]))
        return subblock(whole, (0,) * whole.dim(), offset, size)

    def block(self, tensor: Tensor, group_size: int = 1) -> TensorBlock:
        """Return this rank's block of the parameter, or of what has a value for each `group_size` elements of a row.

        Args:
            tensor: the parameter or a tensor of its layout; a DTensor, or this rank's part of it.
        """
        shape = list(self.shape)
        if group_size > 1:
            shape[-1] //= group_size
        offset, size = block_region(shape, self._splits(self.order))
        block = self._copied(tensor, shape, offset, [axis for axis, dim in enumerate(self.dims) if dim is None])
        if block.size != size:
            raise ValueError(f"a rank should hold {list(size)} of a tensor {list(shape)}, and holds {list(block.size)}")
        return block

    def replicated_block(self, tensor: Tensor) -> TensorBlock:
        """Return the block of a tensor that all ranks of the mesh hold whole."""
        return self._copied(tensor, tensor.shape, (0,) * tensor.dim(), range(self.mesh.ndim))

    def _copied(self, tensor: Tensor, shape: Sequence[int], offset: Extent, axes: Sequence[int]) -> TensorBlock:
        """Return a block of which the ranks along `axes` hold equal copies."""
        replica = 0
        for axis in axes:
            replica = replica * self.mesh.size(axis) + self.mesh.get_local_rank(axis)
        replicas = prod(self.mesh.size(axis) for axis in axes)
        return TensorBlock(
            local_tensor(tensor.detach()), tuple(shape), offset, replica, replicas, (self.mesh, tuple(axes))
        )

    def _splits(self, axes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield dim, number of ranks and rank for axes that divide the parameter."""
        for axis in axes:
            dim = self.dims[axis]
            assert dim is not None
            yield dim, self.mesh.size(axis), self.mesh.get_local_rank(axis)


@dataclass(frozen=True)
class ShardingPlan:
    """How all parameters of a model are divided over the mesh.

    Attributes:
        parts: by the name of the parameter.
        experts: the axes `expert_fsdp` and `expert`, where a mixture's experts are shared.
    """

    mesh: DeviceMesh
    parts: Mapping[str, ParameterSharding]
    experts: DeviceMesh | None = None

    def block(self, name: str, tensor: Tensor, *, replicated: bool = False, group_size: int = 1) -> TensorBlock:
        """Return this rank's block of parameter `name`, or of the optimizer state that belongs to it.

        Args:
            replicated: all ranks hold the whole of it, as they do of a scalar.
            group_size: elements of a row that share one value.
        """
        sharding = self.parts[name]
        if replicated or not tensor.dim():
            return sharding.replicated_block(tensor)
        return sharding.block(tensor, group_size)

    @torch.no_grad()
    def fill(
        self, model: nn.Module, whole: Callable[[str], Tensor], which: Callable[[str], bool] = lambda name: True
    ) -> None:
        """Fill this rank's shards from whole tensors by name, one after another."""
        for name, parameter in model.named_parameters():
            if not which(name):
                continue
            local_tensor(parameter).copy_(self.parts[name].cut(whole(name)))

    def init_weights(self, model: nn.Module, spec: ModelSpec, seed: int) -> None:
        """Fill this rank's shards with the initial weights, the same in every layout."""
        self.fill(model, lambda name: initial_tensor(name, self.parts[name].shape, spec, seed))

    def sum_replicated_gradients(self, model: nn.Module) -> None:
        """Sum the gradients of parameters that ranks of `tensor` replicate: each has seen other tokens or heads.

        Call it once a step, after ZeRO has reduced the gradients over its axis.
        """
        copied: list[tuple[ParameterSharding, list[int], Tensor]] = []
        for name, parameter in model.named_parameters():
            part = self.parts[name]
            # ZeRO reduces over its axis and those before it: the axes behind it remain.
            axes = [axis for axis in range(part.zero_axis + 1, part.mesh.ndim) if part.dims[axis] is None]
            if parameter.grad is not None:
                copied.append((part, axes, local_tensor(parameter.grad)))
        _all_reduce(copied)


def block_region(shape: Sequence[int], splits: Iterable[tuple[int, int, int]]) -> tuple[Extent, Extent]:
    """Return offset and size of the block that is left after several splits, each of what the one before has left.

    Args:
        splits: dim, number of ranks among which it is divided, and rank.
    """
    offset = [0] * len(shape)
    size = list(shape)
    for dim, ranks, rank in splits:
        start, size[dim] = shard_range(size[dim], ranks, rank)
        offset[dim] += start
    return tuple(offset), tuple(size)


def shard_range(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Start and length of a rank's part: equal blocks, rounded up, so that the last may be short (torch.chunk's)."""
    block = -(-size // ranks)
    start = min(size, block * rank)
    return start, min(block, size - start)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def all_reduce_shards(tensors: Sequence[tuple[ParameterSharding, Tensor]]) -> None:
    """Add up tensors over the ranks that hold the whole of a parameter between them, in place; all that go the same
    way at once."""
    _all_reduce([(part, part.order, tensor) for part, tensor in tensors])


def _all_reduce(tensors: Sequence[tuple[ParameterSharding, Sequence[int], Tensor]]) -> None:
    """Add up tensors over axes of their meshes, in place."""
    buckets: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for part, axes, tensor in tensors:
        groups = tuple(part.mesh.get_group(axis) for axis in axes if part.mesh.size(axis) > 1)
        if groups:
            device = part.mesh.device_type
            buckets.setdefault(groups, []).append(tensor)
    # One collective for all tensors that go the same way.
    for groups, bucket in buckets.items():
        # What is offloaded travels from where the ranks compute.
        flat = torch.cat([tensor.flatten() for tensor in bucket]).to(device)
        for group in groups:
            dist.all_reduce(flat, group=group)
        for tensor, total in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(total.view_as(tensor))


def plan_sharding(stages: Sequence[nn.Module], mesh: DeviceMesh, num_kv_heads: int, expert_ranks: int) -> ShardingPlan:
    """Plan the division of a model's parameters over a mesh.

    Args:
        stages: all stages of the model, not yet divided.
        num_kv_heads: of the model; if there are fewer than ranks of `tensor`, neighbours share one.
        expert_ranks: ranks, of those of shard × context, that share a mixture's experts.
    """
    replicate, fsdp, tensor = mesh["replicate"], fsdp_mesh(mesh), mesh["tensor"]
    plain_mesh = join_meshes([replicate, fsdp, tensor])
    kv_head_mesh = None
    if num_kv_heads < tensor.size():
        # The axis `tensor` in two: over the second one key-value heads are replicated.
        sizes = (num_kv_heads, tensor.size() // num_kv_heads)
        kv_head_mesh = join_meshes([replicate, fsdp, split_axis(tensor, 0, sizes, ("kv_heads", "kv_copies"))])
    experts = split_expert_mesh(fsdp, expert_ranks) if expert_ranks > 1 else None
    expert_mesh = None if experts is None else join_meshes([replicate, experts, tensor])

    def plan(shape: torch.Size, sharded: tuple[ShardedDim, ...]) -> ParameterSharding:
        dims = {dim.kind: dim.dim for dim in sharded}
        inner = dims.get("inner", dims.get("kv_heads"))
        zero = 0
        if "experts" in dims:
            # Experts that ZeRO's ranks cannot divide evenly (there may be more ranks than experts) are divided by rows.
            ranks = fsdp.size() // expert_ranks
            split = ranks * (tensor.size() if inner == 1 else 1)
            zero = int(bool(shape[0] // expert_ranks % ranks) and shape[1] % split == 0)
        if "experts" in dims and expert_mesh is not None:
            return ParameterSharding(shape, expert_mesh, (None, zero, 0, inner))
        if "kv_heads" in dims and kv_head_mesh is not None:
            return ParameterSharding(shape, kv_head_mesh, (None, 0, inner, None))
        return ParameterSharding(shape, plain_mesh, (None, zero, inner))

    parts = {}
    for stage in stages:
        table = sharded_dims(stage)
        for name, parameter in stage.named_parameters():
            parts[name] = plan(parameter.shape, table[name])
    return ShardingPlan(mesh, parts, experts)


def shard_parameters(model: nn.Module, plan: ShardingPlan) -> None:
    """Leave of each parameter what ZeRO will divide further, in place; the model is on the meta device."""
    for prefix, module in model.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            piece = plan.parts[f"{prefix}.{leaf}" if prefix else leaf].cut(parameter, zero=False)
            if piece.shape != parameter.shape:
                shard = torch.empty_like(piece, memory_format=torch.contiguous_format)
                setattr(module, leaf, nn.Parameter(shard, requires_grad=parameter.requires_grad))
