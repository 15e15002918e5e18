"""The checks of `jingu doctor` between nodes: clocks, names, the shared folder, pairs of nodes, and mesh axes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from jingu.compat.torch_distributed import set_group_timeouts
from jingu.config.schema import RunConfig
from jingu.errors import join_words, pluralize
from jingu.launch.node_checks import (
    CHECK_SECONDS,
    CLOCK_SECONDS,
    MESSAGE_BYTES,
    NAMES,
    SLOW_SHARE,
    Figures,
    find_slow,
    run_check,
)
from jingu.parallel.mesh import build_mesh, resolve_axis_sizes
from jingu.plan.collectives import Neighbors, ring_seconds
from jingu.plan.machine import find_gpu
from jingu.runtime.device import device_module, device_name
from jingu.runtime.ranks import RankInfo, all_ranks_agree, find_ranks_that_share, gather_from_all

_TRIALS = 3
# Rounds in which each node is paired with another one. One slow pair does not show which of its nodes is at fault; a
# second round with other partners does.
_ROUNDS = 3
# While a pair is slow, all are measured again, at most so often: other programs may have had the cores for a moment.
_REPEATS = 2
# Bus bandwidth in GB/s (as in nccl-tests) of the groups of a mesh axis, by their ranks.
GroupRates = Mapping[tuple[int, ...], float]


def check_network(
    ranks: RankInfo, folder: Path, config: RunConfig | None = None
) -> tuple[dict[str, list[Figures]], dict[str, float]]:
    """Check clocks, names, the shared folder and the network between the nodes. Every rank calls this.

    Args:
        config: measure along the mesh axes of this run; None measures within nodes and across nodes.

    Returns:
        The results of each node, and the rate between nodes for a machine file of `jingu plan`.
    """
    hosts = gather_from_all(ranks.host)
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    names = [hosts[leader] for leader in leaders]
    results: dict[str, list[Figures]] = {name: [] for name in names}

    def add(host: str, check: str, passed: bool, text: str) -> None:
        results[host].append({"check": check, "passed": passed, "text": text, "figures": {}})

    # Creating process groups is collective. The timeout turns a hang of a later check into an error.
    groups = _make_groups(ranks, hosts, config)
    set_group_timeouts(timedelta(seconds=CHECK_SECONDS))
    # 1. Compare the clocks, which are read right after a barrier.
    all_ranks_agree(True)
    clocks = gather_from_all(time.time())
    for name, leader in zip(names, leaders, strict=True):
        skew = clocks[leader] - median(clocks)
        add(name, "clock", abs(skew) < CLOCK_SECONDS, f"{skew:+.3f} s from the other nodes")
    # 2. Every node must find the others by their names.
    own_names = gather_from_all(run_check(NAMES, *names) if ranks.rank in leaders else None)
    for name, leader in zip(names, leaders, strict=True):
        results[name].append(own_names[leader])
    # 3. A file that the first rank renames must be visible on every node.
    is_visible = find_ranks_that_share(folder)
    if is_visible is None:
        add(names[0], "shared folder", False, f"{folder} cannot be written here, so it is unknown which nodes share it")
    else:
        for name, leader in zip(names, leaders, strict=True):
            is_shared = is_visible[leader]
            text = f"{folder} is shared" if is_shared else f"{folder} is not the folder of {names[0]}; share it"
            add(name, "shared folder", is_shared, text)
    # 4. Measure all-reduces over all ranks and along each axis, as in training.
    bus_rates = {axis: _measure_groups(ranks, group) for axis, group in groups.items()}
    # 5. Measure pairs of nodes; in each round all pairs run at once, each node in one of them.
    rates = _measure_pairs(ranks, leaders, names)
    for _ in range(_REPEATS):
        if not find_slow(rates):
            break
        repeat_rates = _measure_pairs(ranks, leaders, names)
        rates = {pair: max(rate, repeat_rates[pair]) for pair, rate in rates.items()}
    slow = find_slow(rates)
    for name in names:
        rank_rates = [rate for pair, rate in rates.items() if name in pair]
        if rank_rates:
            add(
                name,
                "pairs",
                name not in slow,
                f"{min(rank_rates):,.2f} GB/s to {max(rank_rates):,.2f} GB/s with other nodes",
            )
    # 6. Attribute slow groups of an axis to nodes. If the pairs have shown slow nodes, these are the cause.
    for axis, group_rates in bus_rates.items():
        expected_rate = _expected_rate(ranks.device, hosts, next(iter(group_rates)))
        failing = [name for name in find_slow_hosts(group_rates, hosts, expected_rate) if not slow or name in slow]
        for name in failing or names[:1]:
            add(name, f"all-reduce: {axis}", not failing, describe_groups(group_rates, expected_rate))
    return results, {"nic_gbs": median(rates.values())} if rates else {}


def _make_groups(ranks: RankInfo, hosts: Sequence[str], config: RunConfig | None) -> dict[str, ProcessGroup | None]:
    """Return this rank's process group of each axis with more than one rank; None is the group of all ranks."""
    if config is not None:
        from jingu.training.plan_commands import resolve_spec  # slow to import

        sizes = resolve_axis_sizes(config.parallel, ranks.world, resolve_spec(config)[0])
        mesh = build_mesh(sizes, ranks.device)
    else:
        in_node = hosts.count(hosts[0])
        if ranks.world != in_node * len(set(hosts)) or in_node in (1, ranks.world):
            return {"all ranks": None}
        shape = (ranks.world // in_node, in_node)
        mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=("across nodes", "within a node"))
    axes = [axis for axis in mesh.mesh_dim_names or () if 1 < mesh[axis].size() < ranks.world]
    return {"all ranks": None} | {axis: mesh[axis].get_group() for axis in axes}


