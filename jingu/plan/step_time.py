"""The seconds of a training step, by term: a roofline model of each operation, and exposed communication.

Terms are those of a rank of the slowest stage. Formulas: Narayanan et al., 2021 (arXiv:2104.04473, pipelines and
tensor parallelism), Rajbhandari et al., 2020 (ZeRO), Korthikanti et al., 2022 (recomputation), Calculon (Isaev et al.,
2023, exposed communication).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any

from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.model.parts import attended_tokens, attention_width, cached_tokens, score_bytes
from jingu.parallel.mesh import AxisSizes
from jingu.parallel.stages import stages_per_rank
from jingu.plan.activations import boundary_bytes, saved_bytes
from jingu.plan.collectives import (
    Neighbors,
    exchange_seconds,
    place_groups,
    ring_seconds,
)
from jingu.plan.data_parallel import data_loads, data_seconds, data_time
from jingu.plan.machine import Machine
from jingu.plan.software import Software
from jingu.plan.weight_memory import rank_shares
from jingu.plan.workload import BlockSizes, ModelSizes, Stage, Workload

# Terms of a step, in the order of tables.
TERMS = (
    *("matmuls", "attention", "elementwise", "launch", "tensor", "context", "expert", "data", "pipeline"),
    *("bubble", "optimizer"),
)
# Largest cost of the start and end of a matmul, relative to the matmul itself.
START_SHARE = 3.0
_NO_CHECKPOINTING = ActivationCheckpointingSettings()
# Terms of a whole step; the others are sums over micro-batches.
_STEP_TERMS = ("data", "pipeline", "bubble", "optimizer")


# Blocks


@dataclass(frozen=True)
class BlockTime:
    """Seconds of a block's forward pass for one micro-batch; `backward` is for the matmuls of its backward pass."""

    matmuls: float
    backward: float
    attention: float
    elementwise: float


# Tiles of the result that a multiprocessor computes at a time, and their speed relative to the fastest ones.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 128, 0.85), (64, 64, 0.7))


@lru_cache(maxsize=65536)
def wave_share(rows: float, columns: float, count: int, cores: int) -> float:
    """Return the speed of a matmul with this result, relative to one that occupies all multiprocessors.

    Args:
        count: number of equal matmuls that are computed together.
        cores: multiprocessors of the GPU.
    """
    best = 0.0
    for height, width, speed in _TILES:
        tiles = ceil(rows / height) * ceil(columns / width) * count
        waves = ceil(tiles / cores)
        best = max(best, speed * rows * columns * count / (waves * cores * height * width))
    return min(1.0, best)


def matmul_seconds(work: Workload, shape: tuple[float, float, float], count: int, machine: Machine) -> float:
    """Return the seconds of matmuls.

    Args:
        shape: rows and columns of a result, and the length of the sums.
        count: number of matmuls of this shape.
    """
    rows, columns, length = shape
    rates, soft = machine.efficiency, work.software
    flops = 2.0 * rows * columns * length * count
    num_bytes = soft.compute_bytes * count * (rows * length + length * columns + rows * columns)
    peak = machine.matmul_flops * rates.matmul * soft.matmul_speed
    share = wave_share(rows, columns, count, machine.multiprocessors) if machine.multiprocessors else 1.0
    # Starting and ending costs as much as `half_gflop`, but a small matmul is at most this much slower.
    compute = (flops / share + min(rates.half_gflop * 1e9, START_SHARE * flops / share)) / peak
    return max(compute, num_bytes / (machine.memory_gbs * rates.memory * 1e9))


@dataclass(frozen=True)
class Matmul:
    """A matmul of a forward pass: tokens times a rank's part of a matrix.

    Attributes:
        shape: shape of the part; experts first.
        num_bytes: bytes of operands and results.
        backward: seconds of the matmuls of its gradients.
    """

    shape: tuple[int, ...]
    flops: float
    num_bytes: float
    seconds: float
    backward: float


