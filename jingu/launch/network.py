"""The checks of `jingu doctor` between nodes: clocks, the shared folder, pairs of nodes, and all of them together."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from jingu.errors import join_words
from jingu.launch.doctor import CLOCK_SECONDS, MESSAGE_BYTES, find_slow
from jingu.runtime.ranks import RankInfo, all_ranks_agree, find_ranks_that_share, gather_from_all

_TRIALS = 3
# Rounds in which each node is paired with another one: two show which of a slow pair is at fault.
_ROUNDS = 3


def check_network(ranks: RankInfo, folder: Path) -> tuple[dict[str, list[dict[str, Any]]], dict[str, float]]:
    """Check what lies between the nodes; every rank calls this.

    Returns:
        The results of each node, and the rate between nodes for a machine of `jingu plan`.
    """
    hosts = gather_from_all(ranks.host)
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    names = [hosts[leader] for leader in leaders]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

    def add(host: str, check: str, passed: bool, text: str) -> None:
        results[host].append({"check": check, "passed": passed, "text": text, "figures": {}})

    # 1. All clocks are read right after a barrier.
    all_ranks_agree(True)
    clocks = gather_from_all(time.time())
    for name, leader in zip(names, leaders, strict=True):
        skew = clocks[leader] - median(clocks)
        add(name, "clock", abs(skew) < CLOCK_SECONDS, f"{skew:+.3f} s from the other nodes")
    # 2. Every node must find the others by their names.
    unknown = gather_from_all([name for name in names if not has_address(name)])
    for name, leader in zip(names, leaders, strict=True):
        missing = join_words(unknown[leader], "and")
        text = f"no address is known for {missing}; add it to /etc/hosts" if missing else "all nodes have addresses"
        add(name, "names of nodes", not missing, text)
    # 3. A file that the first rank renames must be visible on every node.
    is_visible = find_ranks_that_share(folder)
    for name, leader in zip(names, leaders, strict=True):
        text = f"{folder} is shared" if is_visible[leader] else f"{folder} is not the folder of {names[0]}; share it"
        add(name, "shared folder", is_visible[leader], text)
    # 4. Pairs of nodes, all at once, each node with another one in each round.
    rates = _measure_pairs(ranks.rank, leaders, names)
    slow = find_slow(rates)
    for name in names:
        own = [rate for pair, rate in rates.items() if name in pair]
        if own:
            add(name, "pairs", name not in slow, f"{min(own):,.2f} GB/s to {max(own):,.2f} GB/s with other nodes")
    # 5. All ranks together, as in training.
    tensor = torch.ones(MESSAGE_BYTES // 4)
    seconds = _best_seconds(lambda: dist.all_reduce(tensor))
    bus = 2 * (ranks.world - 1) / ranks.world * MESSAGE_BYTES / seconds / 1e9
    add(names[0], "all-reduce", True, f"{bus:,.2f} GB/s on the bus of {ranks.world} ranks")
    return results, {"nic_gbs": median(rates.values())} if rates else {}


def has_address(name: str) -> bool:
    """Return whether this machine finds the address of a name."""
    try:
        socket.gethostbyname(name)
    except OSError:
        return False
    return True


def _measure_pairs(rank: int, leaders: list[int], names: list[str]) -> dict[tuple[str, str], float]:
    """Return the GB/s between pairs of nodes, on every rank."""
    rates: dict[tuple[str, str], float] = {}
    for pairs in pair_nodes(len(leaders)):
        all_ranks_agree(True)
        seconds = 0.0
        for first, second in pairs:
            if rank in (leaders[first], leaders[second]):
                peer = leaders[second] if rank == leaders[first] else leaders[first]
                seconds = _best_seconds(partial(_exchange, peer))
        everywhere = gather_from_all(seconds)
        for first, second in pairs:
            rates[names[first], names[second]] = MESSAGE_BYTES / everywhere[leaders[first]] / 1e9
    return rates


def pair_nodes(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs: the first rounds of a tournament in which everybody meets everybody."""
    # The circle method: the first one stays, the others move on; with an odd number, one pauses in each round.
    order = list(range(count + count % 2))
    rounds = []
    for _ in range(min(_ROUNDS, count - 1 + count % 2)):
        pairs = [(order[index], order[-1 - index]) for index in range(len(order) // 2)]
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        order = [order[0], order[-1], *order[1:-1]]
    return rounds


def _exchange(peer: int) -> None:
    sent = torch.ones(MESSAGE_BYTES // 4)
    received = torch.empty_like(sent)
    work = dist.isend(sent, peer)
    dist.recv(received, peer)
    if work is not None:
        work.wait()


def _best_seconds(function: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_TRIALS):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
