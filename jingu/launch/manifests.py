"""Manifests for cluster managers: Kubernetes (TrainJob, JobSet, PyTorchJob), SkyPilot and dstack.

Each manifest runs `python -m jingu.launch.node` on every node, and passes the `Start` in an environment variable. It
also carries the conditions that a run needs: shared memory, time to save, volumes, and which exit codes start it again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from jingu.errors import JinguError, join_words
from jingu.launch.node import RETRY_VARIABLE
from jingu.launch.start import START_VARIABLE, Start, prepare_start
from jingu.runtime.exit_codes import EXIT_INTERRUPTED, EXIT_LOST, EXIT_MISTAKE, EXIT_PREEMPTED
from jingu.runtime.files import read_text

_COMMAND = ["python", "-m", "jingu.launch.node"]
_PORT = 29_500
# How long a cluster may take to answer.
ANSWER_SECONDS = 9.0
Manifest = dict[str, Any]
# Time for a pod to stop after its ranks have saved, and to save if the command has no such setting.
_STOP_SECONDS = 60
_SAVE_SECONDS = 600
_SHARED_MEMORY = "shared-memory"


@dataclass(frozen=True)
class Job:
    """A command with the conditions under which it runs.

    Attributes:
        volumes: paths in the container by the names of volumes (persistent volume claims on Kubernetes).
        grace_seconds: time to save and exit after SIGTERM.
    """

    start: Start
    image: str
    max_restarts: int
    volumes: dict[str, str]
    grace_seconds: int


@dataclass(frozen=True)
class ManifestOptions:
    """Options of `jingu launch kubernetes` about the conditions of a run.

    Attributes:
        max_restarts: how often the run starts again after a failure; a lost node does not count.
        volume: volumes to mount, each `NAME:/path`.
        patch: YAML file that is merged into the manifest (a JSON merge patch); null removes a field.
    """

    max_restarts: int = 0
    volume: Sequence[str] = ()
    patch: Path | None = None


DEFAULT_OPTIONS = ManifestOptions()


def write_manifest(
    words: Sequence[str],
    manifest: str = "trainjob",
    image: str = "jingu",
    nodes: int = 1,
    slots: int = 1,
    environment: Path | None = None,
    options: ManifestOptions = DEFAULT_OPTIONS,
    apply: bool = False,
) -> int:
    """Print the manifest of a command, or apply it with kubectl.

    Args:
        manifest: trainjob (Kubeflow Trainer v2), jobset, pytorchjob, skypilot or dstack.
        image: container image with jingu.
        slots: ranks of a node, a GPU each.
        options: restarts, volumes and further fields.

    Raises:
        JinguError: the command is wrong, there is no kubectl, or the cluster refuses the manifest.
    """
    start = prepare_start(words, environment)
    start = replace(start, slots=[list(range(slots))] * nodes)
    start = replace(start, versions={}, master=(f"{start.name}-node-0-0.{start.name}", _PORT))
    job = Job(start, image, options.max_restarts, read_volumes(options.volume), _grace_seconds(start))
    documents = MANIFESTS[manifest](job)
    if options.patch is not None:
        documents = _apply_patch(documents, options.patch)
    # A copy of each part, as YAML would write a reference to a part that occurs twice.
    text = yaml.safe_dump_all(json.loads(json.dumps(documents)), sort_keys=False)
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


def read_volumes(texts: Sequence[str]) -> dict[str, str]:
    """Return paths by volume from texts `NAME:/path`. Raises JinguError for another form."""
    volumes: dict[str, str] = {}
    for text in texts:
        name, colon, path = text.partition(":")
        if not (name and colon and path.startswith("/")):
            raise JinguError(f"{text} is not a volume.", where="--volume", fix="Write it as NAME:/path.")
        if name in volumes or path in (*volumes.values(), "/dev/shm"):
            raise JinguError(f"{text} is mounted twice.", where="--volume", fix="Give each volume a path of its own.")
        volumes[name] = path
    return volumes


def _grace_seconds(start: Start) -> int:
    """Return the time that a node needs to save and to exit after SIGTERM."""
    tree = yaml.safe_load(start.config) if start.config is not None else {}
    return _STOP_SECONDS + int((tree.get("checkpoint") or {}).get("grace_seconds", _SAVE_SECONDS))


def _apply_patch(documents: list[Manifest], path: Path) -> list[Manifest]:
    """Merge a file into the document of the kind that it names, or else into the first one.

    Raises:
        JinguError: the file is not a mapping, or names a kind that the manifest lacks.
    """
    try:
        patch = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise JinguError(f"the file is not valid YAML ({str(error).splitlines()[0]}).", where=path) from None
    if not isinstance(patch, dict):
        raise JinguError(
            "the file is not a mapping.", where=path, fix="Write the fields to change, as in the manifest."
        )
    kinds = [document.get("kind") for document in documents]
    if patch.get("kind", kinds[0]) not in kinds:
        fix = f"It has {join_words([str(kind) for kind in kinds], 'and')}."
        raise JinguError(f"the manifest has no {patch['kind']}.", where=path, fix=fix)
    index = kinds.index(patch.get("kind", kinds[0]))
    return [_merge(document, patch) if number == index else document for number, document in enumerate(documents)]


def _merge(target: Any, patch: Any) -> Any:
    """Return a JSON merge patch (RFC 7386) of a value."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merge(result.get(key), value)
    return result


