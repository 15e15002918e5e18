"""The seconds of a training step, by term: a roofline model of each operation, and exposed communication.

Terms are those of a rank of the slowest stage. Formulas: Narayanan et al., 2021 (arXiv:2104.04473, pipelines and
tensor parallelism), Rajbhandari et al., 2020 (ZeRO), Korthikanti et al., 2022 (recomputation), Calculon (Isaev et al.,
2023, exposed communication).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache, singledispatch
from math import log2
from typing import Any

from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.model.parts import attended_tokens, attention_width, cached_tokens
from jingu.parallel.mesh import AxisSizes
from jingu.parallel.stages import stages_per_rank
from jingu.plan.machine import Machine
from jingu.plan.memory import rank_shares
from jingu.plan.workload import BlockSizes, ModelSizes, Software, Stage, Workload

# Terms of a step, in the order of tables.
TERMS = (
    *("matmuls", "attention", "elementwise", "launch", "tensor", "context", "expert", "data", "pipeline"),
    *("bubble", "optimizer"),
)
# Terms of a whole step; the others are sums over micro-batches.
_STEP_TERMS = ("data", "pipeline", "bubble", "optimizer")


@dataclass(frozen=True)
class Neighbors:
    """Ranks that communicate: their number, and how many of them share a node."""

    ranks: int
    in_node: int


def place_groups(work: Workload, machine: Machine) -> dict[str, Neighbors]:
    """Return the group of each axis. Neighbors on the last axes of the mesh share a node."""
    return _place(work.sizes, machine.gpus_per_node)


@lru_cache(maxsize=4096)
def _place(sizes: AxisSizes, gpus_per_node: int) -> dict[str, Neighbors]:
    groups, inner = {}, 1
    for axis in ("tensor", "context", "shard", "replicate", "pipeline"):
        size = getattr(sizes, axis)
        groups[axis] = Neighbors(size, max(1, min(size, gpus_per_node // inner)))
        inner *= size
    # ZeRO shards over shard × context; expert parallelism uses the nearest of these ranks.
    fsdp = sizes.shard * sizes.context
    room = max(1, gpus_per_node // sizes.tensor)
    groups["fsdp"] = Neighbors(fsdp, min(fsdp, room))
    groups["expert"] = Neighbors(sizes.expert, min(sizes.expert, room))
    groups["expert_fsdp"] = Neighbors(fsdp // sizes.expert, max(1, min(fsdp, room) // sizes.expert))
    return groups


def ring_seconds(size: float, group: Neighbors, machine: Machine, calls: float = 1.0) -> float:
    """Return the time of an all-gather or reduce-scatter of `size` bytes in total, in a number of calls."""
    if group.ranks == 1 or not size:
        return 0.0
    rates, ranks = machine.efficiency, group.ranks
    bandwidth = machine.link_gbs * rates.link
    if group.in_node < ranks:
        # The group's GPUs on a node share its traffic, and each of them has its own network card.
        bandwidth = min(bandwidth, machine.nic_gbs * rates.nic * group.in_node)
    # Ranks that share cores take turns, so latency hardly grows with the ring; the depth of a tree fits better.
    hops = log2(ranks) if machine.ranks_per_core > 1 else min(ranks - 1, 2 * log2(ranks) + group.in_node)
    return calls * hops * rates.hop_us * 1e-6 + size * (ranks - 1) / ranks / (bandwidth * 1e9)


def exchange_seconds(size: float, group: Neighbors, machine: Machine) -> float:
    """Return the time of an all-to-all in which each rank sends `size` bytes in total."""
    if group.ranks == 1 or not size:
        return 0.0
    rates = machine.efficiency
    near = size * (group.in_node - 1) / group.ranks / (machine.link_gbs * rates.link * 1e9)
    far = size * (group.ranks - group.in_node) / group.ranks / (machine.nic_gbs * rates.nic * 1e9)
    # All ranks send at once, so ranks that share cores wait for their turn only once.
    hops = 1 if machine.ranks_per_core > 1 else min(group.ranks - 1, 8)
    return rates.hop_us * 1e-6 * hops + max(near, far)


# Blocks


@dataclass(frozen=True)
class BlockTime:
    """Seconds of a block's forward pass for one micro-batch; `backward` is for the matmuls of its backward pass."""

    matmuls: float
    backward: float
    attention: float
    elementwise: float


