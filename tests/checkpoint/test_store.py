"""Checkpoints of one layout load bitwise in any other; a failed save leaves nothing."""

import errno
import os
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from jingu.checkpoint import save_folder, shards, store
from jingu.checkpoint.manifest import CheckpointError
from jingu.checkpoint.shards import DTYPES
from tests.parallel.layouts import block_at

KINDS = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.complex64,
]  # fmt: skip


def filled(shape, dtype, seed=0):
    """Every bit pattern may occur, including NaNs; bool has two."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return ((raw & 1) if dtype == torch.bool else raw).view(dtype).reshape(shape)


def same(a, b):
    raw_a, raw_b = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw_a, raw_b)


def coordinates(mesh):
    return [
        tuple(int(i) for i in index) for index in torch.cartesian_prod(*map(torch.arange, mesh)).reshape(-1, len(mesh))
    ]


def cut(whole, mesh, coordinate, layout, empty=False):
    """Return a rank's block, given the dim that each mesh axis divides and the axis that divides last."""
    block = block_at(whole, mesh, coordinate, *layout)
    return replace(block, local=torch.zeros_like(block.local.contiguous())) if empty else block


def save_as_ranks(folder, tensors, mesh, layouts):
    """Write the parts of all ranks of the mesh, one after another."""
    partial = save_folder.partial_path(folder)
    partial.mkdir(parents=True)
    for rank, coordinate in enumerate(coordinates(mesh)):
        blocks = {name: cut(tensors[name], mesh, coordinate, layouts[name]) for name in sorted(tensors)}
        store.write_blocks(partial, blocks, rank, prod(mesh))
    save_folder.finish_save(folder, {"step": 3}, prod(mesh))


def assert_loads(folder, tensors, mesh, layouts):
    for coordinate in coordinates(mesh):
        blocks = {name: cut(tensors[name], mesh, coordinate, layouts[name], empty=True) for name in tensors}
        store.load_blocks(folder, save_folder.open_checkpoint(folder), blocks)
        for name, block in blocks.items():
            assert same(block.local, cut(tensors[name], mesh, coordinate, layouts[name]).local)


meshes = st.sampled_from([(1,), (2,), (3,), (4,), (5,), (8,), (2, 2), (2, 3), (4, 2), (2, 1, 4), (2, 2, 2)])


def layout_for(draw, shape, mesh):
    dims = [None, *range(len(shape))]
    if len(mesh) == 2 and len(shape) and draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        return [dim, dim], 0  # as FSDP over tensor parallelism
    return [draw(st.sampled_from(dims)) for _ in mesh], -1


@st.composite
def journeys(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 7), max_size=4), min_size=1, max_size=4))
    tensors = {f"t{i}": filled(shape, draw(st.sampled_from(KINDS)), seed=i) for i, shape in enumerate(shapes)}
    there, here = draw(meshes), draw(meshes)
    return (
        tensors,
        (there, {name: layout_for(draw, tensor.shape, there) for name, tensor in tensors.items()}),
        (here, {name: layout_for(draw, tensor.shape, here) for name, tensor in tensors.items()}),
    )


@given(journey=journeys())
@settings(max_examples=120, deadline=None)
def test_any_layout_loads_any_layout(tmp_path_factory, journey):
    tensors, there, here = journey
    folder = tmp_path_factory.mktemp("store") / "step-00000003"
    save_as_ranks(folder, tensors, *there)
    assert save_folder.verify(folder) == []
    assert_loads(folder, tensors, *here)
    for name, tensor in tensors.items():
        assert same(store.CheckpointReader(folder).read(name), tensor)


@pytest.mark.parametrize("chunk", [64, 1000])
def test_blocks_larger_than_a_read_chunk(tmp_path, monkeypatch, chunk):
    """The same three ways of reading as for large tensors, on small ones."""
    monkeypatch.setattr(shards, "STAGING_BYTES", chunk)
    monkeypatch.setattr(save_folder, "CHUNK", chunk)
    monkeypatch.setattr(shards, "PIECE_BYTES", 3 * chunk)
    tensors = {
        "a": filled((13, 11, 7), torch.float32),
        "b": filled((50, 30), torch.bfloat16),
        "c": filled((999,), torch.int64),
    }
    here = {"a": ([2],), "b": ([1],), "c": ([0],)}
    save_as_ranks(tmp_path / "step", tensors, (4,), {"a": ([1],), "b": ([0],), "c": ([0],)})
    assert_loads(tmp_path / "step", tensors, (3,), here)
    assert_loads(tmp_path / "step", tensors, (1,), here)


@given(journey=journeys())
@settings(max_examples=40, deadline=None)
def test_every_byte_is_written_once_and_replicas_share_the_work(tmp_path_factory, journey):
    tensors, (mesh, layouts), _ = journey
    folder = tmp_path_factory.mktemp("store") / "step-00000003"
    save_as_ranks(folder, tensors, mesh, layouts)
    pieces = [
        piece
        for stored in save_folder.read_manifest(folder / "manifest.json").tensors.values()
        for piece in stored.pieces
    ]
    whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert sum(piece.bytes[1] - piece.bytes[0] for piece in pieces) == whole


