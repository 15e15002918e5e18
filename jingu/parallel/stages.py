"""Divide the blocks of a model over the stages of a pipeline, and check the requirements of schedules and layouts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from math import inf
from typing import TYPE_CHECKING

from jingu.config.batch_plan import BatchPlan, plan_batch
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.policies import RolloutSettings
from jingu.errors import JinguError, pluralize
from jingu.model.count import layer_costs
from jingu.model.parameter_table import parameter_sizes
from jingu.model.sharding_table import iterate_styles
from jingu.model.spec import BaseFormat, ModelSpec
from jingu.parallel.mesh import AxisSizes, resolve_axis_sizes

if TYPE_CHECKING:
    from jingu.model.decoder import Decoder

# Schedules that split a backward pass: first the gradients of the hidden states, and later, when the rank would
# otherwise wait, the gradients of the parameters (zero-bubble schedules; Qi et al., 2023).
SPLIT_BACKWARD_SCHEDULES = frozenset({"zero_bubble", "zbv"})


def splits_backward(settings: ParallelSettings, ranks: int) -> bool:
    """Return whether a pipeline of this many ranks splits its backward passes."""
    return ranks > 1 and settings.pipeline_schedule in SPLIT_BACKWARD_SCHEDULES


def stages_per_rank(settings: ParallelSettings) -> int:
    """Return the number of stages per rank of the axis `pipeline`.

    Raises:
        JinguError: the schedule requires another number than `parallel.stages_per_rank`.
    """
    number, schedule = settings.stages_per_rank, settings.pipeline_schedule
    exact = {"gpipe": 1, "1f1b": 1, "zbv": 2}.get(schedule)
    if number == "auto":
        return exact or 2
    if (exact and number != exact) or (schedule == "interleaved" and number < 2):
        has = {1: "one stage", 2: "two stages", None: "at least two stages"}[exact]
        raise JinguError(
            f"the schedule {schedule} has {has} per rank, not {number}.",
            where="parallel.stages_per_rank",
            fix="Leave it at auto, or choose interleaved or zero_bubble.",
        )
    return number


def rank_of_stage(settings: ParallelSettings, ranks: int, stage: int) -> int:
    """Return the rank of a stage on the axis `pipeline`.

    Stages go to ranks round-robin. With `zbv`, the second half of the stages goes back in reverse order (a V shape), so
    rank 0 has the first and the last stage.

    Args:
        ranks: size of the axis `pipeline`.
        stage: number of the stage, from 0.
    """
    if settings.pipeline_schedule == "zbv" and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


def split_blocks(settings: ParallelSettings, ranks: int, spec: ModelSpec) -> list[range]:
    """Return the block numbers of each stage; in an encoder-decoder, the encoder's blocks are numbered first.

    Args:
        ranks: size of the axis `pipeline`.

    Raises:
        JinguError: there are fewer blocks than stages, or `parallel.layers_per_stage` does not fit.
    """
    layers, stages = (spec.num_encoder_layers or 0) + spec.num_layers, ranks * stages_per_rank(settings)
    if stages > layers:
        per_rank = f" ({ranks} ranks with {stages // ranks} each)" if stages > ranks else ""
        raise JinguError(
            f"{layers} blocks cannot be shared by {stages} stages{per_rank}.",
            where="parallel.pipeline",
            fix=f"Set it to {max(1, layers // (stages // ranks))} or less, or use fewer stages per rank.",
        )
    even = _balance_blocks(spec, stages)
    parts = settings.layers_per_stage or even
    if len(parts) != stages or sum(parts) != layers:
        raise JinguError(
            f"parallel.layers_per_stage has {pluralize(len(parts), 'number')} with the sum {sum(parts)}, for {stages} "
            f"stages and {pluralize(layers, 'block')}.",
            where="parallel.layers_per_stage",
            fix=f"Give {stages} numbers that add up to {layers}, such as {even}, or null.",
        )
    return [range(first, end) for first, end in pairwise([0, *accumulate(parts)])]


@lru_cache(maxsize=256)
def _balance_blocks(spec: ModelSpec, stages: int) -> list[int]:
    """Return the number of blocks of each stage of a model, balanced by cost at the maximum context length."""
    return balance_stages(_costs(spec), stages)


@lru_cache(maxsize=4)
def _costs(spec: ModelSpec) -> list[float]:
    return layer_costs(spec, parameter_sizes(spec), spec.max_position_embeddings)


def balance_stages(costs: Sequence[float], stages: int) -> list[int]:
    """Return the number of blocks of each stage, at least one, that minimizes the cost of the most expensive stage.

    Ties are broken by the smallest sum of squared costs.

    Args:
        costs: the costs, in order, of the embedding, of each block, and of the final norm and head together.
        stages: number of stages, at most the number of blocks.
    """
    # The embedding is in the first stage, and the final norm and head are in the last one.
    blocks = [*costs[1:-1]]
    blocks[0] += costs[0]
    blocks[-1] += costs[-1]
    sums = [0.0, *accumulate(blocks)]
    limit = _smallest_limit(blocks, stages)

    @cache
    def best(end: int, stages: int) -> tuple[float, float, tuple[int, ...]]:
        """Divide the blocks before `end`; return the largest cost, the sum of squared costs, and the stages' sizes."""
        if stages == 1:
            return sums[end], sums[end] ** 2, (end,)
        # Try every number of blocks of the last stage.
        candidates = []
        for first in range(end - 1, stages - 2, -1):
            cost = sums[end] - sums[first]
            if cost > limit:
                break
            if sums[first] > limit * (stages - 1):
                continue
            largest, squares, parts = best(first, stages - 1)
            candidates.append((max(largest, cost), squares + cost**2, (*parts, end - first)))
        return min(candidates, default=(inf, inf, ()))

    return list(best(len(blocks), stages)[2])