@singledispatch
def matmul_seconds(_software: Software, flops: float, num_bytes: float, machine: Machine) -> float:
    """Return the seconds of a matmul with this number of operations, which moves this number of bytes."""
    rates = machine.efficiency
    peak = machine.matmul_tflops * 1e12 * rates.matmul
    return max((flops + rates.half_gflop * 1e9) / peak, num_bytes / (machine.memory_gbs * rates.memory * 1e9))


@dataclass(frozen=True)
class Matmul:
    """A matmul of a forward pass: tokens times a rank's part of a matrix.

    Attributes:
        shape: shape of the part; experts first.
        num_bytes: bytes of operands and results.
    """

    shape: tuple[int, ...]
    flops: float
    num_bytes: float
    seconds: float
    is_trained: bool


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
        seconds = matmul_seconds(soft, flops, num_bytes, machine)
        result.append(Matmul((*shape[:-1], inputs), flops, num_bytes, seconds, weight.is_trained))
    return result


def _sum_matmul_seconds(part: BlockSizes, work: Workload, machine: Machine) -> tuple[float, float]:
    """Return the seconds of all matmuls of a part, for a forward pass and for a backward pass."""
    forward = backward = 0.0
    for matmul in matmuls(part, work, machine):
        forward += matmul.seconds
        # One matmul for the gradient of the inputs, and one for that of the weights if they are trained.
        backward += matmul.seconds * (1 + matmul.is_trained)
    return forward, backward


@lru_cache(maxsize=16384)
def _head_seconds(work: Workload, machine: Machine) -> tuple[float, float]:
    return _sum_matmul_seconds(work.model.head, work, machine)


def _block_time(part: BlockSizes, work: Workload, machine: Machine) -> BlockTime:
    soft, rates = work.software, machine.efficiency
    matmuls, backward = _sum_matmul_seconds(part, work, machine)
    attention = 0.0 if part.layer is None else attention_seconds(soft, part, work, machine)
    elementwise = soft.traffic * traffic_bytes(soft, part, work) / (machine.memory_gbs * rates.memory * 1e9)
    return BlockTime(matmuls, backward, attention, elementwise)


@singledispatch
def traffic_bytes(_software: Software, part: BlockSizes, work: Workload) -> float:
    """Return the bytes that the forward pass of a block saves or permutes, for one micro-batch."""
    return work.tokens / work.sizes.tensor * part.saved_bytes + permutation_bytes(part, work)


def permutation_bytes(part: BlockSizes, work: Workload) -> float:
    """Return the bytes that permutations of a mixture of experts move, for one micro-batch."""
    if part.experts is None or work.sizes.expert == 1:
        return 0.0
    # Rows are permuted into the order of ranks, then of experts, and back; each permutation reads and writes them.
    row = part.experts.num_experts_per_token * work.spec.hidden_size * work.software.compute_bytes
    return 4 * work.tokens / work.sizes.tensor * row


@singledispatch
def attention_seconds(_software: Software, part: BlockSizes, work: Workload, machine: Machine) -> float:
    """Return the seconds of attention in the forward pass of a block."""
    assert part.layer is not None
    context = (attended_tokens if part.is_causal else cached_tokens)(part.layer, work.sequence)
    flops = 4.0 * part.num_attention * work.tokens * context * attention_width(part.layer) / work.sizes.tensor
    seconds = flops / (machine.matmul_tflops * 1e12 * machine.efficiency.attention)
    if work.parallel.context_method == "ring" and work.sizes.context > 1 and part.is_causal:
        # With a causal mask, each round of the ring takes as long as a rank whose tokens attend to all its keys.
        seconds *= 2 - 1 / work.sizes.context
    return seconds


@singledispatch
def count_passes(_software: Software, full: float, selective: float) -> tuple[float, float]:
    """Return the seconds of attention and of elementwise operations in a step, relative to a forward pass.

    Selective checkpointing recomputes elementwise operations.

    Args:
        full: share of the blocks with full checkpointing; selective: share of those with selective checkpointing.
    """
    return 3.5 + full, 2.5 + full + selective


@singledispatch
def exposed_seconds(_software: Software, _kind: str, seconds: float, _computing: float) -> float:
    """Return the seconds of a communication that does not overlap with computation; here, all of them.

    Args:
        _kind: `expert` for all-to-alls, `pipeline` for hidden states between stages.
        _computing: seconds of the computation that another system overlaps it with.
    """
    return seconds


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
    return _shared_computation(work.model, work.software, work.checkpointing, key)


