"""Single faults under each launcher: its exit code means what the table says, and the run ends with the same bits.

A run that its launcher does not start again says in one paragraph what a person must do; the test then does it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from jingu.config.load import dump_yaml
from jingu.config.schema import RunConfig
from jingu.runtime.exit_codes import Restart, find_restart
from tests.conftest import Library, tiny
from tests.e2e.slurm_cluster import SlurmCluster, run_cluster, wait_until, why_not
from tests.launch.nodes import PATH, ROOT, Nodes, interrupt, kill_all, launch_words, start_nodes, why_no_nodes
from tests.limits import PATIENCE

pytestmark = pytest.mark.slow
SETTINGS = {"train.steps": 100, "checkpoint.every": 3, "train.hang_timeout": 10}
RANKS = 2


class Launched:
    """A run of two ranks that a launcher has started.

    Attributes:
        restarts: after which codes the launcher starts the run again.
    """

    restarts: tuple[Restart, ...] = ()

    def __init__(self, file: Path) -> None:
        self.file = file
        self.output = file.with_suffix(".output")
        self.process: subprocess.Popen[Any] | None = None

    def start(self) -> None:
        """Start the run, for the first time or again."""
        raise NotImplementedError

    def processes(self) -> list[psutil.Process]:
        """All processes of the run."""
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def ranks(self) -> list[psutil.Process]:
        """The ranks in their order."""
        processes = [process for process in self.processes() if "train" in process.cmdline()]
        ranks = [process for process in processes if "LOCAL_RANK" in process.environ()]
        return sorted(ranks, key=lambda process: int(process.environ()["RANK"]))

    def read(self) -> str:
        """What the run has printed."""
        return self.output.read_text(encoding="utf-8", errors="replace") if self.output.exists() else ""

    def wait_for(self, words: str) -> None:
        """Wait until the run has printed these words; fail if it ends before."""

        def is_printed() -> bool:
            assert self.process is None or self.process.poll() is None, self.read()
            return words in self.read()

        wait_until(is_printed, self.read)

    def preempt(self) -> None:
        """Ask for the machine back."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def lose_node(self) -> None:
        """Kill all that runs on the last node."""
        assert self.process is not None
        kill_all([psutil.Process(self.process.pid), *self.processes()])

    def wait(self) -> int:
        """Return the exit code of the run, once the launcher has ended it."""
        assert self.process is not None
        return self.process.wait(PATIENCE)


def open_output(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)


ENVIRONMENT = {**os.environ, "PATH": PATH, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}


class Local(Launched):
    """`jingu train --processes 2`."""

    def start(self) -> None:
        words = [sys.executable, "-m", "jingu", "train", str(self.file), "--processes", str(RANKS)]
        descriptor = open_output(self.output)
        self.process = subprocess.Popen(words, env=ENVIRONMENT, stdout=descriptor, stderr=descriptor)
        os.close(descriptor)


class Ssh(Launched):
    """`jingu launch ssh --max-restarts 2`: a node that is lost comes back."""

    restarts = (Restart.COUNTED, Restart.ALWAYS)
    options = ("--max-restarts", "2")

    def __init__(self, file: Path, nodes: Nodes) -> None:
        super().__init__(file)
        self.nodes = nodes

    def start(self) -> None:
        words = launch_words("ssh", "--include", "node1@node2", *self.options, str(self.file))
        self.process = self.nodes.start("bash", "-c", f'exec "$@" >> {self.output} 2>&1', "-", *words)

    def processes(self) -> list[psutil.Process]:
        return self.nodes.processes()

    def preempt(self) -> None:
        assert self.process is not None
        interrupt(self.process, signal.SIGTERM)

    def lose_node(self) -> None:
        kill_all(self.nodes.processes(2))


class Elastic(Ssh):
    """`jingu launch ssh --min-nodes 1`: the run goes on without a node that is lost."""

    options = ("--max-restarts", "2", "--min-nodes", "1")

    def lose_node(self) -> None:
        super().lose_node()
        self.nodes.change(2, "ip link set e0 down")


