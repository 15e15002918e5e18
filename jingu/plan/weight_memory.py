"""A rank's share of weights, gradients and optimizer state, and the copies that are gathered from the shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from jingu.config.sections.optimizers import Slots
from jingu.model.adapter_specs import Lora
from jingu.model.spec import ModelSpec
from jingu.parallel.stages import splits_backward
from jingu.plan.in_flight import micro_batches_in_flight
from jingu.plan.software import Software
from jingu.plan.workload import BlockSizes, Stage, Workload


@dataclass(frozen=True)
class RankShare:
    """A rank's share of a part of the model.

    Attributes:
        weights: bytes of its shards; state: bytes of their optimizer state.
        num_trained: trainable elements of its shards.
        gathered_bytes: bytes of the parameters that ZeRO gathers, in the compute dtype.
        num_reduced: elements of the gradients before ZeRO shards them.
        copy_bytes: bytes of compute-dtype copies of weights that are stored in a wider dtype.
        num_largest: elements of the gradient of the largest parameter, before ZeRO shards it.
        expert_bytes, num_expert: the parts of `gathered_bytes` and `num_reduced` that experts have.
    """

    weights: float
    state: float
    num_trained: int
    gathered_bytes: float
    num_reduced: int
    copy_bytes: float
    num_largest: int
    expert_bytes: float
    num_expert: int


@lru_cache(maxsize=16384)
def rank_share(
    part: BlockSizes, sizes: tuple[int, int, int], slots_of: Callable[..., Slots], soft: Software
) -> RankShare:
    """Return the share of the first rank of a stage of a block, or of embedding or head.

    Args:
        sizes: number of ranks of `tensor`, of `expert`, and of ZeRO's sharding group.
        slots_of: the method `slots` of the settings of the optimizer.
    """
    weights = state = gathered_bytes = copy_bytes = expert_bytes = 0.0
    num_trained = num_reduced = num_largest = num_expert = 0
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
        expert_bytes += unsharded * narrow * weight.is_expert
        copy_bytes += unsharded * narrow * (weight.is_matmul and narrow < itemsize)
        if weight.is_trained:
            num_trained += local
            num_reduced += unsharded
            num_expert += unsharded * weight.is_expert
            num_largest = max(num_largest, unsharded)
            if not weight.is_copy:
                slots = slots_of(weight.shape, is_in_block=part.num_attention > 0)
                state += sum(slot.num_bytes(local, 4.0 * soft.state_share) for slot in slots.values())
    of_collectives = (gathered_bytes, num_reduced, copy_bytes, num_largest, expert_bytes, num_expert)
    return RankShare(weights, state, num_trained, *of_collectives)


def rank_shares(work: Workload, stage: Stage) -> list[tuple[RankShare, int]]:
    """Return the share of the first rank of a stage of each kind of block and of embedding and head, with counts."""
    key = _share_key(work)
    return [(rank_share(part, *key), count) for part, count in stage.parts]


def _share_key(work: Workload) -> tuple[tuple[int, int, int], Callable[..., Slots], Software]:
    sizes = (work.sizes.tensor, work.sizes.expert, work.sizes.shard * work.sizes.context)
    return sizes, work.optimizer.slots, work.software


def checkpoint_bytes(work: Workload) -> float:
    """Return the bytes of a checkpoint: what is trained, and the state of its optimizer."""
    model, soft = work.model, work.software
    # A tied head is saved with the embedding.
    ends = (model.embedding, model.norm if work.spec.tie_word_embeddings else model.head)
    key = ((1, 1, 1), work.optimizer.slots, soft)
    parts = [rank_share(part, *key) for part in (*model.blocks, *ends)]
    return sum(part.num_trained * soft.weight_bytes + part.state for part in parts)


@dataclass(frozen=True)
class WeightCopies:
    """Bytes of copies of weights, and of gradients before ZeRO shards them.

    Attributes:
        in_block: copies of weights in the backward pass of a block; in_loss: during the loss; in_ends: in the backward
            passes of head and embedding.
        recomputation: copies that the recomputation of a block makes.
        whole: gradients of all parameters, which ZeRO 0 and 1 keep until the last micro-batch.
        block_gradients: whole gradients of a block at the end of its backward pass; matrix_gradient: that of its
            largest matrix; end_gradients: those of embedding and head; head_cast: the head's gradient in the compute
            dtype, and copies of it; head_gradient: that gradient as it exists during the backward passes of the blocks.
        reduction: the buffer from which the gradients of a block are reduced; end_buffer: that of embedding and head,
            which FSDP keeps until the next reduction.
    """

    in_block: float = 0.0
    in_loss: float = 0.0
    in_ends: float = 0.0
    recomputation: float = 0.0
    whole: float = 0.0
    block_gradients: float = 0.0
    matrix_gradient: float = 0.0
    end_gradients: float = 0.0
    head_cast: float = 0.0
    head_gradient: float = 0.0
    reduction: float = 0.0
    end_buffer: float = 0.0


def head_is_computed(spec: ModelSpec) -> bool:
    """Return whether the matrix that computes logits is not the parameter itself: see `Decoder.head_operands`."""
    has_adapter = isinstance(spec.adapter, Lora) and "head" in spec.adapter.target_modules
    return spec.head_bias or spec.normalize_lm_head or has_adapter


def weight_copies(work: Workload, stage: Stage, parts: list[tuple[RankShare, int]]) -> WeightCopies:
    """Return the bytes of copies of weights and of whole gradients that a rank has beside its shards."""
    soft, zero = work.software, work.parallel.zero_stage
    blocks, ends = parts[: len(stage.blocks)], parts[len(stage.blocks) :]
    largest = max(part.num_reduced for part, _ in blocks)
    end_numbers = sum(part.num_reduced for part, _ in ends)
    # The gradient of an embedding is as large as its matrix, and is added to that of earlier micro-batches.
    again = work.accumulation > 1
    if not soft.copies_weights:
        return _whole_memory(work, parts)
    is_offloaded = work.parallel.offload.type != "none" and soft.offload_copies_weights
    # A tied head is the matrix of the embedding.
    head = rank_share(work.model.head, *_share_key(work)) if stage.has_head else None
    # A bias or an adapter is joined to the matrix, and rows are normalized, in a copy of it.
    is_computed = head_is_computed(work.spec)
    head_copy = 0.0 if head is None else head.copy_bytes + is_computed * head.weights
    # The backward pass of a norm of its rows has three more tensors of this size, that of a joined matrix one.
    num_copies = 3 * work.spec.normalize_lm_head + work.spec.head_bias
    if work.sizes.data * work.sizes.context == 1 and not is_offloaded:
        # Weights are cast to the compute dtype in the forward pass of each micro-batch. Autograd stores these copies
        # unless it recomputes the forward pass.
        copies = sum(part.copy_bytes * count for part, count in blocks)
        recomputation = 0.0
        if work.checkpointing.type != "none":
            recomputation, copies = max(part.copy_bytes for part, _ in blocks), 0.0
        copies *= micro_batches_in_flight(work, stage)
        end_gradients = soft.gradient_bytes * max((part.num_reduced for part, _ in ends[:1]), default=0) * again
        # Later micro-batches add it to that of the first.
        head_gradient = 0.0 if head is None or again else soft.gradient_bytes * head.num_reduced
        return WeightCopies(
            copies,
            copies + head_copy,
            copies,
            recomputation,
            end_gradients=end_gradients,
            head_cast=0.0 if head is None else num_copies * head.weights,
            head_gradient=head_gradient,
        )
    compute, reduce = soft.compute_bytes, soft.reduce_bytes
    of_ends = sum(part.gathered_bytes for part, _ in ends)
    size = sum(part.gathered_bytes * count for part, count in parts)
    in_block = in_loss = in_ends = size
    if zero == 3:
        # The parameters of the current block, and the prefetched ones of the next in a buffer.
        of_block = max(part.gathered_bytes for part, _ in blocks)
        in_block, in_loss, in_ends = of_ends + 2 * of_block, of_ends + of_block, of_ends + of_block
    if head is not None:
        in_loss += is_computed * head.gathered_bytes
    whole = 0.0
    if zero < 3 and not again:
        # FSDP keeps the buffer in which it has gathered the last block.
        in_loss += blocks[-1][0].gathered_bytes
    if again and (zero <= 1 or splits_backward(work.parallel, work.sizes.pipeline)):
        # Gradients stay unsharded until the last micro-batch; with split backward passes, PyTorch reduces them then.
        whole = reduce * sum(part.num_reduced * count for part, count in parts)
    # Gradients of the current micro-batch are added to whole ones at once, unless they have another dtype.
    current = compute * (not whole or compute < reduce)
    return WeightCopies(
        in_block,
        in_loss,
        in_ends,
        whole=whole,
        block_gradients=current * largest,
        matrix_gradient=compute * max(part.num_largest for part, _ in blocks),
        end_gradients=(reduce if whole else compute) * end_numbers,
        head_cast=compute * (0 if head is None else head.num_reduced) * ((compute < reduce) + num_copies),
        # FSDP reduces it after the backward pass of the embedding.
        head_gradient=current * (0 if head is None else head.num_reduced),
        reduction=reduce * largest,
        end_buffer=reduce * end_numbers,
    )


def _whole_memory(work: Workload, parts: list[tuple[RankShare, int]]) -> WeightCopies:
    """Return what a system without FSDP has beside its shards: ZeRO 1 and 2 divide no weights, and 1 no gradients."""
    soft, zero = work.software, work.parallel.zero_stage
    if zero not in (1, 2):
        return WeightCopies()
    whole = sum(part.gathered_bytes * count for part, count in parts) * soft.weight_bytes / soft.compute_bytes
    others = whole - sum(part.weights * count for part, count in parts)
    gradients = soft.gradient_bytes * sum(part.num_reduced * count for part, count in parts)
    return WeightCopies(others, others, others, whole=gradients if zero == 1 else 0.0)
