"""`jingu launch slurm` on a real Slurm of four nodes: the same bits after a signal, a lost node and a failure."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from jingu.data.build import build
from tests.e2e.slurm_cluster import SlurmCluster, run_cluster, wait_until, why_not
from tests.launch.nodes import kill_all

REASON = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]
# A run that does not end by itself, and whose losses do not depend on where it ends.
ENDLESS = {"train.steps": 100_000, "schedule": {"type": "constant", "warmup": 3}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with run_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def read_log(folder: Path) -> str:
    """What the jobs that were submitted in a folder have printed."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted((folder / "slurm").glob("*.log")))


def wait_for_log(folder: Path, words: str, times: int = 1) -> None:
    wait_until(lambda: read_log(folder).count(words) >= times, lambda: read_log(folder))


@pytest.fixture
def losses_match(tiny_run, train_on, done) -> Callable[..., bool]:
    """Whether a run of so many ranks has the losses of a local one that was not interrupted."""

    def match(name: str, settings: dict[str, object], ranks: int = 2) -> bool:
        losses = done(tiny_run(settings, name=name)).column("loss")
        local = tiny_run(settings | {"train.steps": len(losses)}, name="local")
        train_on(ranks, local)
        assert len(losses) > 0
        return losses == done(local).column("loss")

    return match


def test_four_nodes_train_to_the_same_bits(cluster, run_file, tmp_path, losses_match):
    settings = {"train.steps": 4}
    job = cluster.submit("--nodes", "4", "train", run_file(settings, name="job"), folder=tmp_path)
    assert cluster.wait_for(job, "COMPLETED", "FAILED")["JobState"] == "COMPLETED", read_log(tmp_path)
    assert "rendezvous at n0:" in (log := read_log(tmp_path)) and " over v0" in log
    assert losses_match("job", settings, ranks=4)


def test_a_job_saves_before_its_limit_is_requeued_and_goes_on(cluster, run_file, tmp_path, losses_match):
    job = cluster.submit("--nodes", "2", "--time", "30", run_file(ENDLESS, name="job"), folder=tmp_path)
    wait_for_log(tmp_path, "step 5 of")
    # The limit is so near that Slurm sends the signal with its next look at the job.
    cluster.run("scontrol", "update", f"jobid={job}", "TimeLimit=2")
    assert cluster.wait_for(job, "PENDING", "FAILED", "TIMEOUT")["Restarts"] == "1", read_log(tmp_path)
    cluster.run("scontrol", "update", f"jobid={job}", "TimeLimit=30")
    wait_for_log(tmp_path, "Resuming from step")
    assert read_log(tmp_path).count("Stopped and saved at step") == 1
    # A person cancels the job: it saves, and is not queued again.
    cluster.run("scancel", job)
    assert cluster.wait_for(job, "CANCELLED", "PENDING", "FAILED")["JobState"] == "CANCELLED"
    wait_for_log(tmp_path, "Stopped and saved at step", times=2)
    assert losses_match("job", ENDLESS)


