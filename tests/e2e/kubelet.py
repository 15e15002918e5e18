"""Stands in for a cluster: runs the pods of a manifest, each with a network, an address and a name of its own.

    unshare --net --mount --pid --mount-proc --fork --kill-child python kubelet.py MANIFEST

A pod runs the command of the manifest with its variables, those that the cluster adds, and no other ones. Prints the
exit codes of the pods, in the order in which they end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

Manifest = dict[str, Any]


class Pod(NamedTuple):
    """A pod: its name in the network of the cluster, its command, and its variables."""

    host: str
    command: list[str]
    variables: dict[str, str]


def _address(number: int) -> str:
    return f"10.78.0.{number + 1}"


def _variables(container: Manifest) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container["env"]}


def _torchrun(master: str, port: int, rank: int, nodes: int, slots: object) -> dict[str, str]:
    return {
        "PET_MASTER_ADDR": master,
        "PET_MASTER_PORT": str(port),
        "PET_NODE_RANK": str(rank),
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(slots),
    }


def train_job(manifest: Manifest) -> Iterator[Pod]:
    """Kubeflow Trainer v2: its runtime `torch-distributed` makes a JobSet of one indexed job, `node`."""
    name, trainer = manifest["metadata"]["name"], manifest["spec"]["trainer"]
    nodes = trainer["numNodes"]
    for rank in range(nodes):
        added = _torchrun(f"{name}-node-0-0.{name}", 29_400, rank, nodes, trainer["numProcPerNode"])
        added["JOB_COMPLETION_INDEX"] = str(rank)
        yield Pod(f"{name}-node-0-{rank}.{name}", trainer["command"], _variables(trainer) | added)


def job_set(manifest: Manifest) -> Iterator[Pod]:
    """JobSet: pods have names if the network says so, and numbers if their job is indexed."""
    (job,) = manifest["spec"]["replicatedJobs"]
    network, spec = manifest["spec"]["network"], job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert network["enableDNSHostnames"] and spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"] and job["replicas"] == 1
    for rank in range(spec["completions"]):
        host = f"{manifest['metadata']['name']}-{job['name']}-0-{rank}.{network['subdomain']}"
        yield Pod(host, container["command"], _variables(container) | {"JOB_COMPLETION_INDEX": str(rank)})


def pytorch_job(manifest: Manifest) -> Iterator[Pod]:
    """Kubeflow's training operator 1.9: the master is number 0, and RANK counts pods."""
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    kinds = [kind for kind, replica in spec["pytorchReplicaSpecs"].items() for _ in range(replica["replicas"])]
    for rank, kind in enumerate(kinds):
        (container,) = spec["pytorchReplicaSpecs"][kind]["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        added = _torchrun(f"{name}-master-0", 23_456, rank, len(kinds), spec["nprocPerNode"])
        added |= {"MASTER_ADDR": f"{name}-master-0", "MASTER_PORT": "23456", "RANK": str(rank)}
        added |= {"WORLD_SIZE": str(len(kinds) * int(spec["nprocPerNode"])), "PYTHONUNBUFFERED": "1"}
        host = f"{name}-master-0" if kind == "Master" else f"{name}-worker-{rank - 1}"
        yield Pod(host, container["command"], _variables(container) | added)


def sky_task(manifest: Manifest) -> Iterator[Pod]:
    """SkyPilot: a shell runs `run` on each node."""
    nodes = manifest["num_nodes"]
    for rank in range(nodes):
        added = {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "\n".join(map(_address, range(nodes)))}
        added |= {"SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NUM_GPUS_PER_NODE": "0"}
        yield Pod(f"worker{rank}", ["bash", "-c", manifest["run"]], manifest["envs"] | added)


def dstack_task(manifest: Manifest) -> Iterator[Pod]:
    """dstack: a shell runs the commands on each node."""
    nodes = manifest["nodes"]
    for rank in range(nodes):
        added = {"DSTACK_NODE_RANK": str(rank), "DSTACK_NODES_NUM": str(nodes), "DSTACK_GPUS_PER_NODE": "0"}
        added |= {"DSTACK_MASTER_NODE_IP": _address(0), "DSTACK_NODES_IPS": "\n".join(map(_address, range(nodes)))}
        yield Pod(f"node{rank}", ["bash", "-c", " && ".join(manifest["commands"])], manifest["env"] | added)


KINDS: dict[str, Callable[[Manifest], Iterator[Pod]]] = {
    "TrainJob": train_job,
    "JobSet": job_set,
    "PyTorchJob": pytorch_job,
    "task": dstack_task,
}


def make_network(pods: list[Pod], folder: Path) -> None:
    """Give each pod a network `p0`, ...; all of them are on one bridge and know each other by their names."""

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True)

    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    hosts = folder / "hosts"
    lines = [f"{_address(number)} {pod.host} {pod.host.partition('.')[0]}\n" for number, pod in enumerate(pods)]
    hosts.write_text("127.0.0.1 localhost\n" + "".join(lines))
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
    ip("link add br0 type bridge")
    ip("link set br0 up")
    for number in range(len(pods)):
        ip(f"netns add p{number}")
        ip(f"link add h{number} type veth peer name eth0 netns p{number}")
        ip(f"link set h{number} master br0 up")
        ip(f"-n p{number} addr add {_address(number)}/24 dev eth0")
        ip(f"-n p{number} link set eth0 up")
        ip(f"-n p{number} link set lo up")


def main(path: Path) -> None:
    manifest = list(yaml.safe_load_all(path.read_text()))[-1]
    pods = list(KINDS.get(manifest.get("kind", manifest.get("type")), sky_task)(manifest))
    make_network(pods, path.parent)
    # What the image of a container has.
    image = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS")}
    processes = []
    for number, pod in enumerate(pods):
        name = pod.host.partition(".")[0]
        words = [
            "ip",
            "netns",
            "exec",
            f"p{number}",
            "unshare",
            "--uts",
            "bash",
            "-c",
            f'hostname {name}; exec "$@"',
            "-",
        ]
        processes.append(subprocess.Popen([*words, *pod.command], env=image | pod.variables, stdout=sys.stderr))
    print(json.dumps({"ends": wait_for_pods(processes)}))


def wait_for_pods(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Return the exit codes in the order in which the pods end."""
    codes: list[int] = []
    while processes:
        codes += [code for process in processes if (code := process.poll()) is not None]
        processes = [process for process in processes if process.returncode is None]
        time.sleep(0.05)
    return codes


if __name__ == "__main__":
    main(Path(sys.argv[1]))
