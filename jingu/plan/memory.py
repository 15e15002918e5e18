"""The peak memory of a rank by part, in closed form.

Weights, gradients and optimizer state follow exactly from the shapes of the parameters and the axes of the mesh.
Activations follow from what a block saves for its backward pass, and from the number of micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from jingu.config.sections.optimizers import Slots
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.model.parts import score_bytes
from jingu.parallel.mesh import AxisSizes
from jingu.parallel.stages import stages_per_rank
from jingu.plan.software import Software
from jingu.plan.workload import BlockSizes, ModelSizes, Stage, Workload

# Elements of one chunk of logits (jingu/training/loss.py), on a GPU.
LOGITS_CHUNK = 2**27
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

    @property
    def state(self) -> float:
        """Bytes of weights, gradients and optimizer state on the GPU."""
        return sum(self.device.get(part, 0.0) for part in STATE)


@dataclass(frozen=True)
class RankShare:
    """A rank's share of a part of the model.

    Attributes:
        weights: bytes of its shards; state: bytes of their optimizer state.
        num_trained: trainable elements of its shards.
        gathered_bytes: bytes of the parameters that ZeRO gathers, in the compute dtype.
        num_reduced: elements of the gradients before ZeRO shards them.
        copy_bytes: bytes of compute-dtype copies of weights that are stored in a wider dtype.
    """

    weights: float
    state: float
    num_trained: int
    gathered_bytes: float
    num_reduced: int
    copy_bytes: float


@lru_cache(maxsize=16384)
def rank_share(
    part: BlockSizes, sizes: tuple[int, int, int], slots_of: Callable[..., Slots], soft: Software
) -> RankShare:
    """Return the share of the first rank of a stage of a block, or of embedding or head.

    Args:
        sizes: number of ranks of `tensor`, of `expert`, and of ZeRO's sharding group.
        slots_of: the method `slots` of the settings of the optimizer.
    """
    weights = state = gathered_bytes = copy_bytes = 0.0
    num_trained = num_reduced = 0
    for weight in part.weights:
        local, unsharded = weight.numbers(sizes)
        itemsize = weight.itemsize(soft)
        narrow = min(itemsize, soft.compute_bytes)
        weights += local * itemsize
        if weight.is_stored:
            # One matrix at a time is dequantized.
            copy_bytes = max(copy_bytes, unsharded * soft.compute_bytes)
            continue
        gathered_bytes += unsharded * narrow
        copy_bytes += unsharded * narrow * (weight.is_matmul and narrow < itemsize)
        if weight.is_trained:
            num_trained += local
            num_reduced += unsharded
            if not weight.is_copy:
                slots = slots_of(weight.shape, is_in_block=part.num_attention > 0)
                state += sum(slot.num_bytes(local, 4.0 * soft.state_share) for slot in slots.values())
    return RankShare(weights, state, num_trained, gathered_bytes, num_reduced, copy_bytes)


def micro_batches_in_flight(work: Workload, stage: Stage) -> float:
    """Return the maximum number of micro-batches in flight, in units of all blocks of the rank."""
    ranks, batches = work.sizes.pipeline, work.accumulation
    if ranks == 1:
        return 1.0
    if work.software.buffers_per_stage:
        return min(batches, work.software.buffers_per_stage * ranks + 4)
    chunks = stages_per_rank(work.parallel)
    match work.parallel.pipeline_schedule:
        case "gpipe":
            return batches
        case "1f1b":
            return min(batches, ranks - stage.rank)
        case "zero_bubble" | "zbv":
            # Activations are freed only with the gradients of weights, which wait until the bubble.
            return min(batches, ranks)
    # Interleaved: a rank has several chunks of blocks (Narayanan et al., 2021).
    warm_up = 2 * (ranks - stage.rank - 1) + (chunks - 1) * ranks + 1
    return min(batches, warm_up / chunks)


def block_activations(block: BlockSizes, work: Workload) -> tuple[float, float, float]:
    """Return the bytes that a block stores per micro-batch: all activations, those of selective checkpointing, and its
    input."""
    sizes, spec, layer, soft = work.sizes, work.spec, block.layer, work.software
    assert layer is not None
    tokens, hidden = work.tokens / sizes.tensor, spec.hidden_size
    input_bytes = (tokens if soft.sequence_parallel else work.tokens) * hidden * soft.compute_bytes
    total, inputs = tokens * saved_bytes(block, work), 0.0
    if not soft.sequence_parallel:
        # Norms, residuals and dropout are replicated on the ranks of `tensor` (Korthikanti et al., 2022, equation 2).
        total += (work.tokens - tokens) * 10 * hidden
    elif not soft.saved_per_hidden:
        # Ranks of `tensor` gather the tokens before attention and feed-forward, and keep them.
        inputs = (work.tokens - tokens) * (block.num_attention + 1) * hidden * soft.compute_bytes
    total += inputs
    heads = layer.attention.num_heads
    of_score = score_bytes(layer, soft.compute_bytes) if soft.fused_attention else soft.saved_scores
    scores = of_score * heads / sizes.tensor * work.tokens * work.sequence
    if block.experts is not None and sizes.expert > 1:
        # The all-to-all stores the rows of tokens in two more orders.
        total += 2 * tokens * block.experts.num_experts_per_token * hidden * soft.compute_bytes
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
    """Return the peak memory of a rank of a stage."""
    soft, parts = work.software, rank_shares(work, stage)
    device = {
        "weights": sum(count * part.weights for part, count in parts),
        "gradients": soft.gradient_bytes * sum(count * part.num_trained for part, count in parts),
        "optimizer state": sum(count * part.state for part, count in parts),
        **_gathered_memory(work, stage, parts),
        **_step_activations(_without_data_ranks(work), stage),
    }
    if work.accumulation == 1 and work.parallel.offload.type == "none":
        # With a single micro-batch, gradients are allocated while activations are freed, and reuse their memory.
        freed = [part for part in ("activations", "recomputation", "loss") if part in device]
        share = max(0.0, 1 - device["gradients"] / sum(device[part] for part in freed))
        device |= {part: device[part] * share for part in freed}
    full_gradients = device.pop("whole gradients", 0.0)
    host = {}
    if work.parallel.offload.type != "none":
        host = {part: device.pop(part) for part in STATE}
        device["gradients"] = full_gradients
    device["gradients"] = max(device["gradients"], full_gradients)
    device["buckets"] = soft.buckets_gib * 2**30
    # Parts of a GPU that no tensor uses.
    device["fragmentation"] = (soft.reserved - 1) * sum(device.values())
    axes = sum(size > 1 for size in work.sizes.shape)
    device["libraries"] = soft.context_gib * 2**30 + axes * soft.group_gib * 2**30
    return RankMemory({part: size for part, size in device.items() if size}, host)


def rank_shares(work: Workload, stage: Stage) -> list[tuple[RankShare, int]]:
    """Return the share of the first rank of a stage of each kind of block and of embedding and head, with counts."""
    sizes = (work.sizes.tensor, work.sizes.expert, work.sizes.shard * work.sizes.context)
    key = (sizes, work.optimizer.slots, work.software)
    return [(rank_share(part, *key), count) for part, count in stage.parts]


def checkpoint_bytes(work: Workload) -> float:
    """Return the bytes of a checkpoint: what is trained, and the state of its optimizer."""
    model, soft = work.model, work.software
    # A tied head is saved with the embedding.
    ends = (model.embedding, model.norm if work.spec.tie_word_embeddings else model.head)
    key = ((1, 1, 1), work.optimizer.slots, soft)
    parts = [rank_share(part, *key) for part in (*model.blocks, *ends)]
    return sum(part.num_trained * soft.weight_bytes + part.state for part in parts)


def _gathered_memory(work: Workload, stage: Stage, parts: list[tuple[RankShare, int]]) -> dict[str, float]:
    """Return the memory of gathered parameters, whole gradients and their reduction, beside the shards."""
    soft, zero = work.software, work.parallel.zero_stage
    if not soft.copies_weights:
        return {}
    is_offloaded = work.parallel.offload.type != "none" and soft.offload_copies_weights
    if work.sizes.data * work.sizes.context == 1 and not is_offloaded:
        # Weights are cast to the compute dtype in the forward pass, and autograd stores these copies unless it
        # recomputes the forward pass.
        if work.checkpointing.type == "full":
            return {"compute weights": 0.0}
        return {"compute weights": sum(part.copy_bytes * count for part, count in parts)}
    size = sum(part.gathered_bytes * count for part, count in parts)
    blocks = parts[: len(stage.blocks)]
    if zero == 3:
        # The parameters of the current block, and the prefetched ones of the next.
        size += 2 * max(part.gathered_bytes for part, _ in blocks) - sum(
            part.gathered_bytes * count for part, count in blocks
        )
    result = {"compute weights": size}
    if zero <= 1 and work.accumulation > 1:
        # Gradients stay unsharded until the last micro-batch.
        result["whole gradients"] = soft.reduce_bytes * sum(part.num_reduced * count for part, count in parts)
    # The unsharded gradients of one block during their reduce-scatter.
    result["reduction"] = (soft.compute_bytes + soft.reduce_bytes) * max(part.num_reduced for part, _ in blocks)
    return result


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
    parallel = ParallelSettings(pipeline_schedule=schedule, stages_per_rank=stages)
    return Workload(model, sizes, parallel, sequence, micro_batch, accumulation, checkpointing, software=software)


@lru_cache(maxsize=65536)
def _step_activations(work: Workload, stage: Stage) -> dict[str, float]:
    """Return the bytes of activations in flight, of what travels between stages, and of one chunk of the loss."""
    checkpointing = work.checkpointing
    in_flight = micro_batches_in_flight(work, stage)
    total = recomputation = 0.0
    for block, numbers in stage.blocks:
        all_bytes, selective, input_bytes = block_activations(block, work)
        num_checkpointed = 0
        if checkpointing.type != "none":
            num_checkpointed = sum(number % checkpointing.every == 0 for number in numbers)
        checkpoint = input_bytes if checkpointing.type == "full" else selective
        total += in_flight * (num_checkpointed * checkpoint + (len(numbers) - num_checkpointed) * all_bytes)
        # Checkpointed blocks are recomputed one at a time, from what they have stored.
        recomputation = max(recomputation, (all_bytes - checkpoint) * min(1, num_checkpointed))
    result = {"activations": total, "recomputation": recomputation}
    ranks = work.sizes.pipeline
    if ranks > 1 and work.software.keeps_buffers:
        # Buffers for the hidden states and their gradients of all micro-batches. Those in flight count as the input of
        # a block.
        incoming = stages_per_rank(work.parallel) * (stage.rank > 0)
        outgoing = stages_per_rank(work.parallel) * (stage.rank + 1 < ranks)
        buffers = incoming * max(0.0, work.accumulation - in_flight) + outgoing * work.accumulation
        result["stage buffers"] = buffers * boundary_bytes(work)
    if stage.has_head and not work.spec.score_head:
        result["loss"] = loss_bytes(work)
    return result


def boundary_bytes(work: Workload) -> float:
    """Return the bytes of hidden states that a rank sends to the next pipeline stage, for one micro-batch."""
    tokens = work.tokens / work.sizes.tensor if work.software.splits_sends else work.tokens
    return tokens * work.spec.hidden_size * work.software.compute_bytes


def least_memory(work: Workload, data: int) -> tuple[float, float]:
    """Return lower bounds of the memory of the fullest GPU for any ZeRO: of activations and loss, and with all state.

    Args:
        data: number of data-parallel ranks.
    """
    if work.accumulation == 1:
        # Gradients may reuse the memory of activations.
        return 0.0, 0.0
    soft, sizes = work.software, work.sizes
    parallel = work.parallel.model_copy(update={"zero_stage": 3, "shard": data, "replicate": 1})
    sharded = replace(work, parallel=parallel, sizes=replace(sizes, shard=data, replicate=1))
    activations, total = 0.0, 0.0
    for stage in work.stages:
        size = sum(_step_activations(_without_data_ranks(work), stage).values())
        shares = rank_shares(sharded, stage)
        numbers = sum(count * part.num_trained for part, count in shares)
        state = soft.gradient_bytes * numbers + sum(count * (part.weights + part.state) for part, count in shares)
        gathered = _gathered_memory(sharded, stage, shares)
        # A stage of a single block gathers less without ZeRO 3.
        whole = sum(part.gathered_bytes * count for part, count in shares)
        copies = min(whole, gathered.get("compute weights", 0.0)) + gathered.get("reduction", 0.0)
        # Shards of experts along another dim may be rounded up less.
        activations, total = max(activations, size), max(total, size + copies + 0.98 * state)
    return activations, total


def loss_bytes(work: Workload) -> float:
    """Return the bytes of hidden states and their gradient, of logits, and of what the chunks of a loss need.

    A loss that computes one chunk of the logits at a time accumulates the gradient of the head's weight in fp32.
    """
    software, vocabulary = work.software, -(-work.spec.vocab_size // work.sizes.tensor)
    states = 2 * work.tokens * work.spec.hidden_size * software.compute_bytes
    if software.whole_logits:
        return states + work.tokens * vocabulary * software.logit_bytes
    tokens = min(work.tokens, max(256, LOGITS_CHUNK // vocabulary))
    return states + tokens * vocabulary * software.logit_bytes + 4.0 * vocabulary * work.spec.hidden_size


def fullest_stage(work: Workload) -> tuple[Stage, RankMemory]:
    """Return the stage with the highest memory, and its memory."""
    memories = ((stage, stage_memory(work, stage)) for stage in work.stages)
    return max(memories, key=lambda pair: pair[1].total)
