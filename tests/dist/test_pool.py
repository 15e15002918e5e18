"""Tests of the pool of ranks that other tests use."""

from __future__ import annotations

import gc

from torch.distributed.device_mesh import DeviceMesh

from tests.dist.test_layouts import few_steps, tiny
from tests.rank_pool import RankPool


def meshes_left(rank: int, world: int) -> int:
    return sum(type(each) is DeviceMesh for each in gc.get_objects())


def test_a_call_leaves_no_threads_or_groups(ranks: RankPool) -> None:
    """Otherwise hundreds of threads of destroyed groups would slow down the next calls."""
    ranks.run(few_steps, 2, tiny("llama"), [{"zero_stage": 3}], False)
    assert ranks.run(meshes_left, 2) == [0, 0]