def _train_job(job: Job) -> list[Manifest]:
    """A TrainJob of Kubeflow Trainer v2, and a runtime of its own, since a TrainJob alone cannot say which exit codes
    restart it. The runtime sets torchrun's variables.
    """
    start = job.start
    pod = _pod(job, "node")
    pod["restartPolicy"] = "Never"
    template = _job_template(pod, "node") | {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    }
    job_set = {"failurePolicy": _failure_policy(job), "replicatedJobs": [{"name": "node", "template": template}]}
    policy = {"numNodes": len(start.slots), "torch": {}}
    runtime = {"mlPolicy": policy, "template": {"spec": job_set}}
    container = pod["containers"][0]
    trainer = {
        "image": job.image,
        "command": _COMMAND,
        "env": container["env"],
        "numNodes": len(start.slots),
        "numProcPerNode": len(start.slots[0]),
        "resourcesPerNode": container["resources"],
    }
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": start.name}
    version = "trainer.kubeflow.org/v1alpha1"
    return [
        _object(version, "TrainingRuntime", start, runtime),
        _object(version, "TrainJob", start, {"runtimeRef": reference, "trainer": trainer}),
    ]


def _job_set(job: Job) -> list[Manifest]:
    """A JobSet of one job, whose pods are numbered and find each other by name."""
    start, nodes = job.start, len(job.start.slots)
    pod = _pod(job, "node")
    pod["restartPolicy"] = "Never"
    template = _job_template(pod, "node")
    template["spec"] |= {"completions": nodes, "parallelism": nodes, "completionMode": "Indexed"}
    spec = {
        "failurePolicy": _failure_policy(job),
        "network": {"enableDNSHostnames": True, "subdomain": start.name},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": template}],
    }
    return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", start, spec)]


def _job_template(pod: Manifest, container: str) -> Manifest:
    """The template of a batch/v1 Job whose pods are not replaced one by one: the others would hang without it."""

    def on_exit(*codes: int) -> Manifest:
        values = {"containerName": container, "operator": "In", "values": list(codes)}
        return {"action": "FailJob", "onExitCodes": values}

    evicted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    rules = [on_exit(EXIT_MISTAKE, EXIT_INTERRUPTED), evicted, on_exit(EXIT_LOST, EXIT_PREEMPTED)]
    return {"spec": {"backoffLimit": 0, "podFailurePolicy": {"rules": rules}, "template": {"spec": pod}}}


