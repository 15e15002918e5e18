"""Which shard of each parameter a rank holds, in every layout.

Parameters are divided twice. First, `tensor` parallelism divides them along the dims that the sharding tables name, and
`expert` parallelism divides experts. Then ZeRO divides the rest along the first dim, or along the rows of experts'
matrices. FSDP knows only the second division. Checkpoints, initial weights and gradient norms need positions in the
whole tensor, so this module combines both. Checkpoints write and fill a `TensorBlock`, whatever the layout.
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
from jingu.model.layers import Vector
from jingu.model.parts import kv_heads
from jingu.model.sharding_table import ShardedDim, sharded_dims
from jingu.model.spec import ModelSpec
from jingu.model.weight_init import initial_tensor
from jingu.parallel.mesh import fsdp_mesh, split_expert_mesh

Extent = tuple[int, ...]


@dataclass(frozen=True)
class TensorBlock:
    """One rank's block of a whole tensor, and which ranks hold equal copies of it.

    Attributes:
        local: this rank's values; empty if the rank holds none.
        shape: shape of the whole tensor.
        offset: first index of the block in each dim.
        replica: index of this copy among the equal copies of the block.
        replicas: number of equal copies.
        group: a key that is equal for blocks with copies on the same ranks in the same order.
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
    """Return the block of a plain tensor that is equal on all ranks. Raises TypeError for a DTensor."""
    if is_dtensor(tensor):
        raise TypeError("a DTensor has no block here: ask the ShardingPlan of its model for it")
    return TensorBlock(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim(), rank, ranks, "plain")


def subblock(tensor: Tensor, begin: Extent, offset: Extent, size: Extent) -> Tensor:
    """Return a view of part of a block. All indices are those of the whole tensor.

    Args:
        tensor: the block.
        begin: offset of the block.
        offset, size: the part.
    """
    for dim, (first, start, extent) in enumerate(zip(begin, offset, size, strict=True)):
        tensor = tensor.narrow(dim, start - first, extent)
    return tensor


