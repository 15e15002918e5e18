"""The seconds of data parallelism: collectives of weights and gradients, and what of them computation does not hide."""

from __future__ import annotations

from dataclasses import dataclass

from jingu.parallel.mesh import AxisSizes
from jingu.plan.collectives import all_reduce_seconds, place_sizes, ring_seconds
from jingu.plan.machine import Machine
from jingu.plan.weight_memory import rank_shares
from jingu.plan.workload import Stage, Workload

# Slowdown of computation by communication that overlaps with it and uses all bandwidth of a node's links: 15%. Slower
# communication needs fewer multiprocessors and less memory bandwidth: 2% across nodes (Isaev et al., 2023).
CONTENTION = 0.15


@dataclass(frozen=True)
class DataTime:
    """Seconds of the collectives of data parallelism, before overlap: each once.

    Attributes:
        gather: of the weights of a stage; reduce: of their gradients; replicas: of gradients over `replicate`.
        contention: slowdown of computation that overlaps with them.
    """

    gather: float
    reduce: float
    replicas: float
    contention: float

    @property
    def total(self) -> float:
        return self.gather + self.reduce + self.replicas


@dataclass(frozen=True)
class DataLoad:
    """What ranks of a group exchange in data parallelism, however it is divided into `shard` and `replicate`.

    Attributes:
        group: of the ranks that share it: `fsdp`, or `expert_fsdp` for experts.
        weight_bytes: bytes of the weights; gradient_bytes: of their gradients.
        calls: number of collectives in which they are gathered, or reduced.
    """

    group: str
    weight_bytes: float
    gradient_bytes: float
    calls: float


def data_loads(work: Workload, stage: Stage, machine: Machine) -> tuple[DataLoad, ...]:
    """Return what the ranks of a stage exchange; only ranks with the same experts exchange those."""
    soft, parts = work.software, rank_shares(work, stage)
    weight_bytes = sum(part.gathered_bytes * count for part, count in parts)
    num_reduced = sum(part.num_reduced * count for part, count in parts)
    expert_bytes = sum(part.expert_bytes * count for part, count in parts)
    num_expert = sum(part.num_expert * count for part, count in parts)
    # Embedding and head need a call of their own, which matters only for small models.
    calls = stage.num_blocks * soft.gathers_per_block + machine.is_shared
    dense = DataLoad("fsdp", weight_bytes - expert_bytes, soft.reduce_bytes * (num_reduced - num_expert), calls)
    if not expert_bytes:
        return (dense,)
    return dense, DataLoad("expert_fsdp", expert_bytes, soft.reduce_bytes * num_expert, stage.num_blocks)


def data_time(loads: tuple[DataLoad, ...], sizes: AxisSizes, machine: Machine) -> DataTime:
    """Return the seconds of the collectives of data parallelism, which do not depend on the micro-batches."""
    groups = place_sizes(sizes, machine.gpus_per_node)
    copies = groups["replicate"]
    gather = reduce = replicas = link_bytes = 0.0
    for load in loads:
        group = groups[load.group]
        gather += ring_seconds(load.weight_bytes, group, machine, load.calls)
        reduce += ring_seconds(load.gradient_bytes, group, machine, load.calls)
        replicas += all_reduce_seconds(load.gradient_bytes / group.ranks, copies, machine, load.calls)
        link_bytes += (load.weight_bytes + load.gradient_bytes) * (group.ranks > 1)
        link_bytes += 2 * load.gradient_bytes / group.ranks * (copies.ranks > 1)
    seconds = gather + reduce + replicas
    link_seconds = link_bytes / (machine.link_gbs * machine.efficiency.link * 1e9)
    contention = CONTENTION * min(1.0, link_seconds / seconds) if seconds else 0.0
    return DataTime(gather, reduce, replicas, contention)


def data_seconds(
    work: Workload, stage: Stage, passes_of_batch: tuple[float, float], data: DataTime, zero: int, *, is_shared: bool
) -> float:
    """Return the exposed communication of data parallelism in seconds: gradient reduction and parameter gathering.

    Args:
        passes_of_batch: seconds of the forward and of the backward pass of a micro-batch.
        zero: stage of ZeRO, in place of that of `work`.
        is_shared: whether the ranks share cores.
    """
    soft, rounds = work.software, work.accumulation
    forward, backward = passes_of_batch
    gather, reduce, contention = data.gather, data.reduce, data.contention
    # On shared cores, communication that overlaps takes time from the computation, so nothing is hidden.
    if is_shared:
        if zero == 3:
            return (2 * gather + reduce) * rounds + data.replicas
        return gather + (rounds if zero == 2 else 1) * reduce + data.replicas
    # The first block of a pass cannot overlap.
    first = 1.0 / max(1, stage.num_blocks)
    passes = rounds if zero == 3 else 1
    seconds = passes * _exposed_seconds(gather, first * gather, forward * soft.overlap, contention)
    in_backward = (gather if zero == 3 else 0.0) + reduce
    passes = rounds if zero >= 2 else 1
    seconds += passes * _exposed_seconds(in_backward, first * reduce, backward * soft.overlap, contention)
    return seconds + _exposed_seconds(data.replicas, 0.0, max(0.0, backward * soft.overlap - in_backward), contention)


def _exposed_seconds(seconds: float, least: float, computing: float, contention: float) -> float:
    """Return the seconds that a step takes longer because of communication beside a computation.

    Communication that overlaps competes with computation for multiprocessors and memory.
    """
    hidden = min(max(0.0, seconds - least), computing)
    return seconds - hidden + contention * hidden
