"""The seconds of collectives: rings, trees and all-to-alls of ranks within a node or over several."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

from jingu.parallel.mesh import AxisSizes
from jingu.plan.machine import Machine
from jingu.plan.workload import Workload

# Latency of a collective's start, and of a hop between nodes, relative to a hop between GPUs of a node: 14 and 8.4 µs
# against 3.4 µs in NCCL's own model of its rings (src/graph/tuning.cc), and a launch on each GPU.
START_HOPS, NODE_HOPS = 4.0, 4.0
# Network bandwidth of all-to-alls relative to that of rings, at most the whole: a rank sends to all others at once, and
# ranks of a ring wait for one another in each step. DeepEP's authors measured 43 to 58 GB/s on cards of 50 GB/s.
ALL_TO_ALL_SPEED = 1.25


@dataclass(frozen=True)
class Neighbors:
    """Ranks that communicate: their number, and how many of them share a node."""

    ranks: int
    in_node: int


def place_groups(work: Workload, machine: Machine) -> dict[str, Neighbors]:
    """Return the group of each axis. Neighbors on the last axes of the mesh share a node."""
    return place_sizes(work.sizes, machine.gpus_per_node)


@lru_cache(maxsize=4096)
def place_sizes(sizes: AxisSizes, gpus_per_node: int) -> dict[str, Neighbors]:
    """Return the group of each axis of a mesh."""
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
    """Return the time of all-gathers or reduce-scatters of `size` bytes in total, in a number of calls."""
    if group.ranks == 1 or not size:
        return 0.0
    bandwidth = _bandwidth(group, machine) * 1e9
    return calls * _ring_latency(group, machine) + size * (group.ranks - 1) / group.ranks / bandwidth


def all_reduce_seconds(size: float, group: Neighbors, machine: Machine, calls: float = 1.0) -> float:
    """Return the time of all-reduces: along a ring twice, or up and down a tree of the nodes if that is faster."""
    if group.ranks == 1 or not size:
        return 0.0
    ring = 2 * ring_seconds(size, group, machine, calls)
    nodes = ceil(group.ranks / group.in_node)
    if nodes == 1 or machine.is_shared:
        return ring
    hops = START_HOPS + group.in_node - 1 + NODE_HOPS * log2(nodes)
    tree = 2 * calls * hops * machine.efficiency.hop_us * 1e-6 + 2 * size / (_bandwidth(group, machine) * 1e9)
    return min(ring, tree)


def _bandwidth(group: Neighbors, machine: Machine) -> float:
    """Return the bandwidth of a ring in GB/s."""
    rates = machine.efficiency
    bandwidth = machine.link_gbs * rates.link
    if group.in_node < group.ranks:
        # The group's GPUs on a node share its traffic, and each of them has its own network card.
        bandwidth = min(bandwidth, machine.nic_gbs * rates.nic * group.in_node)
    return bandwidth


def _ring_latency(group: Neighbors, machine: Machine) -> float:
    """Return the seconds that a message along a ring takes beside its bytes."""
    ranks = group.ranks
    if machine.ranks_per_core > 1:
        # Ranks that share cores take turns, so latency hardly grows with the ring; the depth of a tree fits better.
        hops = log2(ranks)
    elif machine.is_shared:
        hops = ranks - 1
    else:
        nodes = ceil(ranks / group.in_node)
        hops = START_HOPS + ranks - nodes + NODE_HOPS * (nodes - 1)
    return hops * machine.efficiency.hop_us * 1e-6


def exchange_seconds(size: float, group: Neighbors, machine: Machine) -> float:
    """Return the time of an all-to-all in which each rank sends `size` bytes in total."""
    if group.ranks == 1 or not size:
        return 0.0
    rates = machine.efficiency
    near = size * (group.in_node - 1) / group.ranks / (machine.link_gbs * rates.link * 1e9)
    nic = rates.nic if machine.is_shared else min(1.0, ALL_TO_ALL_SPEED * rates.nic)
    far = size * (group.ranks - group.in_node) / group.ranks / (machine.nic_gbs * nic * 1e9)
    # All ranks send at once, so ranks that share cores wait for their turn only once.
    hops = 1 if machine.ranks_per_core > 1 else min(group.ranks - 1, 8)
    return rates.hop_us * 1e-6 * hops + max(near, far)
