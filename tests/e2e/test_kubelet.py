"""The pods of every manifest train to the bits of a local run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jingu
from jingu.launch.manifests import MANIFESTS
from tests.limits import PATIENCE

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
PROGRAMS = ("unshare", "ip", "mount", "hostname")
MISSING = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING) or os.getuid() != 0, reason=f"needs root and {', '.join(PROGRAMS)}")
@pytest.mark.parametrize("kind", MANIFESTS)
def test_pods_train_to_the_same_bits(kind, run_file, tiny_run, done, train_on, tmp_path):
    settings = {"train.steps": 4}
    train_on(2, tiny_run(settings, name="local"))
    environment = {**os.environ, "PATH": PATH, "PYTHONPATH": str(Path(jingu.__file__).parents[1])}
    words = ["launch", "kubernetes", "--manifest", kind, "--nodes", "2", run_file(settings, name="pods")]
    manifest = subprocess.run(
        [sys.executable, "-m", "jingu", *words], env=environment, capture_output=True, check=True
    ).stdout
    (tmp_path / "manifest.yaml").write_bytes(manifest)
    unshare = ["unshare", "--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
    words = [sys.executable, str(Path(__file__).with_name("kubelet.py")), str(tmp_path / "manifest.yaml")]
    result = subprocess.run(
        [*unshare, *words],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert result.stdout == '{"ends": [0, 0]}\n', result.stderr
    assert result.stderr.count(" over eth0.") == 2
    assert done(tiny_run(name="pods")).column("loss") == done(tiny_run(name="local")).column("loss")
