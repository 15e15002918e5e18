"""The mesh: the grid of ranks, built once and passed as an argument."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from jingu.config.sections.parallel import ParallelSettings
from jingu.errors import JinguError, counted, either
from jingu.model.spec import Experts, ModelSpec

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Axes of the mesh, from the farthest ranks to the nearest: what talks most stays within a node."""


@dataclass(frozen=True)
class AxisSizes:
    """How many ranks each axis has."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int
    expert: int
    """Folded from shard × context, not an axis of its own."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def data(self) -> int:
        """Number of ranks that see different rows of the batch."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        """Such as `2 shard × 4 tensor`; axes of one rank are left out."""
        return " × ".join(f"{getattr(self, axis)} {axis}" for axis in AXES if getattr(self, axis) > 1) or "1"


def axis_sizes(settings: ParallelSettings, ranks: int, spec: ModelSpec) -> AxisSizes:
    """The size of every axis for a number of ranks. A pure function, so that it can speak before any rank starts.

    Raises:
        JinguError: the axes do not multiply to the ranks, or the model cannot be divided so; says with which numbers.
    """
    given = {axis: getattr(settings, axis) for axis in AXES}
    if settings.zero == 0:
        if given["shard"] not in (1, "auto"):
            raise JinguError(
                f"ZeRO 0 shards nothing, but parallel.shard is {given['shard']}.",
                where="parallel.zero",
                fix=f"Set parallel.replicate={given['shard']} in its place, or parallel.zero to 1, 2 or 3.",
            )
        given["shard"] = 1
    filled = _filled(given)
    given |= {axis: 1 for axis in AXES if given[axis] == "auto" and axis != filled}
    fixed = {axis: size for axis, size in given.items() if axis != filled}
    product = prod(fixed.values())
    if ranks % product or (filled is None and product != ranks):
        named = [f"{axis} {size}" for axis, size in fixed.items() if size > 1] or ["1"]
        layout = " × ".join(named) + f" = {product:,}" * (len(named) > 1)
        rule = "does not divide" if filled else "is not"
        raise JinguError(
            f"the layout {layout} {rule} the number of ranks, {ranks:,}.",
            where="parallel",
            fix=f"Start {counted(product, 'process')}{' or a multiple' if filled else ''} (--processes), "
            "or set one of the axes to auto.",
        )
    if filled is not None:
        given[filled] = ranks // product
    folded = given["shard"] * given["context"]
    sizes = AxisSizes(**given, expert=expert_size(settings, folded, spec))
    _check(sizes, spec, by_heads=settings.context_by == "heads")
    return sizes


def _filled(given: dict[str, int | str]) -> str | None:
    """The axis that takes the ranks that the others leave."""
    model = [axis for axis in ("pipeline", "context", "tensor") if given[axis] == "auto"]
    if len(model) > 1:
        raise JinguError(
            f"{' and '.join(model)} are both auto, and only one of them can take the ranks that are left.",
            where="parallel",
            fix=f"Give parallel.{model[0]} a number.",
        )
    rows = [axis for axis in ("shard", "replicate") if given[axis] == "auto"]
    return next(iter(model + rows), None)


def expert_size(settings: ParallelSettings, folded: int, spec: ModelSpec) -> int:
    """Ranks, of the `folded` ones of shard × context, that share a mixture's experts."""
    if settings.expert != "auto":
        return settings.expert
    return gcd(folded, spec.feed_forward.number) if isinstance(spec.feed_forward, Experts) else 1


def _check(sizes: AxisSizes, spec: ModelSpec, *, by_heads: bool) -> None:
    """Raise JinguError where the model cannot be divided over these axes."""
    heads, kv_heads = spec.attention.heads, spec.attention.kv_heads
    if heads % sizes.tensor:
        raise _undivided(f"{heads} attention heads", sizes.tensor, "tensor", heads)
    if kv_heads % sizes.tensor and sizes.tensor % kv_heads:
        raise _undivided(f"{kv_heads} key-value heads", sizes.tensor, "tensor", kv_heads)
    for what, number in (("attention", heads // sizes.tensor), ("key-value", max(1, kv_heads // sizes.tensor))):
        # Too few key-value heads are repeated.
        if by_heads and number % sizes.context and (what == "attention" or sizes.context % number):
            named = f"the {number} {what} heads of a tensor rank"
            raise _undivided(named, sizes.context, "context", number, or_else="parallel.context_by=ring")
    for what, number in (("vocabulary", spec.vocabulary), ("feed-forward's inner size", spec.feed_forward.size)):
        if -(-number // sizes.tensor) * (sizes.tensor - 1) >= number:
            raise JinguError(
                f"a {what} of {number} leaves nothing for the last of {sizes.tensor} ranks.",
                where="parallel.tensor",
                fix="Set it lower.",
            )
    if sizes.expert > 1:
        number = spec.feed_forward.number if isinstance(spec.feed_forward, Experts) else 0
        if not number:
            raise JinguError("the model has no experts.", where="parallel.expert", fix="Set it to 1.")
        for what, size in (
            (f"{number} experts", number),
            (f"the {sizes.shard * sizes.context} ranks of shard × context", sizes.shard * sizes.context),
        ):
            if size % sizes.expert:
                raise _undivided(what, sizes.expert, "expert", gcd(number, sizes.shard * sizes.context))


def _undivided(what: str, size: int, axis: str, whole: int, or_else: str = "") -> JinguError:
    divisors = [str(n) for n in range(1, whole + 1) if whole % n == 0]
    fix = f"Choose {either([*divisors, or_else] if or_else else divisors)}."
    return JinguError(f"{what} cannot be divided over {size} ranks.", where=f"parallel.{axis}", fix=fix)


def build_mesh(sizes: AxisSizes, device: torch.device) -> DeviceMesh:
    """The mesh over all ranks, with every axis of `AXES`, also those of one rank."""
    return init_device_mesh(device.type, sizes.shape, mesh_dim_names=AXES)


def zero_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axis `fsdp` along which ZeRO shards, which is shard × context."""
    return mesh["shard", "context"]._flatten("fsdp")


def split_experts(zero: DeviceMesh, expert: int) -> DeviceMesh:
    """ZeRO's axis in two: `expert_fsdp`, along which ZeRO shards experts, and `expert`, whose ranks share them."""
    return zero._unflatten(0, (zero.size() // expert, expert), ("expert_fsdp", "expert"))


def with_replicas(mesh: DeviceMesh, zero: DeviceMesh) -> DeviceMesh:
    """The mesh for the sharding engine: ZeRO's axis, and before it `replicate` where that has several ranks."""
    return zero if mesh["replicate"].size() == 1 else DeviceMesh._concatenate([mesh["replicate"], zero])


def ranks_of(mesh: DeviceMesh, *axes: str) -> int:
    """Number of ranks on axes together. To take an axis out of a mesh makes another mesh, which is slow in a step."""
    return prod(mesh.size(AXES.index(axis)) for axis in axes)


def data_ranks(mesh: DeviceMesh) -> int:
    """Number of ranks that see different rows of the batch."""
    return ranks_of(mesh, "replicate", "shard")


def data_rank(mesh: DeviceMesh) -> int:
    """Which share of the rows this rank sees, counted from 0."""
    return mesh.get_local_rank("replicate") * ranks_of(mesh, "shard") + mesh.get_local_rank("shard")


def row_copies(mesh: DeviceMesh) -> int:
    """Number of ranks that see the same rows."""
    return ranks_of(mesh, "pipeline", "context", "tensor")
