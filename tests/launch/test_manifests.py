"""Scripts for Slurm and manifests for clusters: what they start, and what they refuse."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest
import yaml

from jingu.cli import main
from jingu.launch import manifests, node, slurm
from jingu.launch.probe import find_interface
from jingu.launch.start import Start
from jingu.runtime.exit_codes import Restart, find_restart
from tests.launch.programs import install


@pytest.fixture
def run_file(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    Path("run.yaml").write_text("name: My.run_7b\n")
    return "run.yaml"


def test_slurm_script(run_file, capsys):
    words = ["--nodes", "2", "--slots", "8", "--time", "12:00:00", "--sbatch", "partition=gpu", "--sbatch", "exclusive"]
    assert main(["launch", "slurm", *words, "--write", "train", run_file, "optimizer.lr=0.5"]) == 0
    script = capsys.readouterr().out
    settings = ["nodes=2", "ntasks-per-node=1", "time=12:00:00", "partition=gpu", "exclusive", "requeue"]
    settings += ["signal=USR1@180", "output=slurm/my-run-7b-%j.log", "open-mode=append", "job-name=my-run-7b"]
    assert {f"#SBATCH --{setting}" for setting in settings} <= set(script.splitlines())
    assert script == Path("slurm/my-run-7b.sbatch").read_text()
    srun = 'srun() { echo "$JINGU_START"; echo "$@" >&2; }\nscontrol() { :; }\n'
    result = subprocess.run(["bash", "-c", srun + script], capture_output=True, text=True, check=True)
    assert result.stderr == f"--export=ALL --kill-on-bad-exit=1 {sys.executable} -m jingu.launch.node\n"
    start = Start.from_json(result.stdout)
    assert start.words == ["train", "{config}"] and start.slots == [list(range(8))] * 2
    assert yaml.safe_load(start.config)["optimizer"]["lr"] == 0.5


@pytest.mark.parametrize(
    ("codes", "srun_code", "state", "restarts", "requeued", "code"),
    [
        # A node that was preempted has saved; so has one whose job is cancelled, which only Slurm knows.
        ({0: 75, 1: 75}, 0, "RUNNING", 0, True, 75),
        ({0: 75, 1: 75}, 0, "CANCELLED", 0, False, 75),
        # A node that is gone has left no code; srun was quicker than Slurm, and ended the other one.
        ({0: 69, 1: None}, 137, "RUNNING", 0, True, 69),
        ({0: 75, 1: None}, 137, "RUNNING", 0, True, 69),
        ({0: 69, 1: None}, 137, "CANCELLED", 0, False, 69),
        # A person's error, although the other node was ended as if preempted.
        ({0: 75, 1: 2}, 2, "RUNNING", 9, False, 2),
        ({0: 2, 1: None}, 2, "RUNNING", 9, False, 2),
        # A killed rank, with restarts and without.
        ({0: 137, 1: 69}, 137, "RUNNING", 0, False, 137),
        ({0: 137, 1: 69}, 137, "RUNNING", 1, True, 137),
        # No node has started: srun's own failure counts as a failure, and not as a lost node.
        ({}, 1, "RUNNING", 0, False, 1),
        ({}, 1, "RUNNING", 1, True, 1),
        ({0: 0, 1: 0}, 0, "RUNNING", 9, False, 0),
    ],
)
def test_the_script_restarts_by_the_table(
    run_file, tmp_path, capsys, codes, srun_code, state, restarts, requeued, code
):
    words = ["--nodes", "2", "--max-restarts", str(restarts), "--write", "train", run_file]
    assert main(["launch", "slurm", *words]) == 0
    nodes = "".join(
        f"touch $JINGU_CODES/{rank}.started; " + (f"echo {own} > $JINGU_CODES/{rank}.code; " if own is not None else "")
        for rank, own in codes.items()
    )
    (tmp_path / "bin").mkdir()
    for name, body in {
        "srun": f"{nodes}exit {srun_code}",
        "scontrol": f'case "$1" in requeue) echo requeue $2;; *) echo "JobId=7 JobState={state} Reason=None";; esac',
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    root = str(Path(node.__file__).parents[2])
    variables = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "PYTHONPATH": root}
    script = capsys.readouterr().out
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=variables, check=False)
    assert (result.returncode, result.stdout) == (code, "requeue 7\n" if requeued else ""), result.stderr
    assert not list(tmp_path.glob("slurm/*.codes"))


def test_slurm_array_of_parts(run_file, capsys):
    assert main(["launch", "slurm", "--nodes", "5", "--write", "data", "build", run_file]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=1-5\n" in script and "#SBATCH --nodes=1\n" in script
    assert "-m jingu data build run.yaml --part $SLURM_ARRAY_TASK_ID/5\n" in script


def test_slurm_array_of_a_sweep(run_file, capsys):
    words = ["--nodes", "3", "--slots", "4", "--write", "sweep", run_file, "--grid", "seed=1,2,3"]
    assert main(["launch", "slurm", *words]) == 0
    script = capsys.readouterr().out
    assert main(["launch", "slurm", *words[:5], "--", *words[5:]]) == 0
    assert capsys.readouterr().out == script
    assert main(["launch", "slurm", "--", "sweep"]) == 2
    assert "sweep needs the file of a run." in capsys.readouterr().err
    assert "#SBATCH --array=1-3\n" in script and "#SBATCH --signal=USR1@180\n" in script
    assert "jingu sweep run.yaml --grid seed=1,2,3 --processes 4 --part $SLURM_ARRAY_TASK_ID/3\n" in script


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("2:30", 150),
        ("1:00:05", 3605),
        ("2-12", 216_000),
        ("1-0:30", 88_200),
        ("1-1:1:1", 90_061),
        ("UNLIMITED", sys.maxsize),
        ("", sys.maxsize),
    ],
)
def test_time_limits_as_slurm_reads_them(text, seconds):
    assert slurm.read_limit(text) == seconds


def test_a_short_job_has_a_quarter_of_its_time_to_save(run_file, capsys):
    assert main(["launch", "slurm", "--time", "4", "--write", run_file]) == 0
    assert "#SBATCH --signal=USR1@60\n" in capsys.readouterr().out
    assert main(["launch", "slurm", "--sbatch", "signal=USR1@20", "--write", run_file]) == 0
    assert "#SBATCH --signal=USR1@20\n" in capsys.readouterr().out


def test_what_slurm_refuses_is_in_its_words(run_file, monkeypatch, capsys):
    monkeypatch.setattr(slurm.shutil, "which", lambda _: None)
    assert main(["launch", "slurm", run_file]) == 2
    assert "there is no sbatch on this machine." in capsys.readouterr().err
    monkeypatch.setattr(slurm.shutil, "which", lambda _: "/usr/bin/sbatch")
    refusal = SimpleNamespace(returncode=1, stderr="sbatch: error: Invalid account specified\n", stdout="")
    monkeypatch.setattr(slurm.subprocess, "run", lambda *_, **__: refusal)
    assert main(["launch", "slurm", run_file]) == 2
    assert "Slurm refuses the job (Invalid account specified)." in capsys.readouterr().err


@pytest.mark.parametrize("kind", manifests.MANIFESTS)
def test_every_kind_of_manifest_starts_the_same(run_file, capsys, kind):
    words = ["--manifest", kind, "--image", "registry/jingu:1", "--nodes", "3", "--slots", "4", "train", run_file]
    assert main(["launch", "kubernetes", *words]) == 0
    text = capsys.readouterr().out
    manifest = list(yaml.safe_load_all(text))[-1]
    starts = []

    def visit(node):
        if isinstance(node, dict):
            value = node.get("JINGU_START") or (node.get("name") == "JINGU_START" and node["value"])
            starts.extend([value] if value else [])
            list(map(visit, node.values()))
        elif isinstance(node, list):
            list(map(visit, node))

    visit(manifest)
    assert starts and len(set(starts)) == 1
    start = Start.from_json(starts[0])
    assert start.slots == [[0, 1, 2, 3]] * 3 and start.words == ["train", "{config}"]
    assert "registry/jingu:1" in text and "jingu.launch.node" in text
    assert manifest.get("metadata", manifest)["name"] == "my-run-7b"
    # SkyPilot counts cards only together with their kind.
    assert kind == "skypilot" or "gpu: 4" in text


def test_manifests_have_the_fields_of_their_schemas(run_file, capsys):
    """Names from the custom resource definitions of Kubeflow Trainer 2, JobSet 0.8 and the training operator 1.9."""
    shapes = {}
    for kind in ("trainjob", "jobset", "pytorchjob"):
        main(["launch", "kubernetes", "--manifest", kind, "--nodes", "2", run_file])
        shapes[kind] = list(yaml.safe_load_all(capsys.readouterr().out))[-1]
    job = shapes["trainjob"]
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert set(job["spec"]["trainer"]) == {"image", "command", "env", "numNodes", "numProcPerNode", "resourcesPerNode"}
    jobs = shapes["jobset"]["spec"]["replicatedJobs"]
    assert (shapes["jobset"]["apiVersion"], jobs[0]["replicas"]) == ("jobset.x-k8s.io/v1alpha2", 1)
    assert jobs[0]["template"]["spec"]["completionMode"] == "Indexed"
    replicas = shapes["pytorchjob"]["spec"]["pytorchReplicaSpecs"]
    assert (replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == (1, 1)
    assert [c["name"] for c in replicas["Worker"]["template"]["spec"]["containers"]] == ["pytorch"]


# What SkyPilot 0.14 and dstack 0.20 accept of these fields, and nothing else.
TASKS = {
    "skypilot": {
        "required": ["name", "num_nodes", "resources", "envs", "run"],
        "properties": {
            "name": {"type": "string"},
            "num_nodes": {"type": "integer"},
            "resources": {
                "properties": {
                    "image_id": {"type": "string", "pattern": "^docker:"},
                    "job_recovery": {
                        "properties": {
                            "max_restarts_on_errors": {"type": "integer", "minimum": 0},
                            "recover_on_exit_codes": {"type": "array", "items": {"type": "integer"}},
                        },
                        "additionalProperties": False,
                    },
                },
                "additionalProperties": False,
            },
            "envs": {"patternProperties": {"^[a-zA-Z_]\\w*$": {"type": "string"}}, "additionalProperties": False},
            "run": {"type": "string"},
            "volumes": {"additionalProperties": {"type": "string"}},
        },
        "additionalProperties": False,
    },
    "dstack": {
        "required": ["type", "name", "nodes", "image", "commands"],
        "properties": {
            "type": {"const": "task"},
            "name": {"type": "string", "pattern": "^[a-z][a-z0-9-]{1,40}$"},
            "nodes": {"type": "integer", "minimum": 1},
            "image": {"type": "string"},
            "resources": {
                "properties": {"gpu": {"type": "integer"}, "shm_size": {"type": "string", "pattern": "^\\d+GB$"}},
                "additionalProperties": False,
            },
            "volumes": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+:/"}},
            "stop_duration": {"type": "string", "pattern": "^\\d+s$"},
            "retry": {
                "properties": {
                    "on_events": {"items": {"enum": ["no-capacity", "interruption", "error"]}, "minItems": 1}
                },
                "additionalProperties": False,
            },
            "env": {"additionalProperties": {"type": "string"}},
            "commands": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        },
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("name", ["My.run_7b", "7b", "a" * 90 + "-long"])
def test_tasks_have_the_fields_of_their_schemas(tmp_path, monkeypatch, capsys, kind, name):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(f"name: {name}\n")
    assert (
        main(
            ["launch", "kubernetes", "--manifest", kind, "--nodes", "2", "--slots", "3", "--volume", "a:/a", "run.yaml"]
        )
        == 0
    )
    jsonschema_rs.validate(TASKS[kind], yaml.safe_load(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("variables", "rank", "master"),
    [
        ({"JOB_COMPLETION_INDEX": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a"}, 1, ("a", 29_500)),
        ({"JOB_COMPLETION_INDEX": "2"}, 2, ("run-node-0-0.run", 29_500)),
        ({"RANK": "3", "MASTER_ADDR": "run-master-0", "WORLD_SIZE": "4"}, 3, ("run-master-0", 29_500)),
        ({"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}, 1, ("10.0.0.1", 29_500)),
        ({"PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "29400"}, 0, ("a", 29_400)),
    ],
)
def test_a_node_finds_its_number_and_the_first_node(monkeypatch, variables, rank, master):
    start = Start(["train"], slots=[[0]] * 4, master=("run-node-0-0.run", 29_500))
    for name in ("SLURM_JOB_ID", *node._NODE_RANKS, *node._MASTERS):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**variables, "JINGU_START": start.to_json()}.items():
        monkeypatch.setenv(name, value)
    calls = []
    monkeypatch.setattr(node, "run_node", lambda start, rank: calls.append((start.master, rank)))
    node.main()
    assert calls == [(master, rank)]


MODELS = {
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "JobSet": "JobsetV1alpha2JobSet",
}


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_manifests_come_back_whole_from_the_models_of_kubeflow(run_file, capsys, kind):
    """The published models refuse what has a wrong type, and leave out what they do not know."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    words = ["--nodes", "3", "--slots", "2", "--max-restarts", "2", "--volume", "runs:/runs", run_file]
    assert main(["launch", "kubernetes", "--manifest", kind, *words]) == 0
    for manifest in yaml.safe_load_all(capsys.readouterr().out):
        model = getattr(models, MODELS[manifest["kind"]])
        assert model.from_dict(manifest).to_dict() == manifest


