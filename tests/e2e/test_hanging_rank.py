"""A rank that is stopped while a run trains: the watchdog ends the run and names the rank."""

from __future__ import annotations

import signal
import socket

import psutil
import pytest

from jingu.runtime.exit_codes import EXIT_STALLED
from tests.e2e.conftest import read_until
from tests.e2e.test_dying_rank import LOCAL, TORCHRUN, start, wait


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["parallel.shard", "parallel.pipeline"])
def test_a_stopped_rank_ends_a_run(run_file, tiny_run, done, layout):
    """The run exits with the watchdog's code, its ranks are gone, and the verdict is in its folder."""
    settings = {"train.steps": 50_000, "train.hang_timeout": 3, layout: 2}
    process = start(LOCAL, run_file(settings, name="stopped"))
    read_until(process, "step 20 of")
    (second,) = [p for p in psutil.Process(process.pid).children() if p.environ().get("RANK") == "1"]
    second.send_signal(signal.SIGSTOP)
    code, stderr = wait(process)
    assert code == EXIT_STALLED, stderr
    assert f"rank 1 ({socket.gethostname()})" in stderr and "It is stopped" in stderr, stderr
    folder = done(tiny_run(settings, name="stopped")).folder
    (verdict,) = folder.glob("log/jingu-watch-*/verdict.txt")
    assert verdict.read_text().strip() in stderr


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_has_stood_still(run_file, tiny_run, done):
    """The ranks start again from the last checkpoint, and a new watchdog watches them."""
    settings = {"train.steps": 120, "train.hang_timeout": 3, "checkpoint.every": 10}
    words = [*TORCHRUN[:3], "--max-restarts=1", *TORCHRUN[3:]]
    process = start(words, run_file(settings, name="restarted"))
    read_until(process, "step 20 of")
    (second,) = [p for p in psutil.Process(process.pid).children() if p.environ().get("RANK") == "1"]
    second.send_signal(signal.SIGSTOP)
    code, stderr = wait(process)
    assert code == 0, stderr
    assert stderr.count("Training has made no progress") == 1 and "Resuming from step" in stderr
    assert len(done(tiny_run(settings, name="restarted")).column("loss")) == 120
