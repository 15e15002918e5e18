"""When a run saves, what stays, and that saving in the background changes nothing."""

from __future__ import annotations

import errno
import os
import pathlib
import select
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.checkpoint import files
from jingu.checkpoint.background import BackgroundSaver
from jingu.checkpoint.files import read_state
from jingu.checkpoint.resume import all_steps, find_latest, step_folder
from jingu.checkpoint.store import Reader
from jingu.config.schema import RunConfig
from jingu.runtime.ranks import joined
from jingu.runtime.signals import Told
from jingu.train import keep, loop
from jingu.train.keep import Keeper, Progress
from jingu.train.run import open_run
from jingu.train.verbs import train


@pytest.fixture(autouse=True)
def quick(peak: None) -> None:
    """No run here measures the machine."""


class HeldUp(BackgroundSaver):
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
    folder, found = Path(config.runs) / config.name / "checkpoints", {}
    for step in all_steps(folder):
        here = step_folder(folder, step)
        state = read_state(here)["progress"]
        reader = Reader(here)
        tensors = {name: reader.read(name) for name in reader.manifest.tensors}
        found[step] = tensors | {"progress": {**state, "seconds": 0}}
    return found


def test_held_up_writing_saves_the_steps_it_claims(tiny_run, monkeypatch):
    """Weights, moments and counters of every checkpoint, beside a run that waits for each save."""
    settings = {"checkpoint.every": 3, "checkpoint.keep": 99, "precision.type": "fp32", "evaluation.every": 3}
    settings["train.steps"] = 11
    waits = tiny_run({**settings, "checkpoint.background": False}, name="waits")
    assert train(waits) == 0
    monkeypatch.setattr(keep, "BackgroundSaver", HeldUp)
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


def test_the_best_and_every_so_many_stay(tiny_run, done):
    config = tiny_run(
        {"checkpoint.every": 2, "checkpoint.keep": 1, "checkpoint.keep_every": 8, "checkpoint.keep_best": 2}
        | {"evaluation.every": 2, "optimizer.lr": 0.3, "schedule": {"type": "constant", "warmup": 0}}
    )
    assert train(config) == 0
    losses = dict(
        zip(done(config).column("step", "evaluation"), done(config).column("loss", "evaluation"), strict=True)
    )
    best = sorted(losses, key=lambda step: losses[step])[:2]
    assert 20 not in best, "a run that gets worse is what this test needs"
    assert set(checkpoints(config)) == {8, 16, 20, *best}
    state = read_state(done(config).checkpoint())
    assert state["progress"]["evaluation"]["loss"] == losses[20]
    assert state["configuration"]["optimizer"]["lr"] == 0.3
    assert state["versions"]["torch"] == torch.__version__ and "numpy" in state["versions"]


FAULTS = {
    "full": (files, "write_all", errno.ENOSPC),
    "failing fsync": (os, "fsync", errno.EIO),
    "read-only": (pathlib.Path, "mkdir", errno.EROFS),
    "no permission": (pathlib.Path, "rename", errno.EACCES),
}


def test_training_survives_a_disk_that_fails_and_its_last_good_one_loads(tiny_run, done, monkeypatch, capsys):
    """It fails from step 4 to step 11: those saves are told of, the one before stays, the next works."""
    settings = {"checkpoint.every": 3, "checkpoint.keep": 1, "checkpoint.background": False, "train.steps": 14}
    undisturbed = tiny_run(settings, name="undisturbed")
    assert train(undisturbed) == 0
    theirs = done(undisturbed).tensors()
    for fault, (place, name, code) in FAULTS.items():
        config = tiny_run(settings, name=fault.replace(" ", "-"))
        left = train_where(place, name, code, config, monkeypatch)
        assert left == {f"step-{step:08d}": good for step, good in ((3, 3), (6, 3), (9, 3), (12, 12), (14, 14))}, fault
        told = capsys.readouterr().err
        assert told.count(f"(rank 0: {os.strerror(code)})") == 2, fault
        assert told.count("Training goes on without this checkpoint.") == 2, fault
        ours = done(config).tensors()
        assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items()), fault


