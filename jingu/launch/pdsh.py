"""`jingu launch pdsh`: start all nodes with one pdsh process, for clusters that are used through pdsh.

pdsh does not forward input to the nodes, but closes their standard input when it exits. Each node therefore reads its
start and later signals from two files in the shared folder, and end of file on its input terminates its ranks, as over
ssh.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread

from jingu.errors import JinguError
from jingu.launch.hosts import NodeSelection
from jingu.launch.node import SIGNALS_SUFFIX, free_port
from jingu.launch.ssh import (
    EXPLAINED_CODES,
    GRACE_SECONDS,
    POLL_SECONDS,
    SSH_FAILURE,
    SSH_OPTIONS,
    name_failing_nodes,
    node_command,
)
from jingu.launch.start import prepare_start
from jingu.runtime.files import write_text_atomically
from jingu.runtime.signals import STOP_SIGNALS, handle_signals

# Folder of the files with starts and signals, which the nodes must share.
FOLDER = Path("pdsh")
# The line with which pdsh reports that a node has failed.
_FAILURE = re.compile(r"pdsh@.*: (\S+): \S+ exited with exit code (\d+)")
_EXPLAINED_SECONDS = 3.0


def launch_pdsh(
    words: Sequence[str], selection: NodeSelection, environment: Path | None = None, max_restarts: int = 0
) -> int:
    """Run a command on the nodes of a hostfile through pdsh, in the same folder as here and with the same Python.

    The nodes rendezvous at the first one, under its name in the hostfile.

    Returns:
        The exit code of the command.

    Raises:
        JinguError: there is no pdsh, or it does not reach a node.
    """
    program = shutil.which("pdsh")
    if program is None:
        raise JinguError("there is no pdsh on this machine.", fix="Use `jingu launch ssh`, or install pdsh.")
    start = prepare_start(words, environment)
    nodes = selection.nodes()
    slots = [list(node.slots) for node in nodes]
    master = (nodes[0].host, free_port())
    start = replace(start, slots=slots, min_nodes=len(nodes), max_restarts=max_restarts, master=master)
    name_failing_nodes(start, [])
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"{start.name}-{os.getpid()}.json"
    signals = file.with_suffix(SIGNALS_SUFFIX)
    write_text_atomically(file, start.to_json())
    # pdsh itself replaces %n by the rank of the node.
    hosts = ",".join(node.host for node in nodes)
    command = [program, "-S", "-b", "-f", str(len(nodes)), "-w", hosts, node_command(str(file), "%n")]
    options = " ".join([*SSH_OPTIONS, os.environ.get("PDSH_SSH_ARGS_APPEND", "")]).rstrip()
    failures: dict[str, int] = {}
    pending_signals: list[int] = []
    with handle_signals(lambda number, _: pending_signals.append(number), *STOP_SIGNALS):
        process = subprocess.Popen(
            command,
            env={"PDSH_RCMD_TYPE": "ssh", **os.environ, "PDSH_SSH_ARGS_APPEND": options},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            process_group=0,
            text=True,
            errors="replace",
        )
        reader = Thread(target=_pass_errors, args=(process, failures), daemon=True)
        reader.start()
        try:
            _wait(process, signals, failures, pending_signals)
        finally:
            process.kill()
            process.wait()
            reader.join(GRACE_SECONDS)
            for path in (file, signals):
                path.unlink(missing_ok=True)
    name_failing_nodes(start, [host for host, code in failures.items() if code in EXPLAINED_CODES])
    unreachable = [host for host, code in failures.items() if code == SSH_FAILURE]
    if unreachable:
        fix = f"`pdsh -w {unreachable[0]} true` must work without a password; or leave it out with --exclude."
        raise JinguError("the host cannot be reached by pdsh.", where=unreachable[0], fix=fix)
    return max([process.returncode, *failures.values()])


def _pass_errors(process: subprocess.Popen[str], failures: dict[str, int]) -> None:
    """Print the nodes' standard error, and record the exit codes of those that fail."""
    assert process.stderr is not None
    for line in process.stderr:
        match = _FAILURE.match(line)
        if match is None:
            print(line, end="", file=sys.stderr, flush=True)
        else:
            failures[match[1]] = int(match[2])


def _wait(process: subprocess.Popen[str], signals: Path, failures: dict[str, int], pending_signals: list[int]) -> None:
    """Wait for pdsh, and forward signals. After a node has failed, give the others a grace period to exit."""
    deadline: float | None = None
    while process.poll() is None:
        while pending_signals:
            with signals.open("a", encoding="utf-8") as file:
                file.write(f"{pending_signals.pop(0)}\n")
        if deadline is None and failures:
            is_explained = any(code in EXPLAINED_CODES for code in failures.values())
            deadline = time.monotonic() + (_EXPLAINED_SECONDS if is_explained else GRACE_SECONDS)
        if deadline is not None and time.monotonic() > deadline:
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