def matmuls(part: BlockSizes, work: Workload, machine: Machine) -> list[Matmul]:
    """Return the matmuls of a part for one micro-batch."""
    sizes, soft, experts = work.sizes, work.software, part.experts
    result = []
    for weight in part.weights:
        if not weight.is_matmul:
            continue
        shape = weight.cut(sizes.tensor, sizes.expert)
        rows, count = float(work.tokens), 1
        if len(shape) == 3 and experts is not None:
            # This rank has `count` experts, which receive the tokens of all ranks of the expert group.
            count = shape[0]
            rows *= experts.num_experts_per_token * sizes.expert / experts.num_experts
        outputs, inputs = shape[-2], shape[-1] * weight.packing
        flops = 2.0 * rows * outputs * inputs * count
        num_bytes = soft.compute_bytes * count * (rows * (inputs + outputs) + inputs * outputs)
        seconds = matmul_seconds(work, (rows, outputs, inputs), count, machine)
        # Backward: one matmul for the gradient of the inputs, and one for that of the weights if they are trained. The
        # latter has long sums, which kernels split to occupy all multiprocessors.
        backward = matmul_seconds(work, (rows, inputs, outputs), count, machine)
        if not part.has_backward:
            backward = 0.0
        elif weight.is_trained:
            backward += _split_matmul_seconds(work, (outputs, inputs, rows), count, machine)
        result.append(Matmul((*shape[:-1], inputs), flops, num_bytes, seconds, backward))
    return result


def _split_matmul_seconds(work: Workload, shape: tuple[float, float, float], count: int, machine: Machine) -> float:
    rows, columns, length = shape
    parts = (1, 2, 4, 8) if machine.multiprocessors else (1,)
    return min(matmul_seconds(work, (rows, columns, length / n), count * n, machine) for n in parts)


def _sum_matmul_seconds(part: BlockSizes, work: Workload, machine: Machine) -> tuple[float, float]:
    """Return the seconds of all matmuls of a part, for a forward pass and for a backward pass."""
    # Their times depend on the number of tokens alone, not on how many rows and ranks of `context` it comes from.
    key = (work.sizes.tensor, 1, work.sizes.expert, "ulysses", work.tokens, 1)
    return _shared_matmul_seconds(part, _shared_computation(work.model, work.software, _NO_CHECKPOINTING, key), machine)


@lru_cache(maxsize=65536)
def _shared_matmul_seconds(part: BlockSizes, work: Workload, machine: Machine) -> tuple[float, float]:
    parts = matmuls(part, work, machine)
    return sum(matmul.seconds for matmul in parts), sum(matmul.backward for matmul in parts)


@lru_cache(maxsize=16384)
def _head_seconds(work: Workload, machine: Machine) -> tuple[float, float]:
    return _sum_matmul_seconds(work.model.head, work, machine)


def _block_time(part: BlockSizes, work: Workload, machine: Machine) -> BlockTime:
    matmuls, backward = _sum_matmul_seconds(part, work, machine)
    attention = 0.0 if part.layer is None else attention_seconds(part, work, machine)
    elementwise = traffic_bytes(part, work) / (machine.memory_gbs * machine.efficiency.memory * 1e9)
    return BlockTime(matmuls, backward, attention, elementwise)


def traffic_bytes(part: BlockSizes, work: Workload) -> float:
    """Return the bytes that elementwise operations of the forward pass of a block move, for one micro-batch."""
    sizes, soft = work.sizes, work.software
    tokens = work.tokens / sizes.tensor
    result = tokens * saved_bytes(part, work, is_compiled=False)
    if not soft.sequence_parallel:
        result += (work.tokens - tokens) * 8 * work.spec.hidden_size * soft.compute_bytes
    result += permutation_bytes(part, work)
    if part.layer is not None:
        # Soft cap, softmax and dropout read and write the scores.
        of_score = score_bytes(part.layer, soft.compute_bytes) if soft.fused_attention else soft.saved_scores
        heads = part.layer.attention.num_heads / sizes.tensor
        result += part.num_attention * heads * work.tokens * work.sequence * of_score * 2
    return (soft.compiled_traffic if work.is_compiled else soft.traffic) * result


def permutation_bytes(part: BlockSizes, work: Workload) -> float:
    """Return the bytes that permutations of a mixture of experts move, for one micro-batch."""
    if part.experts is None or work.sizes.expert == 1:
        return 0.0
    # Rows are permuted into the order of ranks, then of experts, and back; each permutation reads and writes them.
    row = part.experts.num_experts_per_token * work.spec.hidden_size * work.software.compute_bytes
    return 4 * work.tokens / work.sizes.tensor * row


