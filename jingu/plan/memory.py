"""The peak memory of a rank by part, in closed form.

Weights, gradients and optimizer state follow exactly from the shapes of the parameters and the axes of the mesh.
Activations follow from what a block saves for its backward pass, and from the number of micro-batches in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.model.components import RelativeBias
from jingu.model.feed_forward_specs import GatedFeedForward, PlainFeedForward
from jingu.model.parts import score_bytes
from jingu.parallel.mesh import AxisSizes
from jingu.parallel.stages import stages_per_rank
from jingu.plan.software import Software
from jingu.plan.weight_memory import RankShare, rank_shares, weight_copies
from jingu.plan.workload import BlockSizes, ModelSizes, Stage, Workload, micro_batches_in_flight

# The parts that offload moves to main memory or to disk.
STATE = ("weights", "gradients", "optimizer state")


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank: bytes on the GPU by part, and offloaded bytes (in main memory or on disk) by part."""

    device: dict[str, float]
    host: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes on the GPU."""
        return sum(self.device.values())

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


def weight_passes(work: Workload, stage: Stage) -> float:
    """Return how many micro-batches in flight still need the gradients of weights, in units of all blocks of the rank.

    Only schedules that split backward passes have such micro-batches. The numbers are those of the orders of
    `jingu/plan/timeline.py:rank_orders`.
    """
    chunks = stages_per_rank(work.parallel)
    match work.parallel.pipeline_schedule:
        case "zero_bubble" if work.sizes.pipeline > 1:
            return min(work.accumulation, stage.rank + 1) / chunks
        case "zbv" if work.sizes.pipeline > 1:
            return 1 / chunks
    return 0.0


def block_activations(block: BlockSizes, work: Workload) -> tuple[float, float, float]:
    """Return the bytes that a block stores per micro-batch: all activations, those of selective checkpointing, and its
    input."""
    sizes, spec, layer, soft = work.sizes, work.spec, block.layer, work.software
    assert layer is not None
    tokens, hidden = work.tokens / sizes.tensor, spec.hidden_size
    input_bytes = (tokens if soft.sequence_parallel else work.tokens) * hidden * soft.compute_bytes
    total, inputs = tokens * saved_bytes(block, work), 0.0
    others = work.tokens - tokens
    if not soft.sequence_parallel:
        # Norms, residuals and dropout are replicated on the ranks of `tensor` (Korthikanti et al., 2022, equation 2).
        total += others * 10 * hidden
    elif not soft.saved_per_hidden and sizes.tensor > 1:
        # Ranks of `tensor` gather the tokens before attention and feed-forward, and keep them; also the inputs and
        # outputs of experts, whose rows are whole.
        states = (block.num_attention + 1) * hidden * soft.compute_bytes
        rows = 0.0
        if block.experts is not None:
            size = block.experts.latent_size or hidden
            rows = others * block.experts.num_experts_per_token * size * soft.compute_bytes
        total += others * states + 2 * rows
        # Selective checkpointing saves all tokens of the partial sums that they reduce, and their part of the sums.
        inputs = soft.saved_matmuls * (others * states + rows) + tokens * states
    heads = layer.attention.num_heads
    of_score = score_bytes(layer, soft.compute_bytes) if soft.fused_attention else soft.saved_scores
    if soft.stores_biased_scores and isinstance(layer.position, RelativeBias):
        of_score = soft.compute_bytes
    scores = of_score * heads / sizes.tensor * work.tokens * work.sequence
    if not soft.fused_attention:
        # Selective checkpointing recomputes the scores alone.
        return total + scores, total, input_bytes
    outputs = soft.saved_matmuls * block.matmul_outputs * soft.compute_bytes
    selective = tokens * (outputs + 4 * heads) + input_bytes + inputs
    return total + scores, min(selective, total + scores), input_bytes


def saved_bytes(block: BlockSizes, work: Workload) -> float:
    """Return the bytes per token that a block saves for its backward pass, without attention scores."""
    soft, layer = work.software, block.layer
    if soft.saved_per_hidden:
        return soft.saved_per_hidden * work.spec.hidden_size
    if layer is None or not soft.flash_attention or layer.mixer is not None or score_bytes(layer, soft.compute_bytes):
        return block.saved_bytes
    # The size of a block counts queries, keys and values of all heads in at least fp32, as without a fused kernel. One
    # saves them as they are, and a number for each row of scores.
    part, size = layer.attention, soft.compute_bytes
    if part.latent is not None:
        return block.saved_bytes
    wide = 3 * part.num_heads * max(part.head_dim, part.value_size) * max(size, 4.0)
    narrow = (part.num_heads + 2 * part.num_kv_heads) * part.head_dim * size + 4.0 * part.num_heads
    return block.saved_bytes - block.num_attention * max(0.0, wide - narrow)


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
    temporary = sum(max(moment.get(name, 0.0) for moment in moments) for name in {*chain(*moments)} - {"gradients"})
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
    soft, zero = work.software, work.parallel.zero_stage
    tensors = _step_tensors(_without_data_ranks(work), stage)
    copies_of_weights = weight_copies(work, stage, parts)
    # Gradients of earlier micro-batches. There are none if all forward passes come before the first backward pass.
    in_flight = micro_batches_in_flight(work, stage)
    before = 0.0 if in_flight == work.accumulation else max(gradients, copies_of_weights.whole)
    activations = {"activations": tensors.activations, "stage buffers": tensors.buffers}
    end_buffer = copies_of_weights.end_buffer if before and zero >= 2 else 0.0
    block = {
        "gradients": before,
        "compute weights": copies_of_weights.in_block,
        **activations,
        "recomputation": tensors.recomputation + copies_of_weights.recomputation,
        "backward": tensors.backward + copies_of_weights.matrix_gradient,
        "reduction": end_buffer,
    }
    # At the end of the backward pass of a block, it needs its activations no more, but has all of its gradients; those
    # of the block behind it are reduced.
    share = max(0.0, 1 - 1 / (max(1, stage.num_blocks) * in_flight))
    second = block | {"activations": tensors.activations * share, "reduction": copies_of_weights.reduction}
    block_end = block | {
        "activations": tensors.activations * share,
        "recomputation": 0.0,
        "backward": tensors.gradient_of_block + copies_of_weights.block_gradients,
        "reduction": copies_of_weights.reduction,
    }
    end = {
        "gradients": max(gradients, copies_of_weights.whole),
        "compute weights": copies_of_weights.in_ends,
        "stage buffers": tensors.buffers,
        "backward": copies_of_weights.end_gradients,
        "reduction": copies_of_weights.end_buffer,
    }
    moments = [block, second, block_end, end]
    if not before:
        # The first block has the fewest activations in its backward pass, but the gradients of all others exist.
        later = gradients - soft.gradient_bytes * (parts[0][0].num_trained + sum(p.num_trained for p, _ in parts[-1:]))
        first = {"gradients": max(0.0, later), "activations": tensors.activations * (1 - share)}
        moments.append(block | first)
    if not stage.has_head or work.spec.score_head:
        return moments
    head = {"gradients": before, "compute weights": copies_of_weights.in_ends, "reduction": end_buffer, **activations}
    loss = head | {"compute weights": copies_of_weights.in_loss, "loss": tensors.loss_tensors + tensors.chunk}
    head_end = head | {"loss": tensors.loss_tensors + tensors.loss_copies + copies_of_weights.head_cast}
    return [loss, head_end, head | {"loss": tensors.norm_backward}, *moments]


def _without_data_ranks(work: Workload) -> Workload:
    """Reduce a workload to what activations depend on, without ZeRO and data-parallel ranks.

    Many layouts of a search reduce to the same object, which serves as a cache key.
    """
    sizes, parallel = work.sizes, work.parallel
    axes = (sizes.pipeline, sizes.context, sizes.tensor, sizes.expert)
    key = (parallel.pipeline_schedule, parallel.stages_per_rank, work.sequence, work.micro_batch, work.accumulation)
    return _shared_step(work.model, work.software, work.checkpointing, axes, key)


@lru_cache(maxsize=16384)
def _shared_step(
    model: ModelSizes,
    software: Software,
    checkpointing: ActivationCheckpointingSettings,
    axes: tuple[int, ...],
    key: tuple[Any, ...],
) -> Workload:
    pipeline, context, tensor, expert = axes
    schedule, stages, sequence, micro_batch, accumulation = key
    sizes = AxisSizes(pipeline, 1, 1, context, tensor, expert)
    parallel = _settings_of_schedule(schedule, stages)
    return Workload(model, sizes, parallel, sequence, micro_batch, accumulation, checkpointing, software=software)


@lru_cache(maxsize=1024)
def _settings_of_schedule(schedule: Any, stages: Any) -> ParallelSettings:
    return ParallelSettings(pipeline_schedule=schedule, stages_per_rank=stages)


@dataclass(frozen=True)
class _StepTensors:
    """Bytes of activations and what the loss holds.

    Attributes:
        activations: what is stored for the backward passes of blocks, of all micro-batches in flight.
        recomputation: what the recomputation of a block stores beside its checkpoint.
        backward: gradients of activations in the backward pass of a block; gradient_of_block: that of its result.
        loss_tensors: what the last norm and the loss store, and gradients that the loss has computed already, of all
            micro-batches whose backward pass is not complete.
        loss_copies: these gradients of one micro-batch, times the scale of the loss.
        norm_backward: what the backward pass of the last norm needs, and the gradient of the head.
        chunk: what the loss computes a chunk from.
        buffers: what travels between stages.
    """

    activations: float = 0.0
    recomputation: float = 0.0
    backward: float = 0.0
    gradient_of_block: float = 0.0
    loss_tensors: float = 0.0
    loss_copies: float = 0.0
    norm_backward: float = 0.0
    chunk: float = 0.0
    buffers: float = 0.0


@lru_cache(maxsize=65536)
def _step_tensors(work: Workload, stage: Stage) -> _StepTensors:
    """Return what a rank of a stage holds of activations, of the loss, and of what travels between stages."""
    checkpointing, soft, spec = work.checkpointing, work.software, work.spec
    in_flight = micro_batches_in_flight(work, stage)
    delay = weight_passes(work, stage)
    total = recomputation = backward = 0.0
    for block, numbers in stage.blocks:
        all_bytes, selective, input_bytes = block_activations(block, work)
        num_checkpointed = 0
        if checkpointing.type != "none" and not delay:
            every = checkpointing.every
            num_checkpointed = len(numbers) if every == 1 else sum(number % every == 0 for number in numbers)
        checkpoint = input_bytes if checkpointing.type == "full" else selective
        total += in_flight * (num_checkpointed * checkpoint + (len(numbers) - num_checkpointed) * all_bytes)
        if delay:
            # The gradients of the results of matmuls, from which those of the weights are computed. A split backward
            # pass recomputes a block twice, and keeps what the second pass needs, so checkpoints save nothing.
            outputs = work.tokens / work.sizes.tensor * block.matmul_outputs * soft.compute_bytes
            total += delay * len(numbers) * outputs
        # Checkpointed blocks are recomputed one at a time, from what they have stored.
        recomputation = max(recomputation, (all_bytes - checkpoint) * min(1, num_checkpointed))
        backward = max(backward, backward_bytes(block, work))
    gradient = work.tokens / work.sizes.tensor * spec.hidden_size * soft.compute_bytes
    result = _StepTensors(total, recomputation=recomputation, backward=backward, gradient_of_block=gradient)
    if work.sizes.pipeline > 1 and soft.keeps_buffers:
        result = replace(result, buffers=_num_buffers(work, stage, in_flight) * boundary_bytes(work))
    if not stage.has_head or spec.score_head:
        return result
    states, weight = work.tokens * spec.hidden_size * soft.compute_bytes, _head_bytes(work)
    norm = spec.norm.saved_bytes(spec.hidden_size, 1, soft.compute_bytes) * work.tokens / work.sizes.tensor
    in_loss = in_flight if work.parallel.pipeline_schedule in ("gpipe", "zero_bubble") else 1.0
    backward_inputs = in_loss * (norm + states + weight)
    # Ranks of `tensor` gather the states of all tokens, and keep those of their own beside them.
    loss_tensors = backward_inputs + states * (1 + (work.sizes.tensor > 1) / work.sizes.tensor)
    # The gradients of the norm's result and input, and two products on the way, in at least fp32.
    norm_backward = backward_inputs - states + 4 * gradient * max(1.0, 4.0 / soft.compute_bytes)
    result = replace(result, loss_tensors=loss_tensors, norm_backward=norm_backward)
    return replace(result, loss_copies=states + weight, chunk=loss_bytes(work))


def _num_buffers(work: Workload, stage: Stage, in_flight: float) -> float:
    """Return how many hidden states, or gradients of them, a rank has beside those that its blocks store.

    It has buffers for what it receives of all micro-batches. Schedules of several stages per rank also wait for what
    they have sent only at the end of a step; others have one tensor that is on its way.
    """
    chunks, batches, schedule = stages_per_rank(work.parallel), work.accumulation, work.parallel.pipeline_schedule
    # In a V, both stages of the last rank are neighbors.
    inner = int(schedule == "zbv" and stage.rank == work.sizes.pipeline - 1)
    incoming = chunks - (stage.rank == 0) - inner
    outgoing = chunks - stage.has_head - inner
    # Those in flight count as the input of a block.
    past_batches = max(0.0, batches - in_flight)
    sends = batches * outgoing + past_batches * incoming if schedule not in ("gpipe", "1f1b") else 1.0
    return incoming * past_batches + outgoing * batches + sends


def backward_bytes(block: BlockSizes, work: Workload) -> float:
    """Return the bytes of gradients of activations at the fullest moment of the backward pass of a block.

    That is in the feed-forward: beside the gradient of the block's result, which ranks of `tensor` gather, there are
    those of the input of the last matmul, of the activation, and of the gate. In a mixture of experts, it may be where
    their outputs are weighted, which has the gradients of the outputs and of their products.
    """
    layer, soft = block.layer, work.software
    assert layer is not None
    part = layer.feed_forward.dense_equivalent()
    size = part.intermediate_size if isinstance(part, GatedFeedForward | PlainFeedForward) else work.spec.hidden_size
    factor = 2.0 if isinstance(part, GatedFeedForward) else 1.0
    tokens, hidden = work.tokens / work.sizes.tensor, work.spec.hidden_size
    gathered = work.tokens * hidden if work.sizes.tensor > 1 and soft.sequence_parallel else 0.0
    gradients = factor * size * tokens
    if block.experts is not None:
        rows = work.tokens if gathered else tokens
        gradients = max(
            gradients, 2 * rows * block.experts.num_experts_per_token * (block.experts.latent_size or hidden)
        )
    return soft.compute_bytes * (tokens * hidden + gathered + gradients)


def _head_bytes(work: Workload) -> float:
    """Return the bytes of the gradient of the head's weight, which the chunks of a loss accumulate in fp32."""
    if work.software.whole_logits:
        return 0.0
    vocabulary = -(-work.spec.vocab_size // work.sizes.tensor)
    return max(4.0, work.software.compute_bytes) * vocabulary * work.spec.hidden_size


def boundary_bytes(work: Workload) -> float:
    """Return the bytes of hidden states that a rank sends to the next pipeline stage, for one micro-batch."""
    tokens = work.tokens / work.sizes.tensor if work.software.splits_sends else work.tokens
    return tokens * work.spec.hidden_size * work.software.compute_bytes


def least_memory(work: Workload, data: int, usable: float) -> tuple[float, float]:
    """Return lower bounds of the memory of the fullest GPU for any ZeRO: of activations and loss, and with all state.

    Args:
        data: number of data-parallel ranks.
        usable: bytes of a GPU; if activations and loss are larger, the bounds are those of the first such stage.
    """
    activations, step = 0.0, _without_data_ranks(work)
    largest: list[tuple[Stage, float, float]] = []
    for stage in work.stages:
        tensors = _step_tensors(step, stage)
        activity = tensors.activations + tensors.buffers
        of_block, of_loss = (
            activity + tensors.recomputation + tensors.backward,
            activity + tensors.loss_tensors + tensors.chunk,
        )
        activations = max(activations, of_block, of_loss)
        if activations > usable:
            return activations, activations
        largest.append((stage, of_block, of_loss))
    soft, total = work.software, 0.0
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
        # Shards of experts along another dim may be rounded up less.
        total = max(total, fullest + 0.98 * state)
    return activations, total


def loss_bytes(work: Workload) -> float:
    """Return the bytes of the logits, or of one chunk of them, in all dtypes and with their gradient."""
    software, vocabulary = work.software, -(-work.spec.vocab_size // work.sizes.tensor)
    if software.whole_logits:
        return work.tokens * vocabulary * software.logit_bytes
    tokens = min(work.tokens, max(256, software.chunk_logits // vocabulary))
    return tokens * vocabulary * software.logit_bytes


def fullest_stage(work: Workload) -> tuple[Stage, RankMemory]:
    """Return the stage with the highest memory, and its memory."""
    memories = ((stage, stage_memory(work, stage)) for stage in work.stages)
    return max(memories, key=lambda pair: pair[1].total)
