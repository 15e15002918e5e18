"""`jingu launch ssh`: one ssh connection for each node, which carries its start, its output and signals."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jingu.errors import JinguError, join_words, pluralize
from jingu.launch.hosts import FAILING_NODES, Node, NodeSelection, write_failing_nodes
from jingu.launch.node import HANDSHAKE, combine_codes
from jingu.launch.start import Start, compare_versions, prepare_start
from jingu.runtime.signals import STOP_SIGNALS, handle_signals

# Time for ssh to connect, and in total for a node to describe itself.
CONNECT_SECONDS = 6
_ANSWER_SECONDS = 30.0
# Time for the ranks of other nodes to exit by themselves after those of one node have failed.
GRACE_SECONDS = 15.0
POLL_SECONDS = 0.1
# The exit code of ssh if it fails itself or the remote program was killed.
SSH_FAILURE = 255
# Exit codes of failures with a known reason: an explained error of the node, or a connection failure.
EXPLAINED_CODES = (2, SSH_FAILURE)
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}")


class NodeConnection:
    """A node process on another machine, and the ssh client that is connected to it.

    Args:
        command: shell command to run on the node.
        options: further options of ssh.
    """

    def __init__(self, node: Node, command: str, options: Sequence[str]) -> None:
        self.node = node
        self.description: dict[str, Any] = {}
        self._lines: list[str] = []
        self.answer_event = threading.Event()
        self._is_lost = False
        # In its own process group: Ctrl-C must not kill the ssh client, but reach the node as a signal that is sent.
        self.process = subprocess.Popen(
            ["ssh", *SSH_OPTIONS, "-o", "ServerAliveInterval=15", *options, node.host, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Print the node's output with its name. Output before its description is kept for an error message."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if self.description:
                print(f"{self.node.host}: {line}", end="", file=sys.stderr, flush=True)
            elif line.startswith(HANDSHAKE):
                self.description = json.loads(line.removeprefix(HANDSHAKE))
                self.answer_event.set()
            else:
                self._lines.append(line.strip())
        self.answer_event.set()

    def describe_failure(self) -> JinguError:
        """Return an error about a node that has not described itself, with the reason that ssh or its shell gave."""
        code = self.process.poll()
        lines = [line for line in self._lines if line] if code is not None else []
        reason = lines[-1] if lines else "it does not answer"
        what = f"jingu does not start there ({reason.rstrip('.')})."
        fix = "Every node needs this folder, and this Python with jingu, under the same paths."
        if code in (SSH_FAILURE, None):
            what = f"the host cannot be reached by ssh ({reason.rstrip('.')})."
            fix = f"`ssh {self.node.host} true` must work without a password; or leave it out with --exclude."
        return JinguError(what, where=self.node.host, fix=fix)

    def send(self, line: str) -> None:
        """Send a line to the node, unless it has ended."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()

    def announce_loss(self, code: int | None) -> None:
        """Print once that the node is lost, since it cannot report this itself."""
        if code == SSH_FAILURE and not self._is_lost:
            self._is_lost = True
            text = "the connection has ended, or the node process was killed; its ranks stop."
            print(f"jingu: {self.node.host}: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Stop the node process, which first stops its ranks. Do not wait if it never started."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        if self.description:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_SECONDS)
        self.process.kill()
        self.process.wait()
        self._reader.join()