def attention_seconds(part: BlockSizes, work: Workload, machine: Machine) -> float:
    """Return the seconds of attention in the forward pass of a block."""
    assert part.layer is not None
    soft, rates = work.software, machine.efficiency
    # Without a fused kernel, attention is two matmuls, which compute the scores behind the mask as well. No kernel has
    # soft caps and sinks.
    stores_scores = score_bytes(part.layer, soft.compute_bytes) > 0
    is_causal = part.is_causal and soft.fused_attention
    context = (attended_tokens if is_causal else cached_tokens)(part.layer, work.sequence)
    if stores_scores:
        context = work.sequence
    flops = 4.0 * part.num_attention * work.tokens * context * attention_width(part.layer) / work.sizes.tensor
    speed = soft.attention_speed * (machine.ampere_kernels if soft.ampere_attention else 1.0)
    seconds = flops / (machine.matmul_flops * rates.attention * speed)
    if work.parallel.context_method == "ring" and work.sizes.context > 1 and part.is_causal:
        # With a causal mask, each round of the ring takes as long as a rank whose tokens attend to all its keys.
        seconds *= 2 - 1 / work.sizes.context
    return seconds


def count_passes(soft: Software, full: float, selective: float) -> tuple[float, float]:
    """Return the seconds of attention and of elementwise operations in a step, relative to a forward pass.

    Selective checkpointing recomputes elementwise operations; without fused attention, the attention scores alone.

    Args:
        full: share of the blocks with full checkpointing; selective: share of those with selective checkpointing.
    """
    if soft.fused_attention:
        return 3.5 + full, 2.5 + full + selective
    return 3.0 + full + selective, 2.5 + full + 0.6 * selective


@dataclass(frozen=True)
class StageTime:
    """Seconds of a rank for one micro-batch, by term; `forward` + `backward` is their sum."""

    terms: dict[str, float]
    forward: float
    backward: float


def _computation(work: Workload) -> Workload:
    """Reduce a workload to what the time of one micro-batch depends on, without pipeline, ZeRO and accumulation.

    Many layouts of a search reduce to the same object, which serves as a cache key.
    """
    sizes, parallel = work.sizes, work.parallel
    key = (sizes.tensor, sizes.context, sizes.expert, parallel.context_method, work.sequence, work.micro_batch)
    return _shared_computation(work.model, work.block_software, work.checkpointing, key)


@lru_cache(maxsize=16384)
def _shared_computation(
    model: ModelSizes, software: Software, checkpointing: ActivationCheckpointingSettings, key: tuple[Any, ...]
) -> Workload:
    tensor, context, expert, method, sequence, micro_batch = key
    sizes = AxisSizes(1, 1, 1, context, tensor, expert)
    parallel = _settings_of_context(method)
    return Workload(model, sizes, parallel, sequence, micro_batch, 1, checkpointing, software=software)


@lru_cache(maxsize=2)
def _settings_of_context(method: Any) -> ParallelSettings:
    return ParallelSettings(context_method=method)


