"""A damaged checkpoint is never loaded, and resuming skips it."""

import pathlib
import random
import shutil

import pytest
import torch
from torch import Tensor

from jingu.checkpoint.manifest import CheckpointError
from jingu.checkpoint.resume import all_steps, complete_steps, find_latest, newest_complete, step_folder
from jingu.checkpoint.retention import Retention, after_save, prune
from jingu.checkpoint.save_folder import read_state, verify
from jingu.checkpoint.store import load, save


def some_tensors(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"model/{i}": torch.randn(5, 3 + i, generator=generator) for i in range(3)}


@pytest.fixture
def checkpoints(tmp_path):
    for step in (100, 200):
        save(step_folder(tmp_path, step), some_tensors(step), {"step": step})
    return tmp_path


def test_all_of_a_thousand_flipped_bits_and_truncations_are_detected(checkpoints):
    """Both verifying and loading detect damage in any file, and resuming skips it."""
    generator = random.Random(0)
    last = step_folder(checkpoints, 200)
    files = sorted(last.iterdir())
    seen = set()
    for trial in range(1000):
        path = files[trial % len(files)]
        good = path.read_bytes()
        if trial % 5 == 0:
            path.write_bytes(good[: generator.randrange(len(good))])
        else:
            bad = bytearray(good)
            bad[generator.randrange(len(bad))] ^= 1 << generator.randrange(8)
            path.write_bytes(bad)
        problems = verify(last)
        assert problems and path.name in problems[0], (trial, path.name, problems)
        seen.add(problems[0])
        with pytest.raises(CheckpointError):
            load(last, {name: torch.zeros_like(tensor) for name, tensor in some_tensors(200).items()})
            read_state(last)
        result = find_latest(checkpoints)
        assert result.step == 100 and result.folder == step_folder(checkpoints, 100)
        assert [folder for folder, _ in result.skipped] == [last]
        assert problems[0] in result.skipped[0][1]
        path.write_bytes(good)
    assert verify(last) == []
    shard = "shard-00000-of-00001.safetensors"
    assert {
        "manifest.json is damaged: it does not match its checksum",
        "state.json does not match its checksum",
        f"{shard} does not match its checksum",
        f"{shard}: the bytes of tensor model/1 do not match their checksum",
    } <= seen


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "shard-00000-of-00001.safetensors"])
def test_a_missing_file_is_named(checkpoints, name):
    (step_folder(checkpoints, 200) / name).unlink()
    assert verify(step_folder(checkpoints, 200))[0].startswith(f"{name} is missing")
    assert find_latest(checkpoints).step == 100


def test_several_damaged_tensors_are_counted_in_the_reason(checkpoints):
    folder = step_folder(checkpoints, 200)
    shard = folder / "shard-00000-of-00001.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    raw[-200] ^= 1
    shard.write_bytes(raw)
    assert len(verify(folder)) == 2
    assert find_latest(checkpoints).skipped[0][1].endswith("do not match their checksum (and 1 more)")


def test_a_later_version_of_the_format_says_so(checkpoints, monkeypatch):
    from jingu.checkpoint import manifest

    later = manifest.read_manifest(step_folder(checkpoints, 200) / "manifest.json").model_copy(update={"version": 2})
    (step_folder(checkpoints, 200) / "manifest.json").write_bytes(later.to_bytes())
    assert verify(step_folder(checkpoints, 200)) == [
        "manifest.json has version 2 of the format, and this jingu reads version 1"
    ]


def test_a_manifest_cannot_lead_outside_its_folder(checkpoints):
    from jingu.checkpoint import manifest

    path = step_folder(checkpoints, 200) / "manifest.json"
    result = manifest.read_manifest(path)
    record = result.files["state.json"]
    path.write_bytes(result.model_copy(update={"files": {**result.files, "../state.json": record}}).to_bytes())
    assert verify(path.parent)[0].startswith("manifest.json is not a manifest: files")


def test_a_folder_without_checkpoints_has_no_latest(tmp_path):
    assert find_latest(tmp_path / "absent").step is None
    assert find_latest(tmp_path).folder is None
    assert prune(tmp_path, Retention(1), 100) == []
    (tmp_path / "step-00000007").mkdir()
    (tmp_path / "step-7").mkdir()
    (tmp_path / "notes.txt").touch()
    result = find_latest(tmp_path)
    assert result.step is None
    assert result.skipped == [(tmp_path / "step-00000007", "manifest.json is missing: the save was never finished")]


def test_an_incomplete_newest_checkpoint_is_skipped_with_a_warning(checkpoints, caplog):
    assert newest_complete(checkpoints, checkpoints) == step_folder(checkpoints, 200) and not caplog.messages
    save(step_folder(checkpoints, 300), some_tensors(300), {"step": 300})
    for step in (200, 300):
        (step_folder(checkpoints, step) / "manifest.json").write_bytes(b"{}")
    assert newest_complete(checkpoints, checkpoints) == step_folder(checkpoints, 100)
    assert caplog.messages == [f"{step_folder(checkpoints, 300)} is not complete: using step 100."]


def test_prune_keeps_the_newest_and_deletes_leftovers(checkpoints):
    for step in (300, 123_456_789):
        save(step_folder(checkpoints, step), some_tensors(step), {})
    for name in (".step-00000400.partial", ".step-00000050.deleted"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "shard").touch()
    (checkpoints / ".mine").mkdir()
    assert prune(checkpoints, Retention(2), 123_456_789) == [100, 200]
    assert sorted(path.name for path in checkpoints.iterdir()) == [".mine", "step-00000300", "step-123456789"]


def test_prune_never_deletes_the_last_valid_checkpoint(checkpoints):
    """The checkpoint was damaged after it was saved, so its manifest is intact."""
    (step_folder(checkpoints, 200) / "state.json").write_text("{}")
    assert complete_steps(checkpoints) == [100, 200]
    assert prune(checkpoints, Retention(1), 100) == []
    save(step_folder(checkpoints, 150), some_tensors(150), {})
    assert prune(checkpoints, Retention(1), current=150) == [100]
    assert all_steps(checkpoints) == [150, 200]
    assert find_latest(checkpoints).step == 150


def test_a_failed_deletion_is_repeated_after_the_next_save(checkpoints, monkeypatch):
    def fails(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "rename", fails)
        assert after_save(step_folder(checkpoints, 200), Retention(1), None) is None
    assert complete_steps(checkpoints) == [100, 200]
    assert after_save(step_folder(checkpoints, 200), Retention(1), None) is None
    assert complete_steps(checkpoints) == [200]


def test_a_killed_prune_leaves_no_partial_checkpoint(checkpoints, monkeypatch):
    class Killed(BaseException):
        pass

    def die(path, **_):
        if path.exists():
            next(path.iterdir()).unlink()
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(Killed):
            prune(checkpoints, Retention(1), 200)
    assert all_steps(checkpoints) == complete_steps(checkpoints) == [200]
    assert prune(checkpoints, Retention(1), 200) == []
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000200"]
