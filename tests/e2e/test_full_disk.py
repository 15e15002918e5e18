"""The disk is full while four ranks save: a rank says so, training goes on, and what was saved before remains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jingu
from tests.limits import PATIENCE


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None or os.getuid() != 0, reason="needs root and unshare")
def test_a_full_disk_while_four_ranks_save(run_file, tmp_path):
    """The folder of runs is a disk with room for two checkpoints. Training does not stand still, and ends in code 2."""
    settings = {"train.steps": 8, "checkpoint.every": 2, "checkpoint.keep_last": 9, "train.hang_timeout": 60}
    file = run_file({**settings, "parallel.shard": 4, "checkpoint.async_save": False}, name="full")
    runs = tmp_path / "runs"
    runs.mkdir(exist_ok=True)
    script = f'mount -t tmpfs -o size=2500k none {runs} && "$@"; echo code $?; ls {runs}/full/checkpoints'
    train = [sys.executable, "-m", "jingu", "train", file, "--processes", "4"]
    environment = {**os.environ, "PYTHONPATH": str(Path(jingu.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script, "-", *train],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert result.stdout.split("\n", 1)[1] == "step-00000002\nstep-00000004\n", result.stdout + result.stderr
    assert result.stdout.startswith("code 2\n")
    assert ": No space left on device). Free some space" in result.stderr and "(rank " in result.stderr
    assert "Training continues without this checkpoint." in result.stderr
    assert "Training has" not in result.stderr and "Traceback" not in result.stderr
