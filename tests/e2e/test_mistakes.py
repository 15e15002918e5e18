"""Exact messages of the errors that new users make while running: exit code 2, no traceback, no partial files."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import jingu
from jingu.checkpoint import save_folder
from jingu.cli import main
from jingu.config.load import dump_yaml
from jingu.data.build import build
from jingu.errors import JinguError
from jingu.text.tokenizer_commands import train as train_tokenizer
from jingu.training import precision


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peak: None) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def error_of(tiny_run, tmp_path, capsys) -> Callable[..., str]:
    """Return the error message of `jingu train`, after checking that it leaves the runs unchanged."""

    def say(changes: dict[str, Any] | None = None, *words: str, runs: str = "runs", untouched: bool = True) -> str:
        config = tiny_run({"train.steps": 2, **(changes or {})}).model_copy(update={"runs_dir": runs})
        Path("run.yaml").write_text(dump_yaml(config), encoding="utf-8")
        before = content(Path(runs))
        capsys.readouterr()
        code = main(["train", "run.yaml", *words])
        output = capsys.readouterr()
        assert (code, output.out) == (2, "")
        assert content(Path(runs)) == before or not untouched
        assert [path for path in Path(runs).rglob("*") if path.name.endswith(".partial")] == []
        return output.err.replace(str(tmp_path), "HERE").removesuffix("\n")

    return say


def content(folder: Path) -> dict[str, bytes | None]:
    """Return every file and folder."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def library_in(text: str, library: Any) -> str:
    for part in ("text", "tokenizer", "data"):
        text = text.replace(str(getattr(library, part)), part.upper())
    return text


# What is missing, or belongs to something else


def test_missing_tokenizer_and_data(error_of):
    fix = "Run `jingu tokenizer train` (or `jingu import` a model to start from), or set tokenizer.path to one."
    assert error_of({"tokenizer.path": "none"}) == f"jingu: none: there is no tokenizer folder here. {fix}"
    assert error_of({"data.path": "none"}) == "jingu: none: there is no data set here. Run `jingu data build` first."
    Path("empty").mkdir()
    assert error_of({"tokenizer.path": "empty"}) == f"jingu: empty: the tokenizer's folder has no tokenizer.json. {fix}"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"train.mixer_kernels": "fla"},
            "train.mixer_kernels: fla cannot be used, because no layer of the model has the delta rule or the state "
            "space of Mamba-2. Set it to auto, which computes with PyTorch where the kernels cannot be used.",
        ),
        (
            {"precision": {"type": "fp8"}},
            "precision.type: FP8 is missing here.",
        ),
        ({"model.hidden_size": 2**17}, "model: weights, gradients and optimizer state of one rank take 3,076.0 GiB"),
    ],
)
def test_a_setting_that_the_device_does_not_support_leaves_no_folder(error_of, monkeypatch, changes, sentence):
    if "precision" in changes:
        monkeypatch.setattr(
            precision, "check_fp8", Mock(side_effect=JinguError("FP8 is missing here.", where="precision.type"))
        )
    assert error_of(changes).startswith(f"jingu: {sentence}")


def test_data_set_of_another_tokenizer(error_of, tiny_run, library):
    other = {"tokenizer.path": "other", "tokenizer.vocab_size": 300}
    train_tokenizer(tiny_run(other))
    from jingu.text.tokenizer import Tokenizer

    first, second = (Tokenizer.load(path).fingerprint()[:12] for path in (library.tokenizer, Path("other")))
    assert library_in(error_of(other), library) == (
        f"jingu: DATA: the data set was built with another tokenizer ({first}, 389 entries) than the run's "
        f"({second}, 300 entries). Set tokenizer.path to the tokenizer it was built with, or build a data set with "
        "this one."
    )


def test_no_validation_split(error_of, tiny_run):
    whole = {"data.path": "data", "data.validation_fraction": 0.0}
    build(tiny_run(whole))
    assert error_of({**whole, "data.validation_fraction": 0.2, "evaluation.every": 1}) == (
        "jingu: data: the data set has no validation split. Build it with data.validation_fraction above "
        "0, or set "
        "evaluation.every to 0."
    )


