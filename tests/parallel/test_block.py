"""Blocks of tensors against PyTorch's own arithmetic, and against what FSDP over tensor parallelism does."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from jingu.checkpoint.shards import boxes, overlap
from jingu.compat.torch_distributed import pretend_ranks
from jingu.parallel.sharding import subblock, whole_block
from tests.parallel.layouts import block_at, sharding_at


@st.composite
def layouts(draw):
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dims = [draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) for _ in mesh]
    return shape, mesh, [draw(st.integers(0, n - 1)) for n in mesh], dims


@given(layouts())
@settings(deadline=None)
def test_agrees_with_pytorch(layout):
    shape, mesh, coordinate, dims = layout
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    size, offset = _compute_local_shape_and_global_offset(shape, mesh, coordinate, placements)
    block = block_at(torch.zeros(shape), mesh, coordinate, dims)
    assert block.size == tuple(size) and block.shape == tuple(shape)
    if prod(size):
        assert block.offset == tuple(offset)


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4))
@settings(deadline=None)
def test_fsdp_over_tensor_parallelism_splits_what_tensor_parallelism_left(rows, data, tensor):
    whole = torch.arange(rows)
    for j in range(tensor):
        column = torch.tensor_split(whole, 1)[0].split(-(-rows // tensor) or 1) if rows else ()
        mine = column[j] if j < len(column) else whole[:0]
        for i in range(data):
            parts = mine.split(-(-len(mine) // data) or 1) if len(mine) else ()
            expected = parts[i] if i < len(parts) else whole[:0]
            block = block_at(whole, [data, tensor], [i, j], [0, 0], last_axis=0)
            assert torch.equal(block.local, expected)
            assert torch.equal(whole[block.offset[0] : block.offset[0] + block.size[0]], expected)


def test_replicas_are_counted_over_the_axes_that_copy():
    whole = torch.arange(8)
    coordinates = [(i, j, k) for i in range(2) for j in range(2) for k in range(3)]
    blocks = [block_at(whole, [2, 2, 3], coordinate, [None, 0, None]) for coordinate in coordinates]
    assert {block.replicas for block in blocks} == {6}
    assert len({block.group for block in blocks}) == 1
    for offset in (0, 4):
        assert sorted(block.replica for block in blocks if block.offset == (offset,)) == list(range(6))


def test_a_replicated_tensor_is_copied_on_all_ranks_of_the_mesh():
    coordinates = [(i, j) for i in range(2) for j in range(3)]
    blocks = [sharding_at([8], [2, 3], each, [None, 0]).replicated_block(torch.ones(5)) for each in coordinates]
    assert [block.replica for block in blocks] == list(range(6))
    assert all((block.shape, block.offset, block.size, block.replicas) == ((5,), (0,), (5,), 6) for block in blocks)


def test_one_value_for_several_elements_of_a_row():
    block = sharding_at([6, 32], [3], [1], [0]).block(torch.ones(2, 4), group_size=8)
    assert (block.shape, block.offset, block.size) == ((6, 4), (2, 0), (2, 4))


@pytest.mark.parametrize("rows", [0, 6])
def test_a_local_tensor_of_the_wrong_size_is_refused(rows):
    with pytest.raises(ValueError, match=rf"should hold \[3\] of a tensor \[12\], and holds \[{rows}\]"):
        sharding_at([12], [2, 2], [0, 1], [0, 0]).block(torch.zeros(rows))


def test_a_plain_tensor_is_held_whole_by_every_rank():
    block = whole_block(torch.zeros(3, 2), rank=2, ranks=4)
    assert (block.offset, block.size, block.replica, block.replicas) == ((0, 0), (3, 2), 2, 4)


def test_a_dtensor_is_no_plain_tensor():
    pretend_ranks(0, 2)
    try:
        dtensor = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(TypeError, match="ask the ShardingPlan"):
            whole_block(dtensor)
    finally:
        torch.distributed.destroy_process_group()


def test_overlap_of_blocks():
    assert overlap((0, 2), (3, 4), (2, 0), (5, 3)) == ((2, 2), (1, 1))
    assert overlap((0,), (3,), (3,), (2,)) is None
    assert overlap((), (), (), ()) == ((), ())


@given(st.lists(st.integers(0, 9), max_size=3), st.integers(1, 40))
@settings(deadline=None)
def test_boxes_are_a_block_in_the_order_of_its_memory(shape, most):
    whole = torch.arange(prod(shape)).view(shape)
    found = []
    for offset, size in boxes((5,) * len(shape), tuple(shape), most):
        part = subblock(whole, (5,) * len(shape), offset, size)
        assert part.numel() <= most
        found.append(part.reshape(-1))
    assert torch.equal(torch.cat(found), whole.reshape(-1))
