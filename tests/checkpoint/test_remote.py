"""Copies of checkpoints on object stores without rename: complete or invisible, and resuming from them."""

from __future__ import annotations

import shutil
from typing import Any

import fsspec
import pytest
import torch

from jingu.checkpoint.manifest import CheckpointError
from jingu.checkpoint.remote import RemotePath
from jingu.checkpoint.resume import all_steps, complete_steps, find_latest, step_folder
from jingu.checkpoint.retention import Retention, copy_checkpoint, delete_leftovers, prune
from jingu.checkpoint.save_folder import verify
from jingu.checkpoint.store import CheckpointReader, load, save
from jingu.errors import JinguError

PLACE = "memory://bucket/run/checkpoints"


@pytest.fixture(autouse=True)
def store() -> Any:
    built = fsspec.filesystem("memory")
    yield built
    built.store.clear()
    built.pseudo_dirs[:] = [""]


def saved(checkpoints: Any, step: int, loss: float = 1.0) -> Any:
    state = {"progress": {"step": step, "evaluation": {"loss": loss}}}
    save(step_folder(checkpoints, step), {"w": torch.full((5,), float(step))}, state)
    return step_folder(checkpoints, step)


def here() -> RemotePath:
    return RemotePath.at(PLACE)


def test_a_copy_is_read_in_place(tmp_path):
    for step in (1, 2):
        copy_checkpoint(saved(tmp_path, step), PLACE, Retention(3))
    assert complete_steps(here()) == [1, 2]
    folder = step_folder(here(), 2)
    assert verify(folder) == [] and str(folder) == "memory:///bucket/run/checkpoints/step-00000002"
    assert torch.equal(CheckpointReader(folder).read("w"), torch.full((5,), 2.0))
    (folder / "state.json").unlink()
    assert verify(folder) == ["state.json is missing"]


def test_saving_to_a_url(store):
    """A checkpoint is complete only with its manifest; an older copy is deleted first, a failed one completely."""
    folder = step_folder(here(), 3)
    for value in (1.0, 2.0):
        save(folder, {"w": torch.full((700, 3), value)}, {"step": 3})
        assert verify(folder) == [] and complete_steps(here()) == [3]
        assert torch.equal(CheckpointReader(folder).read("w"), torch.full((700, 3), value))
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["manifest.json", "shard-00000-of-00001.safetensors", "state.json"]
    with pytest.raises(TypeError):
        save(folder, {"w": torch.ones(3)}, {"bad": object()})
    assert all_steps(here()) == []


def test_damaged_copies_at_a_url_are_skipped(store):
    for step in (1, 2, 3):
        save(step_folder(here(), step), {"w": torch.full((5,), float(step))}, {"step": step})
    (step_folder(here(), 3) / "manifest.json").unlink()
    shard = step_folder(here(), 2) / "shard-00000-of-00001.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    store.pipe_file(str(shard), bytes(raw))
    assert find_latest(here()).step == 1
    with pytest.raises(CheckpointError, match="the bytes of tensor w do not match"):
        load(step_folder(here(), 2), {"w": torch.zeros(5)})
    store.pipe_file(str(shard), bytes(raw[:-1]))
    assert verify(step_folder(here(), 2)) == [f"{shard.name} has {len(raw) - 1} bytes, not {len(raw)}"]
    delete_leftovers(here())
    assert all_steps(here()) == [1, 2]
    save(step_folder(here(), 4), {"w": torch.ones(5)}, {"step": 4})
    assert prune(here(), Retention(1), current=4) == [1, 2]


def test_old_copies_are_pruned(tmp_path):
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9), (4, 0.8), (5, 0.7)):
        copy_checkpoint(saved(tmp_path, step, loss), PLACE, Retention(1, every=3, best=1))
    assert complete_steps(here()) == [2, 3, 5]