def test_truncated_data_set(error_of, library):
    shutil.copytree(library.data, "data")
    file = Path("data/train-00000.bin")
    file.write_bytes(file.read_bytes()[:-10])
    size = file.stat().st_size
    assert error_of({"data.path": "data"}) == (
        f"jingu: data/train-00000.bin: the file has {size:,} bytes; the manifest says {size + 10:,} bytes. Copy the "
        "file again, or delete the folder and build the data set again."
    )


# What does not fit


def test_sizes_that_do_not_fit(error_of, library):
    assert error_of({"model.vocab_size": 300}) == (
        "jingu: model.vocab_size: the model has 300 embedding rows, but the tokenizer has 389 entries. Use auto, or "
        "at least 389."
    )
    assert error_of({"model.max_position_embeddings": 16}) == (
        "jingu: model.max_position_embeddings: the model is made for 16 tokens, but the batch has sequences of 33. "
        "Raise "
        "model.max_position_embeddings to 33 or more, or shorten batch.sequence_length."
    )
    assert library_in(error_of({"batch.sequence_length": 50_000}), library) == (
        "jingu: DATA: the data set has 22,881 tokens for training, but one sequence of 50,000 needs 50,001. Add "
        "text, or set batch.sequence_length lower."
    )


def test_batches_that_cannot_be_divided(error_of):
    assert error_of({"batch.micro_batch_size": 3}) == (
        "jingu: batch.micro_batch_size 3 does not divide batch.global_batch_size 8: take 2 or 4, or auto."
    )
    assert error_of({}, "--processes", "3") == (
        "jingu: batch.global_batch_size 8 cannot be divided over 3 ranks: take 6 or 9."
    )
    assert error_of({"batch.micro_batch_size": 4}, "--processes", "4") == (
        "jingu: batch.micro_batch_size 4 does not divide the 2 sequences of a rank (batch.global_batch_size 8 over "
        "4 ranks): take "
        "2, or auto."
    )


def test_too_long_prompts_are_reported_before_training(error_of):
    evaluation = {
        "evaluation.every": 1,
        "evaluation.sample_prompts": ["def ", "x" * 40],
        "evaluation.max_new_tokens": 8,
    }
    assert error_of(evaluation) == (
        "jingu: evaluation.sample_prompts[1]: the prompt has 40 tokens and 8 more (evaluation.max_new_tokens) "
        "follow, but the "
        "model's context is 33 tokens. Shorten the prompt, lower evaluation.max_new_tokens, or raise "
        "model.max_position_embeddings."
    )
    assert main(["train", "run.yaml", "model.max_position_embeddings=48"]) == 0


