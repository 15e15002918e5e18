"""A run with checkpoints on an S3-compatible server resumes bitwise after a kill."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import jingu
from jingu.formats.models import open_model
from tests.e2e.conftest import read_until

PACKAGES = ("s3fs==2026.9.0", "fsspec==2026.9.0", "aiobotocore==3.10.0", "boto3==1.43.117", "moto[server]==5.2.5")


@pytest.fixture(scope="module")
def environment(pytestconfig: pytest.Config) -> dict[str, str]:
    """Environment with s3fs and moto, which are installed once into pytest's cache folder only."""
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("s3")
    if not (folder / "whole").exists():
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(folder), *PACKAGES],
            check=True,
        )
        (folder / "whole").touch()  # an interrupted installation starts over
    # The folder goes to the end of the path: it also has other versions of installed packages.
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.remove({str(folder)!r})\nsys.path.append({str(folder)!r})"
    )
    path = f"{Path(jingu.__file__).parents[1]}{os.pathsep}{folder}"
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    return {**os.environ, **keys, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def server(environment: dict[str, str]) -> Iterator[str]:
    """Return the URL of a server with an empty bucket `bucket`."""
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    address = next(line.split("Running on ")[1].split()[0] for line in process.stderr if "Running on " in line)
    threading.Thread(target=process.stderr.read, daemon=True).start()  # or the log would fill the pipe
    urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")).close()
    yield address
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_killed_run_resumes_from_s3(server, environment, run_file, tiny_run, train_on, done, monkeypatch):
    settings = {"checkpoint.every": 3, "evaluation.every": 5, "train.steps": 30}
    alone = tiny_run(settings, name="alone")
    train_on(1, alone)
    file = run_file({**settings, "checkpoint.url": "s3://bucket/runs"}, name="remote")
    environment = {**environment, "AWS_ENDPOINT_URL": server}
    command = [sys.executable, "-m", "jingu"]

    process = subprocess.Popen([*command, "train", file], env=environment, stderr=subprocess.PIPE, text=True)
    read_until(process, "step 10: validation loss")
    process.kill()
    process.communicate()
    ended = subprocess.run([*command, "train", file], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0 and "Resuming from step " in ended.stderr, ended.stderr
    remote = done(tiny_run(name="remote"))
    assert remote.column("resumed_from", "start")[1] >= 3

    assert remote.column("loss")[-10:] == done(alone).column("loss")[-10:]
    for verb in ("list", "verify"):
        result = subprocess.run(
            [*command, "checkpoint", verb, "s3://bucket/runs/remote"], env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0 and "30" in result.stdout, result.stderr
    folder = remote.folder / "exported"
    subprocess.run(
        [*command, "export", str(remote.folder), "--to", str(folder), "--dtype", "auto"], env=environment, check=True
    )
    exported = open_model(folder)
    for name, tensor in done(alone).tensors().items():
        if name.startswith("model/"):
            assert torch.equal(exported.read(name.removeprefix("model/")), tensor.float()), name