def train_where(place: Any, name: str, code: int, config: RunConfig, monkeypatch: Any) -> dict[str, int | None]:
    """Train where this fails in the saves of steps 6 and 9; after each save, the newest good one."""
    real, save, left = getattr(place, name), keep.save, {}

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
        patch.setattr(keep, "save", failing)
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
def test_fsync_of_the_process_that_writes(fault, tiny_run, done, monkeypatch, tmp_path, capsys):
    """From step 5 to step 11 it does not return, or fails: training goes on meanwhile, and step 3 can be loaded."""
    settings = {"checkpoint.every": 3, "checkpoint.keep": 99, "checkpoint.when_busy": "skip", "train.steps": 14}
    undisturbed = tiny_run({**settings, "checkpoint.background": False}, name="undisturbed")
    config = tiny_run(settings, name="run")
    assert train(undisturbed) == 0
    expected = checkpoints(undisturbed)
    marks = {name: tmp_path / "layer" / name for name in ("slow", "broken")}
    marks["slow"].parent.mkdir()
    (tmp_path / "layer/sitecustomize.py").write_text(FILE_LAYER.format(**{k: str(v) for k, v in marks.items()}))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "layer"))
    savers: list[BackgroundSaver] = []
    opened: list[Any] = []

    class Watched(BackgroundSaver):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            savers.append(self)

    def step(*arguments: Any, **keywords: Any) -> Any:
        begins = keywords["step"] + 1
        if begins == 11:
            found = find_latest(done(config).folder / "checkpoints")
            assert found.step == 3 and found.folder is not None
            reader = Reader(found.folder)
            assert all(torch.equal(reader.read(name), expected[3][name]) for name in reader.manifest.tensors)
            if fault == "slow":
                assert savers[0].busy
                opened.append(marks["slow"].open("w"))  # for long: another fsync may be about to open its end
                marks["slow"].unlink()
            else:
                marks["broken"].unlink()
        if savers[0].busy and not marks["slow"].exists():  # no save begins while one is under way
            select.select([savers[0]._process.stdout], [], [])
        if begins == 5:
            os.mkfifo(marks["slow"]) if fault == "slow" else marks["broken"].touch()
        return real(*arguments, **keywords)

    real = loop.train_step
    monkeypatch.setattr(loop, "train_step", step)
    monkeypatch.setattr(keep, "BackgroundSaver", Watched)
    assert train(config) == 0
    for file in opened:
        file.close()
    said = capsys.readouterr().err
    assert said.count("Training goes on.") == said.count(os.strerror(errno.EIO)) == (2 if fault == "broken" else 0)
    assert ("No checkpoint at step 9: the one before it is still being written." in said) == (fault == "slow")
    found = checkpoints(config)
    assert {*expected} - {*found} == ({9} if fault == "slow" else {6, 9})
    for number, tensors in found.items():
        assert all(name == "progress" or torch.equal(expected[number][name], tensors[name]) for name in tensors)


@pytest.fixture
def keeper(tiny_run, monkeypatch):
    """Makes a keeper of a run, with a clock that the test moves."""
    made = []
    now = [0.0]
    monkeypatch.setattr(keep.time, "monotonic", lambda: now[0])

    def make(**changes: Any) -> Keeper:
        settings = {f"checkpoint.{key}": value for key, value in changes.items()}
        run = open_run(tiny_run(settings))
        run.checkpoints.mkdir(parents=True)
        made.append(Keeper(run, ranks, lambda: {"w": torch.ones(3)}))
        return made[-1]

    make.now = now
    with joined("cpu", torch.get_num_threads()) as ranks:
        yield make
        for each in made:
            each.__exit__(None, None, None)


def test_saves_are_due_by_steps_and_by_the_clock(keeper, monkeypatch):
    made, now = keeper(every=4, minutes=2.0, background=False), keeper.now
    monkeypatch.setattr(keep, "save", lambda *_, **__: None)
    due = []
    for step in range(1, 16):
        now[0] += 30
        if made.due(step, Told(0, made.wishes()[0], False)):
            due.append(step)
            made.save(Progress(step=step))
    assert due == [4, 8, 12]
    made._settings = made._settings.model_copy(update={"every": 0})
    due = [step for step in range(16, 27) if now.__setitem__(0, now[0] + 30) or _saves(made, step)]
    assert due == [16, 20, 24]


def _saves(made: Keeper, step: int) -> bool:
    saves = made.due(step, Told(0, made.wishes()[0], False))
    if saves:
        made.save(Progress(step=step))
    return saves


def test_the_clock_s_wish_from_before_a_save_does_not_count(keeper, monkeypatch):
    made = keeper(every=5, minutes=1.0, background=False)
    monkeypatch.setattr(keep, "save", lambda *_, **__: None)
    made.save(Progress(step=5))
    assert not made.due(6, Told(0, True, False))
    assert made.due(7, Told(0, True, False))


def test_a_save_that_comes_too_soon_waits_or_is_left_out(keeper, caplog):
    waits = keeper(every=1)
    assert waits.due(2, Told(0, False, True))
    skips = waits
    skips._settings = skips._settings.model_copy(update={"when_busy": "skip"})
    assert not skips.due(2, Told(0, False, True))
    assert skips.due(2, Told(0, False, False))


def test_saving_that_takes_too_long_before_the_end_is_given_up(keeper, monkeypatch):
    made, left, codes = keeper(every=0), threading.Event(), []
    monkeypatch.setattr(keep, "save", lambda *_, **__: left.wait())
    monkeypatch.setattr(keep.os, "_exit", lambda code: (codes.append(code), left.set()))
    made.save_last(Progress(step=3), grace=0.01, code=75)
    assert codes == [75]
