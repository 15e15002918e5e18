"""`evaluate`, `serve` and `align` on two nodes, over ssh and as jobs of a real Slurm: the results of this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import psutil
import pytest

import jingu
from jingu.align.commands import align
from jingu.cli import main
from jingu.config.load import load_stages
from tests.align.test_stages import write_stages
from tests.conftest import peak_unmeasured
from tests.e2e.slurm_cluster import SlurmCluster, run_cluster, wait_until, why_not
from tests.launch.nodes import Nodes, interrupt, launch_words, read_output_until
from tests.limits import PATIENCE

pytestmark = pytest.mark.slow
PORT = 18_000
REQUEST = """
import json, sys, urllib.request
body = {"inputs": "def ", "parameters": {"max_new_tokens": 8}}
request = urllib.request.Request(sys.argv[1], json.dumps(body).encode(), {"Content-Type": "application/json"})
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(json.load(opener.open(request))["generated_text"], end="")
"""


class Place(Protocol):
    """Two nodes on which commands are launched; the first one has the address 10.77.0.1."""

    def run(self, *words: str) -> None:
        """Run a command to its end, which must succeed."""
        ...

    def serve(self, *words: str) -> str:
        """Start a server, and return what a client reads from it. The server must end when it is asked to."""
        ...


class SshPlace:
    """Two of the nodes that ssh reaches."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def run(self, *words: str) -> None:
        code, output = self._nodes.launch("ssh", "--include", "node1@node2", *words)
        assert code == 0, output

    def serve(self, *words: str) -> str:
        process = self._nodes.start(*launch_words("ssh", "--include", "node1@node2", *words))
        read_output_until(process, "http://0.0.0.0")
        code, answer = self._nodes.run(sys.executable, "-c", REQUEST, f"http://10.77.0.1:{PORT}/generate")
        interrupt(process)
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode in (0, 130), output
        assert not psutil.wait_procs(self._nodes.processes(), timeout=PATIENCE)[1]
        assert code == 0, answer
        return answer


class SlurmPlace:
    """Jobs of two nodes."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder

    def _read_log(self) -> str:
        return "".join(path.read_text(encoding="utf-8") for path in sorted(self._folder.glob("slurm/*.log")))

    def run(self, *words: str) -> None:
        job = self._cluster.submit("--nodes", "2", *words, folder=self._folder)
        self._cluster.wait_for(job, "RUNNING", "COMPLETED", "FAILED")
        # One that fails is queued again.
        state = self._cluster.wait_for(job, "COMPLETED", "FAILED", "PENDING")["JobState"]
        assert state == "COMPLETED", self._read_log()

    def serve(self, *words: str) -> str:
        job = self._cluster.submit("--nodes", "2", *words, folder=self._folder)
        wait_until(lambda: "http://0.0.0.0" in self._read_log(), self._read_log)
        code, answer = self._cluster.run(sys.executable, "-c", REQUEST, f"http://10.77.0.1:{PORT}/generate")
        self._cluster.run("scancel", job)
        self._cluster.wait_for(job, "CANCELLED")
        ranks = [own for own in self._cluster.processes() if "LOCAL_RANK" in own.environ()]
        assert not psutil.wait_procs(ranks, timeout=PATIENCE)[1]
        assert code == 0, answer
        return answer


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with run_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(params=["ssh", "slurm"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "ssh":
        return SshPlace(request.getfixturevalue("nodes"))
    folder = tmp_path / "jobs"
    folder.mkdir()
    return SlurmPlace(request.getfixturevalue("cluster"), folder)


@pytest.fixture
def model(tiny_run, train_on) -> str:
    """The folder of a little run."""
    config = tiny_run({"train.steps": 4, "model.max_position_embeddings": 512})
    train_on(1, config)
    return f"{config.runs_dir}/{config.name}"


def test_nodes_evaluate_to_the_same_scores(place, model, tmp_path):
    words = ["evaluate", model, "hellaswag_100", "--limit", "5", "--precision", "fp64", "--output"]
    assert main([*words, str(tmp_path / "local")]) == 0
    place.run(*words, str(tmp_path / "remote"))
    local, remote = (
        json.loads((tmp_path / name / "hellaswag_100.json").read_text(encoding="utf-8")) for name in ("local", "remote")
    )
    assert remote["results"] == local["results"] and remote["hashes"] == local["hashes"]


def test_nodes_share_a_model_that_they_serve(place, model):
    expected = jingu.load(model, precision="fp64").generate("def ", max_tokens=8, temperature=0.0)
    options = ["--host", "0.0.0.0", "--port", str(PORT), "--precision", "fp64"]
    assert place.serve("serve", model, *options) == expected


def test_nodes_align_to_the_same_bits(place, tiny_run, tmp_path, done):
    losses = []
    for name in ("local", "remote"):
        folder = tmp_path / name
        folder.mkdir()
        file = write_stages(lambda *a, folder=folder: tiny_run(*a, runs_dir=str(folder / "runs")), folder)
        if name == "remote":
            place.run("align", str(file))
        else:
            with peak_unmeasured():
                assert align(file, processes=2) == 0
        losses.append([done(config).column("loss") for config in load_stages(file)])
    assert losses[0] == losses[1] and [len(column) for column in losses[0]] == [2, 2]
