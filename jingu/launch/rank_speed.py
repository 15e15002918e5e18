"""The speed of a rank while all ranks of a node compute, for `jingu plan`: ranks on CPUs share cores and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from jingu.runtime.device import total_memory
from jingu.runtime.gpus import num_usable_cores
from jingu.runtime.ranks import RankInfo, all_ranks_agree, count_ranks, gather_from_all

# Seconds for which each operation is repeated: long enough that ranks that share a core take turns.
_SECONDS = 0.2
# Rows, inputs and outputs of products.
_PRODUCTS = ((64, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 512, 512), (1024, 512, 2048), (1024, 2048, 512))
# Rows, heads, tokens and dims of attention.
_ATTENTION = (4, 8, 256, 64)


def measure_rank_speed(ranks: RankInfo) -> dict[str, Any]:
    """Return the fields of a machine that CPU ranks share, as each of them finds it; every rank calls this."""
    peak, half = fit_products({shape: _product_seconds(shape) for shape in _PRODUCTS})
    batch, heads, length, size = _ATTENTION
    query = torch.randn(_ATTENTION)
    attention = _mean_seconds(
        lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    )
    # A token sees half of the others.
    attended = 4 * batch * heads * length * (length / 2) * size
    a, b, c = torch.randn(3, 2**20)
    memory = 3 * a.nbytes / _mean_seconds(lambda: torch.add(a, b, out=c))
    small = torch.ones(8, requires_grad=True)
    launch = _mean_seconds(lambda: small + 1)
    local = count_ranks(ranks.world)[1]
    fields: dict[str, Any] = {
        "matmul_tflops": peak / 1e12,
        "peak_tflops": peak / 1e12,
        "memory_gbs": memory / 1e9,
        "memory_gib": total_memory(ranks.device) / 2**30 / local,
        "gpus_per_node": local,
        "is_shared": True,
        "cores": num_usable_cores(),
    }
    efficiency = {
        "matmul": 1.0,
        "half_gflop": half / 1e9,
        "attention": attended / attention / peak,
        "memory": 1.0,
        "kernel_us": launch * 1e6,
    }
    if ranks.world > 1:
        latency, rate = _collective_speed(ranks.world)
        fields["link_gbs"] = rate / 1e9
        efficiency |= {"link": 1.0, "hop_us": latency * 1e6}
    return fields | {"efficiency": efficiency}


def fit_products(seconds: dict[tuple[int, int, int], float]) -> tuple[float, float]:
    """Return the FLOP/s of large products, and the FLOP of one that reaches half of it, by their relative errors.

    Args:
        seconds: of products, by rows, inputs and outputs.
    """
    flops = np.array([2.0 * np.prod(shape, dtype=np.float64) for shape in seconds])
    measured = np.array(list(seconds.values()))
    # (flops + half) / peak = seconds, divided by the seconds.
    table = np.stack([flops / measured, 1 / measured], 1)
    (inverse_peak, overhead), *_ = np.linalg.lstsq(table, np.ones(len(flops)), rcond=None)
    return float(1 / inverse_peak), float(max(overhead / inverse_peak, 1e3))


def _product_seconds(shape: tuple[int, int, int]) -> float:
    rows, inputs, outputs = shape
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    return _mean_seconds(lambda: torch.nn.functional.linear(x, weight))


def _collective_speed(world: int) -> tuple[float, float]:
    """Return the seconds of a hop, and the bytes per second of a ring, from all-reduces of two sizes."""
    sizes = (2**10, 2**22)
    times = []
    for size in sizes:
        tensor = torch.ones(size // 4)
        rounds = []
        for _ in range(10):
            all_ranks_agree(True)
            start = time.perf_counter()
            dist.all_reduce(tensor)
            rounds.append(time.perf_counter() - start)
        times.append(median(gather_from_all(median(rounds))))
    moved = 2 * (sizes[1] - sizes[0]) * (world - 1) / world
    return times[0] / (2 * (world - 1)), moved / max(times[1] - times[0], 1e-6)


def _mean_seconds(function: Callable[[], object]) -> float:
    """Return the seconds of a call, the median over ranks of their means while all of them repeat it."""
    function()
    all_ranks_agree(True)
    calls, start = 0, time.perf_counter()
    while time.perf_counter() < start + _SECONDS:
        function()
        calls += 1
    return median(gather_from_all((time.perf_counter() - start) / calls))
