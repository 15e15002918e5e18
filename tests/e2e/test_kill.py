"""A run that is killed or stopped, and then resumed, ends bitwise equal to an uninterrupted one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import jingu
from tests.e2e.conftest import read_until
from tests.training.test_resume import untimed

LONG = {"train.steps": 60, "train.log_every": 4, "checkpoint.every": 5, "precision.type": "fp32"}
SHORT = {**LONG, "train.steps": 30}


@pytest.fixture
def assert_undisturbed(warm, run_file, tiny_run, done):
    """Compare a finished run with an uninterrupted one of the same settings."""

    def check(changes: dict[str, Any], name: str) -> None:
        if not done(tiny_run(name="undisturbed")).folder.exists():
            assert warm.run("train", run_file(changes, name="undisturbed")).code == 0
        expected, actual = done(tiny_run(changes, name="undisturbed")), done(tiny_run(changes, name=name))
        actual_tensors = actual.tensors()
        expected_tensors = expected.tensors()
        assert actual_tensors.keys() == expected_tensors.keys()
        for key, tensor in expected_tensors.items():
            assert torch.equal(actual_tensors[key], tensor), key
        assert untimed(actual.lines()) == untimed(expected.lines())

    return check


def leftovers(folder: Path) -> list[str]:
    """Return temporary files that should not remain in a run's folder."""
    return [str(path) for path in folder.rglob("*") if path.name.endswith((".partial", ".deleted"))]


class Killed(BaseException):
    """Simulates a SIGKILL."""


class SimulatedKill:
    """From the n-th file operation under a folder on, all of them fail: the disk keeps the state of that moment."""

    def __init__(self) -> None:
        self.remaining, self.under = 0, "/"
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        touches = event in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")
        if self.remaining and touches and str(arguments[0]).startswith(self.under):
            self.remaining = max(1, self.remaining - 1)
            if self.remaining == 1:
                raise Killed


@pytest.fixture(scope="module")
def simulated_kill() -> SimulatedKill:
    return SimulatedKill()


@pytest.mark.parametrize("num_kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_resumes_after_many_kills_at_random_file_operations(
    num_kills, simulated_kill, tiny_run, done, peak, assert_undisturbed
):
    """Each kill comes just before a file of the run is opened, renamed or removed."""
    from jingu.training.commands import train

    config = tiny_run({**LONG, "checkpoint.async_save": False}, name="killed")
    random_moments = random.Random(20)
    kills = 0
    for _ in range(num_kills):
        simulated_kill.remaining, simulated_kill.under = random_moments.randint(2, 50), str(done(config).folder)
        try:
            train(config)
        except Killed:
            kills += 1
        finally:
            simulated_kill.remaining = 0
        if kills == num_kills // 2:
            shutil.rmtree(done(config).folder)
    assert kills == num_kills
    assert train(config) == 0
    assert_undisturbed(LONG, "killed")
    assert leftovers(done(config).folder) == []


def kill_repeatedly(warm, file: str, folder: Path, times: int, seed: int) -> None:
    """Kill half of the times just before a file operation, and half of the times after a random delay."""
    random_moments = random.Random(seed)
    for _ in range(times // 2):
        event = random_moments.randint(1, 20)
        ended = warm.run("train", file, send=signal.SIGKILL, at_event=event, under=folder)
        assert ended.code in (-signal.SIGKILL, 0), ended.err
        # File operations alone would never hit the computation between them.
        warm.run("train", file, send=signal.SIGKILL, after=random_moments.uniform(0.05, 0.6))


def test_resumes_after_sigkill_during_async_saves(warm, run_file, tiny_run, done, assert_undisturbed):
    file = run_file(LONG, name="killed-async")
    folder = done(tiny_run(LONG, name="killed-async")).folder
    kill_repeatedly(warm, file, folder, 10, seed=20)
    ended = warm.run("train", file)
    assert ended.code == 0, ended.err
    assert_undisturbed(LONG, "killed-async")
    assert leftovers(folder) == []


@pytest.mark.slow
def test_resumes_after_five_hundred_kills(warm, run_file, tiny_run, done, assert_undisturbed):
    """Twenty runs, each killed twenty-five times."""
    for number in range(20):
        name = f"slow-{number}"
        file, folder = run_file(LONG, name=name), done(tiny_run(LONG, name=name)).folder
        kill_repeatedly(warm, file, folder, 26, seed=number)
        ended = warm.run("train", file)
        assert ended.code == 0, ended.err
        assert_undisturbed(LONG, name)
        assert leftovers(folder) == []


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 75, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 75, marks=pytest.mark.slow),
    ],
)
def test_a_stop_signal_saves_and_exits(kind, code, warm, run_file, tiny_run, done, assert_undisturbed):
    file = run_file(SHORT, name="stopped")
    folder = done(tiny_run(SHORT, name="stopped")).folder
    ended = warm.run("train", file, send=kind, at_event=12, under=folder)
    assert ended.code == code, ended.err
    steps = [path.name for path in (folder / "checkpoints").iterdir()]
    step = int(max(steps).removeprefix("step-"))
    assert 0 < step < 30
    assert "\nStopping after this step, and saving. Repeat to stop at once.\n" in ended.err
    assert f"Stopped and saved at step {step} of 30. The same command resumes the run.\n" in ended.err
    assert "Traceback" not in ended.err
    ended = warm.run("train", file)
    assert ended.code == 0
    assert f"Resuming from step {step}.\n" in ended.err
    assert_undisturbed(SHORT, "stopped")


def jingu_process(*words: str, **options: Any) -> subprocess.Popen[str]:
    """Start `jingu WORDS` as a user does."""
    environment = {**os.environ, "PYTHONPATH": str(Path(jingu.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "jingu", *words]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, bufsize=1, **options)


@pytest.mark.slow
def test_two_ranks_save_on_sigint_and_resume(run_file, tiny_run, done, train_on):
    """SIGINT goes to the launcher as training begins. The run has so many steps that it cannot end before the signal
    arrives; it resumes with ten more steps."""
    changes = {**LONG, "parallel.zero_stage": 2, "train.log_every": 1, "checkpoint.every": 0}
    changes["schedule"] = {"type": "constant", "warmup": 3}
    file = run_file({**changes, "train.steps": 1_000_000}, name="two")
    process = jingu_process("train", file, "--processes", "2")
    log = read_until(process, "epochs)")  # the last line before the first step
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    log += process.stderr.read()
    process.stderr.close()
    assert process.wait() == 130, log
    folder = done(tiny_run(changes, name="two")).folder
    (checkpoint,) = (folder / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert step > 0
    assert log.count("Stopping after this step") == 1
    assert log.count(f"Stopped and saved at step {step} of 1000000. The same command resumes the run.\n") == 1
    assert "Traceback" not in log and "Error" not in log
    changes["train.steps"] = step + 10
    whole, resumed = tiny_run(changes, name="whole"), tiny_run(changes, name="two")
    train_on(2, whole, resumed)
    assert done(resumed).column("resumed_from", "start") == [None, step]
    resumed_tensors = done(resumed).tensors()
    for key, tensor in done(whole).tensors().items():
        assert torch.equal(resumed_tensors[key], tensor), key
    assert untimed(done(resumed).lines()) == untimed(done(whole).lines())
