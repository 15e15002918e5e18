"""Copies in main memory: a folder for each rank stands for a node of its own, so that what is lacking travels."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.checkpoint import files, store
from jingu.checkpoint.manifest import CheckpointError
from jingu.checkpoint.memory import RUN_ID, MemoryCopies, id_of
from jingu.runtime.ranks import all_agree, joined
from tests.checkpoint.test_ranks import WHOLE, laid_out

ID = 7


def nodes(folder: Path, rank: int, tensors: dict[str, torch.Tensor]) -> MemoryCopies:
    return MemoryCopies(folder / f"node-{rank}", ID, lambda: tensors)


def copy_steps(rank: int, world: int, folder: Path, steps: list[int]) -> tuple[int, list[str]]:
    """Values of a step are those of `WHOLE`, more by the step."""
    tensors = laid_out(world, filled=True)
    memory = nodes(folder, rank, tensors)
    for step in steps:
        for name, tensor in laid_out(world, filled=True).items():
            tensors[name] = tensor + step
        memory.save({"step": step}, step)
    left = sorted(path.name for path in (folder / f"node-{rank}").glob("jingu-*/rank-*/*/*"))
    return memory.bytes, left


def find(rank: int, world: int, folder: Path) -> tuple[list[int], Any]:
    """The steps in memory, and what the newest gives: its state where every value is right, or the complaint."""
    tensors = laid_out(world, filled=False)
    memory = nodes(folder, rank, tensors)
    steps = memory.steps()
    if not steps:
        return steps, None
    try:
        place = memory.gather(steps[-1])
        store.load(place, tensors, agree=all_agree)
        state = files.read_state(place)
    except CheckpointError as error:
        return steps, error.what
    finally:
        memory.release()
    expected = laid_out(world, filled=True)
    assert all(torch.equal(_local(tensors[name]), _local(expected[name] + steps[-1])) for name in WHOLE)
    assert not list(folder.rglob("loading"))
    return steps, state


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.fixture
def four(ranks, tmp_path):
    """Steps 3 and 6 as four nodes of one rank have copied them."""
    held = ranks.run(copy_steps, 4, tmp_path, [3, 6])
    parts = [[f"part-{rank:05d}.json", f"shard-{rank:05d}-of-00004.safetensors"] for rank in range(4)]
    parts[0] += ["part-00004.json", "state.json"]
    assert [names for _, names in held] == [sorted(parts[rank] + parts[rank - 1]) for rank in range(4)]
    return tmp_path


def test_any_one_node_is_lost(four, ranks):
    assert ranks.run(find, 4, four) == [([6], {"step": 6})] * 4
    for lost in range(4):
        shutil.move(four / f"node-{lost}", four / "lost")
        assert ranks.run(find, 4, four) == [([6], {"step": 6})] * 4
        shutil.rmtree(four / f"node-{lost}")
        shutil.move(four / "lost", four / f"node-{lost}")


def test_two_nodes_of_four_are_left(four, ranks):
    """The first and the third have all parts between them; they become the nodes of a run on two ranks."""
    shutil.rmtree(four / "node-1")
    shutil.rmtree(four / "node-3")
    shutil.move(four / "node-2", four / "node-1")
    assert ranks.run(find, 2, four) == [([6], {"step": 6})] * 2


def test_two_neighbours_are_lost(four, ranks):
    shutil.rmtree(four / "node-1")
    shutil.rmtree(four / "node-2")
    assert ranks.run(find, 4, four) == [([], None)] * 4


@pytest.mark.parametrize("name", ["shard-00002-of-00004.safetensors", "part-00001.json", "state.json"])
def test_a_flipped_byte_is_noticed_on_all_ranks(name, four, ranks):
    for path in four.rglob(name):
        raw = bytearray(path.read_bytes())
        raw[-9] ^= 4
        path.write_bytes(raw)
    for steps, complaint in ranks.run(find, 4, four):
        assert steps == [6]
        assert isinstance(complaint, str)


def test_parts_of_two_attempts_at_a_step_are_not_mixed(four, ranks):
    """Half of the nodes have one attempt, the other half another: between them there is no whole one."""
    for node in (0, 1):
        (key,) = (four / f"node-{node}").glob("jingu-*/rank-*/step-*")
        key.rename(key.with_name("step-00000006-00000000000000000001"))
    assert ranks.run(find, 4, four) == [([], None)] * 4


def find_while_one_goes(rank: int, world: int, folder: Path) -> list[int]:
    """The steps, where each rank's earlier copy is deleted after it was seen to be there."""
    gone = folder / f"node-{rank}" / f"jingu-{ID:016x}" / f"rank-{rank:05d}" / "step-00000003-0"
    gone.mkdir()
    plain = Path.iterdir

    def iterdir(path: Path) -> Any:
        found = list(plain(path))
        if gone in found:
            gone.rmdir()
        return iter(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "iterdir", iterdir)
        steps = nodes(folder, rank, laid_out(world, filled=False)).steps()
    assert not gone.exists()
    return steps


def test_a_copy_that_is_deleted_meanwhile_is_passed_over(four, ranks):
    assert ranks.run(find_while_one_goes, 4, four) == [[6]] * 4


def test_a_copied_folder_of_checkpoints_is_another_run(tmp_path):
    with joined("cpu", 1):
        (tmp_path / "a").mkdir()
        first = id_of(tmp_path / "a", True)
        assert id_of(tmp_path / "a", True) == first
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        assert id_of(tmp_path / "b", True) != first
        (tmp_path / "a" / RUN_ID).unlink()
        assert id_of(tmp_path / "a", True) != first


def copy_where_one_is_full(rank: int, world: int, folder: Path) -> str:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    tensors = laid_out(world, filled=True)
    memory = nodes(folder, rank, tensors)
    memory.save({"step": 9}, 9)
    working = os.posix_fallocate
    os.posix_fallocate = full if rank == 1 else working  # where the neighbour's part comes in
    try:
        memory.save({"step": 12}, 12)
    except CheckpointError as error:
        return error.what
    finally:
        os.posix_fallocate = working
    return "saved"


def test_where_one_rank_has_no_room_the_copies_before_stay(ranks, tmp_path):
    said = ranks.run(copy_where_one_is_full, 4, tmp_path)
    assert said[1] == "No space left on device."
    assert {*said[:1], *said[2:]} == {"another rank failed here, and its log says why."}
    assert not list(tmp_path.rglob(".step-*"))
    assert [path.name[:13] for path in tmp_path.rglob("step-*")] == ["step-00000009"] * 4