def test_replicated_tensors_are_distributed_evenly(tmp_path):
    tensors = {f"t{i}": filled((10 + i,), torch.float32) for i in range(16)}
    save_as_ranks(tmp_path / "step", tensors, (4,), {name: ([None],) for name in tensors})
    sizes = [path.stat().st_size for path in (tmp_path / "step").glob("shard-*")]
    assert len(sizes) == 4
    assert max(sizes) < 1.3 * min(sizes)


def test_the_safetensors_library_reads_the_shards(tmp_path):
    tensors = {f"{dtype}": filled((3, 5), dtype) for dtype in DTYPES.values()}
    tensors |= {
        "scalar": filled((), torch.int64),
        "empty": filled((0, 4), torch.float32),
        "Gewicht/ö": filled((2,), torch.float16),
    }
    store.save(tmp_path / "step", tensors, {})
    with safe_open(tmp_path / "step" / "shard-00000-of-00001.safetensors", "pt") as file:
        assert set(file.keys()) == set(tensors)
        assert all(same(file.get_tensor(name), tensor) for name, tensor in tensors.items())
    save_as_ranks(tmp_path / "split", {"w": tensors["torch.float32"]}, (4,), {"w": ([0],)})
    with safe_open(tmp_path / "split" / "shard-00002-of-00004.safetensors", "pt") as file:
        assert same(file.get_tensor("w[2:3,0:5]"), tensors["torch.float32"][2:3])
    with safe_open(tmp_path / "split" / "shard-00003-of-00004.safetensors", "pt") as file:
        assert list(file.keys()) == []


def example():
    return {
        "model/w": filled((6, 4), torch.float32).t(),  # not contiguous
        "model/b": filled((5,), torch.bfloat16),
        "optimizer/w": filled((3, 3), torch.float64),
    }


def test_two_saves_are_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        store.save(tmp_path / name, example(), {"step": 7, "note": "ü"})
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["manifest.json", "shard-00000-of-00001.safetensors", "state.json"]
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in files)