@lru_cache(maxsize=65536)
def _block_terms(block: BlockSizes, work: Workload, machine: Machine) -> tuple[dict[str, float], float, float]:
    """Return the seconds of a block for one micro-batch by term, those of the host's launches, and the share of the
    forward pass."""
    soft, spec, sizes, rates = work.software, work.spec, work.sizes, machine.efficiency
    groups = place_groups(work, machine)
    time = _block_time(block, work, machine)
    share = 1.0 / work.checkpointing.every
    full = share * (work.checkpointing.type == "full")
    selective = share * (work.checkpointing.type == "selective")
    attention_passes, elementwise_passes = count_passes(soft, full, selective)
    passes, all_passes = 2.0 + full, 3.0 + full
    if not block.has_backward:
        full = selective = 0.0
        attention_passes = elementwise_passes = passes = all_passes = 1.0
    # Tensor parallelism: an all-gather and a reduce-scatter around attention and around the feed-forward.
    calls = 2 * (block.num_attention + 1) * passes
    tokens_bytes = work.tokens * spec.hidden_size * soft.compute_bytes
    terms = {
        "matmuls": time.matmuls * (1 + full + selective * (1 - soft.saved_matmuls)) + time.backward,
        "attention": time.attention * attention_passes,
        "elementwise": time.elementwise * elementwise_passes,
        "tensor": ring_seconds(tokens_bytes * calls, groups["tensor"], machine, calls),
        "context": _context_seconds(block, work, groups["context"], machine, time.attention) * all_passes,
        "expert": expert_seconds(work, tokens_bytes / sizes.tensor, block, machine) * passes,
    }
    if soft.overlaps_experts:
        # The all-to-all overlaps with the computation of another micro-batch.
        terms["expert"] = max(0.0, terms["expert"] - soft.overlap * (terms["matmuls"] + terms["attention"]))
    kernels = (soft.kernels + soft.expert_kernels * (block.experts is not None)) * (2 * passes - 1)
    host = (kernels + calls * (sizes.tensor > 1)) * rates.kernel_us * 1e-6
    # Each kernel takes a while to start and to end on the GPU.
    terms["elementwise"] += kernels * rates.operation_us * 1e-6
    return terms, host, 1 / all_passes


def expert_seconds(work: Workload, size: float, block: BlockSizes, machine: Machine) -> float:
    """Return the seconds of the all-to-alls of a forward pass: `size` bytes of tokens to their experts and back."""
    if block.experts is None:
        return 0.0
    choices, group = block.experts.num_experts_per_token, place_groups(work, machine)["expert"]
    if work.software.sends_to_nodes and group.ranks > 1:
        # Each node receives a token at most once; the expected number of nodes with chosen experts follows from the
        # probability that a node has none. The network therefore carries a share of the bytes.
        nodes = group.ranks / group.in_node
        share = nodes * (1 - (1 - 1 / nodes) ** choices) / choices
        machine = machine.model_copy(update={"nic_gbs": machine.nic_gbs / share})
    return 2 * exchange_seconds(size * choices, group, machine)


def model_seconds(work: Workload, machine: Machine) -> float:
    """Return the seconds of all blocks of a model and of the matmuls of its head for one micro-batch."""
    work = _computation(work)
    gpu = host = 0.0
    for block, count in Counter(work.model.blocks).items():
        terms, launch, _ = _block_terms(block, work, machine)
        gpu += count * sum(terms.values())
        host += count * launch
    if not work.spec.score_head:
        gpu += sum(_head_seconds(work, machine))
    return gpu + _launch_seconds(host, gpu, work, machine)


def _launch_seconds(host: float, gpu: float, work: Workload, machine: Machine) -> float:
    """Return the seconds of launches that the GPU's work does not hide. On a CPU both times add up."""
    is_hidden = work.software.hides_launches and not machine.is_shared
    return max(0.0, host - gpu) if is_hidden else host


def stage_time(work: Workload, stage: Stage, machine: Machine) -> StageTime:
    """Return the seconds of a rank of a stage for one micro-batch, including collectives within the stage."""
    return _stage_time(_computation(work), stage, machine)


@lru_cache(maxsize=65536)
def _stage_time(work: Workload, stage: Stage, machine: Machine) -> StageTime:
    terms = dict.fromkeys(TERMS, 0.0)
    forward = host = 0.0
    parts = [(block, len(numbers), work) for block, numbers in stage.blocks]
    prediction, num_losses = work.model.prediction, 1
    if stage.has_head and prediction is not None:
        # Layers of multi-token prediction have no checkpoints.
        num_losses += work.spec.mtp_layers
        parts.append((prediction, work.spec.mtp_layers, replace(work, checkpointing=_NO_CHECKPOINTING)))
    for block, number, step in parts:
        block_terms, launch, share = _block_terms(block, step, machine)
        for term, seconds in block_terms.items():
            terms[term] += number * seconds
        host += number * launch
        forward += share * number * sum(block_terms.values())
    if stage.has_head and not work.spec.score_head:
        head, head_backward = _head_seconds(work, machine)
        logits = num_losses * work.tokens * work.spec.vocab_size / work.sizes.tensor
        traffic = logits * work.software.logit_traffic / (machine.memory_gbs * machine.efficiency.memory * 1e9)
        terms["matmuls"] += num_losses * (head + head_backward)
        terms["elementwise"] += traffic
        forward += num_losses * head + traffic / 2
    total = sum(terms.values())
    terms["launch"] = _launch_seconds(host, total, work, machine)
    if total:
        forward *= 1 + terms["launch"] / total
    return StageTime(terms, forward, total + terms["launch"] - forward)