@lru_cache(maxsize=16384)
def _shared_computation(
    model: ModelSizes, software: Software, checkpointing: ActivationCheckpointingSettings, key: tuple[Any, ...]
) -> Workload:
    tensor, context, expert, method, sequence, micro_batch = key
    sizes = AxisSizes(1, 1, 1, context, tensor, expert)
    parallel = ParallelSettings(context_method=method)
    return Workload(model, sizes, parallel, sequence, micro_batch, 1, checkpointing, software=software)


@lru_cache(maxsize=65536)
def _block_terms(block: BlockSizes, work: Workload, machine: Machine) -> tuple[dict[str, float], float]:
    """Return the seconds of a block for one micro-batch by term, and the share of the forward pass."""
    soft, spec, sizes = work.software, work.spec, work.sizes
    groups = place_groups(work, machine)
    time = _block_time(block, work, machine)
    share = 1.0 / work.checkpointing.every
    full = share * (work.checkpointing.type == "full")
    selective = share * (work.checkpointing.type == "selective")
    attention_passes, elementwise_passes = count_passes(soft, full, selective)
    # Tensor parallelism: an all-gather and a reduce-scatter around attention and around the feed-forward.
    passes = 2.0 + full
    calls = 2 * (block.num_attention + 1) * passes
    tokens_bytes = work.tokens * spec.hidden_size * soft.compute_bytes
    expert = expert_seconds(soft, tokens_bytes / sizes.tensor, block, groups["expert"], machine)
    terms = {
        "matmuls": time.matmuls * (1 + full) + time.backward,
        "attention": time.attention * attention_passes,
        "elementwise": time.elementwise * elementwise_passes,
        "tensor": ring_seconds(tokens_bytes * calls, groups["tensor"], machine, calls),
        "context": _context_seconds(block, work, groups["context"], machine) * (3.0 + full),
        "expert": expert * passes,
    }
    terms["expert"] = exposed_seconds(soft, "expert", terms["expert"], terms["matmuls"] + terms["attention"])
    # The host launches kernels while a GPU computes, so only the excess counts. On a CPU both times add up.
    kernels = (soft.kernels + soft.expert_kernels * (block.experts is not None)) * (2 * passes - 1)
    seconds = (kernels + calls * (sizes.tensor > 1)) * machine.efficiency.kernel_us * 1e-6
    terms["launch"] = seconds if machine.is_shared else max(0.0, seconds - sum(terms.values()))
    terms["elementwise"] += kernels * machine.efficiency.operation_us * 1e-6 * machine.is_shared
    return terms, 1 / (3.0 + full)


@singledispatch
def expert_seconds(_software: Software, size: float, block: BlockSizes, group: Neighbors, machine: Machine) -> float:
    """Return the seconds of the all-to-alls of a forward pass: `size` bytes of tokens to their experts and back."""
    if block.experts is None:
        return 0.0
    return 2 * exchange_seconds(size * block.experts.num_experts_per_token, group, machine)


def model_seconds(work: Workload, machine: Machine) -> float:
    """Return the seconds of all blocks of a model and of the matmuls of its head for one micro-batch."""
    work = _computation(work)
    counts = Counter(work.model.blocks)
    blocks = sum(count * sum(_block_terms(block, work, machine)[0].values()) for block, count in counts.items())
    return blocks + (0.0 if work.spec.score_head else sum(_head_seconds(work, machine)))


def stage_time(work: Workload, stage: Stage, machine: Machine) -> StageTime:
    """Return the seconds of a rank of a stage for one micro-batch, including collectives within the stage."""
    work = _computation(work)
    terms = dict.fromkeys(TERMS, 0.0)
    forward = 0.0
    for block, numbers in stage.blocks:
        block_terms, share = _block_terms(block, work, machine)
        for term, seconds in block_terms.items():
            terms[term] += len(numbers) * seconds
        forward += share * len(numbers) * sum(block_terms.values())
    if stage.has_head and not work.spec.score_head:
        head, head_backward = _head_seconds(work, machine)
        traffic = work.tokens * work.spec.vocab_size / work.sizes.tensor * 16 / (machine.memory_gbs * 1e9)
        terms["matmuls"] += head + head_backward
        terms["elementwise"] += traffic
        forward += head + traffic / 2
    return StageTime(terms, forward, sum(terms.values()) - forward)


