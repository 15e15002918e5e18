"""Saving while training continues: a checkpoint has the state of its step, and no failure stops the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from jingu.checkpoint.async_save import AsyncSaver, SaveResult
from jingu.checkpoint.resume import all_steps, step_folder
from jingu.checkpoint.retention import Retention
from jingu.checkpoint.save_folder import failure_notes, partial_path, read_state, shard_name, verify, write_failure_note
from jingu.checkpoint.store import CheckpointReader, load
from tests.limits import PATIENCE
from tests.parallel.layouts import block_at


def some_state() -> dict[str, Tensor]:
    """Weights, a moment and a counter; one of them not contiguous, one of another dtype."""
    generator = torch.Generator().manual_seed(0)
    return {
        "model/w": torch.randn(70, 33, generator=generator).t(),
        "model/b": torch.randn(5, generator=generator).bfloat16(),
        "optimizer/exp_avg/w": torch.randn(33, 70, generator=generator, dtype=torch.float64),
        "optimizer/step/w": torch.zeros((), dtype=torch.float32),
        "nothing": torch.empty(0, 3),
    }


def train(tensors: dict[str, Tensor]) -> None:
    for tensor in tensors.values():
        tensor.add_(1)


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_holds(folder: Path, expected: dict[str, Tensor]) -> None:
    assert verify(folder) == []
    for name, tensor in expected.items():
        assert torch.equal(CheckpointReader(folder).read(name), tensor), name


def pause(saver: AsyncSaver) -> None:
    """Pause the writer process; `resume` continues it."""
    os.kill(saver._process.pid, signal.SIGSTOP)


def resume(saver: AsyncSaver) -> None:
    os.kill(saver._process.pid, signal.SIGCONT)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return some_state()


@pytest.fixture
def saver(tensors):
    built = AsyncSaver(tensors)
    yield built
    built.close()
    assert built._process.returncode is not None


def test_a_delayed_save_writes_the_state_of_its_step(saver, tensors, tmp_path):
    """Writing is delayed while training changes every tensor; the memory of the copy is reused."""
    assert saver.bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    for step in range(1, 5):
        train(tensors)
        expected, folder = copies(tensors), step_folder(tmp_path, step)
        pause(saver)
        saver.save(folder, tensors, {"step": step}, Retention(10))
        assert saver.busy and saver.poll() is None
        saver.wait_for_copy()
        train(tensors)
        assert not folder.exists()
        resume(saver)
        assert saver.poll(None) == SaveResult(folder, None)
        assert not saver.busy
        assert_holds(folder, expected)
        assert read_state(folder) == {"step": step}
    assert all_steps(tmp_path) == [1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{step}" for step in (1, 2, 3, 4)]


def test_an_optimizer_step_waits_for_the_copy(tmp_path, monkeypatch):
    """The copy starts only when the optimizer has reached its next step."""
    weight = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = torch.optim.AdamW([weight], lr=0.1)

    def step() -> None:
        weight.grad = torch.ones_like(weight)
        optimizer.step()

    def tensors() -> dict[str, Tensor]:
        return {"weight": weight, **optimizer.state[weight]}

    step()
    saver, at_its_step = AsyncSaver(tensors(), optimizer), threading.Event()
    copy, settle = saver._copy, saver.wait_for_copy
    monkeypatch.setattr(saver, "_copy", lambda *arguments: (at_its_step.wait(), copy(*arguments)))
    monkeypatch.setattr(saver, "wait_for_copy", lambda: at_its_step.set() or settle())
    for number in (1, 2):
        at_its_step.clear()
        expected = copies(tensors())
        saver.save(step_folder(tmp_path, number), tensors(), {}, Retention(2))
        assert not saver._copying.done()
        step()
        assert not any(torch.equal(expected[name], tensor) for name, tensor in tensors().items())
        assert saver.poll(None).problem is None
        assert_holds(step_folder(tmp_path, number), expected)
    saver.close()


def test_saving_prunes_old_checkpoints(saver, tensors, tmp_path):
    for step in range(1, 8):
        saver.save(step_folder(tmp_path, step), tensors, {}, Retention(2, every=3))
        assert saver.poll(None).problem is None
    assert all_steps(tmp_path) == [3, 6, 7]


def test_async_and_synchronous_saves_write_the_same_bytes(saver, tensors, tmp_path):
    from jingu.checkpoint.store import save

    saver.save(step_folder(tmp_path / "a", 1), tensors, {"step": 1}, Retention())
    save(step_folder(tmp_path / "b", 1), tensors, {"step": 1})
    assert saver.poll(None).problem is None
    a, b = (step_folder(tmp_path / name, 1) for name in "ab")
    files = sorted(path.name for path in a.iterdir())
    assert files == sorted(path.name for path in b.iterdir())
    assert all((a / name).read_bytes() == (b / name).read_bytes() for name in files)


def test_a_dead_writer_process_is_replaced(saver, tensors, tmp_path):
    pause(saver)
    saver.save(step_folder(tmp_path, 1), tensors, {}, Retention())
    os.kill(saver._process.pid, signal.SIGKILL)
    outcome = saver.poll(None)
    assert outcome.problem == "the process that writes it ended by SIGKILL"
    train(tensors)
    saver.save(step_folder(tmp_path, 2), tensors, {}, Retention())
    assert saver.poll(None) == SaveResult(step_folder(tmp_path, 2), None)
    assert_holds(step_folder(tmp_path, 2), tensors)


def test_a_failing_disk_is_reported_and_training_continues(saver, tensors, tmp_path):
    (tmp_path / "file").touch()
    saver.save(tmp_path / "file" / "step-00000001", tensors, {}, Retention())
    assert "Not a directory" in saver.poll(None).problem
    (tmp_path / "step-00000002").mkdir()
    partial_path(tmp_path / "step-00000003").touch()
    saver.save(step_folder(tmp_path, 3), tensors, {}, Retention())
    assert "File exists" in saver.poll(None).problem
    partial_path(tmp_path / "step-00000003").unlink()
    saver.save(step_folder(tmp_path, 3), tensors, {}, Retention())
    assert saver.poll(None).problem is None
    assert_holds(step_folder(tmp_path, 3), tensors)


def test_a_failed_save_removes_its_files_and_older_leftovers(saver, tensors, tmp_path):
    partial = partial_path(step_folder(tmp_path, 2))
    (partial / shard_name(0, 1)).mkdir(parents=True)  # in the way of the file
    late = partial_path(step_folder(tmp_path, 1)) / shard_name(1, 2)
    late.parent.mkdir()
    late.write_bytes(b"of a rank that came when the first had given up")
    saver.save(step_folder(tmp_path, 2), tensors, {}, Retention())
    assert "File exists" in saver.poll(None).problem
    assert list(tmp_path.iterdir()) == []


def test_a_note_is_complete_when_it_appears(tmp_path):
    seen = []

    class LooksError(Exception):
        def __str__(self) -> str:
            seen.append(failure_notes(tmp_path))
            return "why"

    write_failure_note(tmp_path, 1, LooksError())
    assert seen == [{}] and failure_notes(tmp_path) == {1: "LooksError: why"}


def test_a_later_step_of_another_rank_is_not_deleted(saver, tensors, tmp_path):
    for step in (1, 3):
        partial_path(step_folder(tmp_path, step)).mkdir()
    saver.save(step_folder(tmp_path, 2), tensors, {}, Retention())
    assert saver.poll(None).problem is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step-00000003.partial", "step-00000002"]


def test_changed_tensors_are_refused(saver, tensors, tmp_path):
    with pytest.raises(ValueError, match="differ from those at the start"):
        saver.save(step_folder(tmp_path, 1), {**tensors, "model/b": torch.zeros(6)}, {}, Retention())


def test_ctrl_c_does_not_reach_the_writer_process(saver, tensors, tmp_path):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        saver.save(step_folder(tmp_path, 1), tensors, {}, Retention())
        assert saver.poll(None).problem is None
        os.kill(saver._process.pid, number)


DIES = """
import os, signal, sys
from pathlib import Path
from typing import Any
import torch
from jingu.checkpoint.async_save import AsyncSaver
from jingu.checkpoint.retention import Retention
tensors = {"w": torch.zeros(5)}
saver = AsyncSaver(tensors)
os.kill(saver._process.pid, signal.SIGSTOP)
saver.save(Path(sys.argv[1]), tensors, {}, Retention())
print(saver._process.pid, flush=True)
os.kill(saver._process.pid, signal.SIGCONT)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_writer_process_ends_with_killed_training(tmp_path):
    folder = step_folder(tmp_path, 1)
    process = subprocess.Popen([sys.executable, "-c", DIES, str(folder)], stdout=subprocess.PIPE, text=True)
    writer = psutil.Process(int(process.stdout.readline()))
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    assert psutil.wait_procs([writer], timeout=PATIENCE)[1] == []
    assert not folder.exists() or verify(folder) == []