def pods(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The specs of all pods of a manifest."""
    found: list[dict[str, Any]] = []

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            found.extend([value] if "containers" in value else [])
            list(map(visit, value.values()))
        elif isinstance(value, list):
            list(map(visit, value))

    visit(documents)
    return found


@pytest.mark.parametrize("kind", ["trainjob", "jobset", "pytorchjob"])
@pytest.mark.parametrize(("grace", "seconds"), [("120", 180), ("900", 960)])
def test_pods_have_shared_memory_time_to_save_and_volumes(run_file, tmp_path, capsys, kind, grace, seconds):
    (tmp_path / "patch.yaml").write_text("metadata: {labels: {team: a}}\n")
    words = ["--volume", "data:/data", "--volume", "runs:/runs", "--patch", "patch.yaml", run_file]
    assert (
        main(["launch", "kubernetes", "--manifest", kind, "--nodes", "2", *words, f"checkpoint.grace_seconds={grace}"])
        == 0
    )
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    assert documents[0]["metadata"]["labels"] == {"team": "a"}
    for pod in pods(documents):
        assert pod["terminationGracePeriodSeconds"] == seconds
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
        assert volumes[mounts["/dev/shm"]] == {"emptyDir": {"medium": "Memory"}}
        for name in ("data", "runs"):
            assert volumes[mounts[f"/{name}"]] == {"persistentVolumeClaim": {"claimName": name}}


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_exit_codes_decide_as_the_table_says(run_file, capsys, kind):
    """The rules of Kubernetes' Job and of JobSet, in their order, for each exit code."""
    assert main(["launch", "kubernetes", "--manifest", kind, "--max-restarts", "2", run_file]) == 0
    manifest = next(iter(yaml.safe_load_all(capsys.readouterr().out)))
    spec = manifest["spec"] if kind == "jobset" else manifest["spec"]["template"]["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    rules = spec["failurePolicy"]["rules"]
    assert spec["failurePolicy"]["maxRestarts"] == 2 and job["backoffLimit"] == 0

    def decide(code: int, is_evicted: bool = False) -> Restart:
        message, reason = "", "BackoffLimitExceeded"
        for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
            if code in rule.get("onExitCodes", {}).get("values", []):
                message = (
                    f"Container node for pod a/b failed with exit code {code} matching FailJob rule at index {index}"
                )
            elif is_evicted and "onPodConditions" in rule:
                message = f"Pod a/b has condition DisruptionTarget matching FailJob rule at index {index}"
            if message:
                reason = "PodFailurePolicy"
                break
        for rule in rules:
            patterns = rule.get("onJobFailureMessagePatterns", [""])
            if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
                return {"FailJobSet": Restart.NEVER}.get(rule["action"], Restart.ALWAYS)
        return Restart.COUNTED

    for code in range(1, 256):
        assert decide(code) == find_restart(code), code
    assert decide(137, is_evicted=True) == Restart.ALWAYS and decide(2, is_evicted=True) == Restart.NEVER


def test_a_pod_of_pytorchjob_starts_again_if_its_code_is_temporary(run_file, monkeypatch):
    monkeypatch.setenv(node.RETRY_VARIABLE, "128")
    for name in ("SLURM_JOB_ID", *node._NODE_RANKS, *node._MASTERS):
        monkeypatch.delenv(name, raising=False)
    for code, expected in ((0, 0), (1, 1), (2, 2), (69, 197), (70, 198), (75, 203), (137, 137)):
        monkeypatch.setenv(node.RETRY_VARIABLE, "128")
        monkeypatch.setenv("JINGU_START", Start(["train"], slots=[[0]]).to_json())
        monkeypatch.setattr(node, "run_node", lambda *_, code=code: code)
        assert node.main() == expected


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--volume", "runs"], "--volume: runs is not a volume."),
        (["--volume", "runs:relative"], "--volume: runs:relative is not a volume."),
        (["--volume", "a:/x", "--volume", "b:/x"], "--volume: b:/x is mounted twice."),
        (["--volume", "a:/dev/shm"], "--volume: a:/dev/shm is mounted twice."),
        (["--patch", "list.yaml"], "list.yaml: the file is not a mapping."),
        (["--patch", "kind.yaml"], "kind.yaml: the manifest has no Pod. It has TrainingRuntime and TrainJob."),
        (["--patch", "broken.yaml"], "broken.yaml: the file is not valid YAML"),
        (["--patch", "missing.yaml"], "missing.yaml: the file cannot be read"),
    ],
)
def test_wrong_volumes_and_patches_are_one_sentence(run_file, capsys, words, sentence):
    Path("list.yaml").write_text("- a\n")
    Path("kind.yaml").write_text("kind: Pod\n")
    Path("broken.yaml").write_text("a: [\n")
    assert main(["launch", "kubernetes", *words, run_file]) == 2
    assert sentence in (error := capsys.readouterr().err) and len(error.splitlines()) == 1