def _context_seconds(block: BlockSizes, work: Workload, group: Neighbors, machine: Machine) -> float:
    """Return the exposed communication of context parallelism in a forward pass, in seconds: Ulysses or ring."""
    if group.ranks == 1 or block.layer is None:
        return 0.0
    part, sizes = block.layer.attention, work.sizes
    row = work.tokens * part.head_dim * work.software.compute_bytes / sizes.tensor
    if work.parallel.context_method == "ring":
        travelling = 2 * part.num_kv_heads * row * (group.ranks - 1)
        near = group.in_node == group.ranks
        rate = machine.link_gbs * machine.efficiency.link if near else machine.nic_gbs * machine.efficiency.nic
        attention = _block_time(block, work, machine).attention
        return max(0.0, travelling / (rate * 1e9) - attention)
    return exchange_seconds((2 * part.num_heads + 2 * part.num_kv_heads) * row, group, machine)


# Steps


def step_time(work: Workload, machine: Machine) -> dict[str, float]:
    """Return the seconds of a step by term, for the slowest rank of the pipeline."""
    times = [(stage, stage_time(work, stage, machine)) for stage in work.stages]
    slowest, time = max(times, key=lambda pair: pair[1].forward + pair[1].backward)
    batches, ranks = work.accumulation, work.sizes.pipeline
    terms = {term: seconds * batches for term, seconds in time.terms.items()}
    terms["data"] = data_seconds(work, slowest, time, machine)
    terms["optimizer"] = optimizer_seconds(work, slowest, machine)
    if ranks > 1:
        # Each micro-batch crosses a stage boundary in the forward and in the backward pass.
        travel = 2 * stages_per_rank(work.parallel) * boundary_seconds(work, machine)
        terms["pipeline"] = exposed_seconds(work.software, "pipeline", travel, time.forward + time.backward) * batches
        # The bubble: the time in which a micro-batch passes through the other ranks and back.
        elsewhere = sum(stage.count * (seconds.forward + seconds.backward) for stage, seconds in times)
        elsewhere -= time.forward + time.backward
        terms["bubble"] = idle_share(work) * (elsewhere + (ranks - 1) * travel)
        if machine.ranks_per_core > 1:
            _share_cores(terms, times, work, machine)
    return terms


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


@singledispatch
def boundary_bytes(software: Software, work: Workload) -> float:
    """Return the bytes of hidden states that a rank sends to the next pipeline stage, for one micro-batch."""
    return work.tokens / work.sizes.tensor * work.spec.hidden_size * software.compute_bytes


def boundary_seconds(work: Workload, machine: Machine) -> float:
    """Return the seconds to send a micro-batch's hidden states to the next pipeline stage."""
    size = boundary_bytes(work.software, work)
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


def data_seconds(work: Workload, stage: Stage, time: StageTime, machine: Machine) -> float:
    """Return the exposed communication of data parallelism in seconds: gradient reduction and parameter gathering."""
    soft, zero = work.software, work.parallel.zero_stage
    groups = place_groups(work, machine)
    parts = rank_shares(work, stage)
    gathered_bytes = sum(part.gathered_bytes * count for part, count in parts)
    reduced_bytes = soft.reduce_bytes * sum(part.num_reduced * count for part, count in parts)
    rounds = work.accumulation
    # Embedding and head need a call of their own, which matters only for small models.
    calls = stage.num_blocks + machine.is_shared
    gather = ring_seconds(gathered_bytes, groups["fsdp"], machine, calls)
    reduce = ring_seconds(reduced_bytes, groups["fsdp"], machine, calls)
    replicas = 2 * ring_seconds(reduced_bytes / groups["fsdp"].ranks, groups["replicate"], machine, calls)
    if zero == 3:
        gathers, reductions = 2 * rounds, rounds
    else:
        gathers, reductions = 1, rounds if zero == 2 else 1
    # On shared cores, communication that overlaps takes time from the computation, so nothing is hidden.
    if machine.is_shared:
        return gathers * gather + reductions * reduce + replicas
    # Overlapped communication competes with computation (`overlap`), and the first block of a pass cannot overlap.
    first = 1.0 / max(1, stage.num_blocks)
    passes = rounds if zero == 3 else 1
    seconds = passes * max(first * gather, gather - time.forward * soft.overlap)
    backward = (gather if zero == 3 else 0.0) + reduce
    seconds += (rounds if zero >= 2 else 1) * max(first * reduce, backward - time.backward * soft.overlap)
    return seconds + max(0.0, replicas - max(0.0, time.backward * soft.overlap - backward))


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
