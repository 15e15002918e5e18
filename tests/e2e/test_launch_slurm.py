"""`jingu launch slurm` on a real Slurm of four nodes, in a network namespace of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jingu
from tests.limits import PATIENCE

PATH = f"{os.environ['PATH']}:/usr/sbin"
PROGRAMS = ("slurmctld", "slurmd", "munged", "unshare", "ip")
MISSING = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
CLUSTER = Path(__file__).with_name("slurm_cluster.sh")
# Slurm waits for two minutes before it starts a job again; the cluster's administrator does not.
SCRIPT = """
cd {folder}
launch() {{ {python} -m jingu launch slurm --nodes 2 "$@"; }}
launch --sbatch partition=none train {file} 2> refused; echo $? >> refused
launch train {file}
for i in $(seq 900); do grep -q "step 30 of" slurm/*.log 2> /dev/null && break; sleep 0.3; done
scancel --signal=USR1 1
for i in $(seq 100); do scontrol show job 1 | grep -q JobState=PENDING && break; sleep 0.3; done
scontrol update jobid=1 StartTime=now
for i in $(seq 300); do scontrol show job 1 | grep -qE "JobState=(COMPLETED|FAILED)" && break; sleep 0.5; done
scontrol show job 1 > job
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING) or os.getuid() != 0, reason=f"needs root and {', '.join(PROGRAMS)}")
def test_a_job_saves_at_the_signal_is_requeued_and_ends_with_the_same_bits(
    run_file, tiny_run, done, train_on, tmp_path
):
    settings = {"train.steps": 300}
    train_on(2, tiny_run(settings, name="local"))
    folder = tmp_path / "cluster"
    folder.mkdir()
    script = SCRIPT.format(folder=folder, python=sys.executable, file=run_file(settings, name="job"))
    environment = {**os.environ, "PATH": PATH, "PYTHONPATH": str(Path(jingu.__file__).parents[1])}
    words = ["unshare", "--net", "--mount", "bash", str(CLUSTER), str(folder), "bash", "-c", script]
    subprocess.run(words, env=environment | {"OMP_NUM_THREADS": "1"}, check=True, timeout=PATIENCE)
    log = next((folder / "slurm").glob("*.log")).read_text()
    job = (folder / "job").read_text()
    assert "JobState=COMPLETED" in job and "Restarts=1" in job, log
    assert "Stopped and saved at step" in log and "Complete: 300 steps" in log
    assert "meeting at n0:" in log and " over v0" in log
    refused = (folder / "refused").read_text()
    assert "Slurm refuses the job (" in refused and "invalid partition" in refused and refused.endswith("\n2\n")
    assert done(tiny_run(settings, name="job")).column("loss") == done(tiny_run(settings, name="local")).column("loss")
