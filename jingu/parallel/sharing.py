"""Which part of each parameter a rank holds, in every layout.

A model's parameters are divided twice: first along the dims that its parts name (`model.sharding`), among the ranks of
`tensor` (and a mixture's experts among those of `expert`); then what is left along the first dim, by ZeRO. The engine
sees only the second division. Checkpoints, first weights and norms see whole tensors: here the two are put together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from jingu.model.initialise import initial_values
from jingu.model.sharding import Cut, cuts
from jingu.model.spec import ModelSpec
from jingu.parallel.mesh import split_experts, zero_mesh


@dataclass(frozen=True)
class Part:
    """How one parameter is divided."""

    shape: torch.Size
    """Of the whole."""
    mesh: DeviceMesh
    """`replicate`, ZeRO's axis, and the axes that divide what the table names."""
    dims: tuple[int | None, ...]
    """The dim that each axis of the mesh divides; None where its ranks hold copies."""
    zero_axis: int = 1

    @property
    def order(self) -> list[int]:
        """The axes that divide, in their order: ZeRO's comes last."""
        axes = [axis for axis, dim in enumerate(self.dims) if dim is not None]
        return sorted(axes, key=lambda axis: axis == self.zero_axis)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The same in PyTorch's words."""
        placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in self.dims]
        before = prod(self.mesh.size(axis) for axis in self.order[:-1] if self.dims[axis] == 0)
        placements[self.zero_axis] = _StridedShard(0, split_factor=before)
        return tuple(placements)

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same part."""
        return prod(self.mesh.size(axis) for axis, dim in enumerate(self.dims) if dim is None)

    def has_turn(self, number: int) -> bool:
        """Whether this rank's turn comes at `number`, of the ranks that hold the whole between them."""
        ranks, place = 1, 0
        for axis in self.order:
            size = self.mesh.size(axis)
            ranks, place = ranks * size, place * size + self.mesh.get_local_rank(axis)
        return number % ranks == place

    def whole(self, held: Tensor) -> Tensor:
        """The whole tensor on every rank, from the parts that they hold."""
        whole = held.new_zeros(self.shape)
        self.cut(whole).copy_(held)
        add_up([(self, whole)])
        return whole

    def cut(self, whole: Tensor, *, zero: bool = True) -> Tensor:
        """This rank's part of the whole tensor, or what ZeRO has not divided yet."""
        for axis in self.order if zero else self.order[:-1]:
            dim = self.dims[axis]
            assert dim is not None
            start, count = share(whole.shape[dim], self.mesh.size(axis), self.mesh.get_local_rank(axis))
            whole = whole.narrow(dim, start, count)
        return whole

    def logical(self, held: Tensor, block: int = 1) -> Tensor:
        """The whole tensor, of which this rank holds a part, as a DTensor; without copying."""
        shape = torch.Size((*self.shape[:-1], self.shape[-1] // block))
        stride = torch.empty(shape, device="meta").stride()
        mine = local(held.detach())
        return DTensor.from_local(mine, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)


@dataclass(frozen=True)
class Sharing:
    """How all parameters of a model are divided over the mesh."""

    mesh: DeviceMesh
    parts: Mapping[str, Part]
    """By the name of the parameter."""
    experts: DeviceMesh | None = None
    """The axes `expert_fsdp` and `expert`, where a mixture's experts are shared."""

    def logical(self, name: str, held: Tensor, *, whole: bool = False, block: int = 1) -> Tensor:
        """The whole of parameter `name`, or of what an optimizer keeps for it (on every rank, where it is `whole`; for
        each `block` elements of a row), as a DTensor over the ranks of its stage of the pipeline."""
        part = self.parts[name]
        if held.dim() and not whole:
            return part.logical(held, block)
        return DTensor.from_local(held, part.mesh, [Replicate()] * part.mesh.ndim, run_check=False)

    @torch.no_grad()
    def fill(
        self, model: nn.Module, whole: Callable[[str], Tensor], which: Callable[[str], bool] = lambda name: True
    ) -> None:
        """Fill this rank's parts from whole tensors by name, one after another."""
        for name, parameter in model.named_parameters():
            if not which(name):
                continue
            local(parameter).copy_(self.parts[name].cut(whole(name)))

    def initialise(self, model: nn.Module, spec: ModelSpec, seed: int) -> None:
        """Fill this rank's parts with first weights: those of the same model on one process."""
        self.fill(model, lambda name: initial_values(name, self.parts[name].shape, spec, seed))

    def sum_copies(self, model: nn.Module) -> None:
        """Add up the gradients of what ranks of `tensor` hold copies of: each has seen other tokens or heads.

        To be called once a step, when ZeRO has reduced its own.
        """
        copied: list[tuple[Part, list[int], Tensor]] = []
        for name, parameter in model.named_parameters():
            part = self.parts[name]
            # Of the axes right of ZeRO's.
            axes = [axis for axis in range(part.zero_axis + 1, part.mesh.ndim) if part.dims[axis] is None]
            if parameter.grad is not None:
                copied.append((part, axes, local(parameter.grad)))
        _all_reduce(copied)


def sharing_of(model: nn.Module) -> Sharing:
    """How the parameters of a model are divided that `parallelize` has laid out."""
    sharing = model.sharing
    assert isinstance(sharing, Sharing)
    return sharing


def share(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Start and length of a rank's part: equal blocks, rounded up, so that the last may be short (torch.chunk's)."""
    block = -(-size // ranks)
    start = min(size, block * rank)
    return start, min(block, size - start)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def add_up(tensors: Sequence[tuple[Part | None, Tensor]]) -> None:
    """Add up tensors over the ranks that hold the whole of a parameter between them, in place; all that go the same
    way at once."""
    _all_reduce([(part, part.order, tensor) for part, tensor in tensors if part is not None])


def _all_reduce(tensors: Sequence[tuple[Part, Sequence[int], Tensor]]) -> None:
    """Add up tensors over axes of their meshes, in place."""
    buckets: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for part, axes, tensor in tensors:
        groups = tuple(part.mesh.get_group(axis) for axis in axes if part.mesh.size(axis) > 1)
        if groups:
            device = part.mesh.device_type
            buckets.setdefault(groups, []).append(tensor)
    for groups, held in buckets.items():
        # What is offloaded travels from where the ranks compute.
        flat = torch.cat([tensor.flatten() for tensor in held]).to(device)
        for group in groups:
            dist.all_reduce(flat, group=group)
        for tensor, total in zip(held, flat.split([tensor.numel() for tensor in held]), strict=True):
            tensor.copy_(total.view_as(tensor))


def plan_sharing(model: nn.Module, mesh: DeviceMesh, kv_heads: int, expert: int) -> Sharing:
    """The division of a model that is still whole.

    Args:
        kv_heads: key-value heads of the model; where they are fewer than the ranks of `tensor`, neighbours share one.
        expert: ranks, of those of shard × context, that share a mixture's experts.
    """
    replicate, zero, tensor, join = mesh["replicate"], zero_mesh(mesh), mesh["tensor"], DeviceMesh._concatenate
    whole = join([replicate, zero, tensor])
    by_kv_head = None
    if kv_heads < tensor.size():
        sizes = (kv_heads, tensor.size() // kv_heads)
        by_kv_head = join([replicate, zero, tensor._unflatten(0, sizes, ("kv_heads", "kv_copies"))])
    experts = split_experts(zero, expert) if expert > 1 else None
    by_expert = None if experts is None else join([replicate, experts, tensor])

    def part(shape: torch.Size, cut: tuple[Cut, ...]) -> Part:
        dims = {each.kind: each.dim for each in cut}
        inner = dims.get("inner", dims.get("kv_heads"))
        if "experts" in dims and by_expert is not None:
            return Part(shape, by_expert, (None, 0, 0, inner))
        if "kv_heads" in dims and by_kv_head is not None:
            return Part(shape, by_kv_head, (None, 0, inner, None))
        return Part(shape, whole, (None, 0, inner))

    table = cuts(model)
    parts = {name: part(parameter.shape, table[name]) for name, parameter in model.named_parameters()}
    return Sharing(mesh, parts, experts)


def take_parts(model: nn.Module, sharing: Sharing) -> None:
    """Leave of each parameter what ZeRO will divide, in place; the model is on the meta device."""
    for prefix, module in model.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            piece = sharing.parts[f"{prefix}.{leaf}" if prefix else leaf].cut(parameter, zero=False)
            if piece.shape != parameter.shape:
                mine = torch.empty_like(piece, memory_format=torch.contiguous_format)
                setattr(module, leaf, nn.Parameter(mine, requires_grad=parameter.requires_grad))
