"""One node of a launched command: `python -m jingu.launch.node`.

Under Slurm and in a container, the `Start` is in an environment variable. Over ssh, the node first writes a line that
describes it, and answers the launcher's requests until it receives the start from standard input, which stays open as
long as the launcher runs: each further line is a signal for the ranks, and end of file terminates them.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jingu.errors import JinguError, pluralize
from jingu.launch.node_codes import CODES_VARIABLE, NodeCodes, find_lost_node
from jingu.launch.probe import ProbeListener, Target, find_interface, format_endpoint, probe
from jingu.launch.start import START_VARIABLE, Start, check_versions, installed_versions
from jingu.runtime.exit_codes import EXIT_LOST, EXIT_MISTAKE, EXIT_PREEMPTED, EXIT_STALLED
from jingu.runtime.gpus import visible_devices
from jingu.runtime.peer_watch import UnreachableError, local_address
from jingu.runtime.stderr import ignore_failing_stderr

# Environment variable with a number that is added to exit codes after which the node starts again, for cluster managers
# that take only large codes for temporary failures.
RETRY_VARIABLE = "JINGU_RETRY_OFFSET"
# On Kubernetes, a pod that ends because of another one exits so much later, and the reason of that one counts.
_CONSEQUENCE_SECONDS = 20.0
# Marks the line in which a node describes itself; a login shell may print other lines before it.
HANDSHAKE = "jingu-node "
# The line with which the launcher tells the other nodes that the first one listens.
LISTENING = "listening"
# The line with which the launcher ends ranks at once that did not end by themselves.
END = "end"
# Time for the ranks to save after a signal.
SHUTDOWN_SECONDS = 600
_POLL_SECONDS = 0.1
# Variables with the rank of a node, and with the address of the first node: Slurm, Kubeflow, JobSet, SkyPilot, dstack,
# and older versions of Kubeflow's training operator.
_NODE_RANKS = (
    "SLURM_NODEID",
    "PET_NODE_RANK",
    "JOB_COMPLETION_INDEX",
    "SKYPILOT_NODE_RANK",
    "DSTACK_NODE_RANK",
    "RANK",
)
_MASTERS = ("PET_MASTER_ADDR", "SKYPILOT_NODE_IPS", "DSTACK_MASTER_NODE_IP", "MASTER_ADDR")
# Below the kernel's ephemeral ports.
_PORTS = range(15_000, 32_000)


def describe_node() -> dict[str, object]:
    """Return the name of this node, the address under which ssh reached it, a free port, and its versions."""
    # client address, client port, server address, server port
    connection = os.environ.get("SSH_CONNECTION", "").split()
    address = connection[2] if len(connection) == 4 else socket.gethostname()
    return {"host": socket.gethostname(), "address": address, "port": free_port(), "versions": installed_versions()}


def free_port() -> int:
    """Return a port on which nobody listens.

    It is not an ephemeral port: before the ranks listen on it, the kernel could give such a port to another program.
    """
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("", port))
            return port


def _find_master(start: Start) -> tuple[str, int]:
    """Return the address and port of the rendezvous, from the variables that the cluster manager sets."""
    address, port = start.master
    if "SLURM_JOB_ID" in os.environ:
        # A job step may run on a subset of the job's nodes.
        words = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
        hosts = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
        # Jobs that share a node need different ports, and so do the steps of a job.
        number = int(os.environ["SLURM_JOB_ID"]) + 97 * int(os.environ["SLURM_STEP_ID"])
        return hosts[0], 20_000 + number % 10_000
    variables = [os.environ.get(name, "").split() for name in _MASTERS]
    address = next((words[0] for words in variables if words), address)
    return address, int(os.environ.get("PET_MASTER_PORT", port))


# Whether the first node listens: waits for that, at most so many seconds.
WaitForFirst = Callable[[float], bool]


def run_node(
    start: Start,
    node_rank: int,
    announce: Callable[[], None] = lambda: None,
    wait_for_first: WaitForFirst = lambda _: False,
) -> int:
    """Run the ranks of this node until they exit.

    Args:
        announce: called on the first node once its store listens.
        wait_for_first: called on the other nodes; returns whether the first node is known to listen.

    Returns:
        Their exit code (`jingu.runtime.exit_codes`).
    """
    # Silence a warning for each connection whose peer address has no host name, which nothing here needs.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from jingu.runtime.launcher import NodeOfRun, launch_local_ranks, open_store
    from jingu.runtime.ranks import COLLECTIVE_TIMEOUT, REACH_SECONDS, wait_for_master

    address, port = start.master
    sizes = [len(slots) for slots in start.slots]
    node = NodeOfRun(address, port, sum(sizes[:node_rank]), sum(sizes), SHUTDOWN_SECONDS)
    # 1. Meet the first node. One that is known to listen must not refuse a connection: a firewall does.
    store = None
    if node_rank == 0:
        store = open_store(port)
        announce()
    else:
        patience = COLLECTIVE_TIMEOUT.total_seconds()
        refused_seconds = REACH_SECONDS if wait_for_first(patience) else patience
        # On Kubernetes, the first pod may get its name much later.
        is_pod = "KUBERNETES_SERVICE_HOST" in os.environ
        wait_for_master(address, port, patience if is_pod else REACH_SECONDS, refused_seconds)
    # 2. The network, and the devices.
    slots = start.slots[node_rank]
    os.environ.update(start.environment)
    interface = find_interface(address) if len(start.slots) > 1 else ""
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    for name, devices in visible_devices(slots, {}).items():
        os.environ.setdefault(name, devices)
    cores = len(os.sched_getaffinity(0))
    place = f"rendezvous at {format_endpoint(address, port)}" + (f" over {interface}" if interface else "")
    few = f" They share {pluralize(cores, 'core')}: give the job more." if cores < len(slots) else ""
    print(f"{pluralize(len(slots), 'rank')}, {place}.{few}", file=sys.stderr, flush=True)
    # 3. Put the run's configuration into a memory file, which is freed when this process ends.
    words = start.words
    if start.config is not None:
        descriptor = os.memfd_create("config")
        os.write(descriptor, start.config.encode())
        words = [word.replace("{config}", f"/proc/{os.getpid()}/fd/{descriptor}") for word in words]
    # 4. Run the ranks.
    advice = "Start the command again to resume from the last checkpoint."
    code = launch_local_ranks(len(slots), words, advice=advice, node=node)
    del store  # the ranks of all nodes have met in it
    return code


def _wait_for_file(path: Path, seconds: float) -> bool:
    """Return whether a file appears within some seconds."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _run_started_node(text: str) -> int:
    """Run a node whose `Start` is in an environment variable."""
    start = Start.from_json(text)
    rank = int(next((os.environ[name] for name in _NODE_RANKS if name in os.environ), "0"))
    folder = os.environ.pop(CODES_VARIABLE, None)
    if folder is None:
        offset = int(os.environ.pop(RETRY_VARIABLE, "0"))
        code = _check_and_run(start, rank)
        if code == EXIT_LOST and "KUBERNETES_SERVICE_HOST" in os.environ:
            time.sleep(_CONSEQUENCE_SECONDS)
        return code + offset if code in (EXIT_LOST, EXIT_STALLED, EXIT_PREEMPTED) else code
    codes = NodeCodes(Path(folder), rank)
    try:
        code = _check_and_run(start, rank, codes.announce, partial(_wait_for_file, codes.ready))
    except JinguError as error:
        is_lost = isinstance(error, UnreachableError) and find_lost_node(os.environ.get("SLURM_JOB_NODELIST", ""))
        codes.finish(EXIT_LOST if is_lost else EXIT_MISTAKE)
        raise
    codes.finish(code)
    # With another code, srun would end the other nodes while they are still saving.
    return 0 if code == EXIT_PREEMPTED else code


