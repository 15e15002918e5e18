"""When a run saves, which checkpoints are kept, and that saving in the background changes nothing."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.checkpoint import save_folder
from jingu.checkpoint.async_save import AsyncSaver
from jingu.checkpoint.resume import all_steps, find_latest, step_folder
from jingu.checkpoint.save_folder import read_state
from jingu.checkpoint.store import CheckpointReader
from jingu.config.schema import RunConfig
from jingu.runtime.collective_stop import StopDecision
from jingu.runtime.ranks import join_process_group
from jingu.training import checkpointing, loop, pretraining
from jingu.training.checkpointing import Checkpointer, Progress
from jingu.training.commands import train
from jingu.training.evaluate import EvaluationResult
from jingu.training.run import open_run


@pytest.fixture(autouse=True)
def quick(peak: None) -> None:
    """No run here measures the machine."""


class HeldUp(AsyncSaver):
    """Writes nothing of a step before training has come to the next save."""

    def save(self, *arguments: Any, **keywords: Any) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        super().save(*arguments, **keywords)

    def poll(self, seconds: float | None = 0.0) -> Any:
        if seconds != 0:
            os.kill(self._process.pid, signal.SIGCONT)
        return super().poll(seconds)


def checkpoints(config: RunConfig) -> dict[int, dict[str, Any]]:
    """All that a run's checkpoints hold, by step, without times."""
    folder, found = Path(config.runs_dir) / config.name / "checkpoints", {}
    for step in all_steps(folder):
        here = step_folder(folder, step)
        state = read_state(here)["progress"]
        reader = CheckpointReader(here)
        tensors = {name: reader.read(name) for name in reader.manifest.tensors}
        found[step] = tensors | {"progress": {**state, "seconds": 0}}
    return found


def test_a_delayed_writer_saves_the_state_of_its_step(tiny_run, monkeypatch):
    """Weights, moments and counters of every checkpoint, beside a run that waits for each save."""
    settings = {"checkpoint.every": 3, "checkpoint.keep_last": 99, "precision.type": "fp32", "evaluation.every": 3}
    settings["train.steps"] = 11
    waits = tiny_run({**settings, "checkpoint.async_save": False}, name="waits")
    assert train(waits) == 0
    monkeypatch.setattr(checkpointing, "AsyncSaver", HeldUp)
    goes_on = tiny_run(settings, name="goes-on")
    assert train(goes_on) == 0
    expected, found = checkpoints(waits), checkpoints(goes_on)
    assert list(found) == list(expected) == [3, 6, 9, 11]
    for step, tensors in expected.items():
        assert found[step].keys() == tensors.keys()
        for name, value in tensors.items():
            same = torch.equal(found[step][name], value) if name != "progress" else found[step][name] == value
            assert same, (step, name)
    # The copy would show it if it had been written too late: no two of them are equal.
    assert len({float(tensors["optimizer/step/norm.weight"].sum()) for tensors in expected.values()}) == len(expected)


def test_the_best_checkpoints_and_every_nth_are_kept(tiny_run, done, monkeypatch):
    config = tiny_run(
        {"checkpoint.every": 2, "checkpoint.keep_last": 1, "checkpoint.keep_every": 8, "checkpoint.keep_best": 2}
        | {"evaluation.every": 2}
    )
    # Validation losses of steps 2, 4, …, 20; in reality they would hardly ever be best in the middle of a run.
    measured = iter([5.0, 4.1, 3.0, 4.2, 3.5, 3.2, 4.3, 4.4, 4.5, 4.6])
    monkeypatch.setattr(pretraining, "evaluate", lambda *_: EvaluationResult(next(measured), None, 1, None))
    assert train(config) == 0
    losses = dict(
        zip(done(config).column("step", "evaluation"), done(config).column("loss", "evaluation"), strict=True)
    )
    assert (losses[6], losses[12], losses[20]) == (3.0, 3.2, 4.6)
    assert set(checkpoints(config)) == {6, 12, 8, 16, 20}
    state = read_state(done(config).checkpoint())
    assert state["progress"]["evaluation"]["loss"] == losses[20]
    assert state["configuration"]["optimizer"]["lr"] == 1e-2
    assert state["versions"]["torch"] == torch.__version__ and "numpy" in state["versions"]


