"""Slice arithmetic against PyTorch's own, and against what FSDP over tensor parallelism does."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from jingu.checkpoint.slices import boxes, cut, local_slice, overlap, slice_of


@st.composite
def layouts(draw):
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    placement = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))
    return shape, mesh, [draw(placement) for _ in mesh], [draw(st.integers(0, n - 1)) for n in mesh]


@given(layouts())
@settings(deadline=None)
def test_agrees_with_pytorch(layout):
    shape, mesh, placements, coordinate = layout
    size, offset = _compute_local_shape_and_global_offset(shape, mesh, coordinate, placements)
    found = local_slice(shape, mesh, coordinate, placements)
    assert found.size == tuple(size)
    if prod(size):
        assert found.offset == tuple(offset)


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4))
@settings(deadline=None)
def test_fsdp_over_tensor_parallelism_splits_what_tensor_parallelism_left(rows, data, tensor):
    whole = torch.arange(rows)
    placements = [_StridedShard(0, split_factor=tensor), Shard(0)]
    for j in range(tensor):
        column = torch.tensor_split(whole, 1)[0].split(-(-rows // tensor) or 1) if rows else ()
        mine = column[j] if j < len(column) else whole[:0]
        for i in range(data):
            parts = mine.split(-(-len(mine) // data) or 1) if len(mine) else ()
            expected = parts[i] if i < len(parts) else whole[:0]
            found = local_slice([rows], [data, tensor], [i, j], placements)
            assert torch.equal(whole[found.offset[0] : found.offset[0] + found.size[0]], expected)


def test_replicas_are_counted_over_the_axes_that_copy():
    placements = [Replicate(), Shard(0), Replicate()]
    found = [local_slice([8], [2, 2, 3], [i, j, k], placements) for i in range(2) for j in range(2) for k in range(3)]
    assert {slice.replicas for slice in found} == {6}
    for offset in (0, 4):
        assert sorted(slice.replica for slice in found if slice.offset == (offset,)) == list(range(6))


@pytest.mark.parametrize(
    ("placements", "words"),
    [
        ([Partial(), Shard(0)], "partial sums"),
        ([_StridedShard(0, split_factor=3), Shard(0)], "no single block"),
        ([_StridedShard(0, split_factor=2), Replicate()], "no single block"),
    ],
)
def test_layouts_without_a_block_are_refused(placements, words):
    with pytest.raises(ValueError, match=words):
        local_slice([12], [2, 2], [0, 1], placements)


def test_a_plain_tensor_is_held_whole_by_every_rank():
    found = slice_of(torch.zeros(3, 2), rank=2, ranks=4)
    assert found is not None
    assert (found.offset, found.size, found.replica, found.replicas) == ((0, 0), (3, 2), 2, 4)


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
        part = cut(whole, (5,) * len(shape), offset, size)
        assert part.numel() <= most
        found.append(part.reshape(-1))
    assert torch.equal(torch.cat(found), whole.reshape(-1))