def _smallest_limit(costs: Sequence[float], stages: int) -> float:
    """Return the lowest possible cost of the most expensive stage, slightly rounded up, by bisection.

    `balance_stages` skips stages that cost more, which keeps its search fast.
    """
    low, high = max(costs), sum(costs)
    for _ in range(50):
        middle = (low + high) / 2
        # Fill the stages greedily up to `middle`, and count them.
        count, load = 1, 0.0
        for cost in costs:
            if load + cost > middle:
                count, load = count + 1, 0.0
            load += cost
        low, high = (low, middle) if count <= stages else (middle, high)
    return high * (1 + 1e-9)


def plan_layout(config: RunConfig, ranks: int, spec: ModelSpec, rows_per_group: int = 1) -> tuple[AxisSizes, BatchPlan]:
    """Return the sizes of the mesh axes and the division of the batch over them. No rank needs to run yet.

    Args:
        ranks: number of ranks of the run.
        rows_per_group: rows that must stay in one micro-batch, such as the answers to one prompt.

    Raises:
        JinguError: ranks, model and batch do not fit together; the message gives the numbers.
    """
    # First the mesh, then the batch, then the requirements that the parts of the layout have of each other.
    sizes = resolve_axis_sizes(config.parallel, ranks, spec)
    updates = config.task.updates_per_step if isinstance(config.task, RolloutSettings) else 1
    plan = plan_batch(config.batch, sizes.data, sizes.pipeline, rows_per_group, updates)
    check_layout(config.parallel, config.train.activation_checkpointing.type, spec, sizes, plan.accumulation)
    return sizes, plan


def check_layout(
    settings: ParallelSettings, checkpointing: str, spec: ModelSpec, sizes: AxisSizes, micro_batches: int
) -> None:
    """Raise JinguError if parts of a layout do not fit together.

    Args:
        checkpointing: type of activation checkpointing: none, selective or full.
        micro_batches: micro-batches per step on one rank.
    """
    if sizes.pipeline > 1:
        split_blocks(settings, sizes.pipeline, spec)
        if splits_backward(settings, sizes.pipeline):
            _check_split_backward(settings, checkpointing, spec)
        _check_micro_batches(settings, sizes.pipeline, micro_batches)
    if sizes.expert > 1 and checkpointing == "selective":
        raise JinguError(
            "selective activation checkpointing records every operation of a block, including those that gather the "
            "experts of a rank, and these differ when the block is recomputed.",
            where="train.activation_checkpointing.type",
            fix="Set it to full or none, or parallel.expert=1.",
        )
    if spec.quantization is not None:
        _check_packed(spec, spec.quantization, sizes)