def _failure_policy(job: Job) -> Manifest:
    """When a JobSet restarts as a whole: never after a person's error, always after a loss, else `max_restarts` times.

    The message of a job that its pod failure policy has failed ends with the number of the rule.
    """
    mistake = {
        "name": "mistake",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [f"exit code ({EXIT_MISTAKE}|{EXIT_INTERRUPTED}) "],
    }
    loss = {
        "name": "loss",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {"maxRestarts": job.max_restarts, "rules": [mistake, loss]}


def _pytorch_job(job: Job) -> list[Manifest]:
    """A PyTorchJob of Kubeflow's training operator v1, which starts pods again whose exit code is above 127."""
    start = job.start
    pod = _pod(job, "pytorch")
    pod["containers"][0]["env"].append({"name": RETRY_VARIABLE, "value": "128"})
    replicas = {"Master": {"replicas": 1, "restartPolicy": "ExitCode", "template": {"spec": pod}}}
    if len(start.slots) > 1:
        replicas["Worker"] = {**replicas["Master"], "replicas": len(start.slots) - 1}
    spec = {
        "nprocPerNode": str(len(start.slots[0])),
        # After a failure all pods restart, and each of them counts.
        "runPolicy": {"backoffLimit": max(1, job.max_restarts) * len(start.slots)},
        "pytorchReplicaSpecs": replicas,
    }
    return [_object("kubeflow.org/v1", "PyTorchJob", start, spec)]


def _sky_task(job: Job) -> list[Manifest]:
    start = job.start
    recovery = {
        "max_restarts_on_errors": job.max_restarts,
        "recover_on_exit_codes": [EXIT_LOST, EXIT_PREEMPTED],
    }
    task = {
        "name": start.name,
        "num_nodes": len(start.slots),
        "resources": {"image_id": f"docker:{job.image}", "job_recovery": recovery},
        "envs": {START_VARIABLE: start.to_json()},
        "run": " ".join(_COMMAND),
    }
    if job.volumes:
        task["volumes"] = {path: name for name, path in job.volumes.items()}
    return [task]


def _dstack_task(job: Job) -> list[Manifest]:
    start = job.start
    task = {
        "type": "task",
        "name": start.name,
        "nodes": len(start.slots),
        "image": job.image,
        "resources": {"gpu": len(start.slots[0]), "shm_size": "8GB"},
        "env": {START_VARIABLE: start.to_json()},
        "commands": [" ".join(_COMMAND)],
        "stop_duration": f"{job.grace_seconds}s",
        # An error would start again whatever its exit code is.
        "retry": {"on_events": ["interruption"]},
    }
    if job.volumes:
        task["volumes"] = [f"{name}:{path}" for name, path in job.volumes.items()]
    return [task]


MANIFESTS: dict[str, Callable[[Job], list[Manifest]]] = {
    "trainjob": _train_job,
    "jobset": _job_set,
    "pytorchjob": _pytorch_job,
    "skypilot": _sky_task,
    "dstack": _dstack_task,
}


def _object(version: str, kind: str, start: Start, spec: Manifest) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": start.name}, "spec": spec}


def _pod(job: Job, container: str) -> Manifest:
    """The spec of a pod: NCCL and checkpoints in memory need more shared memory than the 64 MiB of a container."""
    mounts = [{"name": _SHARED_MEMORY, "mountPath": "/dev/shm"}]
    volumes: list[Manifest] = [{"name": _SHARED_MEMORY, "emptyDir": {"medium": "Memory"}}]
    for name, path in job.volumes.items():
        mounts.append({"name": name, "mountPath": path})
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": name}})
    return {
        "terminationGracePeriodSeconds": job.grace_seconds,
        "containers": [
            {
                "name": container,
                "image": job.image,
                "command": _COMMAND,
                "env": [{"name": START_VARIABLE, "value": job.start.to_json()}],
                "resources": {"limits": {"nvidia.com/gpu": len(job.start.slots[0])}},
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