# Several ranks


def sharded(rank: int, world: int) -> dict[str, Any]:
    whole = torch.arange(35.0).reshape(7, 5)
    return {"w": block_at(whole, (world,), (rank,), [0]), "plain": torch.arange(9.0)}


def save_on_two(rank: int, world: int, folder: Path) -> list[object]:
    """Rank 1's writer process is first delayed, then killed before any other has started, then works."""
    import torch.distributed as dist

    tensors, output = sharded(rank, world), []
    saver = AsyncSaver(tensors, rank=rank, ranks=world)
    for step, fate in ((1, "late"), (2, "dies"), (3, "works")):
        if fate == "dies" or (rank == 1 and fate == "late"):
            pause(saver)
        saver.save(step_folder(folder, step), tensors, {"step": step}, Retention(3))
        if rank == 0:
            output.append(saver.poll(0.05 if fate == "late" else 0.0) is None or fate == "works")
        dist.barrier()
        if rank == 1 and fate == "late":
            resume(saver)
        if rank == 1 and fate == "dies":
            os.kill(saver._process.pid, signal.SIGKILL)
        if rank == 0 and fate == "dies":
            dist.barrier()
            resume(saver)
        outcome = saver.poll(None)
        if rank == 1 and fate == "dies":
            dist.barrier()
        output.append(outcome.problem if outcome else None)
        dist.barrier()
    saver.close()
    return output


def test_rank_0_waits_for_all_parts_and_learns_of_failures(tmp_path, ranks):
    first, second = ranks.run(save_on_two, 2, tmp_path)
    died = "the process that writes it ended by SIGKILL"
    assert second == [None, died, None]
    assert first[:2] == [True, None] and first[5] is None
    assert first[3] == f"the checkpoint could not be saved (rank 1: {died})."
    assert all_steps(tmp_path) == [1, 3]
    for step in (1, 3):
        whole = {"w": torch.zeros(7, 5), "plain": torch.zeros(9)}
        load(step_folder(tmp_path, step), whole)
        assert torch.equal(whole["w"], torch.arange(35.0).reshape(7, 5))
        assert torch.equal(whole["plain"], torch.arange(9.0))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
