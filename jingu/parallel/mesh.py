"""The device mesh: sizes of its axes, its construction, and derived meshes. Built once and passed as an argument."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING

from jingu.config.batch_plan import divisors
from jingu.config.sections.parallel import ParallelSettings
from jingu.errors import JinguError, join_words, pluralize
from jingu.model.components import LayerSpec
from jingu.model.spec import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

# Axes of the mesh, from outermost to innermost. Ranks of the last axes are neighbors, so the axes that communicate
# most stay within a node.
AXES = ("pipeline", "replicate", "shard", "context", "tensor")


@dataclass(frozen=True)
class AxisSizes:
    """Number of ranks on each mesh axis.

    Attributes:
        expert: ranks that share the experts; folded from shard × context, so not an axis of its own.
    """

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int
    expert: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def data(self) -> int:
        """Return the number of ranks that see different rows of the batch."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        """Return a name such as `2 shard × 4 tensor`, without axes of one rank."""
        return " × ".join(f"{getattr(self, axis)} {axis}" for axis in AXES if getattr(self, axis) > 1) or "1"


def resolve_axis_sizes(settings: ParallelSettings, ranks: int, spec: ModelSpec) -> AxisSizes:
    """Return the size of every mesh axis for a number of ranks. No rank needs to run yet.

    Raises:
        JinguError: the axis sizes do not multiply to the number of ranks, or the model cannot be divided that way. The
            message gives the numbers.
    """
    axis_sizes = {axis: getattr(settings, axis) for axis in AXES}
    if settings.zero_stage == 0:
        if axis_sizes["shard"] not in (1, "auto"):
            raise JinguError(
                f"ZeRO 0 shards nothing, but parallel.shard is {axis_sizes['shard']}.",
                where="parallel.zero_stage",
                fix=f"Set parallel.replicate={axis_sizes['shard']} instead, or parallel.zero_stage to 1, 2 or 3.",
            )
        axis_sizes["shard"] = 1
    # One axis that is `auto` takes the remaining ranks; other axes that are `auto` get one rank.
    open_axis = _find_open_axis(axis_sizes)
    axis_sizes |= {axis: 1 for axis in AXES if axis_sizes[axis] == "auto" and axis != open_axis}
    given_sizes = {axis: size for axis, size in axis_sizes.items() if axis != open_axis}
    product = prod(given_sizes.values())
    # The product of the axis sizes must be the number of ranks.
    if ranks % product or (open_axis is None and product != ranks):
        factors = [f"{axis} {size}" for axis, size in given_sizes.items() if size > 1] or ["1"]
        layout = " × ".join(factors) + f" = {product:,}" * (len(factors) > 1)
        rule = "does not divide" if open_axis else "is not"
        raise JinguError(
            f"the layout {layout} {rule} the number of ranks, {ranks:,}.",
            where="parallel",
            fix=f"Start {pluralize(product, 'process')}{' or a multiple' if open_axis else ''} (--processes), "
            "or set one of the axes to auto.",
        )
    if open_axis is not None:
        axis_sizes[open_axis] = ranks // product
    # Experts are divided over ranks of shard × context.
    expert_ranks = axis_sizes["shard"] * axis_sizes["context"]
    sizes = AxisSizes(**axis_sizes, expert=expert_size(settings, expert_ranks, spec))
    _check(sizes, spec, by_heads=settings.context_method == "ulysses")
    if settings.async_tensor_parallel and sizes.tensor == 1:
        raise JinguError(
            "there are no messages to overlap, since parallel.tensor is 1.",
            where="parallel.async_tensor_parallel",
            fix="Leave it out.",
        )
    return sizes


def _find_open_axis(axis_sizes: dict[str, int | str]) -> str | None:
    """Return the `auto` axis that takes the remaining ranks; None if no axis is `auto`.

    An axis that divides the model goes before `shard`, and `shard` before `replicate`.

    Raises:
        JinguError: several of the axes that divide the model are `auto`.
    """
    model = [axis for axis in ("pipeline", "context", "tensor") if axis_sizes[axis] == "auto"]
    if len(model) > 1:
        raise JinguError(
            f"{' and '.join(model)} are both auto, and only one of them can take the ranks that are left.",
            where="parallel",
            fix=f"Give parallel.{model[0]} a number.",
        )
    rows = [axis for axis in ("shard", "replicate") if axis_sizes[axis] == "auto"]
    return next(iter(model + rows), None)


def expert_size(settings: ParallelSettings, ranks: int, spec: ModelSpec) -> int:
    """Return the number of ranks that share the experts of a mixture of experts.

    Args:
        ranks: number of ranks of shard × context. `parallel.expert: auto` uses as many of them as divide the experts.
    """
    if settings.expert != "auto":
        return settings.expert
    return 1 if spec.experts is None else gcd(ranks, spec.experts.num_experts)


def _check(sizes: AxisSizes, spec: ModelSpec, *, by_heads: bool) -> None:
    """Raise JinguError if the model cannot be divided over these axes.

    Args:
        by_heads: whether context parallelism divides attention by heads (Ulysses).
    """
    for layer in spec.kinds:
        _check_layer(sizes, spec, layer, by_heads=by_heads)
    # Layers that predict further tokens need the embeddings of the tokens after those of a rank.
    for axis, size in (("pipeline", sizes.pipeline), ("context", sizes.context)):
        if spec.mtp_loss_weight and size > 1:
            raise JinguError(
                f"multi-token prediction is trained without {axis} parallelism, and parallel.{axis} is {size}.",
                where=f"parallel.{axis}",
                fix="Set it to 1, or model.mtp_loss_weight to 0, which keeps the layers as they are.",
            )
    if (spec.has_shared_kv or spec.per_layer_inputs) and sizes.pipeline > 1:
        raise JinguError(
            "layers that share keys and values, or that have inputs of their own, are not divided into stages, and "
            f"parallel.pipeline is {sizes.pipeline}.",
            where="parallel.pipeline",
            fix="Set it to 1, and divide the model by parallel.tensor, parallel.context or parallel.shard.",
        )
    if spec.has_state and sizes.context > 1:
        raise JinguError(
            "layers with a state (a delta rule, Mamba-2, or a short convolution) need whole sequences, and "
            f"parallel.context is {sizes.context}.",
            where="parallel.context",
            fix="Set it to 1, and divide the model by parallel.tensor, parallel.pipeline or parallel.shard.",
        )
    # Experts and the ranks that share them must divide evenly.
    if sizes.expert > 1:
        number = 0 if spec.experts is None else spec.experts.num_experts
        if not number:
            raise JinguError("the model has no experts.", where="parallel.expert", fix="Set it to 1.")
        for what, size in (
            (f"{number} experts", number),
            (f"the {sizes.shard * sizes.context} ranks of shard × context", sizes.shard * sizes.context),
        ):
            if size % sizes.expert:
                raise _division_error(what, sizes.expert, "expert", gcd(number, sizes.shard * sizes.context))


def _check_layer(sizes: AxisSizes, spec: ModelSpec, layer: LayerSpec, *, by_heads: bool) -> None:
    """Raise JinguError if a layer cannot be divided over these axes; see `_check`."""
    if layer.has_attention:
        _check_heads(sizes, layer.attention.num_heads, layer.attention.num_kv_heads, by_heads=by_heads)
    mixer = layer.state_mixer
    if mixer is not None:
        heads, groups = mixer.heads
        # A convolution is divided by channels.
        _check_heads(sizes, heads or sizes.tensor, groups or sizes.tensor, by_heads=by_heads)
        if mixer.norm_groups is not None and groups % sizes.tensor:
            # Its norm is over all heads of a group.
            raise _division_error(f"{groups} groups of heads", sizes.tensor, "tensor", groups)
    for what, number in (("vocabulary", spec.vocab_size), ("feed-forward intermediate size", layer.intermediate_size)):
        # Blocks are rounded up, so the last rank can be left without a part.
        if number and -(-number // sizes.tensor) * (sizes.tensor - 1) >= number:
            raise JinguError(
                f"a {what} of {number} leaves nothing for the last of {sizes.tensor} ranks.",
                where="parallel.tensor",
                fix="Set it lower.",
            )


def _check_heads(sizes: AxisSizes, heads: int, kv_heads: int, *, by_heads: bool) -> None:
    """Raise JinguError if heads cannot be divided over these axes; see `_check`."""
    if heads % sizes.tensor:
        raise _division_error(f"{heads} attention heads", sizes.tensor, "tensor", heads)
    if kv_heads % sizes.tensor and sizes.tensor % kv_heads:
        raise _division_error(f"{kv_heads} key-value heads", sizes.tensor, "tensor", kv_heads)
    for what, number in (("attention", heads // sizes.tensor), ("key-value", max(1, kv_heads // sizes.tensor))):
        # If there are fewer key-value heads than context ranks, they are repeated.
        if by_heads and number % sizes.context and (what == "attention" or sizes.context % number):
            what_heads = f"the {number} {what} heads of a tensor rank"
            raise _division_error(what_heads, sizes.context, "context", number, or_else="parallel.context_method=ring")


def _division_error(what: str, size: int, axis: str, total: int, or_else: str = "") -> JinguError:
    """Return the error for an axis that does not divide `what`; it suggests the divisors of `total`, and `or_else`."""
    choices = [*map(str, divisors(total)), *filter(None, [or_else])]
    fix = f"Choose {join_words(choices)}."
    return JinguError(f"{what} cannot be divided over {size} ranks.", where=f"parallel.{axis}", fix=fix)


def build_mesh(sizes: AxisSizes, device: torch.device) -> DeviceMesh:
    """Build the mesh over all ranks. It has every axis of `AXES`, including axes of one rank."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, sizes.shape, mesh_dim_names=AXES)


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of the single axis `fsdp`, along which ZeRO shards: shard × context."""
    from jingu.compat.torch_distributed import flatten_axes

    return flatten_axes(mesh["shard", "context"], "fsdp")


def split_expert_mesh(zero: DeviceMesh, expert: int) -> DeviceMesh:
    """Split the axis `fsdp` in two: `expert_fsdp` and `expert`.

    Ranks of `expert` hold different experts. Ranks of `expert_fsdp` hold the same experts, sharded by ZeRO.

    Args:
        zero: the mesh of `fsdp_mesh`.
        expert: number of ranks of `expert`.
    """
    from jingu.compat.torch_distributed import split_axis

    return split_axis(zero, 0, (zero.size() // expert, expert), ("expert_fsdp", "expert"))


def hsdp_mesh(mesh: DeviceMesh, zero: DeviceMesh) -> DeviceMesh:
    """Return the mesh for FSDP: the axis `zero`, preceded by `replicate` if that has several ranks (HSDP)."""
    from jingu.compat.torch_distributed import join_meshes

    return zero if mesh["replicate"].size() == 1 else join_meshes([mesh["replicate"], zero])


def num_ranks(mesh: DeviceMesh, *axes: str) -> int:
    """Return the product of the sizes of some axes. Indexing a mesh instead is too slow for every step."""
    return prod(mesh.size(AXES.index(axis)) for axis in axes)


def num_data_ranks(mesh: DeviceMesh) -> int:
    """Return the number of ranks that see different rows of the batch."""
    return num_ranks(mesh, "replicate", "shard")


def data_rank(mesh: DeviceMesh) -> int:
    """Return the index of this rank's share of the rows, from 0."""
    return mesh.get_local_rank("replicate") * num_ranks(mesh, "shard") + mesh.get_local_rank("shard")


def num_row_replicas(mesh: DeviceMesh) -> int:
    """Return the number of ranks that see the same rows."""
    return num_ranks(mesh, "pipeline", "context", "tensor")