@dataclass(frozen=True)
class ParameterSharding:
    """How one parameter is divided.

    Attributes:
        shape: shape of the whole parameter.
        mesh: a mesh of `replicate`, ZeRO's axis, and the axes that divide the dims of the sharding table, in order.
        dims: for each axis of the mesh, the dim that it divides; None if the ranks of the axis hold copies.
        zero_axis: index of ZeRO's axis in the mesh.
    """

    shape: torch.Size
    mesh: DeviceMesh
    dims: tuple[int | None, ...]
    zero_axis: int = 1

    @classmethod
    def on_one_rank(cls, shape: torch.Size) -> ParameterSharding:
        """Return the sharding of a parameter that one rank holds whole. It has no mesh."""
        return cls(shape, cast(DeviceMesh, None), ())

    @property
    def order(self) -> list[int]:
        """Indices of the mesh axes that divide the parameter, in the order of division: ZeRO's axis comes last."""
        axes = [axis for axis, dim in enumerate(self.dims) if dim is not None]
        return sorted(axes, key=lambda axis: axis == self.zero_axis)

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same shard."""
        return prod(self.mesh.size(axis) for axis, dim in enumerate(self.dims) if dim is None)

    def has_turn(self, number: int) -> bool:
        """Return whether item `number` falls to this rank, if the ranks that share the parameter take turns."""
        ranks, place = 1, 0
        for axis in self.order:
            size = self.mesh.size(axis)
            ranks, place = ranks * size, place * size + self.mesh.get_local_rank(axis)
        return number % ranks == place

    def whole(self, shard: Tensor) -> Tensor:
        """Return the whole tensor on every rank, given each rank's shard. Every rank must call this."""
        full = shard.new_zeros(self.shape)
        self.cut(full).copy_(shard)
        all_reduce_shards([(self, full)])
        return full

    def cut(self, full: Tensor, *, zero: bool = True) -> Tensor:
        """Return a view of this rank's shard of a whole tensor.

        Args:
            zero: False returns the larger part that ZeRO divides further.
        """
        offset, size = block_region(full.shape, self._splits(self.order if zero else self.order[:-1]))
        return subblock(full, (0,) * full.dim(), offset, size)

    def block(self, tensor: Tensor, group_size: int = 1) -> TensorBlock:
        """Return this rank's block of the parameter, or of a tensor that is divided in the same way.

        Args:
            tensor: a DTensor, or this rank's part.
            group_size: elements of a row that share one value of the tensor, such as a quantization scale.

        Raises:
            ValueError: the tensor does not have the size of this rank's block.
        """
        shape = list(self.shape)
        if group_size > 1:
            shape[-1] //= group_size
        offset, size = block_region(shape, self._splits(self.order))
        block = self._block_with_copies(
            tensor, shape, offset, [axis for axis, dim in enumerate(self.dims) if dim is None]
        )
        if block.size != size:
            raise ValueError(f"a rank should hold {list(size)} of a tensor {list(shape)}, and holds {list(block.size)}")
        return block

    def replicated_block(self, tensor: Tensor) -> TensorBlock:
        """Return the block of a tensor of which every rank of the mesh holds a whole copy."""
        return self._block_with_copies(tensor, tensor.shape, (0,) * tensor.dim(), range(self.mesh.ndim))

    def _block_with_copies(
        self, tensor: Tensor, shape: Sequence[int], offset: Extent, axes: Sequence[int]
    ) -> TensorBlock:
        """Return the block of a tensor of which the ranks along `axes` hold equal copies."""
        replica = 0
        for axis in axes:
            replica = replica * self.mesh.size(axis) + self.mesh.get_local_rank(axis)
        replicas = prod(self.mesh.size(axis) for axis in axes)
        return TensorBlock(
            local_tensor(tensor.detach()), tuple(shape), offset, replica, replicas, (self.mesh, tuple(axes))
        )

    def _splits(self, axes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield (dim, number of ranks, this rank) for axes that divide the parameter."""
        for axis in axes:
            dim = self.dims[axis]
            assert dim is not None
            yield dim, self.mesh.size(axis), self.mesh.get_local_rank(axis)


@dataclass(frozen=True)
class ShardingPlan:
    """How all parameters of a model are divided over the mesh.

    Attributes:
        mesh: the whole device mesh.
        parts: the sharding of each parameter, by its name.
        experts: a mesh of the axes `expert_fsdp` and `expert`; None without expert parallelism.
    """

    mesh: DeviceMesh
    parts: Mapping[str, ParameterSharding]
    experts: DeviceMesh | None = None

    def block(self, name: str, tensor: Tensor, *, is_replicated: bool = False, group_size: int = 1) -> TensorBlock:
        """Return this rank's block of parameter `name`, or of optimizer state that belongs to it.

        Args:
            tensor: a DTensor, or this rank's part.
            is_replicated: every rank holds the whole tensor. Scalars are always replicated.
            group_size: elements of a row that share one value of the tensor.
        """
        sharding = self.parts[name]
        if is_replicated or not tensor.dim():
            return sharding.replicated_block(tensor)
        return sharding.block(tensor, group_size)

    @torch.no_grad()
    def fill(
        self, model: nn.Module, read: Callable[[str], Tensor], which: Callable[[str], bool] = lambda name: True
    ) -> None:
        """Fill this rank's shards from whole tensors, one after another.

        Args:
            read: returns a whole tensor by the name of its parameter.
            which: returns whether to fill a parameter, by its name.
        """
        for name, parameter in model.named_parameters():
            if not which(name):
                continue
            local_tensor(parameter).copy_(self.parts[name].cut(read(name)))

    def init_weights(self, model: nn.Module, spec: ModelSpec, seed: int) -> None:
        """Fill this rank's shards with initial weights that depend only on names and seed, not on the layout."""
        self.fill(model, lambda name: initial_tensor(name, self.parts[name].shape, spec, seed))

    def sum_replicated_gradients(self, model: nn.Module) -> None:
        """Sum the gradients of parameters that ranks of `tensor` replicate, over these ranks.

        Each of these ranks has computed the gradient for other tokens or heads. Call this once per step, after ZeRO has
        reduced the gradients over its axis.
        """
        gradients: list[tuple[ParameterSharding, list[int], Tensor]] = []
        for name, parameter in model.named_parameters():
            part = self.parts[name]
            # ZeRO has reduced over its axis and the axes before it; the axes after it remain.
            axes = [axis for axis in range(part.zero_axis + 1, part.mesh.ndim) if part.dims[axis] is None]
            if parameter.grad is not None:
                gradients.append((part, axes, local_tensor(parameter.grad)))
        _all_reduce(gradients)


def block_region(shape: Sequence[int], splits: Iterable[tuple[int, int, int]]) -> tuple[Extent, Extent]:
    """Return offset and size of the block that is left after several splits, each of the part that the last one left.

    Args:
        shape: shape of the whole tensor.
        splits: for each split, the dim, the number of ranks that share it, and the rank whose part is kept.
    """
    offset = [0] * len(shape)
    size = list(shape)
    for dim, ranks, rank in splits:
        start, size[dim] = shard_range(size[dim], ranks, rank)
        offset[dim] += start
    return tuple(offset), tuple(size)


def shard_range(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return start and length of a rank's part: blocks of equal size, rounded up, as in `torch.chunk`.

    The last parts may be shorter, or empty.
    """
    block = -(-size // ranks)
    start = min(size, block * rank)
    return start, min(block, size - start)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; a plain tensor is returned as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def all_reduce_shards(tensors: Sequence[tuple[ParameterSharding, Tensor]]) -> None:
    """Sum each tensor, in place, over the ranks that together hold its parameter.

    Tensors that are summed over the same ranks share one collective.
    """
    _all_reduce([(part, part.order, tensor) for part, tensor in tensors])


def _all_reduce(tensors: Sequence[tuple[ParameterSharding, Sequence[int], Tensor]]) -> None:
    """Sum each tensor over the given axes of its mesh, in place."""
    buckets: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for part, axes, tensor in tensors:
        groups = tuple(part.mesh.get_group(axis) for axis in axes if part.mesh.size(axis) > 1)
        if groups:
            device = part.mesh.device_type
            buckets.setdefault(groups, []).append(tensor)
    # One collective per list of process groups.
    for groups, bucket in buckets.items():
        # Offloaded tensors are moved to the device of the mesh, whose backend communicates.
        flat = torch.cat([tensor.flatten() for tensor in bucket]).to(device)
        for group in groups:
            dist.all_reduce(flat, group=group)
        for tensor, total in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(total.view_as(tensor))


def plan_sharding(stages: Sequence[nn.Module], mesh: DeviceMesh, spec: ModelSpec, expert_ranks: int) -> ShardingPlan:
    """Plan the division of a model's parameters over a mesh.

    Args:
        stages: all stages of the model, not yet sharded.
        spec: the model. If `tensor` has more ranks than a layer has key-value heads, neighbors hold the same head.
        expert_ranks: number of ranks of shard × context that share the experts (expert parallelism).
    """
    # Each kind of parameter has a mesh of its own: replicate × ZeRO × the axes that divide it before ZeRO.
    replicate, fsdp, tensor = mesh["replicate"], fsdp_mesh(mesh), mesh["tensor"]
    plain_mesh = join_meshes([replicate, fsdp, tensor])
    kv_head_meshes = {}
    numbers = {layer.attention.num_kv_heads for layer in spec.kinds}
    numbers |= {layer.state_mixer.heads[1] for layer in spec.kinds if layer.state_mixer is not None}
    for number in sorted(numbers):
        if 0 < number < tensor.size():
            # Split the axis `tensor` in two: the first divides the key-value heads, the second has copies of them.
            axes = split_axis(tensor, 0, (number, tensor.size() // number), ("kv_heads", "kv_copies"))
            kv_head_meshes[number] = join_meshes([replicate, fsdp, axes])
    experts = split_expert_mesh(fsdp, expert_ranks) if expert_ranks > 1 else None
    expert_mesh = None if experts is None else join_meshes([replicate, experts, tensor])

    unsharded = {
        f"{name}.weight"
        for stage in stages
        for name, module in stage.named_modules()
        if isinstance(module, Vector) and not module.is_trained
    }

    def plan(name: str, shape: torch.Size, sharded_dims: tuple[ShardedDim, ...]) -> ParameterSharding:
        """Return the sharding of one parameter, given the dims that its sharding table divides."""
        if name in unsharded:
            return ParameterSharding(shape, plain_mesh, (None, None, None))
        dims = {dim.kind: dim.dim for dim in sharded_dims}
        inner = dims.get("inner", dims.get("kv_heads"))
        # ZeRO shards along the first dim.
        zero = 0
        if "experts" in dims:
            # If ZeRO's ranks cannot divide the experts evenly (there may be more ranks than experts), ZeRO shards the
            # rows of their matrices, provided that these divide evenly.
            ranks = fsdp.size() // expert_ranks
            split = ranks * (tensor.size() if inner == 1 else 1)
            zero = int(bool(shape[0] // expert_ranks % ranks) and shape[1] % split == 0)
        if "experts" in dims and expert_mesh is not None:
            return ParameterSharding(shape, expert_mesh, (None, zero, 0, inner))
        kv_head_mesh = kv_head_meshes.get(kv_heads(spec.layer_of(name), name))
        if "kv_heads" in dims and kv_head_mesh is not None:
            return ParameterSharding(shape, kv_head_mesh, (None, 0, inner, None))
        return ParameterSharding(shape, plain_mesh, (None, zero, inner))

    parts = {}
    for stage in stages:
        table = sharded_dims(stage)
        for name, parameter in stage.named_parameters():
            parts[name] = plan(name, parameter.shape, table[name])
    return ShardingPlan(mesh, parts, experts)


def shard_parameters(model: nn.Module, plan: ShardingPlan) -> None:
    """Replace each parameter by this rank's part before ZeRO, in place. The model is on the meta device."""
    for prefix, module in model.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            piece = plan.parts[f"{prefix}.{leaf}" if prefix else leaf].cut(parameter, zero=False)
            if piece.shape != parameter.shape:
                shard = torch.empty_like(piece, memory_format=torch.contiguous_format)
                setattr(module, leaf, nn.Parameter(shard, requires_grad=parameter.requires_grad))
