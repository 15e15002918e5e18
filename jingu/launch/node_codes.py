"""The exit codes of the nodes of a Slurm job, in files of a folder that the nodes share.

srun ends all tasks when one fails, and its own exit code does not tell which one was the cause.
`python -m jingu.launch.node_codes FOLDER CODE` prints the exit code of the job and when it is started again.

A node that reboots kills its ranks, and for a moment this looks like a failure of a rank: srun and the script are
quicker than Slurm, which calls a node lost only after minutes. So before a failure counts, the nodes must keep
answering for some seconds.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from jingu.runtime.exit_codes import EXIT_LOST, Restart, combine_exit_codes, find_restart
from jingu.runtime.files import write_text_atomically

# How long slurmd must keep answering on all nodes after a failure, the time between two attempts, and that for one.
_STEADY_SECONDS = 12.0
_POLL_SECONDS = 2.0
_CONNECT_SECONDS = 5.0
# What `scontrol show node` says of a node, and `scontrol show config` of all nodes whose port is the usual one.
_NODE = re.compile(
    r"NodeName=(?P<name>\S+).* NodeAddr=(?P<address>\S+)(?:.* Port=(?P<port>\d+))?.* State=(?P<state>\S+)"
)
_PORT = re.compile(r"^SlurmdPort\s*=\s*(\d+)", re.MULTILINE)
_LOST_STATES = re.compile(r"DOWN|NOT_RESPONDING|REBOOT_ISSUED|FAIL|\*")

# The environment variable that names the folder.
CODES_VARIABLE = "JINGU_CODES"


class NodeCodes:
    """The files of one node: `RANK.started` and, once it has ended, `RANK.code`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self.ready = folder / "ready"
        self._write("started", "")

    def announce(self) -> None:
        """Say that the store of the first node listens."""
        self.ready.touch()

    def finish(self, code: int) -> None:
        """Record the exit code of the node."""
        self._write("code", str(code))

    def _write(self, suffix: str, text: str) -> None:
        # A full disk must not end a run; the node then looks lost.
        with suppress(OSError):
            write_text_atomically(self._folder / f"{self._rank}.{suffix}", text)


def read_code(folder: Path, code: int) -> int:
    """Return the exit code of a job.

    Args:
        folder: with the files of its nodes. A node that has started, and has no code, was lost.
        code: exit code of srun, which counts if no node has started.
    """
    starts = {path.stem for path in folder.glob("*.started")}
    codes = {path.stem: int(path.read_text(encoding="utf-8")) for path in folder.glob("*.code")}
    if not starts:
        return code
    return combine_exit_codes(codes.values(), is_node_lost=bool(starts - codes.keys()))


def find_lost_node(node_list: str, seconds: float | None = None) -> str | None:
    """Watch the nodes of a job for some seconds; return the name of one that Slurm has lost, or on which slurmd ends.

    Args:
        node_list: nodes in Slurm's notation (`SLURM_JOB_NODELIST`).
        seconds: how long to watch; None: as long as slurmd may take to end.

    Returns:
        None if all nodes answer, or if Slurm does not say where they should.
    """
    match = _PORT.search(_ask_slurm("show", "config"))
    end = time.monotonic() + (_STEADY_SECONDS if seconds is None else seconds)
    while match is not None:
        for node in map(_NODE.search, _ask_slurm("--oneliner", "show", "node", node_list).splitlines()):
            if node is not None and (_LOST_STATES.search(node["state"]) or not _answers(node, int(match[1]))):
                return node["name"]
        if time.monotonic() > end:
            break
        time.sleep(_POLL_SECONDS)
    return None


def _ask_slurm(*words: str) -> str:
    with suppress(OSError):
        return subprocess.run(["scontrol", *words], capture_output=True, text=True, check=False).stdout
    return ""


def _answers(node: re.Match[str], usual_port: int) -> bool:
    """Return whether slurmd listens on a node."""
    try:
        socket.create_connection((node["address"], int(node["port"] or usual_port)), _CONNECT_SECONDS).close()
    except socket.gaierror:
        return True  # this machine does not know the name, which says nothing about the node
    except OSError:
        return False
    return True


def main(words: Sequence[str]) -> None:
    code = read_code(Path(words[0]), int(words[1]))
    node_list = os.environ.get("SLURM_JOB_NODELIST", "")
    host = find_lost_node(node_list) if find_restart(code) == Restart.COUNTED else None
    if host is not None:
        print(f"jingu: {host} no longer answers Slurm, so this counts as the loss of the node.", file=sys.stderr)
        code = EXIT_LOST
    print(code, find_restart(code).name.lower())


if __name__ == "__main__":
    main(sys.argv[1:])
