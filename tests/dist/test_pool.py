"""The pool of ranks that the other tests use."""

from __future__ import annotations

import gc

from torch.distributed.device_mesh import DeviceMesh

from tests.dist.test_layouts import few_steps, tiny
from tests.rank_pool import RankPool


def meshes_left(rank: int, world: int) -> int:
    return sum(type(each) is DeviceMesh for each in gc.get_objects())


def test_nothing_of_a_call_is_left(ranks: RankPool) -> None:
    """Or hundreds of threads of groups that are gone would keep the cores from the next calls."""
    ranks.run(few_steps, 2, tiny("llama"), [{"zero_stage": 3}], False)
    assert ranks.run(meshes_left, 2) == [0, 0]
