"""Benchmarks of a CPU rank while all ranks of its node compute, since they share cores and memory (`jingu plan`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from jingu.plan.actual import computing_clock
from jingu.plan.calibration import fit_efficiency
from jingu.plan.machine import Machine
from jingu.runtime.device import total_memory
from jingu.runtime.gpus import num_usable_cores
from jingu.runtime.ranks import RankInfo, all_ranks_agree, count_ranks, gather_from_all
from jingu.training.reference_steps import measure_reference_steps

# Seconds for which each operation is repeated: long enough that ranks that share a core take turns.
_SECONDS = 0.2
# Rows, inputs and outputs of the benchmarked matmuls.
_MATMULS = ((64, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 512, 512), (1024, 512, 2048), (1024, 2048, 512))
# Batch size, heads, tokens and head size of the benchmarked attention.
_ATTENTION = (4, 8, 256, 64)
# Initial values for collectives in the fit to reference steps.
_LINK_GBS, _HOP_US = 1.0, 300.0


def measure_rank_speed(ranks: RankInfo) -> dict[str, Any]:
    """Return the fields of a machine file for CPU ranks that share a node. Every rank calls this."""
    # 1. Measure single operations.
    local, cores = count_ranks(ranks.world)[1], num_usable_cores()
    share = max(1.0, local / cores)
    peak, half = fit_matmuls({shape: _matmul_seconds(shape, share) for shape in _MATMULS})
    batch, heads, length, size = _ATTENTION
    query = torch.randn(_ATTENTION)
    attention = _mean_seconds(
        lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True),
        share,
    )
    # With a causal mask, a token attends to half of the others on average.
    attention_flops = 4 * batch * heads * length * (length / 2) * size
    a, b, c = torch.randn(3, 2**20)
    memory = 3 * a.nbytes / _mean_seconds(lambda: torch.add(a, b, out=c), share)
    small = torch.ones(8, requires_grad=True)
    launch = _mean_seconds(lambda: small + 1, share)
    fields: dict[str, Any] = {
        "matmul_tflops": peak / 1e12,
        "peak_tflops": peak / 1e12,
        "memory_gbs": memory / 1e9,
        "memory_gib": total_memory(ranks.device) / 2**30 / local,
        "gpus_per_node": local,
        "is_shared": True,
        "cores": cores,
        "link_gbs": _LINK_GBS,
    }
    efficiency = {
        "matmul": 1.0,
        "half_gflop": half / 1e9,
        "attention": attention_flops / attention / peak,
        "memory": 1.0,
        "kernel_us": launch * 1e6,
        "link": 1.0,
        "hop_us": _HOP_US,
    }
    # 2. Fit the efficiencies to measured training steps of small models, which also contain collectives.
    start = Machine.model_validate({"nic_gbs": 1.0} | fields | {"efficiency": efficiency})
    rates = fit_efficiency(measure_reference_steps(ranks, start), start.efficiency)
    return fields | {"efficiency": rates.model_dump()}


def fit_matmuls(seconds: dict[tuple[int, int, int], float]) -> tuple[float, float]:
    """Fit seconds = (FLOP + half) / peak to measured matmuls by least squares on relative errors.

    Args:
        seconds: duration of each matmul, by its rows, inputs and outputs.

    Returns:
        The peak FLOP/s, and the FLOP of a matmul that reaches half of it.
    """
    flops = np.array([2.0 * np.prod(shape, dtype=np.float64) for shape in seconds])
    measured_seconds = np.array(list(seconds.values()))
    # Both sides divided by the seconds: flops / seconds · (1 / peak) + 1 / seconds · (half / peak) = 1.
    table = np.stack([flops / measured_seconds, 1 / measured_seconds], 1)
    (inverse_peak, overhead), *_ = np.linalg.lstsq(table, np.ones(len(flops)), rcond=None)
    return float(1 / inverse_peak), float(max(overhead / inverse_peak, 1e3))


def _matmul_seconds(shape: tuple[int, int, int], ranks_per_core: float) -> float:
    rows, inputs, outputs = shape
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    return _mean_seconds(lambda: torch.nn.functional.linear(x, weight), ranks_per_core)


def _mean_seconds(function: Callable[[], object], ranks_per_core: float) -> float:
    """Return the mean seconds of a call while all ranks repeat it; the median of all ranks."""
    function()
    all_ranks_agree(True)
    calls, own_start, start = 0, computing_clock(), time.perf_counter()
    while time.perf_counter() < start + _SECONDS:
        function()
        calls += 1
    return ranks_per_core * median(gather_from_all((computing_clock() - own_start) / calls))