def _check_and_run(start: Start, rank: int, *callbacks: Callable[..., Any]) -> int:
    if start.versions:
        check_versions({"the launcher": start.versions, socket.gethostname(): installed_versions()})
    return run_node(replace(start, master=_find_master(start)), rank, *callbacks)


def _run_connected_node() -> int:
    """Run a node that is connected to a launcher by standard input and output."""
    listener = ProbeListener()
    _reply(**describe_node(), probe_port=listener.port)
    for line in sys.stdin:
        request = json.loads(line)
        if "route" in request:
            _reply(address=local_address(request["route"]))
        elif "probe" in request:
            _reply(failures=probe([Target(*target) for target in request["probe"]]))
        else:
            listener.close()
            first_listens = threading.Event()
            threading.Thread(target=_obey_launcher, args=(first_listens,), daemon=True).start()
            start = Start(**request["start"])
            try:
                return run_node(start, request["node_rank"], partial(_reply, listening=True), first_listens.wait)
            except UnreachableError as error:
                if not first_listens.is_set():
                    raise
                # This node has connected to the first one before (a request to probe), which is lost by now.
                print(f"jingu: {error}", file=sys.stderr)
                return EXIT_LOST
    return EXIT_LOST


def _reply(**values: object) -> None:
    print(HANDSHAKE + json.dumps(values), flush=True)


def _obey_launcher(first_listens: threading.Event) -> None:
    """Send this process the signals that the launcher writes, and SIGTERM when the launcher is gone."""
    for line in sys.stdin:
        if line.strip() == LISTENING:
            first_listens.set()
        elif line.strip() == END:
            os.kill(os.getpid(), signal.SIGUSR2)
        else:
            os.kill(os.getpid(), int(line))
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Run this node. Its `Start` comes from a variable (Slurm, a container) or from standard input (ssh)."""
    ignore_failing_stderr()
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    # An exception in the main thread, which kills the ranks.
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(EXIT_LOST))
    text = os.environ.pop(START_VARIABLE, None)
    return _run_started_node(text) if text is not None else _run_connected_node()


if __name__ == "__main__":
    try:
        code = main()
    except JinguError as error:
        print(f"jingu: {error}", file=sys.stderr)
        code = EXIT_MISTAKE
    except SystemExit as error:
        code = int(error.code or 0)
    sys.stdout.flush()
    # Do not wait for the thread that blocks on standard input.
    os._exit(code)