FAULTS = {
    "full": (save_folder, "write_all", errno.ENOSPC),
    "failing fsync": (os, "fsync", errno.EIO),
    "read-only": (pathlib.Path, "mkdir", errno.EROFS),
    "no permission": (pathlib.Path, "rename", errno.EACCES),
}


def test_training_survives_a_failing_disk_and_the_last_valid_checkpoint_loads(tiny_run, done, monkeypatch, capsys):
    """It fails from step 4 to step 11: those saves are told of, the one before stays, the next works."""
    settings = {"checkpoint.every": 3, "checkpoint.keep_last": 1, "checkpoint.async_save": False, "train.steps": 14}
    undisturbed = tiny_run(settings, name="undisturbed")
    assert train(undisturbed) == 0
    theirs = done(undisturbed).tensors()
    for fault, (place, name, code) in FAULTS.items():
        config = tiny_run(settings, name=fault.replace(" ", "-"))
        left = train_where(place, name, code, config, monkeypatch)
        assert left == {f"step-{step:08d}": good for step, good in ((3, 3), (6, 3), (9, 3), (12, 12), (14, 14))}, fault
        told = capsys.readouterr().err
        assert told.count(f"(rank 0: {os.strerror(code)})") == 2, fault
        assert told.count("Training continues without this checkpoint.") == 2, fault
        ours = done(config).tensors()
        assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items()), fault


def train_where(place: Any, name: str, code: int, config: RunConfig, monkeypatch: Any) -> dict[str, int | None]:
    """Train where this fails in the saves of steps 6 and 9; after each save, the newest good one."""
    real, save, left = getattr(place, name), checkpointing.save, {}

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    def failing(folder: Path, *arguments: Any, **keywords: Any) -> None:
        with monkeypatch.context() as patch:
            if folder.name in ("step-00000006", "step-00000009"):
                patch.setattr(place, name, fails)
            try:
                save(folder, *arguments, **keywords)
            finally:
                patch.setattr(place, name, real)
                left[folder.name] = find_latest(folder.parent).step

    with monkeypatch.context() as patch:
        patch.setattr(checkpointing, "save", failing)
        assert train(config) == 0
    return left


FILE_LAYER = """
import errno, os

real = os.fsync


def fsync(file):
    try:
        with open({slow!r}):  # returns when its other end is opened
            pass
    except FileNotFoundError:
        pass
    if os.path.exists({broken!r}):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    real(file)


os.fsync = fsync
"""


@pytest.mark.parametrize("fault", ["slow", "broken"])
def test_fsync_of_the_writer_process(fault, tiny_run, done, monkeypatch, tmp_path, capsys):
    """From step 5 to step 11 it does not return, or fails: training goes on meanwhile, and step 3 can be loaded."""
    settings = {"checkpoint.every": 3, "checkpoint.keep_last": 99, "checkpoint.when_busy": "skip", "train.steps": 14}
    undisturbed = tiny_run({**settings, "checkpoint.async_save": False}, name="undisturbed")
    config = tiny_run(settings, name="run")
    assert train(undisturbed) == 0
    expected = checkpoints(undisturbed)
    marks = {name: tmp_path / "layer" / name for name in ("slow", "broken")}
    marks["slow"].parent.mkdir()
    (tmp_path / "layer/sitecustomize.py").write_text(FILE_LAYER.format(**{k: str(v) for k, v in marks.items()}))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "layer"))
    savers: list[AsyncSaver] = []
    opened: list[Any] = []

    class Watched(AsyncSaver):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            savers.append(self)

    def step(*arguments: Any, **keywords: Any) -> Any:
        begins = keywords["step"] + 1
        if begins == 11:
            found = find_latest(done(config).folder / "checkpoints")
            assert found.step == 3 and found.folder is not None
            reader = CheckpointReader(found.folder)
            assert all(torch.equal(reader.read(name), expected[3][name]) for name in reader.manifest.tensors)
            if fault == "slow":
                assert savers[0].busy
                opened.append(marks["slow"].open("w"))  # for long: another fsync may be about to open its end
                marks["slow"].unlink()
            else:
                marks["broken"].unlink()
        if savers[0].busy and not marks["slow"].exists():  # no save begins while one is under way
            wait([savers[0]._writing])
        if begins == 5:
            os.mkfifo(marks["slow"]) if fault == "slow" else marks["broken"].touch()
        return real(*arguments, **keywords)

    real = loop.train_step
    monkeypatch.setattr(loop, "train_step", step)
    monkeypatch.setattr(checkpointing, "AsyncSaver", Watched)
    assert train(config) == 0
    for file in opened:
        file.close()
    said = capsys.readouterr().err
    assert said.count("Training continues.") == said.count(os.strerror(errno.EIO)) == (2 if fault == "broken" else 0)
    assert ("No checkpoint at step 9: the one before it is still being written." in said) == (fault == "slow")
    found = checkpoints(config)
    assert {*expected} - {*found} == ({9} if fault == "slow" else {6, 9})
    for number, tensors in found.items():
        assert all(name == "progress" or torch.equal(expected[number][name], tensors[name]) for name in tensors)