def _context_seconds(block: BlockSizes, work: Workload, group: Neighbors, machine: Machine, attention: float) -> float:
    """Return the exposed communication of context parallelism in a forward pass, in seconds: Ulysses or ring.

    Args:
        attention: seconds of attention in a forward pass.
    """
    if group.ranks == 1 or block.layer is None:
        return 0.0
    part, sizes = block.layer.attention, work.sizes
    row = work.tokens * part.head_dim * work.software.compute_bytes / sizes.tensor
    if work.parallel.context_method == "ring":
        travelling = 2 * part.num_kv_heads * row * (group.ranks - 1)
        near = group.in_node == group.ranks
        rate = machine.link_gbs * machine.efficiency.link if near else machine.nic_gbs * machine.efficiency.nic
        return max(0.0, travelling / (rate * 1e9) - attention)
    return exchange_seconds((2 * part.num_heads + 2 * part.num_kv_heads) * row, group, machine)


# Steps


def step_time(work: Workload, machine: Machine) -> dict[str, float]:
    """Return the seconds of a step by term, for the slowest rank of the pipeline."""
    terms, slowest, time = schedule_time(work, machine)
    data = data_time(data_loads(work, slowest, machine), work.sizes, machine)
    passes, zero = (time.forward, time.backward), work.parallel.zero_stage
    terms["data"] = data_seconds(work, slowest, passes, data, zero, is_shared=machine.is_shared)
    terms["optimizer"] = optimizer_seconds(work, slowest, machine)
    return terms


def schedule_time(work: Workload, machine: Machine) -> tuple[dict[str, float], Stage, StageTime]:
    """Return the seconds of a step by term, without those that depend on ZeRO; the slowest stage, and its time."""
    times = [(stage, stage_time(work, stage, machine)) for stage in work.stages]
    slowest, time = max(times, key=lambda pair: pair[1].forward + pair[1].backward)
    batches, ranks = work.accumulation, work.sizes.pipeline
    terms = {term: seconds * batches for term, seconds in time.terms.items()}
    if ranks > 1:
        # Each micro-batch crosses a stage boundary in the forward and in the backward pass.
        travel = 2 * stages_per_rank(work.parallel) * boundary_seconds(work, machine)
        hidden = time.forward + time.backward if work.software.overlaps_sends else 0.0
        # A rank sends one while it receives another, unless its software does this in turn.
        messages = travel * (2 if work.software.sends_in_turn else 1)
        terms["pipeline"] = max(0.0, messages - hidden) * batches
        if work.parallel.pipeline_schedule == "1f1b" and batches >= ranks:
            bubble = _idle_seconds(times, time, travel)
        else:
            # The time in which a micro-batch passes through the other ranks and back.
            elsewhere = sum(stage.count * (seconds.forward + seconds.backward) for stage, seconds in times)
            bubble = idle_share(work) * (elsewhere - time.forward - time.backward + (ranks - 1) * travel)
        terms["bubble"] = bubble
        if machine.ranks_per_core > 1:
            _share_cores(terms, times, work, machine)
    return terms, slowest, time


def _idle_seconds(times: list[tuple[Stage, StageTime]], slowest: StageTime, travel: float) -> float:
    """Return the seconds in which the slowest rank of a 1F1B pipeline waits.

    It waits for the first micro-batch from the ranks before it, and at the end for their backward passes. The ranks
    after it return the first gradients while it computes further forward passes, and the last ones while it computes
    further backward passes.
    """
    ranks: list[StageTime] = []
    for stage, time in sorted(times, key=lambda pair: pair[0].rank):
        ranks += [time] * stage.count
    number = max(n for n, time in enumerate(ranks) if time is slowest)
    before = sum(time.forward + time.backward + travel for time in ranks[:number])
    after = sum(time.forward + time.backward + travel for time in ranks[number + 1 :])
    ahead = len(ranks) - 1 - number
    return before + max(0.0, after - ahead * slowest.forward) + max(0.0, after - ahead * slowest.backward)


