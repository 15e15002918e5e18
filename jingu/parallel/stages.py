"""How the blocks of a model are shared by the stages of a pipeline, and what its schedules ask for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

import torch

from jingu.config.batch import BatchPlan, plan_batch
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import ParallelSettings
from jingu.errors import JinguError, counted
from jingu.model.count import layer_costs
from jingu.model.decoder import Decoder, make_model, parameter_shapes
from jingu.model.packed import GROUPS, Packed, need_bitsandbytes
from jingu.model.sharding import styled
from jingu.model.spec import Kind, ModelSpec
from jingu.parallel.mesh import AxisSizes, axis_sizes

SPLIT_BACKWARD = frozenset({"zero_bubble", "zbv"})
"""Schedules that compute the gradients of states first, and those of parameters where a rank would wait."""


def stages_per_rank(settings: ParallelSettings) -> int:
    """Stages that a rank of the axis `pipeline` has.

    Raises:
        JinguError: the schedule has another number.
    """
    given, schedule = settings.stages_per_rank, settings.schedule
    exact = {"gpipe": 1, "1f1b": 1, "zbv": 2}.get(schedule)
    if given == "auto":
        return exact or 2
    if (exact and given != exact) or (schedule == "interleaved" and given < 2):
        has = {1: "one stage", 2: "two stages", None: "at least two stages"}[exact]
        raise JinguError(
            f"the schedule {schedule} has {has} a rank, not {given}.",
            where="parallel.stages_per_rank",
            fix="Leave it at auto, or choose interleaved or zero_bubble.",
        )
    return given


def rank_of_stage(settings: ParallelSettings, ranks: int, stage: int) -> int:
    """Place on the axis `pipeline`: in turns, but for zbv, which goes there and back."""
    if settings.schedule == "zbv" and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


def divide_blocks(settings: ParallelSettings, ranks: int, spec: ModelSpec) -> list[range]:
    """The blocks of each stage; those of an encoder are counted first.

    Args:
        ranks: size of the axis `pipeline`.

    Raises:
        JinguError: there are fewer blocks than stages, or `parallel.parts` does not fit.
    """
    layers, stages = (spec.encoder_layers or 0) + spec.layers, ranks * stages_per_rank(settings)
    if stages > layers:
        each = f" ({ranks} ranks with {stages // ranks} each)" if stages > ranks else ""
        raise JinguError(
            f"{layers} blocks cannot be shared by {stages} stages{each}.",
            where="parallel.pipeline",
            fix=f"Set it to {max(1, layers // (stages // ranks))} or less, or use fewer stages a rank.",
        )
    even = balanced_parts(layer_costs(spec, parameter_shapes(spec), spec.context), stages)
    parts = settings.parts or even
    if len(parts) != stages or sum(parts) != layers:
        raise JinguError(
            f"parallel.parts has {counted(len(parts), 'number')} with the sum {sum(parts)}, for {stages} stages and "
            f"{counted(layers, 'block')}.",
            where="parallel.parts",
            fix=f"Give {stages} numbers that add up to {layers}, such as {even}, or null.",
        )
    return [range(first, end) for first, end in pairwise([0, *accumulate(parts)])]


def balanced_parts(costs: Sequence[float], stages: int) -> list[int]:
    """Number of blocks of each stage, at least one, so that the most expensive stage costs the least.

    Args:
        costs: of the embedding, of each block, and of norm and head.
    """
    blocks = [*costs[1:-1]]
    blocks[0] += costs[0]
    blocks[-1] += costs[-1]
    sums = [0.0, *accumulate(blocks)]

    @cache
    def best(end: int, stages: int) -> tuple[float, float, tuple[int, ...]]:
        """Largest cost, sum of squares (among equals the most even), and parts, of the blocks before `end`."""
        if stages == 1:
            return sums[end], sums[end] ** 2, (end,)
        found = []
        for first in range(stages - 1, end):
            largest, squares, parts = best(first, stages - 1)
            cost = sums[end] - sums[first]
            found.append((max(largest, cost), squares + cost**2, (*parts, end - first)))
        return min(found)

    return list(best(len(blocks), stages)[2])


def plan_layout(config: RunConfig, ranks: int, spec: ModelSpec) -> tuple[AxisSizes, BatchPlan]:
    """The axes of the mesh and the division of the batch over them. A pure function, for before any rank starts.

    Raises:
        JinguError: ranks, model and batch do not fit together; says with which numbers.
    """
    sizes = axis_sizes(config.parallel, ranks, spec)
    plan = plan_batch(config.batch, sizes.data, sizes.pipeline)
    if sizes.pipeline > 1:
        divide_blocks(config.parallel, sizes.pipeline, spec)
        if config.parallel.schedule in SPLIT_BACKWARD:
            _check_split_backward(config, spec)
        _check_micro_batches(config.parallel, sizes.pipeline, plan.accumulation)
    if sizes.expert > 1 and config.train.activation_checkpointing.type == "selective":
        raise JinguError(
            "selective activation checkpointing sees every operation of a block, also those that gather a rank's "
            "experts, which are not the same when it computes again.",
            where="train.activation_checkpointing.type",
            fix="Set it to full or none, or parallel.expert=1.",
        )
    if spec.base is not None:
        _check_packed(spec, spec.base, sizes)
    return sizes, plan


def _check_packed(spec: ModelSpec, kind: Kind, sizes: AxisSizes) -> None:
    """JinguError where matrices cannot be packed, or ranks of `tensor` would share what is packed together."""
    if kind == "nf4":
        need_bitsandbytes("matrices are rounded to nf4", "tune.base", "int4")
    if sizes.data * sizes.context > 1 and torch.__version__ < "2.12":
        raise JinguError(
            "PyTorch before 2.12 casts what ranks share of a model, and so cannot share matrices of few bits.",
            where="tune.base",
            fix="Install PyTorch 2.12 or later, leave it out, or use ranks of `tensor` and `pipeline` alone.",
        )
    with torch.device("meta"):
        model = make_model(spec)
    if not any(isinstance(part, Packed) for part in model.modules()):
        raise JinguError(
            f"none of the blocks' matrices has a multiple of 16 rows of a multiple of {GROUPS[kind]} elements, so none "
            "would be rounded.",
            where="tune.base",
            fix="Leave it out.",
        )
    check_groups(model, sizes.tensor)


def check_groups(model: Decoder, tensor: int) -> None:
    """JinguError where so many ranks of `tensor` would share what is packed together."""
    for name, part, style in styled(model):
        weight = getattr(part, "weight", None)
        if style not in ("row", "from_heads") or not isinstance(weight, Packed) or weight.kind == "int8":
            continue
        if (inputs := 2 * weight.values.shape[-1]) % (tensor * GROUPS[weight.kind]):
            raise JinguError(
                f"{tensor} ranks of `tensor` cannot share the {inputs} inputs of {name} in whole groups of "
                f"{GROUPS[weight.kind]}, which {weight.kind} packs together.",
                where="parallel.tensor",
                fix="Choose another number of ranks, or int8.",
            )


def _check_split_backward(config: RunConfig, spec: ModelSpec) -> None:
    schedule = config.parallel.schedule
    if spec.encoder_layers is not None:
        raise JinguError(
            f"the schedule {schedule} divides a backward pass at what a stage has received, and where the decoder "
            "begins that is the encoder's states, which its own first layers do not depend on.",
            where="parallel.schedule",
            fix="Set it to 1f1b, interleaved or gpipe.",
        )
    if config.parallel.zero == 3:
        raise JinguError(
            f"the schedule {schedule} cannot run with ZeRO 3: between the two halves of a backward pass it needs the "
            "gathered parameters of a stage, which ZeRO 3 lets go.",
            where="parallel.zero",
            fix="Set parallel.zero=2, or parallel.schedule to 1f1b or interleaved.",
        )
    if config.train.activation_checkpointing.type == "selective":
        raise JinguError(
            f"the schedule {schedule} passes backward twice, and what selective activation checkpointing keeps can be "
            "taken once only.",
            where="train.activation_checkpointing.type",
            fix="Set it to full or none, or parallel.schedule to 1f1b or interleaved.",
        )


def _check_micro_batches(settings: ParallelSettings, ranks: int, number: int) -> None:
    schedule, needed = settings.schedule, ""
    if schedule == "1f1b" and number < ranks:
        needed = f"at least as many as stages, {ranks}"
    elif schedule in ("interleaved", "zero_bubble") and number % max(1, number // ranks):
        needed = f"a multiple of the ranks of the pipeline, {ranks}, or fewer than twice"
    if needed:
        raise JinguError(
            f"the schedule {schedule} needs {needed}, but a step has {number} micro-batches a rank.",
            where="batch.micro_size",
            fix="Set it lower, raise batch.global_size, or choose another parallel.schedule (gpipe takes any number).",
        )