@pytest.fixture
def make_checkpointer(tiny_run, monkeypatch):
    """Returns a function that makes the checkpointer of a run, with a clock that the test moves."""
    checkpointers = []
    clock = [0.0]
    monkeypatch.setattr(checkpointing.time, "monotonic", lambda: clock[0])

    def make(**changes: Any) -> Checkpointer:
        settings = {f"checkpoint.{key}": value for key, value in changes.items()}
        run = open_run(tiny_run(settings))
        run.checkpoints.mkdir(parents=True)
        checkpointers.append(Checkpointer(run, ranks, lambda: {"w": torch.ones(3)}))
        return checkpointers[-1]

    make.clock = clock
    with join_process_group("cpu", torch.get_num_threads()) as ranks:
        yield make
        for checkpointer in checkpointers:
            checkpointer.__exit__(None, None, None)


def save_if_due(checkpointer: Checkpointer, step: int) -> bool:
    is_due = checkpointer.should_save(step, StopDecision(0, checkpointer.status()[0], False))
    if is_due:
        checkpointer.save(Progress(step=step))
    return is_due


def test_saves_are_due_by_steps_and_by_the_clock(make_checkpointer, monkeypatch):
    checkpointer = make_checkpointer(every=4, every_minutes=2.0, async_save=False)
    monkeypatch.setattr(checkpointing, "save", lambda *_, **__: None)

    def saved_steps(steps: range) -> list[int]:
        saved = []
        for step in steps:
            make_checkpointer.clock[0] += 30
            if save_if_due(checkpointer, step):
                saved.append(step)
        return saved

    assert saved_steps(range(1, 16)) == [4, 8, 12]
    checkpointer._settings = checkpointer._settings.model_copy(update={"every": 0})
    assert saved_steps(range(16, 27)) == [16, 20, 24]


def test_a_request_of_the_clock_from_before_a_save_does_not_count(make_checkpointer, monkeypatch):
    checkpointer = make_checkpointer(every=5, every_minutes=1.0, async_save=False)
    monkeypatch.setattr(checkpointing, "save", lambda *_, **__: None)
    checkpointer.save(Progress(step=5))
    assert not checkpointer.should_save(6, StopDecision(0, True, False))
    assert checkpointer.should_save(7, StopDecision(0, True, False))


def test_a_save_that_comes_too_soon_waits_or_is_skipped(make_checkpointer, caplog):
    checkpointer = make_checkpointer(every=1)
    assert checkpointer.should_save(2, StopDecision(0, False, True))
    checkpointer._settings = checkpointer._settings.model_copy(update={"when_busy": "skip"})
    assert not checkpointer.should_save(2, StopDecision(0, False, True))
    assert checkpointer.should_save(2, StopDecision(0, False, False))


def test_a_final_save_that_exceeds_the_grace_time_is_given_up(make_checkpointer, monkeypatch):
    checkpointer = make_checkpointer(every=0)
    has_exited = threading.Event()
    codes = []
    monkeypatch.setattr(checkpointing, "save", lambda *_, **__: has_exited.wait())
    monkeypatch.setattr(checkpointing.os, "_exit", lambda code: (codes.append(code), has_exited.set()))
    checkpointer.save_final(Progress(step=3), grace_seconds=0.01, exit_code=75)
    assert codes == [75]