def test_state_and_names_are_restored(tmp_path):
    state = {"step": 7, "lr": 0.1, "nested": {"list": [1, None, "ü"]}}
    store.save(tmp_path / "step", example(), state)
    assert save_folder.read_state(tmp_path / "step") == state
    assert save_folder.tensor_names(tmp_path / "step", "model/") == ["model/b", "model/w"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step"]


def test_loading_a_part_by_prefix(tmp_path):
    store.save(tmp_path / "step", example(), {})
    weights = {name: torch.zeros_like(tensor) for name, tensor in example().items() if name.startswith("model/")}
    with pytest.raises(CheckpointError, match="unexpected tensors: optimizer/w"):
        store.load(tmp_path / "step", weights)
    store.load(tmp_path / "step", weights, prefix="model/")
    assert all(same(weights[name], example()[name]) for name in weights)


def test_all_mismatches_are_reported_at_once(tmp_path):
    store.save(tmp_path / "step", example(), {})
    reference = {"model/w": torch.zeros(4, 7), "model/b": torch.zeros(5), "model/new": torch.zeros(1)}
    with pytest.raises(CheckpointError) as caught:
        store.load(tmp_path / "step", reference)
    assert str(caught.value) == (
        f"{tmp_path / 'step'}: this checkpoint is of another model or optimizer: missing tensors: model/new; "
        "unexpected tensors: optimizer/w; tensors of another shape or dtype (nothing is converted): "
        "model/b (expected F32 [5], stored BF16 [5]), model/w (expected F32 [4, 7], stored F32 [4, 6])."
    )


def test_loading_detects_damage_on_all_ranks(tmp_path):
    store.save(tmp_path / "step", example(), {})
    shard = tmp_path / "step" / "shard-00000-of-00001.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 4
    shard.write_bytes(raw)
    votes = []
    with pytest.raises(CheckpointError, match="the bytes of tensor model/b do not match their checksum"):
        store.load(tmp_path / "step", example(), gather=lambda problem: votes.append(problem) or [problem])
    assert votes[0] is None and "model/b" in votes[1]
    shard.write_bytes(raw[:-3])
    with pytest.raises(CheckpointError, match=f"has {len(raw) - 3} bytes, not {len(raw)}"):
        store.load(tmp_path / "step", example())
    with pytest.raises(CheckpointError, match="rank 1: it is on fire"):
        store.load(_saved(tmp_path / "good"), example(), gather=lambda problem: [problem, "it is on fire"])


def _saved(folder):
    store.save(folder, example(), {})
    return folder


class Failing:
    """A replacement for a system call that works `good` times, then fails."""

    def __init__(self, call, good, code):
        self.call, self.remaining, self.code, self.failed = call, good, code, False

    def __call__(self, *arguments):
        if self.remaining == 0:
            self.failed = True
            raise OSError(self.code, os.strerror(self.code))
        self.remaining -= 1
        return self.call(*arguments)


@pytest.mark.parametrize("good", range(12))
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_failed_save_leaves_the_last_checkpoint_valid(tmp_path, monkeypatch, call, good):
    first = _saved(tmp_path / "step-00000001")
    code = errno.ENOSPC if call == "write" else errno.EIO
    target = (save_folder, "write_all") if call == "write" else (os, "fsync")
    failing = Failing(getattr(*target), good, code)
    with monkeypatch.context() as patch:
        patch.setattr(*target, failing)
        try:
            store.save(tmp_path / "step-00000002", example(), {})
        except CheckpointError as error:
            assert f"rank 0: {os.strerror(code)}" in str(error)
            assert str(tmp_path / "step-00000002") in str(error)
    assert save_folder.verify(first) == []
    remaining = sorted(path.name for path in tmp_path.iterdir())
    if failing.failed and not (call == "fsync" and good == 5):
        assert remaining == ["step-00000001"]
    else:  # nothing failed, or only the last step of all, after the rename
        assert save_folder.verify(tmp_path / "step-00000002") == []
    assert failing.failed == (good < (7 if call == "write" else 6))
    store.save(tmp_path / "step-00000002", example(), {})
    assert save_folder.verify(tmp_path / "step-00000002") == []


def test_a_bug_keeps_its_traceback(tmp_path):
    with pytest.raises(TypeError, match="not JSON serializable"):
        store.save(tmp_path / "step", example(), {"bad": object()})
    assert list(tmp_path.iterdir()) == []


def test_saving_a_step_again_replaces_it(tmp_path):
    _saved(tmp_path / "step")
    store.save(tmp_path / "step", {"other": torch.ones(2)}, {})
    assert save_folder.tensor_names(tmp_path / "step") == ["other"]
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_ranks_that_disagree_or_leave_gaps_are_refused(tmp_path):
    whole = filled((8,), torch.float32)
    partial = save_folder.partial_path(tmp_path / "gap")
    partial.mkdir()
    for rank in range(2):
        store.write_blocks(partial, {"w": cut(whole, (4,), (rank,), ([0],))}, rank, 2)
    with pytest.raises(CheckpointError, match="tensor w has 8 elements and its pieces 4"):
        save_folder.finish_save(tmp_path / "gap", {}, 2)
    partial = save_folder.partial_path(tmp_path / "shapes")
    partial.mkdir()
    for rank, rows in enumerate((8, 6)):
        store.write_blocks(partial, {"w": cut(whole[:rows], (2,), (rank,), ([0],))}, rank, 2)
    with pytest.raises(CheckpointError, match=r"ranks disagree about tensor w: F32 \[8\] and F32 \[6\]"):
        save_folder.finish_save(tmp_path / "shapes", {}, 2)
    partial = save_folder.partial_path(tmp_path / "absent")
    partial.mkdir()
    store.write_blocks(partial, {"w": cut(whole, (2,), (0,), ([0],))}, 0, 2)
    with pytest.raises(CheckpointError, match="cannot see the part of rank 1"):
        save_folder.finish_save(tmp_path / "absent", {}, 2)


def test_memory_of_saving_does_not_grow_with_the_tensor(monkeypatch):
    """The pieces that pass through Python are views of the tensor, not copies."""
    monkeypatch.setattr(shards, "PIECE_BYTES", 1000)
    tensor = torch.zeros(77, 13)
    plan, blocks = shards.plan_part(store.local_blocks({"w": tensor}), 0, 1)
    pieces = plan.tensors["w"].pieces
    assert len(pieces) > 3
    for piece in pieces:
        view = shards.piece_bytes(blocks["w"], piece)
        assert len(view) == piece.bytes[1] - piece.bytes[0]
        assert torch.frombuffer(view, dtype=torch.uint8).data_ptr() == tensor.data_ptr() + piece.bytes[0]


def test_a_reader_reads_manifest_and_header_once(tmp_path, monkeypatch):
    tensors = {f"model/{name}": torch.randn(3, 5) for name in "abc"}
    store.save(tmp_path / "step", tensors, {})
    reader = store.CheckpointReader(tmp_path / "step")
    (tmp_path / "step" / "manifest.json").unlink()
    checks = []
    check = store.check_header
    monkeypatch.setattr(store, "check_header", lambda *given: (checks.append(given[-1]), check(*given)))
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in tensors.items())
    assert len(checks) == 1
    assert all(torch.equal(reader.read_expert(name, 1), tensor[1]) for name, tensor in tensors.items())
    with pytest.raises(CheckpointError, match="no tensor model/d"):
        reader.read("model/d")
