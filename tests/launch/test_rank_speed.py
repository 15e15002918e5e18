"""What ranks measure of a machine that they share."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from jingu.launch.rank_speed import fit_matmuls, measure_rank_speed
from jingu.plan.machine import Machine
from jingu.runtime.ranks import RankInfo


def test_matmuls_give_peak_and_half_size() -> None:
    shapes = [(3, 5, 7), (64, 100, 33), (512, 512, 512), (1024, 2048, 512)]
    peak, half = 7e10, 3e6
    exact = {shape: (2 * prod(shape) + half) / peak for shape in shapes}
    assert fit_matmuls(exact) == pytest.approx((peak, half), rel=1e-6)
    # Without an overhead, the second is as good as 0.
    assert fit_matmuls({shape: 2 * prod(shape) / peak for shape in shapes})[1] < 1e4


def measure(rank: int, world: int) -> dict[str, Any]:
    return measure_rank_speed(RankInfo(rank, world, torch.device("cpu")))


def test_all_ranks_agree_on_a_machine(ranks: Any) -> None:
    first, second = ranks.run(measure, 2)
    assert first == second
    machine = Machine.model_validate({"nic_gbs": 1.0} | first)
    assert machine.is_shared and min(machine.matmul_tflops, machine.link_gbs, machine.efficiency.hop_us) > 0
