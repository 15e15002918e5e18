"""A rank that dies or raises ends the whole job, which names it; every rank's log is in its own file."""

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
from tests.e2e.conftest import heard

LONG = {"train.steps": 50_000, "parallel.zero_stage": 2, "precision.type": "fp32"}
LOCAL = ["-m", "jingu", "train", "{file}", "--processes", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "jingu", "train", "{file}"]
PATIENCE = 300
"""Seconds after which a job counts as one that hangs; the engines' own timeouts are many minutes."""


def start(words: list[str], file: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(jingu.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *(word.format(file=file) for word in words)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, bufsize=1)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and what is left of stderr; no rank outlives the job."""
    ranks = psutil.Process(process.pid).children(recursive=True)
    _, said = process.communicate(timeout=PATIENCE)
    assert not psutil.wait_procs(ranks, timeout=PATIENCE)[1]
    return process.returncode, said


BY = pytest.mark.parametrize(
    "words", [LOCAL, pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["processes", "torchrun"]
)


@BY
def test_a_rank_is_killed(words, run_file, tiny_run, done):
    process = start(words, run_file(LONG, name="killed"))
    heard(process, "epochs)")  # the last words before the first step
    (second,) = [p for p in psutil.Process(process.pid).children(recursive=True) if p.environ().get("RANK") == "1"]
    second.send_signal(signal.SIGKILL)
    code, said = ended(process)
    assert code not in (0, 130)
    if words is LOCAL:
        assert code == 2 and f"rank 1 on {socket.gethostname()} was killed by SIGKILL" in said
        assert "Traceback" not in said
    else:
        assert "SIGKILL" in said and "local_rank: 1" in said
    log = done(tiny_run(LONG, name="killed")).folder / "log"
    assert [file.name for file in sorted(log.iterdir())] == ["rank-00000.log", "rank-00001.log"]
    # Some waits of gloo do not notice that the other rank has gone: who ended this one then says so.
    by_force = "ranks that did not exit by themselves were killed" if words is LOCAL else "forcefully exiting"
    assert "the run failed" in (log / "rank-00000.log").read_text() or by_force in said


@BY
def test_a_rank_raises(words, run_file, tiny_run, done):
    log = done(tiny_run(LONG, name="raises")).folder / "log"
    (log / "rank-00001.log").mkdir(parents=True)  # the second rank cannot open its log
    code, said = ended(start(words, run_file(LONG, name="raises")))
    assert code == 1
    assert "IsADirectoryError" in said and f"This was rank 1 of 2, on {socket.gethostname()}." in said
    assert said.count("Traceback (most recent call last)") - (words is TORCHRUN) <= 1