def test_a_job_goes_on_without_a_lost_node(cluster, run_file, tmp_path, losses_match):
    settings = ENDLESS | {"checkpoint.every": 5}
    job = cluster.submit("--nodes", "2", run_file(settings, name="job"), folder=tmp_path)
    wait_for_log(tmp_path, "step 8 of")
    assert cluster.job(job)["NodeList"] == "n[0-1]"
    cluster.run("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    try:
        cluster.wait_for(job, "PENDING")
        wait_for_log(tmp_path, "Resuming from step")
        # Ranks that could still reach each other have saved.
        saves = read_log(tmp_path).count("Stopped and saved at step")
        assert cluster.job(job)["NodeList"] in ("n[0,2]", "n[0,3]", "n[2-3]")
        cluster.run("scancel", job)
        cluster.wait_for(job, "CANCELLED")
        wait_for_log(tmp_path, "Stopped and saved at step", times=saves + 1)
    finally:
        cluster.run("scontrol", "update", "nodename=n1", "state=resume")
    assert losses_match("job", settings)


def test_a_failure_ends_a_job_unless_it_may_restart(cluster, run_file, tmp_path, losses_match):
    settings = ENDLESS | {"checkpoint.every": 5}
    words = ["--nodes", "2", "--max-restarts", "1", run_file(settings, name="job")]
    job = cluster.submit(*words, folder=tmp_path)
    wait_for_log(tmp_path, "step 8 of")
    # A job that is requeued without a failure still has its restart.
    cluster.run("scontrol", "requeue", job)
    cluster.wait_for(job, "PENDING")
    for times, state in enumerate(("PENDING", "FAILED"), start=1):
        wait_for_log(tmp_path, "Resuming from step", times=times)
        nodes = [process for process in cluster.processes() if "jingu.launch.node" in process.cmdline()]
        ranks = [child for node in nodes for child in node.children() if "RANK" in child.environ()]
        ranks[-1].send_signal(signal.SIGKILL)
        assert cluster.wait_for(job, "PENDING", "FAILED")["JobState"] == state, read_log(tmp_path)
    assert losses_match("job", settings)


def test_a_preempted_job_saves_is_requeued_and_goes_on(cluster, run_file, tmp_path):
    """Slurm sends SIGTERM, as when a person cancels the job, and the job ends before its grace time is over."""
    job = cluster.submit("--nodes", "2", run_file(ENDLESS, name="job"), folder=tmp_path)
    wait_for_log(tmp_path, "step 5 of")
    high = ["sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 5"]
    code, output = cluster.run(*high, folder=tmp_path)
    assert code == 0, output
    assert cluster.wait_for(job, "PENDING", "FAILED")["JobState"] == "PENDING", read_log(tmp_path)
    wait_for_log(tmp_path, "Resuming from step")
    assert read_log(tmp_path).count("Stopped and saved at step") == 1
    cluster.run("scancel", job)
    cluster.wait_for(job, "CANCELLED")


@pytest.mark.parametrize("first", ["node", "ranks"])
def test_a_job_goes_on_although_srun_saw_the_end_of_a_node_first(cluster, run_file, tmp_path, first):
    """All that runs on a node is killed, slurmd too, as when it reboots; or its ranks end some time before."""
    settings = ENDLESS | {"checkpoint.every": 5, "train.hang_timeout": 20}
    job = cluster.submit("--nodes", "2", run_file(settings, name="job"), folder=tmp_path)
    wait_for_log(tmp_path, "step 8 of")
    (daemon,) = [process for process in cluster.processes() if process.cmdline() == ["slurmd", "-D", "-N", "n1"]]
    words = daemon.cmdline()
    victims = [process for process in cluster.processes() if process.environ().get("SLURMD_NODENAME") == "n1"]
    if first == "ranks":
        kill_all([process for process in victims if "train" in process.cmdline()])
        wait_for_log(tmp_path, "srun: error: n1: task 1: Exited with exit code 137")
    kill_all([daemon, *victims])
    try:
        assert cluster.wait_for(job, "PENDING", "FAILED")["JobState"] == "PENDING", read_log(tmp_path)
    finally:
        cluster.start("bash", "-c", 'exec "$@" > slurmd.out 2>&1', "-", *words, folder=tmp_path)
        cluster.run("scancel", job)
        cluster.run("scontrol", "update", "nodename=n1", "state=resume")


def test_an_allocation_runs_a_step_and_saves_after_ctrl_c(cluster, run_file, tmp_path, losses_match):
    file = run_file(ENDLESS, name="job")
    # The step has other nodes than the first ones of the allocation.
    busy = (
        "srun --nodes=2 --ntasks=2 --exclusive sleep 1000 &\nuntil squeue -s -h | grep -q sleep; do sleep 0.3; done\n"
    )
    launch = f"{sys.executable} -m jingu launch slurm --nodes 2 {file}"
    wrong = f"{sys.executable} -m jingu launch slurm --nodes 5 {file}; echo code $?"
    script = f"{busy}{wrong}\nexec {launch}"
    process = cluster.start("salloc", "--nodes=4", "bash", "-c", script, folder=tmp_path)
    text = ""
    assert process.stdout is not None
    while "step 5 of" not in text:
        text += (line := process.stdout.readline())
        assert line, text
    launcher = [one for one in psutil.Process(process.pid).children(recursive=True) if "launch" in one.cmdline()[:4]]
    launcher[0].send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130 and "Stopped and saved at step" in text + output, text + output
    assert "rendezvous at n2:" in text
    assert "the allocation has 4 nodes, and --nodes is 5." in text and "code 2" in text
    assert losses_match("job", ENDLESS)


def test_arrays_build_a_data_set_and_sweep(cluster, run_file, tiny_run, tmp_path):
    changes = {"data.path": str(tmp_path / "array"), "train.steps": 2}
    file = run_file(changes, name="array")
    build(tiny_run(changes | {"data.path": str(tmp_path / "local")}))
    job = cluster.submit("--nodes", "3", "data", "build", file, folder=tmp_path)
    wait_until(lambda: (tmp_path / "array" / "manifest.json").exists(), lambda: read_log(tmp_path))
    for path in (tmp_path / "local").rglob("*.bin"):
        assert path.read_bytes() == (tmp_path / "array" / path.relative_to(tmp_path / "local")).read_bytes()
    job = cluster.submit("--nodes", "2", "sweep", file, "--grid", "seed=1,2", folder=tmp_path)
    wait_until(lambda: not cluster.run("squeue", "-h", "-j", job)[1].strip(), lambda: read_log(tmp_path))
    table = tmp_path / "runs" / "array-sweep" / "sweep.json"
    assert [run["state"] for run in json.loads(table.read_text())["runs"]] == ["complete"] * 2, read_log(tmp_path)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--sbatch", "partition=none"], "invalid partition specified: none"),
        (["--sbatch", "account=nobody"], "Invalid account or account/partition combination specified"),
        (["--time", "soon"], "Invalid --time specification"),
    ],
)
def test_a_refusal_is_in_the_words_of_slurm(cluster, run_file, tmp_path, words, sentence):
    code, output = cluster.run("jingu", "launch", "slurm", *words, run_file(), folder=tmp_path)
    assert code == 2 and "Slurm refuses the job (" in output and sentence in output, output
    assert len(output.splitlines()) == 1