def launch_ssh(
    words: Sequence[str],
    selection: NodeSelection,
    environment: Path | None = None,
    ssh_options: str = "",
    max_restarts: int = 0,
    min_nodes: int | None = None,
) -> int:
    """Run a command on the nodes of a hostfile, in the same folder as here and with the same Python.

    Args:
        ssh_options: further options of ssh, such as `-i key -p 2222`.
        min_nodes: the run continues after losing nodes as long as this many remain; None: all.

    Returns:
        The exit code of the command.

    Raises:
        JinguError: there is no ssh, its options are invalid, or a node cannot be reached or differs from the others.
    """
    if shutil.which("ssh") is None:
        fix = "Install an OpenSSH client, or use `jingu launch slurm`."
        raise JinguError("there is no ssh on this machine.", fix=fix)
    try:
        options = shlex.split(ssh_options)
    except ValueError as error:
        what = f"{ssh_options!r} cannot be divided into words ({str(error).lower()})."
        raise JinguError(what, where="--ssh-options", fix="Close each quotation.") from None
    start = prepare_start(words, environment)
    nodes = selection.nodes()
    start = replace(
        start,
        slots=[list(node.slots) for node in nodes],
        min_nodes=min(min_nodes or len(nodes), len(nodes)),
        max_restarts=max_restarts,
    )
    name_failing_nodes(start, [])
    command = _node_command()
    pending_signals: list[int] = []
    connections: list[NodeConnection] = []
    with handle_signals(lambda number, _: pending_signals.append(number), *STOP_SIGNALS):
        try:
            connections += [NodeConnection(node, command, options) for node in nodes]
            _check_nodes(connections, start)
            first = connections[0].description
            start = replace(start, master=(first["address"], first["port"]))
            for rank, connection in enumerate(connections):
                connection.send(json.dumps({"start": asdict(start), "node_rank": rank}))
            return _wait_for_nodes(connections, start, pending_signals)
        finally:
            for connection in connections:
                connection.close()


def _check_nodes(connections: Sequence[NodeConnection], start: Start) -> None:
    """Wait until all nodes have described themselves. Raises JinguError for the first node that failed."""
    begin = time.monotonic()
    deadline = begin + _ANSWER_SECONDS
    waiting = list(connections)
    failed_connections: list[NodeConnection] = []
    while waiting and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        waiting = [connection for connection in connections if not connection.answer_event.is_set()]
        failed_connections = [
            connection for connection in connections if connection.answer_event.is_set() and not connection.description
        ]
        if failed_connections:
            # Wait a little longer, until it is known which other nodes cannot be reached either.
            deadline = begin + CONNECT_SECONDS + 1
    errors = {connection.node.host: connection.describe_failure() for connection in failed_connections or waiting}
    errors = errors or compare_versions(
        {connection.node.host: connection.description["versions"] for connection in connections}
    )
    if errors:
        name_failing_nodes(start, list(errors))
        raise next(iter(errors.values()))


def name_failing_nodes(start: Start, hosts: Sequence[str]) -> None:
    """For `jingu doctor`, write the file of failing nodes if the doctor itself has not; without hosts, remove it."""
    if start.words[0] == "doctor" and not (hosts and FAILING_NODES.exists()):
        write_failing_nodes(hosts)


def _node_command() -> str:
    """Return the shell command of a node process, in the same folder as here and with the same Python."""
    variables = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []
    program = shlex.join(["env", *variables, sys.executable, "-m", "jingu.launch.node"])
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {program}"


def _wait_for_nodes(connections: Sequence[NodeConnection], start: Start, pending_signals: list[int]) -> int:
    """Wait until all nodes have exited, and forward signals. After too many failures, stop the others.

    Returns:
        The exit code of the command.
    """
    deadline: float | None = None
    while True:
        while pending_signals:
            number = pending_signals.pop(0)
            for connection in connections:
                connection.send(str(number))
        codes = [connection.process.poll() for connection in connections]
        for connection, code in zip(connections, codes, strict=True):
            connection.announce_loss(code)
        if None not in codes:
            break
        num_failures = sum(code not in (None, 0) for code in codes)
        if deadline is None and num_failures and len(codes) - num_failures < start.min_nodes:
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            hosts = [item.node.host for item, code in zip(connections, codes, strict=True) if code is None]
            print(f"jingu: ending {pluralize(len(hosts), 'node')} that did not exit: {join_words(hosts, 'and')}.")
            break
        time.sleep(POLL_SECONDS)
    hosts = [
        node_connection.node.host
        for node_connection, code in zip(connections, codes, strict=True)
        if code in EXPLAINED_CODES
    ]
    name_failing_nodes(start, hosts)
    exit_codes = [code for code in codes if code is not None]
    is_complete = exit_codes.count(0) >= start.min_nodes and None not in codes
    return 0 if is_complete and start.min_nodes < len(codes) else combine_codes(exit_codes)
