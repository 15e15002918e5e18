"""The peak memory of a rank by part, in closed form.

Weights, gradients and optimizer state follow exactly from the shapes of the parameters and the axes of the mesh.
Activations follow from what a block saves for its backward pass, and from the number of micro-batches in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from jingu.parallel.stages import splits_backward
from jingu.plan.activations import StepTensors, step_tensors, without_data_ranks
from jingu.plan.in_flight import micro_batches_in_flight, stages_of_rank
from jingu.plan.weight_memory import RankShare, WeightCopies, rank_shares, weight_copies
from jingu.plan.workload import Stage, Workload

# The parts that offload moves to main memory or to disk.
STATE = ("weights", "gradients", "optimizer state")


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank: bytes on the GPU by part, and offloaded bytes (in main memory or on disk) by part."""

    device: dict[str, float]
    host: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes on the GPU, rounded so that equal sums of parts are equal numbers."""
        return float(round(sum(self.device.values())))

    def of_tensors(self) -> dict[str, float]:
        """Return the bytes of tensors on the GPU and in main memory, by parts that a run can measure."""
        outside = ("fragmentation", "libraries")
        size = sum(size for part, size in self.device.items() if part not in outside) + sum(self.host.values())
        parts = {part: self.device.get(part, 0.0) + self.host.get(part, 0.0) for part in ("weights", "optimizer state")}
        return parts | {"gradients and activations": size - sum(parts.values())}

    @property
    def state(self) -> float:
        """Bytes of weights, gradients and optimizer state on the GPU."""
        return sum(self.device.get(part, 0.0) for part in STATE)


def stage_memory(work: Workload, stage: Stage) -> RankMemory:
    """Return the peak memory of a rank of a stage: that of the fullest moment of a step.

    With a single micro-batch, gradients are allocated while activations are freed, and reuse their memory: the parts of
    the moment, except the state, are then smaller by a common share.
    """
    soft, parts = work.software, rank_shares(work, stage)
    state = {
        "weights": sum(count * part.weights for part, count in parts),
        "gradients": soft.gradient_bytes * sum(count * part.num_trained for part, count in parts),
        "optimizer state": sum(count * part.state for part, count in parts),
    }
    is_offloaded = work.parallel.offload.type != "none"
    moments = step_moments(work, stage, parts, state["gradients"])
    if is_offloaded:
        moments = [moment | {"gradients": max(0.0, moment["gradients"] - state["gradients"])} for moment in moments]
    least = 0.0 if is_offloaded else state["gradients"]
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    peak = max(least, sum(fullest.values()))
    # Memory of other moments that the allocator does not reuse.
    largest: dict[str, float] = {}
    for moment in moments:
        for name, size in moment.items():
            if size > largest.get(name, 0.0):
                largest[name] = size
    temporary = sum(size for name, size in largest.items() if name != "gradients")
    fragments = (1 - soft.allocator_reuse) * max(0.0, moments[0]["gradients"] + temporary - peak)
    if fullest["gradients"] < least:
        remainder = sum(fullest.values()) - fullest["gradients"]
        share = (peak - least) / remainder if remainder else 0.0
        fullest = {part: size * share for part, size in fullest.items()} | {"gradients": least}
    host = state if is_offloaded else {}
    device = ({} if is_offloaded else state) | fullest
    device["buckets"] = soft.buckets_gib * 2**30
    # Parts of a GPU that no tensor uses.
    device["fragmentation"] = fragments + (soft.reserved - 1) * (sum(device.values()) + fragments)
    axes = sum(size > 1 for size in work.sizes.shape)
    device["libraries"] = soft.context_gib * 2**30 + axes * soft.group_gib * 2**30
    return RankMemory({part: size for part, size in device.items() if size}, host)


def step_moments(
    work: Workload, stage: Stage, parts: list[tuple[RankShare, int]], gradients: float
) -> list[dict[str, float]]:
    """Return what a rank holds beside its weights and optimizer state at the moments when it may hold most, by part.

    The moments are those of the last micro-batch in flight: while the loss computes a chunk of logits; before the
    backward pass of the head; in that of the norm before it; in the backward pass of the last block (before that of
    others, which hold fewer activations), and after the backward pass of the embedding.

    Args:
        gradients: bytes of the gradients of the rank's shards.
    """
    soft = work.software
    tensors = step_tensors(without_data_ranks(work), stage)
    copies_of_weights = weight_copies(work, stage, parts)
    # Gradients of earlier micro-batches. There are none if all forward passes come before the first backward pass.
    in_flight = micro_batches_in_flight(work, stage)
    before = 0.0 if in_flight == work.accumulation else max(gradients, copies_of_weights.whole)
    activations = {"activations": tensors.activations, "stage buffers": tensors.buffers}
    end_buffer = 0.0
    if before and not copies_of_weights.whole:
        # FSDP keeps such a buffer for each stage of the rank.
        num_stages = len(stages_of_rank(work, stage))
        end_buffer = copies_of_weights.end_buffer + (num_stages - 1) * copies_of_weights.reduction
    block = {
        "gradients": before,
        "compute weights": copies_of_weights.in_block,
        **activations,
        "recomputation": tensors.recomputation + copies_of_weights.recomputation,
        "backward": tensors.backward + copies_of_weights.matrix_gradient + copies_of_weights.head_gradient,
        "reduction": end_buffer,
    }
    # At the end of the backward pass of a block, it needs its activations no more, but has all of its gradients; those
    # of the block behind it are reduced.
    splits = splits_backward(work.parallel, work.sizes.pipeline)
    share = 1.0 if splits else max(0.0, 1 - 1 / (max(1, stage.num_blocks) * in_flight))
    # Whole gradients of the block behind are in the buffer of their reduction now; then there are its shards.
    of_shards = soft.gradient_bytes * parts[0][0].num_trained
    reduction = min(copies_of_weights.reduction, of_shards if copies_of_weights.whole else inf)
    second = block | {"activations": tensors.activations * share, "reduction": reduction}
    block_end = block | {
        "activations": tensors.activations * share,
        "recomputation": 0.0,
        "backward": tensors.gradient_of_block + copies_of_weights.block_gradients + copies_of_weights.head_gradient,
        "reduction": copies_of_weights.reduction,
    }
    end = {
        "gradients": max(gradients, copies_of_weights.whole),
        "compute weights": copies_of_weights.in_ends,
        "stage buffers": tensors.buffers_at_end,
        "backward": copies_of_weights.end_gradients,
        "reduction": copies_of_weights.end_buffer,
    }
    moments = [block, second, block_end, end]
    if not before:
        # The first block has the fewest activations in its backward pass, but the gradients of all others exist.
        later, head_gradient = of_shards, copies_of_weights.head_gradient
        ends = parts[len(stage.blocks) :]
        if copies_of_weights.reduction:
            # FSDP still reduces those of the block behind, and those of embedding and head only at the end.
            later += of_shards + soft.gradient_bytes * sum(part.num_trained * count for part, count in ends)
            head_gradient = 0.0
        elif work.model.embedding in stage.ends and not work.spec.tie_word_embeddings:
            later += soft.gradient_bytes * ends[0][0].num_trained
        first = {
            "gradients": max(0.0, gradients - later),
            "activations": tensors.activations * (1 - share),
            "backward": block["backward"] - head_gradient,
            "reduction": copies_of_weights.reduction,
        }
        moments.append(block | first)
    if not stage.has_head or work.spec.score_head:
        return moments
    return [*_loss_moments(tensors, copies_of_weights, before, end_buffer, splits), *moments]


def _loss_moments(
    tensors: StepTensors, copies_of_weights: WeightCopies, gradients: float, reduction: float, splits: bool
) -> list[dict[str, float]]:
    """Return the moments of `step_moments` before the backward pass of the blocks.

    Args:
        gradients: bytes of the gradients of earlier micro-batches; reduction: those of the buffers that FSDP keeps.
        splits: whether backward passes are split.
    """
    head = {
        "gradients": gradients,
        "compute weights": copies_of_weights.in_ends,
        "activations": tensors.activations_in_loss,
        "stage buffers": tensors.buffers_in_loss,
        # That of an earlier micro-batch, which a split backward pass does not add to the others yet.
        "backward": splits * copies_of_weights.head_gradient,
        "reduction": reduction,
    }
    loss = head | {"compute weights": copies_of_weights.in_loss, "loss": tensors.loss_tensors + tensors.chunk}
    head_end = head | {"loss": tensors.loss_tensors + tensors.loss_copies + copies_of_weights.head_cast}
    return [loss, head_end, head | {"loss": tensors.norm_backward}]


def least_memory(work: Workload, data: int, usable: float) -> tuple[float, float]:
    """Return lower bounds of the memory of the fullest GPU for any ZeRO: without state, and with all of it.

    Args:
        data: number of data-parallel ranks.
        usable: bytes of a GPU; if activations and loss are larger, the bounds are those of the first such stage.
    """
    step = without_data_ranks(work)
    largest: list[tuple[Stage, float, float]] = []
    for stage in work.stages:
        tensors = step_tensors(step, stage)
        activity = tensors.activations + tensors.buffers
        of_block = activity + tensors.recomputation + tensors.backward
        of_loss = tensors.activations_in_loss + tensors.buffers_in_loss + tensors.loss_tensors + tensors.chunk
        if max(of_block, of_loss) > usable:
            return max(of_block, of_loss), max(of_block, of_loss)
        largest.append((stage, of_block, of_loss))
    soft, temporary, total = work.software, 0.0, 0.0
    parallel = work.parallel.model_copy(update={"zero_stage": 3, "shard": data, "replicate": 1})
    sharded = replace(work, parallel=parallel, sizes=replace(work.sizes, shard=data, replicate=1))
    for stage, of_block, of_loss in largest:
        shares = rank_shares(sharded, stage)
        # Without earlier micro-batches, gradients may reuse the memory of activations.
        has_gradients = micro_batches_in_flight(work, stage) < work.accumulation
        numbers = has_gradients * sum(count * part.num_trained for part, count in shares)
        state = soft.gradient_bytes * numbers + sum(count * (part.weights + part.state) for part, count in shares)
        copies_of_weights = weight_copies(sharded, stage, shares)
        # A stage of one or two blocks gathers less without ZeRO 3.
        whole = sum(part.gathered_bytes * count for part, count in shares)
        fullest = max(
            of_block + min(whole, copies_of_weights.in_block), of_loss + min(whole, copies_of_weights.in_loss)
        )
        temporary = max(temporary, fullest)
        # Shards of experts along another dim may be rounded up less.
        total = max(total, fullest + 0.98 * state)
    return temporary, total


def fullest_stage(work: Workload) -> tuple[Stage, RankMemory]:
    """Return the stage with the highest memory, and its memory."""
    memories = ((stage, stage_memory(work, stage)) for stage in work.stages)
    return max(memories, key=lambda pair: pair[1].total)