def _share_cores(
    terms: dict[str, float], times: list[tuple[Stage, StageTime]], work: Workload, machine: Machine
) -> None:
    """Adapt the terms of a pipeline to ranks that share cores, where a rank is faster while others wait.

    A step takes the maximum of two times: the work of all ranks on all cores, and the longest path with one core for
    each rank.
    """
    computing = [term for term in TERMS if term not in _STEP_TERMS]
    path = (sum(terms[term] for term in computing) + terms["bubble"]) / machine.ranks_per_core
    for term in computing:
        mean = sum(stage.count * time.terms[term] for stage, time in times) / work.sizes.pipeline
        terms[term] = mean * work.accumulation
    terms["bubble"] = max(0.0, path - sum(terms[term] for term in computing))


def boundary_seconds(work: Workload, machine: Machine) -> float:
    """Return the seconds to send a micro-batch's hidden states to the next pipeline stage."""
    size = boundary_bytes(work)
    group = place_groups(work, machine)["pipeline"]
    near = group.in_node == group.ranks
    rates = machine.efficiency
    bandwidth = machine.link_gbs * rates.link if near else machine.nic_gbs * rates.nic
    return rates.hop_us * 1e-6 + size / (bandwidth * 1e9)


def idle_share(work: Workload) -> float:
    """Return the bubble of a step as a share of the other ranks' time for one micro-batch.

    The formulas are exact if all stages take equally long, and a forward pass as long as either half of a backward
    pass: `simulate_pipeline`, which runs the order of passes of each schedule, gives the same. For gpipe, 1f1b and
    interleaved, with at least as many micro-batches as ranks, they are those of Narayanan et al. (2021).
    """
    ranks, chunks = work.sizes.pipeline, stages_per_rank(work.parallel)
    if ranks == 1:
        return 0.0
    # Ranks fill a part of the bubble with work on other micro-batches, which is missing if there are fewer of these
    # than ranks. With a single one, the ranks take turns, except that weight gradients need not be waited for.
    missing = max(0, ranks - work.accumulation)
    match work.parallel.pipeline_schedule:
        case "zero_bubble":
            # In units of a third of a chunk's time.
            idle = ranks - 1 + chunks * min(missing, ranks / 2) + (3 * chunks - 2) * max(0.0, missing - ranks / 2)
            return idle / (3 * chunks * (ranks - 1))
        case "zbv":
            # A micro-batch passes each rank twice, so that twice as many of them as ranks fill the bubble.
            return max(1 / 6, 2 / 3 - (work.accumulation - 1) / (3 * (ranks - 1)))
        case _:
            return 1 / chunks + (1 - 1 / chunks) * missing / (ranks - 1)


def optimizer_seconds(work: Workload, stage: Stage, machine: Machine) -> float:
    """Return the seconds of gradient clipping and the update, including transfers to and from main memory."""
    numbers = sum(part.num_trained * count for part, count in rank_shares(work, stage))
    if work.parallel.offload.type != "none":
        # Gradients and weights (8 bytes) cross the bus, and the update moves 30 bytes in main memory.
        bus, memory = 8.0, 30.0
        more = work.accumulation - 1
        if work.parallel.zero_stage >= 2:
            # Every micro-batch reduces gradients (4 bytes), which are added to those in main memory (12 bytes).
            bus += 4.0 * more
            memory += 12.0 * more
        if work.parallel.zero_stage == 3:
            # Every micro-batch fetches the weights (4 bytes), for the forward and for the backward pass.
            bus += 4.0 * (2 * more + 1)
        # The bandwidth of main memory is taken as twice that of the bus.
        return numbers * (bus / (machine.host_gbs * 1e9) + memory / (machine.host_gbs * 2e9))
    return numbers * 34 / (machine.memory_gbs * machine.efficiency.memory * 1e9)
