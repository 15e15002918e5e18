"""What `jingu checkpoint list | verify | diff` prints."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest
import torch

from jingu.checkpoint import commands
from jingu.checkpoint.remote import checkpoint_path
from jingu.checkpoint.resume import all_steps, step_folder
from jingu.checkpoint.store import save
from jingu.cli import main
from jingu.config.load import dump_yaml
from jingu.errors import JinguError


@pytest.fixture
def run(tmp_path):
    weights = torch.tensor([3.0, 4.0])
    for step in (1, 2):
        tensors = {
            "same": torch.ones(2, 2),
            "w": weights * step,
            "grown": torch.zeros(step),
            f"only{step}": torch.ones(1),
        }
        save(step_folder(tmp_path / "checkpoints", step), tensors, {"step": step, "seed": 0})
    return tmp_path


def test_list(run, capsys):
    (run / "checkpoints" / ".step-00000009.partial").mkdir()
    (step_folder(run / "checkpoints", 3)).mkdir()
    (step_folder(run / "checkpoints", 2) / "state.json").write_text("{}")
    commands.list_checkpoints(run)
    lines = [line.split(maxsplit=5) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["checkpoint", "size", "tensors", "ranks", "state"]
    assert [line[0] for line in lines[1:]] == [
        "step-00000001",
        "step-00000002",
        "step-00000003",
        ".step-00000009.partial",
    ]
    assert lines[1][3:] == ["4", "1", "complete"]
    assert lines[2][3:] == ["4", "1", "damaged: state.json missing or cut short"]
    assert " ".join(lines[3][3:]) == "not usable: manifest.json is missing: the save was never finished."
    assert " ".join(lines[4][3:]).startswith("unfinished")


def test_checkpoints_deleted_meanwhile_are_skipped(run, capsys, monkeypatch):
    first, partial = step_folder(run / "checkpoints", 1), run / "checkpoints" / ".step-00000009.partial"
    partial.mkdir()
    shutil.copytree(first, run / "copy")
    plain, problems_of = Path.iterdir, commands.find_problems

    def iterdir(path):
        if path in (first, partial):
            shutil.rmtree(path)
        return plain(path)

    def verified(folder):
        if folder == first:
            shutil.rmtree(first)
        return problems_of(folder)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", iterdir)
        commands.list_checkpoints(run)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["checkpoint", "step-00000002"]
    shutil.move(run / "copy", first)
    monkeypatch.setattr(commands, "find_problems", verified)
    commands.verify(run)
    assert capsys.readouterr().out.startswith("step-00000001: deleted meanwhile\nstep-00000002: good (")


def test_verify(run, capsys):
    commands.verify(run)
    assert capsys.readouterr().out.count(": good (4 tensors in 3 files, ") == 2
    (step_folder(run / "checkpoints", 2) / "state.json").unlink()
    with pytest.raises(JinguError) as caught:
        commands.verify(run)
    assert str(caught.value) == (
        f"{run}: 1 of 2 checkpoints is damaged: step-00000002. Delete what is damaged; training resumes "
        "from the newest good checkpoint, step 1."
    )
    assert "step-00000002: damaged\n  state.json is missing\n" in capsys.readouterr().out
    commands.verify(step_folder(run / "checkpoints", 1))
    (step_folder(run / "checkpoints", 1) / "manifest.json").unlink()
    with pytest.raises(JinguError, match="No other checkpoint here is good"):
        commands.verify(run)


def test_diff(run, capsys):
    commands.diff(step_folder(run / "checkpoints", 1), run)
    out = capsys.readouterr().out.splitlines()
    assert [line.split() for line in out] == [
        ["tensor", "dtype", "and", "shape", "largest", "difference", "norm", "in", "first", "norm", "in", "second"],
        ["grown", "float32", "[1]", "→", "float32", "[2]"],
        ["w", "float32", "[2]", "4", "5", "10"],
        [],
        ["only", "in", "the", "first:", "only1"],
        ["only", "in", "the", "second:", "only2"],
        ["state", "step:", "1", "→", "2"],
        ["1", "tensors", "are", "equal", "to", "the", "last", "bit,", "2", "differ."],
    ]


def test_prune(run, capsys):
    for step in (3, 4, 5, 6):
        save(step_folder(run / "checkpoints", step), {"w": torch.ones(9)}, {"progress": {"evaluation": {"loss": step}}})
    (step_folder(run / "checkpoints", 6) / "state.json").write_text("{}")
    commands.prune(run, keep_every=2, keep_best=1)
    out = capsys.readouterr().out
    assert "step-00000006 stays, though it is not usable (state.json has 2 bytes, not " in out
    assert "Deleted step-00000001, and freed " in out
    assert all_steps(run / "checkpoints") == [2, 3, 4, 5, 6]
    commands.prune(run, damaged=True)
    assert all_steps(run / "checkpoints") == [5]
    commands.prune(run)
    assert capsys.readouterr().out.endswith("There was nothing to delete.\n")
    for name in (".step-00000003.deleted", ".step-00000009.partial"):
        (run / "checkpoints" / name).mkdir()
        (run / "checkpoints" / name / "x.safetensors").write_bytes(bytes(5000))
    commands.prune(run)
    out = capsys.readouterr().out
    assert "Deleted .step-00000003.deleted (of a save that did not finish), .step-00000009.partial (of a save" in out
    assert out.endswith("and freed 10 kB.\n")
    (step_folder(run / "checkpoints", 5) / "manifest.json").unlink()
    with pytest.raises(JinguError, match="no checkpoint here is good, and nothing was deleted"):
        commands.prune(run, damaged=True)
    assert all_steps(run / "checkpoints") == [5]


def test_a_run_in_training_is_not_pruned(run):
    descriptor = os.open(run, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(JinguError, match="is training this run now"):
        commands.prune(run)
    os.close(descriptor)


def test_every_command_accepts_a_url(run, tmp_path, capsys):
    address = f"file://{run}"
    assert main(["checkpoint", "diff", f"{address}/checkpoints/step-00000001", address]) == 0
    assert "1 tensors are equal to the last bit, 2 differ." in capsys.readouterr().out
    (step_folder(run / "checkpoints", 3)).mkdir()  # someone may be saving it
    assert main(["checkpoint", "prune", address]) == 0
    assert "Deleted step-00000001, and freed " in capsys.readouterr().out
    assert all_steps(run / "checkpoints") == [2, 3]
    assert main(["checkpoint", "list", address]) == 0
    assert main(["checkpoint", "verify", f"{address}/checkpoints/step-00000002"]) == 0
    assert ": good (" in capsys.readouterr().out
    with pytest.raises(JinguError, match="newest good checkpoint, step 2"):
        commands.verify(checkpoint_path(f"{address}/checkpoints/step-00000003"))


def test_a_run_with_checkpoints_at_a_url(tiny_run, tmp_path, capsys):
    """They are listed through the run's folder, and so are copies."""
    for name, setting, above in (("far", "url", "a"), ("near", "copy_to", "b")):
        config = tiny_run({f"checkpoint.{setting}": f"file://{tmp_path}/{above}"}, name=name)
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
        for step in (1, 2):
            save(step_folder(tmp_path / above / name / "checkpoints", step), {"w": torch.ones(9)}, {})
    save(step_folder(tmp_path / "runs/near/checkpoints", 2), {"w": torch.ones(9)}, {})
    commands.prune(tmp_path / "runs/far")
    assert all_steps(tmp_path / "a/far/checkpoints") == [2]
    capsys.readouterr()
    commands.list_checkpoints(tmp_path / "runs/near")
    here, there = capsys.readouterr().out.split(f"Copies at file://{tmp_path}/b/near/checkpoints:")
    assert (here.count("complete"), there.count("complete")) == (1, 2)


def test_difference_shows_nan_and_small_types():
    nan, *_ = commands.difference(torch.tensor([1.0, float("nan"), 2.0]), torch.ones(3))
    assert nan != nan
    small = commands.difference(torch.tensor([0, 255], dtype=torch.uint8), torch.tensor([1, 0], dtype=torch.uint8))
    assert small == [255.0, 255.0, 1.0]


@pytest.mark.parametrize("verb", [commands.list_checkpoints, commands.verify])
def test_a_folder_without_checkpoints(tmp_path, verb):
    with pytest.raises(JinguError, match="there is no checkpoint here"):
        verb(tmp_path)
    with pytest.raises(JinguError, match="there is no such folder"):
        verb(tmp_path / "absent")
