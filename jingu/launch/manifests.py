"""Manifests for cluster managers: Kubernetes (TrainJob, JobSet, PyTorchJob), SkyPilot and dstack.

Each manifest runs `python -m jingu.launch.node` on every node, and passes the `Start` in an environment variable.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from jingu.errors import JinguError
from jingu.launch.start import START_VARIABLE, Start, prepare_start

_COMMAND = ["python", "-m", "jingu.launch.node"]
_PORT = 29_500
# How long a cluster may take to answer.
ANSWER_SECONDS = 9.0
Manifest = dict[str, Any]


def write_manifest(
    words: Sequence[str],
    manifest: str = "trainjob",
    image: str = "jingu",
    nodes: int = 1,
    slots: int = 1,
    environment: Path | None = None,
    max_restarts: int = 0,
    apply: bool = False,
) -> int:
    """Print the manifest of a command, or apply it with kubectl.

    Args:
        manifest: trainjob (Kubeflow Trainer v2), jobset, pytorchjob, skypilot or dstack.
        image: container image with jingu.
        slots: ranks of a node, a GPU each.

    Raises:
        JinguError: the command is wrong, there is no kubectl, or the cluster refuses the manifest.
    """
    start = prepare_start(words, environment)
    start = replace(start, slots=[list(range(slots))] * nodes)
    start = replace(start, versions={}, master=(f"{start.name}-node-0-0.{start.name}", _PORT))
    text = yaml.safe_dump(MANIFESTS[manifest](start, image, max_restarts), sort_keys=False)
    if not apply:
        print(text, end="")
        return 0
    program = shutil.which("kubectl")
    if program is None:
        raise JinguError("there is no kubectl on this machine.", fix="Install it, or leave out --apply.")
    try:
        # kubectl retries for a long time if the cluster does not answer, hence the timeout.
        result = subprocess.run(
            [program, "apply", "-f", "-"],
            input=text,
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        what = f"the cluster does not answer in {ANSWER_SECONDS:.0f} s."
        raise JinguError(what, fix="`kubectl get nodes` must work; or leave out --apply.") from None
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no reason"])[-1].rstrip(".")
        raise JinguError(f"the cluster refuses the manifest ({reason}).", fix="Change it, and apply it with kubectl.")
    print(result.stdout, end="")
    return 0


def _train_job(start: Start, image: str, max_restarts: int) -> Manifest:
    """A TrainJob of Kubeflow Trainer v2; its runtime sets torchrun's variables."""
    trainer = {
        "image": image,
        "command": _COMMAND,
        "env": _variables(start),
        "numNodes": len(start.slots),
        "numProcPerNode": len(start.slots[0]),
        "resourcesPerNode": _resources(start),
    }
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    return _object("trainer.kubeflow.org/v1alpha1", "TrainJob", start, spec)


def _job_set(start: Start, image: str, max_restarts: int) -> Manifest:
    """A JobSet of one job, whose pods are numbered and find each other by name."""
    nodes = len(start.slots)
    container = _container(start, image, "node")
    pods = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    job = {"completions": nodes, "parallelism": nodes, "completionMode": "Indexed", "backoffLimit": 0}
    # A single node cannot be replaced: the others would hang in their collectives.
    spec = {
        "failurePolicy": {"maxRestarts": max_restarts},
        "network": {"enableDNSHostnames": True, "subdomain": start.name},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": {**job, "template": pods}}}],
    }
    return _object("jobset.x-k8s.io/v1alpha2", "JobSet", start, spec)


def _pytorch_job(start: Start, image: str, max_restarts: int) -> Manifest:
    """A PyTorchJob of Kubeflow's training operator v1."""
    pods = {"spec": {"containers": [_container(start, image, "pytorch")]}}
    policy = "OnFailure" if max_restarts else "Never"
    replicas = {"Master": {"replicas": 1, "restartPolicy": policy, "template": pods}}
    if len(start.slots) > 1:
        replicas["Worker"] = {**replicas["Master"], "replicas": len(start.slots) - 1}
    spec = {
        "nprocPerNode": str(len(start.slots[0])),
        # After a failure all pods restart, and each of them counts.
        "runPolicy": {"backoffLimit": max_restarts * len(start.slots)},
        "pytorchReplicaSpecs": replicas,
    }
    return _object("kubeflow.org/v1", "PyTorchJob", start, spec)


def _sky_task(start: Start, image: str, max_restarts: int) -> Manifest:
    return {
        "name": start.name,
        "num_nodes": len(start.slots),
        "resources": {"image_id": f"docker:{image}"},
        "envs": {START_VARIABLE: start.to_json()},
        "run": " ".join(_COMMAND),
    }


def _dstack_task(start: Start, image: str, max_restarts: int) -> Manifest:
    return {
        "type": "task",
        "name": start.name,
        "nodes": len(start.slots),
        "image": image,
        "resources": {"gpu": len(start.slots[0])},
        "env": {START_VARIABLE: start.to_json()},
        "commands": [" ".join(_COMMAND)],
    }


MANIFESTS: dict[str, Callable[[Start, str, int], Manifest]] = {
    "trainjob": _train_job,
    "jobset": _job_set,
    "pytorchjob": _pytorch_job,
    "skypilot": _sky_task,
    "dstack": _dstack_task,
}


def _object(version: str, kind: str, start: Start, spec: Manifest) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": start.name}, "spec": spec}


def _container(start: Start, image: str, name: str) -> Manifest:
    return {
        "name": name,
        "image": image,
        "command": _COMMAND,
        "env": _variables(start),
        "resources": _resources(start),
    }


def _variables(start: Start) -> list[dict[str, str]]:
    return [{"name": START_VARIABLE, "value": start.to_json()}]


def _resources(start: Start) -> Manifest:
    return {"limits": {"nvidia.com/gpu": len(start.slots[0])}}
