"""One node of a launched command: `python -m jingu.launch.node`.

Under Slurm and in a container, the `Start` is in an environment variable. Over ssh, the node first writes a line that
describes it, and then reads the start from standard input, which stays open as long as the launcher runs: each further
line is a signal for the ranks, and end of file terminates them.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from jingu.errors import JinguError, pluralize
from jingu.launch.start import START_VARIABLE, Start, check_versions, installed_versions
from jingu.runtime.gpus import visible_devices
from jingu.runtime.signals import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_STALLED, LAUNCHER_PIPE

# Marks the line in which a node describes itself; a login shell may print other lines before it.
HANDSHAKE = "jingu-node "
# Time for the ranks to save after a signal.
SHUTDOWN_SECONDS = 600
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
# The environment variable that names a file. A node of a Slurm job creates it when its ranks have saved after a signal.
SAVED_VARIABLE = "JINGU_SAVED"
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


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


def _check_port(port: int) -> None:
    """Raise JinguError if another process listens on the rendezvous port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            what = f"the ranks cannot meet at port {port} ({error.strerror})."
            raise JinguError(what, where=socket.gethostname(), fix="Start again, at another port.") from error


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


def find_interface(address: str) -> str:
    """Return the network interface that leads to an address; empty if it is unknown.

    Without it, gloo takes the interface of the host name's address, which is the loopback interface on many machines.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing, but makes the kernel choose the local address.
            probe.connect((address, 9))
            own_address = probe.getsockname()[0]
        except OSError:
            return ""
        for _, name in socket.if_nameindex():
            try:
                # 0x8915 is SIOCGIFADDR on Linux: get the address of an interface.
                reply = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(reply[20:24]) == own_address and name != "lo":
                return name
    return ""


def run_node(start: Start, node_rank: int) -> int:
    """Run the ranks of this node until they exit. Returns the exit code of the command."""
    # Silence a warning for each connection whose peer address has no host name, which nothing here needs.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from jingu.runtime.ranks import wait_for_master

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    address, port = start.master
    if node_rank == 0:
        _check_port(port)
    elif "KUBERNETES_SERVICE_HOST" not in os.environ:  # on Kubernetes, the first pod may get its name much later
        wait_for_master(address, port)
    slots = start.slots[node_rank]
    os.environ.update(start.environment)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    # 1. The network, and the devices.
    interface = find_interface(address) if len(start.slots) > 1 else ""
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    for name, devices in visible_devices(slots, {}).items():
        os.environ.setdefault(name, devices)
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // len(slots))))
    place = f"rendezvous at {address}:{port}" + (f" over {interface}" if interface else "")
    few = f" They share {pluralize(cores, 'core')}: give the job more." if cores < len(slots) else ""
    print(f"{pluralize(len(slots), 'rank')}, {place}.{few}", file=sys.stderr, flush=True)
    # 2. Put the run's configuration into a memory file, which is freed when this process ends.
    words = start.words
    if start.config is not None:
        descriptor = os.memfd_create("config")
        os.write(descriptor, start.config.encode())
        words = [word.replace("{config}", f"/proc/{os.getpid()}/fd/{descriptor}") for word in words]
    # 3. Give the ranks a pipe that closes when this process is killed, so that they stop then.
    os.environ[LAUNCHER_PIPE] = f"/proc/{os.getpid()}/fd/{os.pipe()[0]}"
    # 4. Run torchrun's agent. If the run may continue with fewer nodes, these rendezvous again after a loss.
    is_elastic = start.min_nodes < len(start.slots)
    config = LaunchConfig(
        min_nodes=start.min_nodes,
        max_nodes=len(start.slots),
        nproc_per_node=len(slots),
        run_id="jingu",
        rdzv_backend="c10d" if is_elastic else "static",
        rdzv_endpoint=f"{address}:{port}",
        rdzv_configs={} if is_elastic else {"rank": node_rank},
        max_restarts=start.max_restarts,
        local_addr=address if node_rank == 0 else None,
        signals_to_handle=_SIGNALS,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "jingu", *words)
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            if failure.exitcode < 0:
                name = signal.Signals(-failure.exitcode).name
                print(f"jingu: rank {rank} on {socket.gethostname()} was killed by {name}.", file=sys.stderr)
        return combine_codes([failure.exitcode for failure in error.failures.values()])
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            return EXIT_INTERRUPTED
        # Slurm sends SIGTERM when another node has failed: return 1, so that the exit code of that node counts.
        is_ended_by_slurm = error.sigval == signal.SIGTERM and "SLURM_JOB_ID" in os.environ
        return 1 if is_ended_by_slurm else EXIT_PREEMPTED
    return 0


def combine_codes(codes: list[int]) -> int:
    """Return one exit code for all ranks or nodes: the most informative one, such as 2 for an explained error."""
    for code in (2, EXIT_STALLED, EXIT_INTERRUPTED, EXIT_PREEMPTED):
        if code in codes:
            return code
    failures = [abs(code) for code in codes if code]
    return failures[0] if failures else 0


def _obey_launcher() -> None:
    """Send this process the signals that the launcher writes, and SIGTERM when the launcher is gone."""
    for line in sys.stdin:
        os.kill(os.getpid(), int(line))
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Run this node. Its `Start` comes from a variable (Slurm, a container) or from standard input (ssh)."""
    text = os.environ.pop(START_VARIABLE, None)
    if text is not None:
        start = Start.from_json(text)
        if start.versions:
            check_versions({"the launcher": start.versions, socket.gethostname(): installed_versions()})
        rank = next((os.environ[name] for name in _NODE_RANKS if name in os.environ), "0")
        saved_value = os.environ.pop(SAVED_VARIABLE, None)
        code = run_node(replace(start, master=_find_master(start)), int(rank))
        if code == EXIT_PREEMPTED and saved_value is not None:
            # With another code, srun would end the other nodes while they are still saving.
            Path(saved_value).touch()
            return 0
        return code
    print(HANDSHAKE + json.dumps(describe_node()), flush=True)
    line = sys.stdin.readline()
    if not line:
        return 1
    message = json.loads(line)
    threading.Thread(target=_obey_launcher, daemon=True).start()
    return run_node(Start(**message["start"]), message["node_rank"])


if __name__ == "__main__":
    try:
        code = main()
    except JinguError as error:
        print(f"jingu: {error}", file=sys.stderr)
        code = 2
    sys.stdout.flush()
    # Do not wait for the thread that blocks on standard input.
    os._exit(code)
