"""With torchrun's elastic agent, a dead rank leads to a restart from the last checkpoint, also on fewer ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import jingu
from jingu.checkpoint.save_folder import read_state
from tests.e2e.conftest import read_until


def torchrun(ranks: int, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(jingu.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=2"]
    command = [*agent, f"--nproc-per-node={ranks}", "-m", "jingu", *words]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0, 1], ids=["checkpoints", "memory"])
def test_the_job_restarts_on_four_ranks_and_then_on_two(memory, run_file, tiny_run, train_on, done, tmp_path):
    settings: dict[str, Any] = {"checkpoint.every": 3, "evaluation.every": 5, "parallel.zero_stage": 2}
    settings["schedule"] = {"type": "constant", "warmup": 3}
    settings["checkpoint.in_memory"] = {"every": memory, "folder": str(tmp_path / "memory")}
    alone = tiny_run({**settings, "train.steps": 310}, name="alone")
    train_on(1, alone)

    process = torchrun(4, "train", run_file({**settings, "train.steps": 300}, name="elastic"))
    assert process.stderr is not None
    log = read_until(process, "step 10: validation loss")  # the save of step 9 has waited for that of step 6
    workers = [child for child in psutil.Process(process.pid).children(recursive=True) if "RANK" in child.environ()]
    (victim,) = [worker for worker in workers if worker.environ()["RANK"] == "2" and "train" in worker.cmdline()]
    victim.kill()
    log += process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0, log
    assert "Resuming from step " in log
    assert ("is in the memory of the nodes; no checkpoint is read." in log) == bool(memory)
    starts = done(tiny_run(name="elastic")).column("resumed_from", "start")
    assert len(starts) == 2 and starts[1] >= 6

    process = torchrun(2, "train", run_file({**settings, "train.steps": 310}, name="elastic"))
    _, log = process.communicate()
    assert process.returncode == 0, log
    elastic = done(tiny_run(name="elastic"))
    uninterrupted = done(alone)
    assert elastic.column("ranks", "start") == [4, 4, 2]
    assert elastic.column("step") == uninterrupted.column("step") == list(range(1, 311))
    assert elastic.column("loss") == pytest.approx(uninterrupted.column("loss"), rel=1e-9)
    receipts = [read_state(run.checkpoint())["progress"]["sample_hash"]["hash"] for run in (elastic, uninterrupted)]
    assert receipts[0] == receipts[1]