def _measure_groups(ranks: RankInfo, group: ProcessGroup | None) -> dict[tuple[int, ...], float]:
    """Return the bus bandwidth in GB/s of all groups of an axis, which run their all-reduce at the same time.

    Args:
        group: the group of this rank.
    """
    members = list(range(ranks.world)) if group is None else dist.get_process_group_ranks(group)
    tensor = torch.ones(MESSAGE_BYTES // 4, device=ranks.device)
    all_ranks_agree(True)
    seconds = _best_seconds(lambda: dist.all_reduce(tensor, group=group), ranks.device)
    rate = 2 * (len(members) - 1) / len(members) * MESSAGE_BYTES / seconds / 1e9
    return {tuple(group_members): rate for group_members, rate in gather_from_all([members, rate])}


def _expected_rate(device: torch.device, hosts: Sequence[str], members: Sequence[int]) -> float | None:
    """Return the expected bus bandwidth in GB/s of a group of ranks; None for GPUs that the planner does not know."""
    gpu = find_gpu(device_name(device)) if device.type != "cpu" else None
    if gpu is None or len(members) == 1:
        return None
    member_hosts = [hosts[rank] for rank in members]
    seconds = 2 * ring_seconds(MESSAGE_BYTES, Neighbors(len(member_hosts), member_hosts.count(member_hosts[0])), gpu)
    return 2 * (len(member_hosts) - 1) / len(member_hosts) * MESSAGE_BYTES / seconds / 1e9


def find_slow_hosts(rates: GroupRates, hosts: Sequence[str], usual_rate: float | None = None) -> list[str]:
    """Return the nodes all of whose groups of an axis are slow.

    Args:
        hosts: host of each rank.
        usual_rate: expected GB/s; None takes those of the median group.
    """
    limit = SLOW_SHARE * (usual_rate or median(rates.values()))
    slow: set[str] = set()
    healthy: set[str] = set()
    for members, rate in rates.items():
        (slow if rate < limit else healthy).update(hosts[rank] for rank in members)
    return sorted(slow - healthy)


def describe_groups(rates: GroupRates, usual_rate: float | None = None) -> str:
    """Describe the bus bandwidth of the groups of an axis."""
    slowest = min(rates, key=lambda members: rates[members])
    usual = f"; {usual_rate:,.2f} GB/s are expected" if usual_rate is not None else ""
    if len(rates) == 1:
        return f"{rates[slowest]:,.2f} GB/s on the bus of {pluralize(len(slowest), 'rank')}{usual}"
    names = join_words([str(rank) for rank in slowest], "and")
    return (
        f"{rates[slowest]:,.2f} GB/s on the bus of ranks {names}, the slowest of {len(rates)} groups; the median is "
        f"{median(rates.values()):,.2f} GB/s{usual}"
    )


def _measure_pairs(ranks: RankInfo, leaders: list[int], names: list[str]) -> dict[tuple[str, str], float]:
    """Return the GB/s between pairs of nodes, on every rank."""
    rates: dict[tuple[str, str], float] = {}
    for pairs in pair_nodes(len(leaders)):
        all_ranks_agree(True)
        seconds = 0.0
        for first, second in pairs:
            if ranks.rank in (leaders[first], leaders[second]):
                peer = leaders[second] if ranks.rank == leaders[first] else leaders[first]
                seconds = _best_seconds(partial(_exchange, peer, ranks.device), ranks.device)
        everywhere = gather_from_all(seconds)
        for first, second in pairs:
            rates[names[first], names[second]] = MESSAGE_BYTES / everywhere[leaders[first]] / 1e9
    return rates


def pair_nodes(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs: the first rounds of a round-robin tournament."""
    # The circle method: the first node keeps its place and the others rotate; an odd count leaves out one per round.
    order = list(range(count + count % 2))
    rounds = []
    for _ in range(min(_ROUNDS, count - 1 + count % 2)):
        pairs = [(order[index], order[-1 - index]) for index in range(len(order) // 2)]
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        order = [order[0], order[-1], *order[1:-1]]
    return rounds


def _exchange(peer: int, device: torch.device) -> None:
    """Send to a rank and receive from it at the same time. As two separate calls this would deadlock under NCCL."""
    outgoing = torch.ones(MESSAGE_BYTES // 4, device=device)
    incoming = torch.empty_like(outgoing)
    exchange = [dist.P2POp(dist.isend, outgoing, peer), dist.P2POp(dist.irecv, incoming, peer)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()


def _best_seconds(function: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(_TRIALS):
        start = time.perf_counter()
        function()
        if device.type != "cpu":
            device_module(device).synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
