"""A rank that dies or raises ends the whole job; the error names the rank, and every rank logs to its own file."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import jingu
from jingu.cli import main
from tests.e2e.conftest import read_until
from tests.forked_rank import fork_ranks
from tests.limits import PATIENCE

LONG = {"train.steps": 50_000, "parallel.zero_stage": 2, "precision.type": "fp32"}
LOCAL = ["-m", "jingu", "train", "{file}", "--processes", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "jingu", "train", "{file}"]
"""Seconds after which a job counts as hanging; the engines' own timeouts are many minutes."""


def start(words: list[str], file: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(jingu.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *(word.format(file=file) for word in words)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, bufsize=1)


def wait(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code and the rest of stderr, after checking that no rank outlives the job."""
    ranks = psutil.Process(process.pid).children(recursive=True)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert not psutil.wait_procs(ranks, timeout=PATIENCE)[1]
    return process.returncode, stderr


with_each_launcher = pytest.mark.parametrize(
    "words", [LOCAL, pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["processes", "torchrun"]
)


@with_each_launcher
def test_a_killed_rank_ends_the_job(words, run_file, tiny_run, done):
    process = start(words, run_file(LONG, name="killed"))
    read_until(process, "epochs)")  # the last words before the first step
    (second,) = [p for p in psutil.Process(process.pid).children(recursive=True) if p.environ().get("RANK") == "1"]
    second.send_signal(signal.SIGKILL)
    code, stderr = wait(process)
    assert code not in (0, 130)
    if words is LOCAL:
        assert code == 137 and f"rank 1 on {socket.gethostname()} was killed by SIGKILL" in stderr
        assert "Traceback" not in stderr
    else:
        assert "SIGKILL" in stderr and "local_rank: 1" in stderr
    log = done(tiny_run(LONG, name="killed")).folder / "log"
    assert [file.name for file in sorted(log.iterdir())] == ["rank-00000.log", "rank-00001.log"]
    # Some waits of gloo do not notice that the other rank is gone. The launcher then kills this one and says so.
    by_force = "ranks that did not exit by themselves were killed" if words is LOCAL else "forcefully exiting"
    assert "the run failed" in (log / "rank-00000.log").read_text() or by_force in stderr


@with_each_launcher
def test_a_rank_that_raises_ends_the_job(words, run_file, tiny_run, done, capfd):
    log = done(tiny_run(LONG, name="raises")).folder / "log"
    (log / "rank-00001.log").mkdir(parents=True)  # the second rank cannot open its log
    file = run_file(LONG, name="raises")
    if words is LOCAL:
        with fork_ranks():
            code = main(["train", file, "--processes", "2"])
        stderr = capfd.readouterr().err
    else:
        code, stderr = wait(start(words, file))
    assert code == 1
    assert "IsADirectoryError" in stderr and f"This was rank 1 of 2, on {socket.gethostname()}." in stderr
    assert stderr.count("Traceback (most recent call last)") - (words is TORCHRUN) <= 1