def test_missing_tensorboard(error_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert error_of({"train.tensorboard": True}) == (
        "jingu: train.tensorboard is on, but the tensorboard package is not installed. Install it (`pip install "
        "tensorboard`), or leave out the setting."
    )
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert "train.trackers=mlflow is on, but the mlflow package" in error_of({"train.trackers": ["mlflow"]})


def test_missing_gpu(error_of, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    for is_built, reason in ((True, "finds no accelerator"), (False, "is built without CUDA")):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda is_built=is_built: is_built)
        assert error_of({"device.type": "cuda"}) == (
            f"jingu: device.type: no CUDA device is to be found; PyTorch {torch.__version__} {reason}. It needs a "
            "build of PyTorch for CUDA or ROCm, and their driver. Use auto or cpu otherwise."
        )


# The run's folder


def test_a_run_of_another_configuration(error_of):
    assert main(["train", run_yaml(error_of)]) == 0
    assert error_of({"optimizer.lr": 0.5}) == (
        "jingu: runs/run: this run was started with another configuration: optimizer.lr: 0.01 → 0.5. To resume "
        "it would mix two runs. Choose another name (name=...), delete the folder to start over, or, if the change is "
        "intended, resume with --allow optimizer.lr."
    )


def run_yaml(error_of: Callable[..., str]) -> str:
    """The configuration file is valid; the error is on the command line."""
    assert "there is no option --proceses" in error_of({}, "--proceses", "2")
    return "run.yaml"


def test_a_file_where_a_folder_should_be(error_of):
    Path("runs").write_text("not a folder")
    words = "there is a file where a folder should be. Move it away, or choose another folder for runs (runs_dir=...)."
    assert error_of() == f"jingu: runs: {words}"
    Path("runs").unlink()
    Path("runs").mkdir()
    Path("runs/run").write_text("not a folder")
    assert error_of() == f"jingu: runs/run: {words}"


def test_read_only_folder(error_of, monkeypatch):
    """The tests may run as root, so the permission error is simulated."""
    real = Path.mkdir

    def refusing(self: Path, *arguments: Any, **keywords: Any) -> None:
        if self.parts[0] == "runs":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        real(self, *arguments, **keywords)

    monkeypatch.setattr(Path, "mkdir", refusing)
    assert error_of() == (
        "jingu: runs/run: this cannot be written (Permission denied). Fix its permissions, or choose "
        "another folder for runs (runs_dir=...)."
    )


def test_the_same_run_started_twice(error_of):
    Path("runs/run/checkpoints").mkdir(parents=True)
    other = os.open("runs/run", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        assert error_of() == (
            "jingu: runs/run: another process is training this run now. Wait for it, stop it, or choose another name "
            "(name=...)."
        )
    finally:
        os.close(other)


def test_only_damaged_checkpoints(error_of):
    assert main(["train", run_yaml(error_of)]) == 0
    for file in Path("runs/run/checkpoints").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    assert error_of(untouched=False) == (
        "Skipping step-00000002: shard-00000-of-00001.safetensors has 100 bytes, not "
        f"{written_bytes('runs/run/checkpoints/step-00000002')}.\n"
        "jingu: runs/run/checkpoints: the run has checkpoints, and none of them is valid. Restore one from a copy, or "
        "delete the folder to start the run over."
    )


def written_bytes(checkpoint: str) -> int:
    from jingu.checkpoint.manifest import read_manifest

    return read_manifest(Path(checkpoint) / "manifest.json").files["shard-00000-of-00001.safetensors"].bytes


# A full disk

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_disk_fills_up_while_saving(error_of, monkeypatch, done, tiny_run):
    """Training continues; the last valid checkpoint stays, and with free space the same command resumes from it."""
    changes = {"train.steps": 6, "checkpoint.every": 2, "checkpoint.async_save": False}
    real, saves = save_folder.write_all, []

    def filling_up(*arguments: Any) -> None:
        saves.append(1)
        if len(saves) > calls_of_a_save:
            raise FULL
        real(*arguments)

    calls_of_a_save = 10**9
    monkeypatch.setattr(save_folder, "write_all", filling_up)
    assert main(["train", run_yaml(error_of), "train.steps=2", "schedule.warmup=1", "name=counting"]) == 0
    calls_of_a_save, saves[:] = len(saves), []
    words = error_of(changes, untouched=False)
    why = "the checkpoint could not be saved (rank 0: No space left on device)."
    fix = "Free some space or repair the disk. Earlier checkpoints are untouched."
    where = "runs/run/checkpoints/step-0000000"
    assert f"WARNING: {where}4: {why} {fix} Training continues without this checkpoint.\n" in words
    assert words.endswith(f"jingu: {where}6: {why} {fix}")
    assert "Traceback" not in words
    assert [path.name for path in Path("runs/run/checkpoints").iterdir()] == ["step-00000002"]
    assert main(["checkpoint", "verify", "runs/run"]) == 0
    monkeypatch.setattr(save_folder, "write_all", real)
    assert main(["train", "run.yaml"]) == 0
    assert sorted(path.name for path in Path("runs/run/checkpoints").iterdir()) == ["step-00000004", "step-00000006"]


def test_the_disk_is_full_for_metrics(capsys, monkeypatch, done, tiny_run):
    """The lines stay in memory, and are written when there is space again; a truncated line is completed."""
    real, writes, limit = Path.open, [], 0

    class Filling:
        def __init__(self, file: Any) -> None:
            self.write, self.close, self._file = self._write, file.close, file

        def _write(self, data: bytes) -> int:
            writes.append(1)
            if 3 < len(writes) < limit:
                if len(writes) % 2:
                    raise FULL
                return self._file.write(data[:5])
            return self._file.write(data)

    def opening(self: Path, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        file = real(self, mode, *arguments, **keywords)
        return Filling(file) if self.name == "metrics.jsonl" and mode == "ab" else file

    def trained(name: str, steps: int) -> str:
        writes.clear()
        Path("run.yaml").write_text(dump_yaml(tiny_run({"train.steps": steps}, name=name)), encoding="utf-8")
        assert main(["train", "run.yaml"]) == 0
        return capsys.readouterr().err

    monkeypatch.setattr(Path, "open", opening)
    log = trained("undisturbed", 6)
    assert "WARNING" not in log
    assert "\nstep 6 of 6: loss " in log
    assert "%|" not in log  # lines instead of a bar, where there is no terminal
    limit = 8
    full = (
        "metrics.jsonl: the disk is full. Make room, or choose another folder for runs (runs_dir=...). Training "
        "continues, and the lines are kept in memory."
    )
    assert trained("full", 6).count(full) == 1
    steps = [done(tiny_run(name=name)).column("step") for name in ("undisturbed", "full")]
    assert steps[0] == steps[1] == [1, 2, 3, 4, 5, 6]
    limit = 10**9
    assert "metrics.jsonl: the disk is full; 6 lines lost.\n" in trained("short", 6)


def test_the_disk_is_full_before_the_first_step(error_of, monkeypatch):
    real = os.fsync

    def full(descriptor: int) -> None:
        if "config.yaml" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise FULL
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    assert error_of(untouched=False) == (
        "jingu: runs/run: the disk is full. Make room, or choose another folder for runs (runs_dir=...)."
    )
    log = "runs/run/log"
    assert set(content(Path("runs"))) == {"runs/run", "runs/run/checkpoints", log, f"{log}/rank-00000.log"}


# Errors of several ranks


def test_an_error_of_several_ranks_is_reported_once(tiny_run, tmp_path):
    """The error appears only while training: the shared disk is full."""
    config = tiny_run({"train.steps": 2, "batch.micro_batch_size": 4})
    Path("run.yaml").write_text(dump_yaml(config), encoding="utf-8")
    runs = Path(config.runs_dir)
    checkpoint = runs / "run" / "checkpoints" / "step-00000002"
    result = run_with_failing_writes(["train", "run.yaml", "--processes", "2"])
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("jingu: ") == 1
    words, note = result.stderr.replace(str(checkpoint), "STEP").splitlines()[-2:]
    assert words.endswith(
        "jingu: STEP: the checkpoint could not be saved (rank 0: No space left on device; rank 1: No space left on "
        "device). Free some space or repair the disk. Earlier checkpoints are untouched."
    )
    assert re.fullmatch(rf"This was rank [01] of 2, on {re.escape(socket.gethostname())}\.", note)
    assert "Traceback" not in result.stderr and "torch" not in result.stderr
    assert list(checkpoint.parent.iterdir()) == []
    for rank in range(2):
        log = (runs / "run" / "log" / f"rank-{rank:05d}.log").read_text(encoding="utf-8")
        assert "ERROR" in log and "No space left on device" in log


def run_with_failing_writes(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run `jingu WORDS` in an environment whose `sitecustomize` makes every rank fail to write tensors."""
    Path("full").mkdir()
    Path("full/sitecustomize.py").write_text(
        "import sys\n"
        "def full(event, arguments):\n"
        "    if event == 'open' and str(arguments[0]).endswith('.safetensors') and '.partial' in str(arguments[0]):\n"
        "        raise OSError(28, 'No space left on device')\n"
        "sys.addaudithook(full)\n"
    )
    path = os.pathsep.join([str(Path("full").absolute()), str(Path(jingu.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "jingu", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True)