def _check_packed(spec: ModelSpec, kind: BaseFormat, sizes: AxisSizes) -> None:
    """Raise JinguError if the layout or the model does not allow quantized matrices."""
    if kind == "stored":
        if sizes.tensor > 1:
            raise JinguError(
                "matrices in their stored form cannot be divided over ranks of `tensor`.",
                where="tune.quantization",
                fix="Set parallel.tensor to 1.",
            )
        return
    import torch

    from jingu.model.decoder import build_model
    from jingu.model.quantized_weight import GROUP_SIZES, QuantizedWeight, require_bitsandbytes

    if kind == "nf4":
        require_bitsandbytes("matrices are rounded to nf4", "tune.quantization", "int4")
    if sizes.data * sizes.context > 1 and torch.__version__ < "2.12":
        raise JinguError(
            "before PyTorch 2.12, FSDP casts every parameter that it shards, so it cannot shard quantized matrices.",
            where="tune.quantization",
            fix="Install PyTorch 2.12 or later, leave this setting out, or use only the axes tensor and pipeline.",
        )
    with torch.device("meta"):
        model = build_model(spec)
    if not any(isinstance(part, QuantizedWeight) for part in model.modules()):
        raise JinguError(
            "no matrix of a block can be quantized: the number of rows must be a multiple of 16, and the number of "
            f"columns a multiple of {GROUP_SIZES[kind]}.",
            where="tune.quantization",
            fix="Leave it out.",
        )
    check_quantization_groups(model, sizes.tensor)


def check_quantization_groups(model: Decoder, tensor: int) -> None:
    """Raise JinguError if ranks of `tensor` would divide a group of weights that are quantized together."""
    from jingu.model.quantized_weight import GROUP_SIZES, QuantizedWeight

    for name, part, style in iterate_styles(model):
        weight = dict(part.named_children()).get("weight")
        if style not in ("row", "from_heads") or not isinstance(weight, QuantizedWeight):
            continue
        if weight.kind in ("int8", "fp8"):
            continue
        if (inputs := 2 * weight.values.shape[-1]) % (tensor * GROUP_SIZES[weight.kind]):
            raise JinguError(
                f"{tensor} ranks of `tensor` cannot share the {inputs} inputs of {name} in whole groups of "
                f"{GROUP_SIZES[weight.kind]}, which {weight.kind} packs together.",
                where="parallel.tensor",
                fix="Choose another number of ranks, or int8.",
            )


def _check_split_backward(settings: ParallelSettings, checkpointing: str, spec: ModelSpec) -> None:
    """Raise JinguError if the model or the layout does not allow a schedule that splits backward passes."""
    schedule = settings.pipeline_schedule
    if spec.num_encoder_layers is not None:
        raise JinguError(
            f"the schedule {schedule} splits a backward pass at the tensors that a stage has received. The stage where "
            "the decoder begins receives the encoder's hidden states, and the first layers of the decoder do not "
            "depend on them.",
            where="parallel.pipeline_schedule",
            fix="Set it to 1f1b, interleaved or gpipe.",
        )
    if settings.zero_stage == 3:
        raise JinguError(
            f"the schedule {schedule} cannot run with ZeRO 3: between the two halves of a backward pass it needs the "
            "gathered parameters of a stage, which ZeRO 3 frees.",
            where="parallel.zero_stage",
            fix="Set parallel.zero_stage=2, or parallel.pipeline_schedule to 1f1b or interleaved.",
        )
    if checkpointing == "selective":
        raise JinguError(
            f"the schedule {schedule} runs two backward passes, and the activations that selective activation "
            "checkpointing saves can be used only once.",
            where="train.activation_checkpointing.type",
            fix="Set it to full or none, or parallel.pipeline_schedule to 1f1b or interleaved.",
        )


def _check_micro_batches(settings: ParallelSettings, ranks: int, number: int) -> None:
    """Raise JinguError if the schedule does not allow this number of micro-batches per step."""
    schedule, requirement = settings.pipeline_schedule, ""
    if schedule == "1f1b" and number < ranks:
        requirement = f"at least as many as stages, {ranks}"
    elif schedule in ("interleaved", "zero_bubble") and number % max(1, number // ranks):
        requirement = f"a multiple of the ranks of the pipeline, {ranks}, or fewer than twice as many"
    if requirement:
        raise JinguError(
            f"the schedule {schedule} needs {requirement}, but a step has {number} micro-batches per rank.",
            where="batch.micro_batch_size",
            fix="Set it lower, raise batch.global_batch_size, or choose another parallel.pipeline_schedule (gpipe "
            "takes any number).",
        )