class Slurm(Launched):
    """`jingu launch slurm --max-restarts 2`."""

    restarts = (Restart.COUNTED, Restart.ALWAYS)

    def __init__(self, file: Path, cluster: SlurmCluster) -> None:
        super().__init__(file)
        self.cluster = cluster
        self.job = ""

    def start(self) -> None:
        words = ["--nodes", str(RANKS), "--max-restarts", "2", str(self.file)]
        self.job = self.cluster.submit(*words, folder=self.file.parent)

    def processes(self) -> list[psutil.Process]:
        return [process for process in self.cluster.processes() if process.environ().get("SLURM_JOB_ID") == self.job]

    def read(self) -> str:
        logs = sorted((self.file.parent / "slurm").glob("*.log"))
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in logs)

    def preempt(self) -> None:
        words = ["sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 5"]
        code, output = self.cluster.run(*words, folder=self.file.parent)
        assert code == 0, output

    def lose_node(self) -> None:
        name = self.ranks()[-1].environ()["SLURMD_NODENAME"]
        victims = [one for one in self.cluster.processes() if one.environ().get("SLURMD_NODENAME") == name]
        (daemon,) = [one for one in self.cluster.processes() if one.cmdline() == ["slurmd", "-D", "-N", name]]
        words = daemon.cmdline()
        kill_all([daemon, *victims])
        wait_until(lambda: self.cluster.job(self.job)["JobState"] != "RUNNING", self.read)
        # It has rebooted.
        self.cluster.start("bash", "-c", 'exec "$@" > slurmd.out 2>&1', "-", *words, folder=self.file.parent)
        self.cluster.run("scontrol", "update", f"nodename={name}", "state=resume")

    def wait(self) -> int:
        while True:
            job = self.cluster.wait_for(self.job, "PENDING", "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
            if job["JobState"] != "PENDING":
                return int(job["ExitCode"].partition(":")[0])
            wait_until(lambda: self.cluster.job(self.job)["JobState"] != "PENDING", self.read)


class Pods(Launched):
    """The pods of a JobSet; the first one that fails decides (`tests/launch/test_manifests.py` has the rules)."""

    def start(self) -> None:
        words = ["launch", "kubernetes", "--manifest", "jobset", "--nodes", str(RANKS), str(self.file)]
        manifest = subprocess.run(
            [sys.executable, "-m", "jingu", *words], env=ENVIRONMENT, capture_output=True, check=True
        ).stdout
        path = self.file.with_name("manifest.yaml")
        path.write_bytes(manifest)
        namespaces = ["unshare", "--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
        kubelet = [sys.executable, str(Path(__file__).with_name("kubelet.py")), str(path)]
        descriptor = open_output(self.output)
        environment = ENVIRONMENT | {"PATH": f"{Path(sys.executable).parent}:{PATH}"}
        self.process = subprocess.Popen(
            [*namespaces, *kubelet], env=environment, stdout=subprocess.PIPE, stderr=descriptor, text=True
        )
        os.close(descriptor)

    def pods(self) -> list[psutil.Process]:
        pods = []
        for process in self.processes():
            with suppress(psutil.Error):
                if process.cmdline()[1:] == ["-m", "jingu.launch.node"]:
                    pods.append(process)
        return pods

    def preempt(self) -> None:
        """Kubernetes drains the node of the last pod."""
        self.pods()[-1].send_signal(signal.SIGTERM)

    def lose_node(self) -> None:
        pod = self.pods()[-1]
        kill_all([pod, *pod.children(recursive=True)])

    def wait(self) -> int:
        assert self.process is not None
        text, _ = self.process.communicate(timeout=PATIENCE)
        first = next((code for code in json.loads(text)["ends"] if code), 0)
        # The pod of a lost node has no code. It is evicted, which always starts the run again.
        return 69 if first < 0 else first


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A disk for the runs of this file, which all namespaces see."""
    reason = why_no_nodes()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def cluster(disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with run_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def launched(request: pytest.FixtureRequest, disk: Path, library: Library, tmp_path: Path) -> Iterator[Launched]:
    """A run of the launcher that the test names, whose runs are in a folder of its own on the disk."""
    launcher = request.param
    folder = disk / re.sub(r"\W+", "-", request.node.name).strip("-")
    folder.mkdir()
    config = tiny(library, folder / "runs", {**SETTINGS, "name": "run"})
    # What a run prints is beside its file. On the full disk, it could not say why it has ended.
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(config), encoding="utf-8")
    try:
        if launcher is Slurm:
            yield Slurm(file, request.getfixturevalue("cluster"))
        elif issubclass(launcher, Ssh):
            with start_nodes(tmp_path / "nodes", 2) as nodes:
                yield launcher(file, nodes)
        else:
            yield launcher(file)
    finally:
        # All tests share the disk, which is small.
        shutil.rmtree(folder, ignore_errors=True)


def kill_a_rank(run: Launched) -> None:
    run.ranks()[-1].kill()


def stop_a_rank(run: Launched) -> None:
    run.ranks()[-1].send_signal(signal.SIGSTOP)


def runs_dir(run: Launched) -> Path:
    return Path(yaml.safe_load(run.file.read_text(encoding="utf-8"))["runs_dir"])


def fill_the_disk(run: Launched) -> None:
    with suppress(OSError), (runs_dir(run) / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))


def free_the_disk(run: Launched) -> None:
    (runs_dir(run) / "filler").unlink(missing_ok=True)


# Each fault, the exit code of the table, and what the run says if it does not start again.
FAULTS: dict[str, tuple[Callable[[Launched], None], int, str]] = {
    "killed rank": (kill_a_rank, 137, "was killed by SIGKILL"),
    "preemption": (lambda run: run.preempt(), 75, "Stopped and saved at step"),
    "lost node": (lambda run: run.lose_node(), 69, ""),
    "hang": (stop_a_rank, 70, "It is stopped"),
    "full disk": (fill_the_disk, 2, "Free some space"),
}
undisturbed: dict[str, Any] = {}


@contextmanager
def a_disk_that_is_freed(run: Launched) -> Iterator[None]:
    try:
        yield
    finally:
        free_the_disk(run)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("launched", [Local, Ssh, Elastic, Slurm, Pods], indirect=True)
def test_a_run_ends_with_the_same_bits_after_a_fault(launched, fault, tiny_run, train_on, done):
    plant, code, sentence = FAULTS[fault]
    is_whole = isinstance(launched, Local) and fault == "lost node"
    # The preemption of what runs the launcher ends the launcher, too.
    restarts = () if isinstance(launched, Ssh) and fault == "preemption" else launched.restarts
    with a_disk_that_is_freed(launched):
        launched.start()
        launched.wait_for("step 10 of")
        plant(launched)
        if find_restart(code) in restarts:
            assert launched.wait() == 0, launched.read()
        else:
            # What has ended with the machine has no code.
            assert launched.wait() == (-signal.SIGKILL if is_whole else code), launched.read()
            assert sentence in launched.read() and "Complete: " not in launched.read()
            free_the_disk(launched)
            launched.start()
            assert launched.wait() == 0, launched.read()
    output = launched.read()
    assert "Traceback" not in output and "Resuming from step" in output, output
    assert output.count("Complete: 100 steps") == 1
    run = done(
        RunConfig.model_validate(
            {"runs_dir": str(runs_dir(launched)), **tiny_run(name="run").model_dump(exclude={"runs_dir"})}
        )
    )
    if not undisturbed:
        local = tiny_run(SETTINGS, name="local")
        train_on(RANKS, local)
        undisturbed.update(loss=done(local).column("loss"), tensors=done(local).tensors())
    losses = dict(zip(run.column("step"), run.column("loss"), strict=True))
    assert sorted(losses) == list(range(1, 101))
    if isinstance(launched, Elastic) and fault == "lost node":
        assert list(losses.values()) == pytest.approx(undisturbed["loss"], rel=1e-9)  # one rank adds in another order
        return
    assert list(losses.values()) == undisturbed["loss"]
    tensors = run.tensors()
    assert tensors.keys() == undisturbed["tensors"].keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in undisturbed["tensors"].items())


def listens(process: psutil.Process) -> bool:
    """Whether a rank listens for others, and so connects to them."""
    folder = Path(f"/proc/{process.pid}")
    with suppress(OSError):
        sockets = {str(path.readlink()) for path in (folder / "fd").iterdir()}
        rows = [line.split() for name in ("tcp", "tcp6") for line in (folder / "net" / name).read_text().splitlines()]
        return any(row[3] == "0A" and f"socket:[{row[9]}]" in sockets for row in rows)
    return False


@pytest.mark.parametrize("fault", ["killed rank", "lost node"])
@pytest.mark.parametrize("launched", [Local, Ssh, Elastic, Slurm, Pods], indirect=True)
def test_a_loss_while_the_ranks_connect_is_no_error_of_a_person(launched, fault):
    """The last rank has published its address, and the first one then tries to connect to it."""
    plant, code, _ = FAULTS[fault]
    if isinstance(launched, Local) and fault == "lost node":
        pytest.skip("this machine is the node")
    launched.start()
    ranks: list[psutil.Process] = []

    def have_started() -> bool:
        with suppress(psutil.Error):  # programs that end while the launcher starts
            ranks[:] = launched.ranks()
        return len(ranks) == RANKS

    wait_until(have_started, launched.read)
    first, last = ranks
    first.suspend()
    wait_until(lambda: listens(last), launched.read)
    plant(launched)
    with suppress(psutil.NoSuchProcess):
        first.resume()
    if find_restart(code) not in launched.restarts:
        assert launched.wait() == code, launched.read()
        launched.start()
    assert launched.wait() == 0, launched.read()
    output = launched.read()
    assert "Traceback" not in output and output.count("Complete: 100 steps") == 1, output


@pytest.mark.parametrize("launched", [Local, Ssh, Elastic, Slurm, Pods], indirect=True)
def test_an_error_of_a_person_is_one_paragraph_and_never_starts_again(launched):
    """The data set is not there, which only the ranks see."""
    text = launched.file.read_text(encoding="utf-8")
    data = next(line for line in text.splitlines() if line.startswith("  path: ") and line.endswith("data"))
    launched.file.write_text(text.replace(data, f"  path: {launched.file.parent}/no-data"), encoding="utf-8")
    launched.start()
    assert launched.wait() == 2, launched.read()
    output = launched.read()
    assert output.count("there is no data set here") == 1 and "Traceback" not in output, output
    assert "start again" not in output