def test_a_refusal_of_the_cluster_is_one_sentence(run_file, monkeypatch, capsys):
    monkeypatch.setattr(manifests.shutil, "which", lambda _: None)
    assert main(["launch", "kubernetes", "--apply", run_file]) == 2
    assert "there is no kubectl on this machine." in capsys.readouterr().err
    monkeypatch.setattr(manifests.shutil, "which", lambda _: "/usr/bin/kubectl")
    refusal = SimpleNamespace(returncode=1, stderr='error: no matches for kind "TrainJob"\n', stdout="")
    monkeypatch.setattr(manifests.subprocess, "run", lambda *_, **__: refusal)
    assert main(["launch", "kubernetes", "--apply", run_file]) == 2
    assert 'the cluster refuses the manifest (error: no matches for kind "TrainJob").' in capsys.readouterr().err


def test_a_cluster_that_does_not_answer_is_one_sentence(run_file, tmp_path, monkeypatch, capsys):
    assert manifests.ANSWER_SECONDS < 10
    install(monkeypatch, tmp_path / "bin", "kubectl", "signal.pause()")
    monkeypatch.setattr(manifests, "ANSWER_SECONDS", 0.1)
    assert main(["launch", "kubernetes", "--apply", run_file]) == 2
    assert "the cluster does not answer in 0 s." in capsys.readouterr().err


def test_interface_of_an_address():
    interfaces = {name for _, name in socket.if_nameindex()} - {"lo"}
    default = find_interface("192.0.2.1")
    assert default in interfaces | {""}
    # A name that is a loopback address, or unknown here: the default route leads to the other nodes.
    assert (
        find_interface("127.0.0.1") == find_interface("127.0.1.1") == find_interface("no-such-host.invalid") == default
    )