@pytest.mark.parametrize("good", range(3))
def test_an_interrupted_copy_is_invisible(good, tmp_path, monkeypatch):
    """Also if there was a complete copy of the same step before."""
    copy_checkpoint(saved(tmp_path, 1), PLACE, Retention(3))
    for _ in range(2):
        copy_checkpoint(saved(tmp_path, 2), PLACE, Retention(3))
    real, calls = fsspec.implementations.memory.MemoryFileSystem.put_file, []

    def broken(self: Any, *arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) > good:
            raise OSError("the network is gone")
        return real(self, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(fsspec.implementations.memory.MemoryFileSystem, "put_file", broken)
        with pytest.raises(CheckpointError, match=r"could not be copied to .*the network is gone"):
            copy_checkpoint(step_folder(tmp_path, 2), PLACE, Retention(3))
    assert complete_steps(here()) == [1]
    copy_checkpoint(step_folder(tmp_path, 2), PLACE, Retention(3))
    assert complete_steps(here()) == [1, 2]


def test_an_unknown_url_scheme():
    with pytest.raises(JinguError, match="the URL cannot be opened"):
        RemotePath.at("nowhere://bucket")


def test_a_run_without_local_checkpoints_resumes_from_the_copies(tiny_run, done, peak, tmp_path, capsys):
    from jingu.training.commands import train

    settings = {"checkpoint.every": 4, "checkpoint.copy_to": f"file://{tmp_path}/shared", "train.steps": 10}
    whole, parts = (tiny_run(settings, name=name) for name in ("whole", "parts"))
    assert train(whole) == train(parts) == 0
    shared = tmp_path / "shared/parts/checkpoints"
    assert sorted(path.name for path in shared.iterdir()) == ["step-00000008", "step-00000010"]
    shutil.rmtree(done(parts).folder / "checkpoints")
    (shared / "step-00000010/state.json").write_text("{}")
    capsys.readouterr()
    assert train(parts) == 0
    output = capsys.readouterr().err
    assert f"Skipping file://{shared}/step-00000010: state.json has 2 bytes" in output
    assert "Resuming from step 8.\n" in output
    ours, theirs = done(parts).tensors(), done(whole).tensors()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert verify(shared / "step-00000010") == []


@pytest.mark.parametrize("background", [True, False])
def test_copies_in_a_folder_are_relative_to_the_current_one(background, tiny_run, tmp_path, monkeypatch, capsys):
    from jingu.checkpoint.commands import list_checkpoints
    from jingu.training.commands import train

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, folder, place in (("near", "shared", "shared"), ("home", "~/shared", "home/shared")):
        settings = {"checkpoint.every": 2, "checkpoint.copy_to": folder, "checkpoint.async_save": background}
        assert train(tiny_run({**settings, "train.steps": 3}, name=name)) == 0
        copies = tmp_path / place / name / "checkpoints"
        assert complete_steps(copies) == [2, 3]
        capsys.readouterr()
        list_checkpoints(tmp_path / "runs" / name)
        assert capsys.readouterr().out.partition(f"Copies at {copies}:")[2].count("complete") == 2


@pytest.mark.parametrize("background", [True, False])
def test_a_run_saves_its_checkpoints_to_a_url(background, tiny_run, done, peak, tmp_path, capsys):
    from jingu.checkpoint.commands import list_checkpoints
    from jingu.formats.models import open_model
    from jingu.training.commands import train

    settings = {"checkpoint.every": 4, "train.steps": 10, "checkpoint.async_save": background}
    whole = tiny_run(settings, name="whole")
    parts = tiny_run({**settings, "checkpoint.url": f"file://{tmp_path}/shared"}, name="parts")
    assert train(whole) == train(parts) == 0
    shared = tmp_path / "shared/parts/checkpoints"
    assert sorted(path.name for path in shared.iterdir()) == ["step-00000008", "step-00000010"]
    assert not (done(parts).folder / "checkpoints").exists()
    (shared / "step-00000010/manifest.json").unlink()
    capsys.readouterr()
    assert train(parts) == 0
    assert "Resuming from step 8.\n" in capsys.readouterr().err
    theirs, opened = done(whole).tensors(), open_model(done(parts).folder)
    assert all(torch.equal(opened.read(name[6:]), theirs[name]) for name in theirs if name.startswith("model/"))
    list_checkpoints(RemotePath.at(f"file://{tmp_path}/shared/parts"))
    assert capsys.readouterr().out.count("complete") == 2
    with pytest.raises(JinguError, match=r"checkpoint\.url: .* → null"):
        train(parts.model_copy(update={"checkpoint": whole.checkpoint}))


def test_two_ranks_save_to_a_url(tiny_run, train_on, done, tmp_path):
    settings = {
        "checkpoint.every": 4,
        "train.steps": 10,
        "parallel.zero_stage": 3,
        "checkpoint.url": f"file://{tmp_path}",
    }
    config, alone = tiny_run(settings, name="two"), tiny_run({"train.steps": 10}, name="alone")
    train_on(1, alone)
    train_on(2, config)
    (tmp_path / "two/checkpoints/step-00000010/manifest.json").unlink()
    train_on(2, config)
    assert done(config).column("resumed_from", "start") == [None, 8]
    assert done(config).column("loss") == pytest.approx(done(alone).column("loss"), rel=1e-9)


def test_training_continues_if_copying_fails(tiny_run, done, peak, tmp_path, capsys):
    from jingu.training.commands import train

    (tmp_path / "file").touch()
    config = tiny_run({"checkpoint.every": 2, "train.steps": 4, "checkpoint.copy_to": f"{tmp_path}/file/shared"})
    assert train(config) == 0
    assert capsys.readouterr().err.count(f"it could not be copied to {tmp_path}/file/shared/run/checkpoints") == 2
    done(config).checkpoint()
