"""A real Slurm of four nodes on this machine, in namespaces of its own, and commands that run in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

import jingu
from tests.launch.nodes import network_of
from tests.limits import PATIENCE

PATH = f"{os.environ['PATH']}:/usr/sbin"
_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "unshare", "nsenter", "ip")


def why_not() -> str:
    """Return why this machine cannot run the cluster; empty if it can."""
    missing = [program for program in _PROGRAMS if shutil.which(program, path=PATH) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if os.getuid() != 0:
        return "needs root"
    words = ["unshare", "--net", "--mount", "--pid", "--fork", "true"]
    return "" if subprocess.run(words, capture_output=True, check=False).returncode == 0 else "needs namespaces"


class SlurmCluster:
    """The cluster; its nodes are n0 to n3."""

    def __init__(self, folder: Path, first_process: int) -> None:
        self._folder = folder
        self._first_process = psutil.Process(first_process)
        self._enter = ["nsenter", f"--target={first_process}", "--net", "--mount", "--pid"]

    def start(self, *words: str, folder: Path) -> subprocess.Popen[str]:
        """Start a command on the login node, in a folder; `jingu` is the jingu of this test."""
        words = (sys.executable, "-m", *words) if words[0] == "jingu" else words
        environment = {
            **os.environ,
            "PATH": PATH,
            "PYTHONPATH": str(Path(jingu.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            "SLURM_CONF": str(self._folder / "slurm.conf"),
        }
        return subprocess.Popen(
            [*self._enter, f"--wdns={folder}", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str, folder: Path = Path("/")) -> tuple[int, str]:
        """Run a command on the login node. Returns its exit code and its output."""
        process = self.start(*words, folder=folder)
        output, _ = process.communicate(timeout=PATIENCE)
        return process.returncode, output

    def submit(self, *words: str, folder: Path) -> str:
        """Run `jingu launch slurm`. Returns the number of the job."""
        code, output = self.run("jingu", "launch", "slurm", *words, folder=folder)
        assert code == 0 and output.startswith("Submitted batch job "), output
        return output.split()[3].rstrip(":")

    def processes(self) -> list[psutil.Process]:
        """Return all processes on the nodes."""
        network = network_of(self._first_process.pid)
        processes = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if network_of(process.pid) == network:
                    processes.append(process)
        return processes

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm knows about a job."""
        _, output = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(word.partition("=")[::2] for word in output.split() if "=" in word)

    def wait_for(self, number: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of these states. One in the queue then starts without Slurm's two minutes.

        It starts two seconds later, since nodes refuse a requeued job in the second in which its last run ended.
        """
        wait_until(lambda: self.job(number)["JobState"] in states, lambda: f"{self.job(number)}")
        job = self.job(number)
        if job["JobState"] == "PENDING":
            self.run("scontrol", "update", f"jobid={number}", "StartTime=now+2")
        return job


def wait_until(is_true: Callable[[], bool], describe: Callable[[], str]) -> None:
    """Wait until something is true; fail with a description if it takes too long."""
    end = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < end, describe()
        time.sleep(0.3)


@contextmanager
def run_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Start the cluster, and end all of its processes with the block or with this process."""
    script = str(Path(__file__).with_suffix(".sh"))
    words = ["unshare", "--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child", "bash", script]
    with subprocess.Popen(
        [*words, str(folder)],
        env={**os.environ, "PATH": PATH},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield SlurmCluster(folder, psutil.Process(process.pid).children()[0].pid)
        finally:
            process.stdin.close()
            process.wait(PATIENCE)
