"""`jingu launch ssh`: one ssh connection for each node, which carries its start, its output and signals.

The launcher also decides whether the run starts again, on which nodes: it sees the exit codes of all of them.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from jingu.errors import JinguError, join_words, pluralize
from jingu.launch.hosts import FAILING_NODES, Node, NodeSelection, write_failing_nodes
from jingu.launch.node import END, LISTENING
from jingu.launch.node_connection import CONNECT_SECONDS, NodeConnection
from jingu.launch.node_counts import NodeCounts, explain_ranks
from jingu.launch.probe import PROBE_SECONDS, Failure, Target, choose_targets, find_culprits, is_loopback
from jingu.launch.start import Start, compare_versions, prepare_start
from jingu.runtime.exit_codes import (
    EXIT_INTERRUPTED,
    EXIT_LOST,
    EXIT_MISTAKE,
    EXIT_PREEMPTED,
    Restart,
    combine_exit_codes,
    find_restart,
)
from jingu.runtime.signals import STOP_SIGNALS, handle_signals

# Time in total for a node to describe itself, and to answer a request.
_ANSWER_SECONDS = 30.0
# Time for the ranks of other nodes to exit by themselves after those of one node have failed, and after an error that
# is explained already.
GRACE_SECONDS = 15.0
EXPLAINED_SECONDS = 3.0
# Time for the ranks of other nodes to save and exit after a node was lost; the watchdog ends ranks that hang.
LOST_SECONDS = 150.0
# Time for the doctor of the first node to conclude without the others.
DOCTOR_SECONDS = 180.0
# Time for lost nodes to come back, such as one that reboots, and time between two attempts to reach them.
RETURN_SECONDS = 600.0
_RETRY_SECONDS = 5.0
POLL_SECONDS = 0.1


@dataclass
class Launch:
    """A command on the nodes of a hostfile.

    Attributes:
        options: further options of ssh.
        pending_signals: signals that have arrived, and have not been forwarded yet.
        is_stopped: whether a signal has arrived: then nothing starts again.
    """

    start: Start
    nodes: list[Node]
    counts: NodeCounts
    options: list[str]
    pending_signals: list[int] = field(default_factory=list)
    is_stopped: bool = False

    def receive_signal(self, number: int) -> None:
        self.pending_signals.append(number)
        self.is_stopped = True

    @property
    def is_doctor(self) -> bool:
        return self.start.words[0] == "doctor"


class Outcome(NamedTuple):
    """How a command has ended on the nodes.

    Attributes:
        code: its exit code.
        failing: hosts that have failed with an explained error, or were lost.
    """

    code: int
    failing: list[str]


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
        max_restarts: how often the command starts again after a failure. A lost node does not count.
        min_nodes: the run continues after losing nodes as long as this many remain; None: all.

    Returns:
        The exit code of the command.

    Raises:
        JinguError: there is no ssh, its options are invalid, a node cannot be reached or differs from the others, or
            the run cannot train on the nodes.
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
    explain = explain_ranks(start) if min_nodes is not None else lambda _: None
    counts = NodeCounts(nodes, min(min_nodes or len(nodes), len(nodes)), explain)
    counts.check()
    launch = Launch(start, nodes, counts, options)
    name_failing_nodes(launch, [])
    restarts = 0
    with handle_signals(lambda number, _: launch.receive_signal(number), *STOP_SIGNALS):
        outcome = _run_first(launch)
        while True:
            restart = Restart.NEVER if launch.is_stopped else find_restart(outcome.code)
            may_restart = max_restarts > 0 or min_nodes is not None
            if restart == Restart.COUNTED:
                restarts += 1
                may_restart = restarts <= max_restarts
            if restart == Restart.NEVER or not may_restart:
                return _conclude(launch, outcome)
            print(f"jingu: the ranks have ended with exit code {outcome.code}; they start again.", file=sys.stderr)
            outcome = _run_again(launch)


def _conclude(launch: Launch, outcome: Outcome) -> int:
    """Say what a person must do about a lost node; return the exit code."""
    if outcome.code == EXIT_LOST and not launch.is_stopped:
        advice = (
            "the run has lost a node, or the connection to it. Start the command again to resume from the last "
            "checkpoint, without that node (--exclude) unless it is back. --max-restarts and --min-nodes do so alone."
        )
        print(f"jingu: {advice}", file=sys.stderr)
    return outcome.code


@contextmanager
def _connect(launch: Launch, nodes: Sequence[Node]) -> Iterator[list[NodeConnection]]:
    """Start a node process on each node; end them with the block."""
    command = _node_command()
    connections: list[NodeConnection] = []
    seconds = GRACE_SECONDS
    try:
        connections += [NodeConnection(node, command, launch.options) for node in nodes]
        yield connections
    except JinguError:
        seconds = EXPLAINED_SECONDS
        raise
    finally:
        for connection in connections:
            connection.release()
        if any(connection.process.poll() == EXIT_MISTAKE for connection in connections):
            seconds = EXPLAINED_SECONDS
        deadline = time.monotonic() + seconds
        for connection in connections:
            connection.close(deadline)


def _run_first(launch: Launch) -> Outcome:
    """Run the command for the first time, on all nodes or with spare ones.

    Raises:
        JinguError: a node cannot be reached, or differs from the others.
    """
    with _connect(launch, launch.nodes) as connections:
        errors = _wait_for_descriptions(connections)
        if not errors:
            errors = compare_versions(
                {connection.node.host: connection.description["versions"] for connection in connections}
            )
        if not errors:
            errors = _find_network_errors(connections)
            if errors and launch.is_doctor:
                return _check_each_node(launch, connections, errors)
        if errors:
            name_failing_nodes(launch, list(errors))
            raise next(iter(errors.values()))
        return _run(launch, connections)


def _run_again(launch: Launch) -> Outcome:
    """Run the command again on the nodes that can be reached, once there are enough of them."""
    deadline = time.monotonic() + RETURN_SECONDS
    is_announced = False
    while not launch.is_stopped:
        with _connect(launch, launch.nodes) as connections:
            errors = _wait_for_descriptions(connections)
            connections = [connection for connection in connections if connection.node.host not in errors]
            if connections:
                errors |= _find_network_errors(connections)
                connections = [connection for connection in connections if connection.node.host not in errors]
            nodes = launch.counts.choose([connection.node for connection in connections])
            if nodes:
                return _run(launch, connections[: len(nodes)], spare=connections[len(nodes) :])
        if time.monotonic() > deadline:
            fix = "Start the command again when they are back, or leave them out with --exclude or --min-nodes."
            what = f"these nodes did not come back in {RETURN_SECONDS / 60:.0f} minutes."
            print(f"jingu: {JinguError(what, where=join_words(list(errors), 'and'), fix=fix)}", file=sys.stderr)
            return Outcome(EXIT_LOST, list(errors))
        if not is_announced:
            is_announced = True
            reasons = " ".join(str(error) for error in errors.values())
            print(f"jingu: waiting for nodes to come back: {reasons}", file=sys.stderr, flush=True)
        time.sleep(_RETRY_SECONDS)
    return Outcome(EXIT_LOST, [])


def _wait_for_descriptions(connections: Sequence[NodeConnection]) -> dict[str, JinguError]:
    """Wait until all nodes have described themselves. Returns an error for each node that has not."""
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
    return {connection.node.host: connection.describe_failure() for connection in failed_connections or waiting}


def _find_network_errors(connections: Sequence[NodeConnection]) -> dict[str, JinguError]:
    """Let all nodes connect to each other. Returns an error for each node that explains a failure."""
    if len(connections) == 1:
        return {}
    first = connections[0].description
    # If this is the first node, its name may be a loopback address here, from which others cannot reach it.
    peers = (connection.description["address"] for connection in connections[1:])
    peer = next((address for address in peers if not is_loopback(address)), None)
    if is_loopback(first["address"]) and peer is not None:
        connections[0].send(json.dumps({"route": peer}))
        first["address"] = connections[0].receive(_ANSWER_SECONDS).get("address") or first["address"]
    # Ranks connect to the address from which a node reaches the first one.
    for connection in connections[1:]:
        connection.send(json.dumps({"route": first["address"]}))
    targets = [Target(connections[0].node.host, first["address"], first["probe_port"])]
    for connection in connections[1:]:
        address = connection.receive(_ANSWER_SECONDS).get("address") or connection.description["address"]
        targets.append(Target(connection.node.host, address, connection.description["probe_port"]))
    for index, connection in enumerate(connections):
        connection.send(json.dumps({"probe": choose_targets(index, targets)}))
    failures: dict[tuple[str, str], Failure] = {}
    for connection in connections:
        reply = connection.receive(_ANSWER_SECONDS + PROBE_SECONDS)
        failures |= {
            (connection.node.host, host): Failure(*failure) for host, failure in reply.get("failures", {}).items()
        }
    fix = "Open all ports between the nodes, and give their interfaces and switches the same MTU."
    return {
        host: JinguError(f"the network between the nodes does not work: {sentence}.", where=host, fix=fix)
        for host, sentence in find_culprits(failures).items()
    }


def _check_each_node(launch: Launch, connections: Sequence[NodeConnection], errors: dict[str, JinguError]) -> Outcome:
    """Run the doctor on each node by itself, since the network between them does not work."""
    for connection in connections:
        address, port = connection.description["address"], connection.description["port"]
        start = replace(launch.start, slots=[list(connection.node.slots)], master=(address, port))
        connection.send(json.dumps({"start": asdict(start), "node_rank": 0}))
    deadline = time.monotonic() + DOCTOR_SECONDS
    while any(connection.exit_code() is None for connection in connections) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    failing = [connection.node.host for connection in connections if connection.exit_code() != 0]
    for error in errors.values():
        print(f"jingu: {error}", file=sys.stderr)
    FAILING_NODES.unlink(missing_ok=True)
    name_failing_nodes(launch, [node.host for node in launch.nodes if node.host in {*failing, *errors}])
    return Outcome(EXIT_MISTAKE, failing)


def name_failing_nodes(launch: Launch, hosts: Sequence[str]) -> None:
    """For `jingu doctor`, write the file of failing nodes if the doctor itself has not; without hosts, remove it."""
    if launch.is_doctor and not (hosts and FAILING_NODES.exists()):
        write_failing_nodes(hosts)


def _node_command() -> str:
    """Return the shell command of a node process, in the same folder as here and with the same Python."""
    variables = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []
    program = shlex.join(["env", *variables, sys.executable, "-m", "jingu.launch.node"])
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {program}"


def _run(launch: Launch, connections: Sequence[NodeConnection], spare: Sequence[NodeConnection] = ()) -> Outcome:
    """Run the command on nodes that have described themselves."""
    if len(connections) < len(launch.nodes):
        names = [connection.node.host for connection in connections]
        text = (
            f"the run goes on with {pluralize(len(names), 'node')} of {len(launch.nodes)}: {join_words(names, 'and')}."
        )
        if spare:
            hosts = [connection.node.host for connection in spare]
            error = launch.counts.error([connection.node for connection in (*connections, *spare)])
            text += f" {join_words(hosts, 'and')} {'is' if len(hosts) == 1 else 'are'} idle: {error}"
        print(f"jingu: {text}", file=sys.stderr, flush=True)
    first = connections[0].description
    slots = [list(connection.node.slots) for connection in connections]
    start = replace(launch.start, slots=slots, master=(first["address"], first["port"]))
    for rank, connection in enumerate(connections):
        connection.send(json.dumps({"start": asdict(start), "node_rank": rank}))
    return _wait_for_nodes(launch, connections)


def _wait_for_nodes(launch: Launch, connections: Sequence[NodeConnection]) -> Outcome:
    """Wait until all nodes have exited, and forward signals. After a failure, stop the others."""
    deadline: float | None = None
    has_announced = False
    while True:
        while launch.pending_signals:
            number = launch.pending_signals.pop(0)
            for connection in connections:
                connection.send(str(number))
        if connections[0].is_listening.is_set() and not has_announced:
            has_announced = True
            for connection in connections[1:]:
                connection.send(LISTENING)
        codes = [connection.exit_code() for connection in connections]
        if None not in codes:
            break
        # Nodes that stop after a signal save for as long as they need.
        if deadline is None and any(code not in (None, 0, EXIT_INTERRUPTED, EXIT_PREEMPTED) for code in codes):
            deadline = time.monotonic() + _grace_seconds(launch, codes)
        if deadline is not None and time.monotonic() > deadline:
            running = [item for item, code in zip(connections, codes, strict=True) if code is None]
            for connection in running:
                connection.send(END)
            hosts = [connection.node.host for connection in running]
            text = f"ending {pluralize(len(hosts), 'node')} that did not exit: {join_words(hosts, 'and')}."
            print(f"jingu: {text}", file=sys.stderr, flush=True)
            break
        time.sleep(POLL_SECONDS)
    failing = [
        connection.node.host
        for connection, code in zip(connections, codes, strict=True)
        if connection.is_lost or code == EXIT_MISTAKE
    ]
    name_failing_nodes(launch, failing)
    is_lost = any(connection.is_lost for connection in connections)
    exit_codes = [code for code in codes if code is not None]
    return Outcome(combine_exit_codes(exit_codes, is_lost), failing)


def _grace_seconds(launch: Launch, codes: Sequence[int | None]) -> float:
    """Return how long the other nodes may run after one has failed."""
    if launch.is_doctor and codes[0] is None:
        return DOCTOR_SECONDS
    if EXIT_MISTAKE in codes:
        return EXPLAINED_SECONDS
    return LOST_SECONDS if EXIT_LOST in codes else GRACE_SECONDS
