"""What a rank stores for the backward passes of a step, in closed form: activations, losses, and buffers of stages.

Dims: M moments of a step, C stages of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.model.components import AlibiPositions, RelativeBias
from jingu.model.feed_forward_specs import GatedFeedForward, PlainFeedForward
from jingu.model.norm_specs import RmsNorm
from jingu.model.parts import norm_places, score_bytes
from jingu.parallel.mesh import AxisSizes
from jingu.parallel.stages import splits_backward
from jingu.plan.in_flight import InFlight, end_of_step, moments_in_flight, stages_of_rank
from jingu.plan.software import Software
from jingu.plan.workload import BlockSizes, ModelSizes, Stage, Workload


def block_activations(block: BlockSizes, work: Workload) -> tuple[float, float, float]:
    """Return the bytes that a block stores per micro-batch: all activations, those of selective checkpointing, and its
    input."""
    sizes, spec, layer, soft = work.sizes, work.spec, block.layer, work.software
    assert layer is not None
    if not block.has_backward:
        return 0.0, 0.0, 0.0
    tokens, hidden = work.tokens / sizes.tensor, spec.hidden_size
    input_bytes = (tokens if soft.sequence_parallel else work.tokens) * hidden * soft.compute_bytes
    total, inputs = tokens * saved_bytes(block, work, is_compiled=work.is_compiled), 0.0
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
    of_score = (
        score_bytes(layer, soft.compute_bytes, is_compiled=work.is_compiled)
        if soft.fused_attention
        else soft.saved_scores
    )
    if soft.stores_biased_scores and isinstance(layer.position, RelativeBias):
        of_score = max(4.0, soft.compute_bytes)
    scores = of_score * heads / sizes.tensor * work.tokens * work.sequence
    if not soft.fused_attention:
        # Selective checkpointing recomputes the scores alone.
        return total + scores, total, input_bytes
    outputs = soft.saved_matmuls * block.matmul_outputs * soft.compute_bytes
    selective = tokens * (outputs + 4 * heads) + input_bytes + inputs
    return total + scores, min(selective, total + scores), input_bytes


def saved_bytes(block: BlockSizes, work: Workload, *, is_compiled: bool) -> float:
    """Return the bytes per token that a block saves for its backward pass, without attention scores.

    Args:
        is_compiled: whether it is compiled.
    """
    soft, layer = work.software, block.layer
    if soft.saved_per_hidden:
        return soft.saved_per_hidden * work.spec.hidden_size
    saved = block.compiled_bytes if is_compiled else block.saved_bytes
    if layer is None or not soft.flash_attention or not layer.has_attention or score_bytes(layer, soft.compute_bytes):
        return saved
    # The size of a block counts queries, keys and values of all heads in at least fp32, as without a fused kernel. One
    # saves them as they are, padded to one size, and a number for each row of scores.
    part, size = layer.attention, soft.compute_bytes
    largest = max(part.head_dim, part.value_size)
    wide = 3 * part.num_heads * largest * max(size, 4.0)
    narrow = (part.num_heads + 2 * part.num_kv_heads) * largest * size + 4.0 * part.num_heads
    if size < 4:
        narrow += part.joined_bytes(size)
    if part.head_dim != part.value_size:
        # The padded results are copied for the output projection.
        narrow += part.num_heads * largest * size
    # Kernels that store biased scores save the others as without fusion.
    stores_scores = soft.stores_biased_scores and isinstance(layer.position, RelativeBias)
    return saved + (block.num_attention - stores_scores) * (narrow - wide)


def backward_bytes(block: BlockSizes, work: Workload) -> float:
    """Return the bytes beside what is stored at the fullest moment of a block's passes: gradients of activations.

    That is in the feed-forward: beside the gradient of the block's result, which ranks of `tensor` gather, there are
    those of the input of the last matmul, of the activation, and of the gate. In a mixture of experts, it may be where
    their outputs are weighted, which has the gradients of the outputs and of their products.
    """
    layer, soft = block.layer, work.software
    assert layer is not None
    part = layer.feed_forward.dense_equivalent()
    size = part.intermediate_size if isinstance(part, GatedFeedForward | PlainFeedForward) else work.spec.hidden_size
    # The backward pass of a ReLU needs its result, so that no memory is free when it has both gradients.
    has_both = isinstance(part, GatedFeedForward) or (isinstance(part, PlainFeedForward) and part.activation == "relu")
    factor = 2.0 if has_both else 1.0
    tokens, hidden = work.tokens / work.sizes.tensor, work.spec.hidden_size
    gathered = work.tokens * hidden if work.sizes.tensor > 1 and soft.sequence_parallel else 0.0
    gradients = factor * size * tokens
    if block.experts is not None:
        rows = work.tokens if gathered else tokens
        # With biases, there are also the results of the last matmul without them, and the biases of all rows.
        copies = 4 if block.experts.bias else 2
        gradients = max(
            gradients, copies * rows * block.experts.num_experts_per_token * (block.experts.latent_size or hidden)
        )
    # At the end of a forward pass, ranks of `tensor` have partial sums of all tokens, and a copy in the order in which
    # they are scattered; also their part of the result, and what is alive of their part of a block.
    forward = 0.0 if soft.saved_per_hidden else 2 * gathered + 4 * tokens * hidden * bool(gathered)
    total = soft.compute_bytes * max(tokens * hidden + gathered + gradients, forward)
    if isinstance(layer.position, RelativeBias):
        # Gradients of biases, and of the encoder's states, are sums over blocks.
        total += max(4.0, soft.compute_bytes) * layer.attention.num_heads * work.sequence**2 / work.sizes.context
        total += soft.compute_bytes * tokens * hidden
    if norm_places(layer, "feed_forward")[1] and not work.is_compiled:
        # A norm behind the feed-forward comes first, while all that the block has saved exists.
        total = max(total, soft.compute_bytes * tokens * hidden + norm_gradients(work, 1 + (soft.compute_bytes < 4)))
    if soft.fused_attention and score_bytes(layer, soft.compute_bytes):
        # Two gradients of the scores, while what the feed-forward has saved exists no more.
        scores = 2 * max(4.0, soft.compute_bytes) * layer.attention.num_heads * tokens * work.sequence
        feed_forward = layer.feed_forward.saved_bytes(hidden, soft.compute_bytes, is_compiled=work.is_compiled)
        total = max(total, scores - tokens * feed_forward)
    return total


def norm_gradients(work: Workload, copies: int = 0) -> float:
    """Return the bytes of what the backward pass of a norm computes, in at least fp32.

    They are the gradients of its result and input, and two products on the way.

    Args:
        copies: number of further tensors of this size.
    """
    numbers = work.tokens / work.sizes.tensor * work.spec.hidden_size
    return (4 + copies) * numbers * max(4.0, work.software.compute_bytes)


def loss_bytes(work: Workload) -> float:
    """Return the bytes of the logits, or of one chunk of them, in all dtypes and with their gradient."""
    software, vocabulary = work.software, -(-work.spec.vocab_size // work.sizes.tensor)
    if software.whole_logits:
        return work.tokens * vocabulary * software.logit_bytes
    tokens = min(work.tokens, max(256, software.chunk_logits // vocabulary))
    size = software.logit_bytes
    if work.spec.logit_softcap is not None:
        # The logits before and behind the soft cap, and their gradient, in at least fp32.
        size = 3 * max(4.0, software.compute_bytes)
    return tokens * vocabulary * size


def boundary_bytes(work: Workload) -> float:
    """Return the bytes of hidden states that a rank sends to the next pipeline stage, for one micro-batch."""
    tokens = work.tokens / work.sizes.tensor if work.software.splits_sends else work.tokens
    return tokens * work.spec.hidden_size * work.software.compute_bytes


def _head_bytes(work: Workload) -> float:
    """Return the bytes of the gradient of the head's weight, which the chunks of a loss accumulate in fp32."""
    is_trained = any(weight.is_trained and weight.is_matmul for weight in work.model.head.weights)
    if work.software.whole_logits or not is_trained:
        return 0.0
    vocabulary = -(-work.spec.vocab_size // work.sizes.tensor)
    return max(4.0, work.software.compute_bytes) * vocabulary * work.spec.hidden_size


def without_data_ranks(work: Workload) -> Workload:
    """Reduce a workload to what activations depend on, without ZeRO and data-parallel ranks.

    Many layouts of a search reduce to the same object, which serves as a cache key.
    """
    sizes = work.sizes
    axes = (sizes.pipeline, sizes.context, sizes.tensor, sizes.expert)
    batch = (work.sequence, work.micro_batch, work.accumulation)
    return _shared_step(work.model, work.software, work.checkpointing, axes, (*work.stage_key, *batch))


@lru_cache(maxsize=16384)
def _shared_step(
    model: ModelSizes,
    software: Software,
    checkpointing: ActivationCheckpointingSettings,
    axes: tuple[int, ...],
    key: tuple[Any, ...],
) -> Workload:
    pipeline, context, tensor, expert = axes
    schedule, stages, layers, sequence, micro_batch, accumulation = key
    sizes = AxisSizes(pipeline, 1, 1, context, tensor, expert)
    parallel = _settings_of_schedule(schedule, stages, layers)
    return Workload(model, sizes, parallel, sequence, micro_batch, accumulation, checkpointing, software=software)


@lru_cache(maxsize=1024)
def _settings_of_schedule(schedule: Any, stages: Any, layers: tuple[int, ...] | None) -> ParallelSettings:
    return ParallelSettings(
        pipeline_schedule=schedule, stages_per_rank=stages, layers_per_stage=None if layers is None else list(layers)
    )


@dataclass(frozen=True)
class StepTensors:
    """Bytes of activations and what the loss holds.

    Attributes:
        activations: what is stored for the backward passes of all micro-batches in flight, at the fullest backward pass
            of a block; activations_in_loss: at the fullest loss, without the loss of the current micro-batch.
        recomputation: what the recomputation of a block stores beside its checkpoint.
        backward: gradients of activations in the backward pass of a block; gradient_of_block: that of its result.
        loss_tensors: what the last norm and the loss store, and gradients that the loss has computed already, of all
            micro-batches whose backward pass is not complete.
        loss_copies: these gradients of one micro-batch, times the scale of the loss.
        norm_backward: what the backward pass of the last norm needs, and the gradient of the head.
        chunk: what the loss computes a chunk from.
        buffers: what travels between stages, at the fullest backward pass of a block; buffers_in_loss: at the fullest
            loss; buffers_at_end: after the last backward pass.
    """

    activations: float = 0.0
    activations_in_loss: float = 0.0
    recomputation: float = 0.0
    backward: float = 0.0
    gradient_of_block: float = 0.0
    loss_tensors: float = 0.0
    loss_copies: float = 0.0
    norm_backward: float = 0.0
    chunk: float = 0.0
    buffers: float = 0.0
    buffers_in_loss: float = 0.0
    buffers_at_end: float = 0.0


@lru_cache(maxsize=65536)
def step_tensors(work: Workload, stage: Stage) -> StepTensors:
    """Return what a rank of a stage holds of activations, of the loss, and of what travels between stages."""
    soft, spec = work.software, work.spec
    stages, moments = stages_of_rank(work, stage), moments_in_flight(work, stage)
    sizes: list[_MicroBatchBytes] = []
    of_blocks = {block: _stored_by_block(work, block) for block, _ in stage.blocks}
    # Many stages of a rank have equal parts.
    of_parts: dict[Any, _MicroBatchBytes] = {}
    for single in stages:
        key = single.parts if work.checkpointing.every == 1 else single
        if key not in of_parts:
            of_parts[key] = _stored_by_stage(work, single, of_blocks)
        sizes.append(of_parts[key])
    states, weight = work.tokens * spec.hidden_size * soft.compute_bytes, _head_bytes(work)
    norm = spec.norm.saved_bytes(spec.hidden_size, 1, soft.compute_bytes) * work.tokens / work.sizes.tensor
    has_loss = stage.has_head and not spec.score_head
    # What the last norm and the loss store, and gradients that the loss has computed already.
    prediction = 0.0
    if has_loss:
        prediction = _prediction_bytes(work, norm + states + weight)
        sizes[-1] = replace(sizes[-1], loss=norm + states + weight + prediction)
    splits = splits_backward(work.parallel, work.sizes.pipeline)
    # Checkpointed blocks are recomputed one at a time, from what they have stored. A split backward pass keeps what it
    # recomputes until its second part.
    recomputation = 0.0 if splits else max(size.recomputation for size in sizes)
    gradient = work.tokens / work.sizes.tensor * spec.hidden_size * soft.compute_bytes
    buffers_M = _stage_buffer_bytes(work, stage, moments)
    activations, buffers = _fullest(_bytes_in_flight(moments, sizes, splits), buffers_M)
    of_norm = norm_gradients(work)
    result = StepTensors(
        activations=activations,
        buffers=buffers,
        buffers_at_end=float(_stage_buffer_bytes(work, stage, end_of_step(len(stages), work.accumulation))[0]),
        recomputation=recomputation,
        backward=max([of_norm * splits, *(backward_bytes(block, work) for block, _ in stage.blocks)]),
        gradient_of_block=gradient,
    )
    if not has_loss:
        return result
    backward_inputs = norm + states + weight
    # Ranks of `tensor` gather the states of all tokens, and keep those of their own beside them.
    loss_tensors = backward_inputs + prediction + states * (1 + (work.sizes.tensor > 1) / work.sizes.tensor)
    norm_backward = backward_inputs - states * (not splits) + of_norm
    # A factor of the logits multiplies the states, and the bias of a head is appended to them; both make a copy.
    is_scaled = spec.scale_lm_head or spec.logit_scale != 1.0
    # Backward passes of the last stage follow on losses.
    follows_M = moments.stage == len(stages) - 1
    of_loss_M = np.where(follows_M, _bytes_in_flight(moments, sizes, splits, in_loss=True), -np.inf)
    activations, buffers = _fullest(of_loss_M, buffers_M)
    return replace(
        result,
        activations_in_loss=activations,
        buffers_in_loss=buffers,
        loss_tensors=loss_tensors,
        norm_backward=norm_backward,
        loss_copies=states + weight,
        chunk=loss_bytes(work) + states * (is_scaled / work.sizes.tensor + spec.head_bias),
    )


@dataclass(frozen=True)
class _MicroBatchBytes:
    """What the blocks of a stage store per micro-batch, in bytes.

    Attributes:
        forward: what the forward pass stores.
        weight_pass: what the first part of a split backward pass adds: recomputed activations, and the gradients of the
            results of matmuls, from which those of the weights are computed.
        recomputation: what the recomputation of a block adds.
        loss: what the loss stores, and the gradients that it has computed.
    """

    forward: float = 0.0
    weight_pass: float = 0.0
    recomputation: float = 0.0
    loss: float = 0.0


def _stored_by_stage(work: Workload, stage: Stage, of_blocks: dict[BlockSizes, _MicroBatchBytes]) -> _MicroBatchBytes:
    """Return what the blocks of a stage store per micro-batch.

    Args:
        of_blocks: what one block of each kind stores without checkpointing, and what checkpointing recomputes.
    """
    every = work.checkpointing.every
    forward = weight_pass = recomputation = 0.0
    for block, numbers in stage.blocks:
        size = of_blocks[block]
        num_checkpointed = len(numbers) if every == 1 else sum(number % every == 0 for number in numbers)
        forward += len(numbers) * size.forward - num_checkpointed * size.recomputation
        weight_pass += len(numbers) * size.weight_pass + num_checkpointed * size.recomputation
        recomputation = max(recomputation, size.recomputation * min(1, num_checkpointed))
    forward += _mask_bytes(work, stage)
    if stage.has_head:
        # The gradient of the result of the last norm.
        weight_pass += work.tokens / work.sizes.tensor * work.spec.hidden_size * max(4.0, work.software.compute_bytes)
    else:
        # The gradient of the result of the last block is in the buffer into which it was received.
        weight_pass -= boundary_bytes(work)
    if work.model.embedding in stage.ends:
        # Nobody needs gradients of the inputs of the first stage: its whole backward pass comes with those of weights.
        weight_pass = 0.0
    return _MicroBatchBytes(forward, weight_pass, recomputation)


def _prediction_bytes(work: Workload, loss: float) -> float:
    """Return what the layers of multi-token prediction store per micro-batch, with their losses.

    Args:
        loss: what the last norm and the loss of the next token store.
    """
    block = work.model.prediction
    if block is None:
        return 0.0
    # Two norms come before the projection, whose input is as wide as both together.
    spec, size = work.spec, work.software.compute_bytes
    tokens = work.tokens / work.sizes.tensor
    projection = tokens * (2 * spec.norm.saved_bytes(spec.hidden_size, 1, size) + 2 * spec.hidden_size * size)
    return spec.mtp_layers * (block_activations(block, work)[0] + projection + loss)


def _mask_bytes(work: Workload, stage: Stage) -> float:
    """Return the bytes of the masks of a micro-batch: of windows and position biases, shared by all equal layers."""
    size = work.software.compute_bytes
    masks: dict[tuple[int | None, ...], float] = {}
    if not work.software.flash_attention:
        return 0.0
    for block, _ in stage.blocks:
        layer = block.layer
        if layer is None or not layer.has_attention:
            continue
        part, heads = layer.attention, layer.attention.num_heads
        key = (block.is_causal, part.sliding_window, part.chunk_size)
        if isinstance(layer.position, RelativeBias):
            # Trained biases stay in at least fp32.
            masks[(*key, heads)] = heads * max(4.0, size)
        elif isinstance(layer.position, AlibiPositions):
            masks[(*key, heads)] = heads * size
        elif part.reach is not None and part.reach < work.sequence:
            masks[key] = size
    # Rows of several documents have masks of their own.
    return sum(masks.values()) * work.tokens * work.sequence


def _stored_by_block(work: Workload, block: BlockSizes) -> _MicroBatchBytes:
    """Return what a block stores without checkpointing, and what checkpointing recomputes."""
    all_bytes, selective, input_bytes = block_activations(block, work)
    checkpoint = {"none": all_bytes, "selective": selective, "full": input_bytes}[work.checkpointing.type]
    gradients = work.tokens / work.sizes.tensor * _gradients_of_results(block, work)
    return _MicroBatchBytes(all_bytes, gradients, all_bytes - checkpoint)


def _gradients_of_results(block: BlockSizes, work: Workload) -> float:
    """Return the bytes per token of the gradients from which a block's gradients of weights are computed.

    They are those of the results of matmuls, and of the norms before attention and feed-forward.
    """
    layer, size, hidden = block.layer, work.software.compute_bytes, work.spec.hidden_size
    assert layer is not None
    outputs = block.matmul_outputs
    if layer.mixer is None:
        # The result of attention depends on no weight.
        outputs -= block.num_attention * layer.attention.num_heads * layer.attention.value_size
    return outputs * size + (block.num_attention + 1) * hidden * max(4.0, size)


def _fullest(activations_M: NDArray[np.float64], buffers_M: NDArray[np.float64]) -> tuple[float, float]:
    """Return the activations and the stage buffers of the moment with the most bytes of both."""
    moment = int(np.argmax(activations_M + buffers_M))
    return float(activations_M[moment]), float(buffers_M[moment])


def _bytes_in_flight(
    moments: InFlight, sizes: list[_MicroBatchBytes], splits: bool, in_loss: bool = False
) -> NDArray[np.float64]:
    """Return the bytes [M] of activations of all micro-batches in flight, in each backward pass.

    Args:
        sizes: what each stage of the rank stores.
        in_loss: count before the backward pass, when the loss is computed.
    """
    # A search calls this many thousand times, so it leaves out what is zero.
    total_M = moments.num_activations @ [size.forward for size in sizes]
    if splits:
        weight_passes_MC = moments.num_weight_passes - moments.current if in_loss else moments.num_weight_passes
        total_M += weight_passes_MC @ [size.weight_pass for size in sizes]
        if not sizes[0].weight_pass:
            # The first stage of the model recomputes a block at a time, as without a split.
            total_M += moments.current[:, 0] * sizes[0].recomputation
    if sizes[-1].loss:
        losses_M = moments.num_activations[:, -1]
        if in_loss or not splits:
            # The loss of the current micro-batch is counted apart, or its backward pass is complete.
            losses_M = losses_M - moments.current[:, -1]
        total_M += losses_M * sizes[-1].loss
    return total_M


def _stage_buffer_bytes(work: Workload, stage: Stage, moments: InFlight) -> NDArray[np.float64]:
    """Return the bytes [M] of hidden states, and of gradients of them, beside those that the blocks of a rank store."""
    # A block saves what it has received, unless its norm saves a wider copy of it.
    widens = isinstance(work.spec.norm, RmsNorm) and work.software.compute_bytes < 4
    saves_input = work.checkpointing.type != "none" or not widens
    return num_stage_buffers(work, stage, moments, saves_input) * boundary_bytes(work)


def num_stage_buffers(work: Workload, stage: Stage, moments: InFlight, saves_input: bool) -> NDArray[np.float64]:
    """Return how many tensors [M] of other stages, or for them, a rank has beside those that its blocks store.

    Args:
        saves_input: whether blocks save what they receive.
    """
    if work.sizes.pipeline == 1 or not work.software.keeps_buffers:
        return np.zeros(len(moments.stage))
    schedule = work.parallel.pipeline_schedule
    is_inner = schedule == "zbv" and stage.rank == work.sizes.pipeline - 1
    return _num_stage_buffers(
        moments, schedule, work.accumulation, stage.rank > 0, stage.has_head, is_inner, saves_input
    )


@lru_cache(maxsize=65536)
def _num_stage_buffers(
    moments: InFlight,
    schedule: str,
    batches: int,
    has_previous: bool,
    has_head: bool,
    is_inner: bool,
    saves_input: bool,
) -> NDArray[np.float64]:
    """Return how many tensors [M] of other stages, or for them, a rank has beside those that its blocks store.

    It has buffers for what it receives of all micro-batches. Schedules other than 1F1B wait for what they have sent at
    the end of a step only. A rank of 1F1B has the results of micro-batches in flight, and one gradient on its way.

    Args:
        has_previous: whether there is a stage before the first of the rank.
        has_head: whether its last stage is the last of the model.
        is_inner: whether its stages are neighbors, as at the tip of a V. They send nothing, but buffers refer to what
            they exchange.
        saves_input: whether blocks save what they receive.
    """
    num_stages = moments.num_activations.shape[1]
    inputs_C, outputs_C = np.ones(num_stages), np.ones(num_stages)
    inputs_C[0] = has_previous
    outputs_C[-1] = not has_head
    numbers_M = (batches - saves_input * moments.num_activations) @ inputs_C + batches * outputs_C.sum()
    if schedule == "1f1b":
        return numbers_M + moments.num_activations @ outputs_C + inputs_C[0]
    if is_inner:
        outputs_C[0] = inputs_C[1] = 0
    backward_MC = moments.num_forward - moments.num_activations + moments.num_weight_passes
    return numbers_M + moments.num_forward @ outputs_C + backward_MC @ inputs_C
