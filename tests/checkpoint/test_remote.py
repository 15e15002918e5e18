"""Copies of checkpoints on stores without a rename: whole or not to be seen, and the way back from them."""

from __future__ import annotations

import shutil
from typing import Any

import fsspec
import pytest
import torch

from jingu.checkpoint import remote
from jingu.checkpoint.files import verify
from jingu.checkpoint.manifest import CheckpointError
from jingu.checkpoint.resume import Keep, step_folder
from jingu.checkpoint.store import read_tensor, save
from jingu.errors import JinguError

PLACE = "memory://bucket/run/checkpoints"


@pytest.fixture(autouse=True)
def store() -> Any:
    made = fsspec.filesystem("memory")
    yield made
    made.store.clear()
    made.pseudo_dirs[:] = [""]


def saved(checkpoints: Any, step: int, loss: float = 1.0) -> Any:
    state = {"progress": {"step": step, "evaluation": {"loss": loss}}}
    save(step_folder(checkpoints, step), {"w": torch.full((5,), float(step))}, state)
    return step_folder(checkpoints, step)


def test_a_copy_comes_back_as_it_was(tmp_path):
    for step in (1, 2):
        remote.copy(saved(tmp_path / "a", step), PLACE, Keep(3))
    assert remote.steps(PLACE) == [1, 2]
    folder = remote.fetch(PLACE, 2, tmp_path / "b")
    assert folder == step_folder(tmp_path / "b", 2) and verify(folder) == []
    assert torch.equal(read_tensor(folder, "w"), torch.full((5,), 2.0))
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["step-00000002"]


def test_what_need_not_stay_goes(tmp_path):
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9), (4, 0.8), (5, 0.7)):
        remote.copy(saved(tmp_path, step, loss), PLACE, Keep(1, every=3, best=1))
    assert remote.steps(PLACE) == [2, 3, 5]


@pytest.mark.parametrize("good", range(3))
def test_a_copy_that_breaks_off_is_not_to_be_seen(good, tmp_path, monkeypatch):
    """Also where a complete one of the same step was there before."""
    remote.copy(saved(tmp_path, 1), PLACE, Keep(3))
    for _ in range(2):
        remote.copy(saved(tmp_path, 2), PLACE, Keep(3))
    real, calls = fsspec.implementations.memory.MemoryFileSystem.put_file, []

    def broken(self: Any, *arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) > good:
            raise OSError("the network is gone")
        return real(self, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(fsspec.implementations.memory.MemoryFileSystem, "put_file", broken)
        with pytest.raises(CheckpointError, match=r"could not be copied to .* the network is gone"):
            remote.copy(step_folder(tmp_path, 2), PLACE, Keep(3))
    assert remote.steps(PLACE) == [1]
    remote.copy(step_folder(tmp_path, 2), PLACE, Keep(3))
    assert remote.steps(PLACE) == [1, 2]


def test_an_address_that_nothing_knows():
    with pytest.raises(JinguError, match="there is no way to this address"):
        remote.steps("nowhere://bucket")


def test_a_run_whose_own_checkpoints_are_gone_goes_on_from_the_copies(tiny_run, done, peak, tmp_path, capsys):
    from jingu.train.verbs import train

    settings = {"checkpoint.every": 4, "checkpoint.copy_to": f"file://{tmp_path}/shared", "train.steps": 10}
    whole, parts = (tiny_run(settings, name=name) for name in ("whole", "parts"))
    assert train(whole) == train(parts) == 0
    shared = tmp_path / "shared/parts/checkpoints"
    assert sorted(path.name for path in shared.iterdir()) == ["step-00000008", "step-00000010"]
    shutil.rmtree(done(parts).folder / "checkpoints")
    (shared / "step-00000010/state.json").write_text("{}")
    capsys.readouterr()
    assert train(parts) == 0
    said = capsys.readouterr().err
    assert "Passing over step 10 at file://" in said and "Fetched step 8 from file://" in said
    assert "Going on from step 8.\n" in said
    ours, theirs = done(parts).tensors(), done(whole).tensors()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert verify(shared / "step-00000010") == []


def test_where_copying_fails_training_goes_on(tiny_run, done, peak, tmp_path, capsys):
    from jingu.train.verbs import train

    (tmp_path / "file").touch()
    config = tiny_run({"checkpoint.every": 2, "train.steps": 4, "checkpoint.copy_to": f"{tmp_path}/file/shared"})
    assert train(config) == 0
    assert capsys.readouterr().err.count(f"it could not be copied to {tmp_path}/file/shared/run/checkpoints") == 2
    done(config).checkpoint()
