"""Several machines with sshd, which are namespaces of this one: own networks, names and mounts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

import jingu
from tests.limits import PATIENCE

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
PROGRAMS = ("sshd", "ssh", "ssh-keygen", "unshare", "nsenter", "ip", "tc")


def why_no_nodes() -> str:
    """Return why there can be no nodes on this machine; empty if there can."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if missing or os.getuid():
        return f"needs root and {', '.join(missing or PROGRAMS)}"
    result = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False
    )
    return "needs namespaces" if result.returncode else ""


class Nodes:
    """node1, node2 and so on, at 10.77.0.1, .2 and so on.

    Attributes:
        folder: in which commands run; the nodes share it. The hostfile `hosts` is there.
    """

    def __init__(self, folder: Path, count: int, root: psutil.Process) -> None:
        self.folder = folder
        self._root = root
        (folder / "hosts").write_text("".join(f"node{number} slots=1\n" for number in range(1, count + 1)))
        # The order in which they were started is that of their process numbers.
        self._pids = sorted(process.pid for process in root.children() if process.name() == "sshd")

    def start(self, *words: str, node: int | None = None, **environment: str) -> subprocess.Popen[str]:
        """Start a program beside the nodes, or on one of them; stdout and stderr are one."""
        pid = self._root.pid if node is None else self._pids[node - 1]
        enter = ["nsenter", f"--target={pid}", "--net", "--mount", "--pid", *(["--uts"] if node else [])]
        return subprocess.Popen(
            [*enter, "bash", "-c", 'cd "$0" && exec "$@"', str(self.folder), *words],
            env={**os.environ, "PATH": PATH, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def run(self, *words: str, node: int | None = None, **environment: str) -> tuple[int, str]:
        """Run a program to its end; return its exit code and its output."""
        process = self.start(*words, node=node, **environment)
        output, _ = process.communicate(timeout=PATIENCE)
        return process.returncode, output

    def change(self, node: int, command: str) -> None:
        """Run a shell command on a node, which must succeed."""
        code, output = self.run("bash", "-c", command, node=node)
        assert code == 0, output

    def launch(self, where: str, *words: str, **environment: str) -> tuple[int, str]:
        """Run `jingu launch WHERE --hostfile hosts WORDS`."""
        return self.run(*launch_words(where, *words), **environment)

    def processes(self, node: int | None = None) -> list[psutil.Process]:
        """Return the processes on a node, or on all of them, without the sshd that was there from the begin."""
        networks = {network_of(pid) for pid in (self._pids if node is None else [self._pids[node - 1]])}
        processes = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.pid not in self._pids and network_of(process.pid) in networks:
                    processes.append(process)
        return processes


ROOT = str(Path(jingu.__file__).parents[1])


def launch_words(where: str, *words: str) -> list[str]:
    """Return a command that launches another one on the nodes of the hostfile."""
    return [sys.executable, "-m", "jingu", "launch", where, "--hostfile", "hosts", *words]


def interrupt(process: subprocess.Popen[str], number: int = signal.SIGINT) -> None:
    """Press Ctrl-C in a program on the nodes, or send it another signal."""
    (program,) = psutil.Process(process.pid).children()
    program.send_signal(number)


def read_output_until(process: subprocess.Popen[str], words: str) -> str:
    """Read what a program on the nodes prints until these words are in it; fail if it ends before."""
    assert process.stdout is not None
    return read_stream_until(process.stdout, words)


def read_stream_until(stream: IO[str], words: str) -> str:
    """Read a stream until these words are in it; fail if it ends before."""
    text = ""
    while words not in text:
        text += (letter := stream.read(1))
        assert letter, text
    return text


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kill processes, some of which may end with others."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def network_of(pid: int) -> str:
    """Return what identifies the network namespace of a process."""
    return str(Path(f"/proc/{pid}/ns/net").readlink())


@contextmanager
def start_nodes(folder: Path, count: int, password: str = "") -> Iterator[Nodes]:
    """Have nodes within the block. Nothing of them remains, whatever happens there, or to this process.

    Args:
        password: with a password of root, the nodes are new: there is no key, and `/mnt` is an empty shared folder.
    """
    folder.mkdir()
    script = Path(__file__).with_name("ssh_nodes.sh")
    namespaces = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    process = subprocess.Popen(
        ["unshare", *namespaces, "bash", str(script), str(folder), str(count), password],
        env={**os.environ, "PATH": PATH},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        if first != "ready\n":
            process.kill()  # else the script, which waits for its input to end, would write no end
            raise AssertionError(first + process.stdout.read())
        (root,) = psutil.Process(process.pid).children()
        work = folder / "work"
        work.mkdir()
        yield Nodes(work, count, root)
    finally:
        process.kill()  # and with it the first process of the namespaces
        process.communicate()
