"""Copies in main memory; a folder for each rank represents a node, so that missing files are transferred."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.checkpoint import memory_copies as module
from jingu.checkpoint import save_folder, store
from jingu.checkpoint.manifest import CheckpointError
from jingu.checkpoint.memory_copies import RUN_ID, MemoryCopies, run_id
from jingu.runtime.ranks import gather_from_all, join_process_group
from tests.checkpoint.test_ranks import WHOLE, laid_out, save_on_full_disk, save_or_explain, values

ID = 7


def nodes(folder: Path, rank: int, tensors: dict[str, torch.Tensor]) -> MemoryCopies:
    return MemoryCopies(folder / f"node-{rank}", ID, lambda: tensors)


def copy_steps(rank: int, world: int, folder: Path, steps: list[int]) -> tuple[int, list[str]]:
    """Values of a step are those of `WEIGHT_SCALE`, more by the step."""
    tensors = laid_out(world, filled=True)
    memory = nodes(folder, rank, tensors)
    for step in steps:
        for name, tensor in laid_out(world, filled=True).items():
            values(tensors[name]).copy_(values(tensor) + step)
        memory.save({"step": step}, step)
    remaining = sorted(path.name for path in (folder / f"node-{rank}").glob("jingu-*/rank-*/*/*"))
    return memory.bytes, remaining


def find(rank: int, world: int, folder: Path) -> tuple[list[int], Any]:
    """The steps in memory, and what the newest gives: its state where every value is right, or the complaint."""
    tensors = laid_out(world, filled=False)
    memory = nodes(folder, rank, tensors)
    steps = memory.steps()
    if not steps:
        return steps, None
    try:
        place = memory.gather(steps[-1])
        store.load(place, tensors, gather=gather_from_all)
        state = save_folder.read_state(place)
    except CheckpointError as error:
        return steps, error.what
    finally:
        memory.release()
    expected = laid_out(world, filled=True)
    assert all(torch.equal(values(tensors[name]), values(expected[name]) + steps[-1]) for name in WHOLE)
    assert not list((folder / f"node-{rank}").rglob("loading"))
    return steps, state


@pytest.fixture
def four(ranks, tmp_path):
    """Steps 3 and 6 as four nodes of one rank have copied them."""
    stored = ranks.run(copy_steps, 4, tmp_path, [3, 6])
    parts = [[f"part-{rank:05d}.json", f"shard-{rank:05d}-of-00004.safetensors"] for rank in range(4)]
    parts[0] += ["part-00004.json", "state.json"]
    assert [names for _, names in stored] == [sorted(parts[rank] + parts[rank - 1]) for rank in range(4)]
    return tmp_path


def test_recovery_after_losing_any_one_node(four, ranks):
    assert ranks.run(find, 4, four) == [([6], {"step": 6})] * 4
    for lost in range(4):
        shutil.move(four / f"node-{lost}", four / "lost")
        assert ranks.run(find, 4, four) == [([6], {"step": 6})] * 4
        shutil.rmtree(four / f"node-{lost}")
        shutil.move(four / "lost", four / f"node-{lost}")


def test_recovery_on_two_of_four_nodes(four, ranks):
    """The first and the third have all parts between them; they become the nodes of a run on two ranks."""
    shutil.rmtree(four / "node-1")
    shutil.rmtree(four / "node-3")
    shutil.move(four / "node-2", four / "node-1")
    assert ranks.run(find, 2, four) == [([6], {"step": 6})] * 2


def test_losing_two_neighbouring_nodes(four, ranks):
    shutil.rmtree(four / "node-1")
    shutil.rmtree(four / "node-2")
    assert ranks.run(find, 4, four) == [([], None)] * 4


@pytest.mark.parametrize("name", ["shard-00002-of-00004.safetensors", "part-00001.json", "state.json"])
def test_all_ranks_detect_a_flipped_byte(name, four, ranks):
    for path in four.rglob(name):
        raw = bytearray(path.read_bytes())
        raw[-9] ^= 4
        path.write_bytes(raw)
    for steps, complaint in ranks.run(find, 4, four):
        assert steps == [6]
        assert isinstance(complaint, str)


def test_parts_of_two_attempts_at_a_step_are_not_mixed(four, ranks):
    """Half of the nodes have one attempt, the other half another, so that neither is complete."""
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
        result = list(plain(path))
        if gone in result:
            gone.rmdir()
        return iter(result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "iterdir", iterdir)
        steps = nodes(folder, rank, laid_out(world, filled=False)).steps()
    assert not gone.exists()
    return steps


def test_a_copy_deleted_meanwhile_is_skipped(four, ranks):
    assert ranks.run(find_while_one_goes, 4, four) == [[6]] * 4


def two_nodes(folder: Path, rank: int, tensors: dict[str, torch.Tensor]) -> MemoryCopies:
    """Ranks 0 and 1 are on one node, 2 and 3 on another."""
    return MemoryCopies(folder / f"node-{rank // 2}", ID, lambda: tensors)


def save_on_two_nodes(rank: int, world: int, folder: Path) -> None:
    two_nodes(folder, rank, laid_out(world, filled=True)).save({"step": 5}, 5)


def find_where_the_receiving_rank_is_late(rank: int, world: int, folder: Path, gates: list[Path]) -> bool:
    """Rank 2 receives the files for its node only when rank 3 has done all that it does without waiting."""
    tensors, expected = laid_out(world, filled=False), laid_out(world, filled=True)
    copies = two_nodes(folder, rank, tensors)
    assert copies.steps() == [5]
    plain, agree, receive = module.run_on_all_ranks, module.all_ranks_agree, torch.distributed.recv
    begins = False

    def together(work: Any, *given: Any) -> Any:
        nonlocal begins
        result = plain(work, *given)
        begins = begins or (work.__name__ == "make_room" and rank in (2, 3))
        return result

    def pass_gate(mode: str) -> None:
        nonlocal begins
        if begins:
            begins = False
            gates.pop(0).open(mode).close()  # returns when its other end is opened

    def all_agree(mine: bool) -> bool:
        if rank == 3:
            pass_gate("w")
        return agree(mine)

    def gather(problem: Any) -> list[Any]:
        if rank == 3:
            pass_gate("w")
        return gather_from_all(problem)

    def recv(*given: Any) -> Any:
        pass_gate("r")
        return receive(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run_on_all_ranks", together)
        patch.setattr(module, "all_ranks_agree", all_agree)
        patch.setattr(torch.distributed, "recv", recv)
        place = copies.gather(5)
        store.load(place, tensors, gather=gather)
    copies.release()
    assert rank < 2 or not gates
    return all(torch.equal(values(tensors[name]), values(expected[name])) for name in WHOLE)


def test_ranks_wait_for_files_that_their_node_still_receives(ranks, tmp_path):
    ranks.run(save_on_two_nodes, 4, tmp_path)
    shutil.rmtree(tmp_path / "node-1")
    gates = [tmp_path / "first", tmp_path / "second"]
    for gate in gates:
        os.mkfifo(gate)
    assert ranks.run(find_where_the_receiving_rank_is_late, 4, tmp_path, gates) == [True] * 4


def test_a_folder_may_disappear_while_it_is_listed(tmp_path, monkeypatch):
    root, plain = tmp_path / f"jingu-{ID:016x}", Path.iterdir

    def iterdir(path: Path) -> Any:
        if path == root:
            root.rmdir()
        return plain(path)

    with join_process_group("cpu", 1):
        copies = MemoryCopies(tmp_path, ID, dict)
        monkeypatch.setattr(Path, "iterdir", iterdir)
        copies.delete()
    assert not root.exists()


def test_a_copied_folder_of_checkpoints_is_another_run(tmp_path):
    with join_process_group("cpu", 1):
        (tmp_path / "a").mkdir()
        first = run_id(tmp_path / "a", True)
        assert run_id(tmp_path / "a", True) == first
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        assert run_id(tmp_path / "b", True) != first
        (tmp_path / "a" / RUN_ID).unlink()
        assert run_id(tmp_path / "a", True) != first


def copy_where_one_is_full(rank: int, world: int, folder: Path) -> str:
    tensors = laid_out(world, filled=True)
    memory = nodes(folder, rank, tensors)
    memory.save({"step": 9}, 9)
    save = partial(memory.save, {"step": 12}, 12)
    # The file for the neighbour's part finds no space.
    return save_on_full_disk(os, "posix_fallocate", save) if rank == 1 else save_or_explain(save)


def test_earlier_copies_stay_if_one_rank_has_no_space(ranks, tmp_path):
    output = ranks.run(copy_where_one_is_full, 4, tmp_path)
    assert output[1] == "No space left on device."
    assert {*output[:1], *output[2:]} == {"rank 1: No space left on device."}
    assert not list(tmp_path.rglob(".step-*"))
    assert [path.name[:13] for path in tmp_path.rglob("step-*")] == ["step-00000009"] * 4
