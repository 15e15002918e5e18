"""`jingu launch ssh` to four machines with their own networks: the same bits, Ctrl-C, faults, bad input."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest
import torch

from jingu.checkpoint.save_folder import read_state
from tests.launch.nodes import ROOT, interrupt, kill_all, launch_words, read_output_until
from tests.limits import PATIENCE

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("count", [2, 4])
def test_nodes_train_to_the_same_bits_and_all_their_logs_come_back(nodes, run_file, tiny_run, done, train_on, count):
    settings = {"train.steps": 4, "batch.global_batch_size": 24}
    train_on(count, tiny_run(settings, name="local"))
    chosen = "@".join(f"node{number}" for number in range(1, count + 1))
    code, output = nodes.launch("ssh", "--include", chosen, "train", run_file(settings, name="remote"))
    assert code == 0, output
    for number in range(1, count + 1):
        assert f"node{number}: 1 rank, rendezvous at 10.77.0.1:" in output and " over e0." in output
    remote = done(tiny_run(settings, name="remote"))
    assert remote.column("loss") == done(tiny_run(settings, name="local")).column("loss")
    assert [file.name for file in sorted((remote.folder / "log").glob("rank-*"))] == [
        f"rank-{rank:05d}.log" for rank in range(count)
    ]
    assert nodes.processes() == []


def test_ctrl_c_ends_all_ranks_on_all_nodes(nodes, run_file, tiny_run, done):
    settings = {"train.steps": 50_000, "batch.global_batch_size": 24}
    (nodes.folder / "variables").write_text("# for the ranks\nCOLOR=deep blue\n")
    words = launch_words("ssh", "--exclude", "node2", "--environment", "variables", run_file(settings, name="stopped"))
    process = nodes.start(*words)
    text = read_output_until(process, "step 3 of")
    colors = [own.environ().get("COLOR") for own in nodes.processes() if "LOCAL_RANK" in own.environ()]
    assert colors.count("deep blue") >= 3 and set(colors) == {"deep blue"}
    interrupt(process)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "Stopped and saved at step" in output, output
    assert "node2: " not in text
    assert not psutil.wait_procs(nodes.processes(), timeout=PATIENCE)[1]
    assert done(tiny_run(settings, name="stopped")).checkpoint().is_dir()


def test_a_killed_launcher_ends_all_ranks(nodes, run_file):
    process = nodes.start(*launch_words("ssh", run_file({"train.steps": 50_000}, name="orphans")))
    read_output_until(process, "step 3 of")
    (launcher,) = psutil.Process(process.pid).children()
    launcher.kill()
    assert not psutil.wait_procs(nodes.processes(), timeout=PATIENCE)[1]
    process.communicate()


@pytest.mark.parametrize("number", [1, 2])
def test_the_ranks_of_a_killed_node_process_stop_and_save(nodes, run_file, tiny_run, done, number):
    """With that of the first node, the store is gone in which the ranks have met."""
    process = nodes.start(*launch_words("ssh", run_file({"train.steps": 50_000}, name="lost")))
    read_output_until(process, "step 3 of")
    (program,) = [own for own in nodes.processes(number) if own.cmdline()[-2:] == ["-m", "jingu.launch.node"]]
    program.kill()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 69 and "Stopped and saved at step" in output, output
    assert f"jingu: node{number}: the connection has ended, or the node process was killed; its ranks stop." in output
    assert not psutil.wait_procs(nodes.processes(), timeout=PATIENCE)[1]
    assert done(tiny_run(name="lost")).checkpoint().is_dir()


def test_a_run_goes_on_without_a_lost_node(nodes, run_file, tiny_run, done, train_on):
    """All that runs on the node is killed at once. The others go on from the last checkpoint, with the same samples."""
    settings = {"train.steps": 100, "batch.global_batch_size": 24, "checkpoint.every": 3}
    train_on(1, tiny_run(settings, name="local"))
    words = ["--exclude", "node4", "--min-nodes", "2", "--max-restarts", "2", run_file(settings, name="fewer")]
    process = nodes.start(*launch_words("ssh", *words))
    read_output_until(process, "step 10 of")
    kill_all(nodes.processes(3))
    nodes.change(3, "ip link set e0 down")
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and "jingu: node3: the connection has ended" in output, output
    fewer, local = (done(tiny_run(settings, name=name)) for name in ("fewer", "local"))
    assert fewer.column("ranks", "start") == [3, 2] and fewer.column("resumed_from", "start")[1] >= 6
    assert fewer.column("loss") == pytest.approx(local.column("loss"), rel=1e-9)
    receipts = [read_state(run.checkpoint())["progress"]["sample_hash"]["hash"] for run in (fewer, local)]
    assert receipts[0] == receipts[1]


# What a node lacks, and the sentence about it over ssh. Commands run on node2.
WITHOUT_SHARED_FOLDER = "mount -t tmpfs none {folder}"
OTHER_VERSION = (
    "sed 's/^__version__ = .*/__version__ = \"0.0.7\"/' {root}/jingu/version.py > {folder}/other && "
    "mount --bind {folder}/other {root}/jingu/version.py"
)
OTHER_TORCH = (
    "metadata=$(ls -d {site}/torch-*.dist-info)/METADATA; "
    "sed 's/^Version: .*/Version: 1.2.3/' $metadata > {folder}/other && mount --bind {folder}/other $metadata"
)
NO_PYTHON = "mount --bind /dev/null {python}"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("ip link set e0 down", "node2: the host cannot be reached by ssh ("),
        (OTHER_VERSION, "node2: the node has jingu 0.0.7 ("),
        (OTHER_TORCH, "node2: the node has torch 1.2.3 ("),
        (NO_PYTHON, "node2: jingu does not start there ("),
        (WITHOUT_SHARED_FOLDER + "/..", "node2: jingu does not start there ("),
    ],
)
def test_what_a_node_lacks_is_one_sentence(nodes, run_file, command, sentence):
    site = Path(torch.__file__).parents[1]
    file = run_file()
    inner = nodes.folder / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    nodes.folder = inner
    # The keys of ssh are not in this folder.
    nodes.change(2, command.format(folder=inner, root=ROOT, site=site, python=os.path.realpath(sys.executable)))
    code, output = nodes.launch("ssh", file)
    assert code == 2 and sentence in output and "Traceback" not in output, output
    assert sum(line.split(": ")[0] != "node1" for line in output.splitlines() if line) <= 2, output


def test_wrong_keys_and_missing_hosts_are_one_sentence(nodes, run_file):
    options = f"-F /dev/null -i {nodes.folder.parent}/host -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    words = ("--include", "node1", run_file())
    code, output = nodes.launch("ssh", "--ssh-options", options, *words)
    assert code == 2 and "node1: the host cannot be reached by ssh (" in output and "Permission denied" in output
    (nodes.folder / "hosts").write_text("node1 slots=1\n10.77.0.9 slots=1\n")
    code, output = nodes.launch("ssh", run_file())
    assert code == 2 and "10.77.0.9: the host cannot be reached by ssh" in output, output


def test_runs_that_nodes_do_not_share_are_refused(nodes, run_file, tmp_path):
    runs = tmp_path / "own"
    runs.mkdir()
    nodes.change(3, f"mount -t tmpfs none {runs}")
    code, output = nodes.launch("ssh", "--exclude", "node4@node2", run_file(name="alone"), f"runs_dir={runs}")
    assert code == 2 and f"{runs}/alone: the run's folder on node1 is not shared with node3." in output, output


def test_a_link_at_10_mbit_is_named(nodes, run_file):
    settings = {"train.steps": 50_000, "train.hang_timeout": 6}
    process = nodes.start(*launch_words("ssh", run_file(settings, name="slow")))
    read_output_until(process, "step 5 of")
    nodes.change(3, "tc qdisc add dev e0 root tbf rate 10mbit burst 32kbit latency 200ms")
    read_output_until(process, "Straggler: the network from node3 to node")
    interrupt(process)
    process.communicate(timeout=PATIENCE)


def test_a_clock_that_differs_is_named_by_the_run_and_the_doctor(nodes, run_file, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import time\nown = time.time\ntime.time = lambda: own() + 300\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    nodes.change(2, f"mount --bind {site} {empty}")
    path = {"PYTHONPATH": f"{ROOT}:{empty}"}
    code, output = nodes.launch("ssh", run_file({"train.steps": 2, "train.hang_timeout": 60}, name="late"), **path)
    assert code == 0 and "The clock of node2 is 300 s ahead of those of the other nodes" in output, output
    code, output = nodes.launch("ssh", "doctor", **path)
    assert code == 2 and (nodes.folder / "failing_nodes.txt").read_text() == "node2\n", output
    assert output.count(" FAILS ") == 1 and " FAILS  clock " in output, output


def test_the_doctor_finds_a_slow_link(nodes):
    nodes.change(3, "tc qdisc add dev e0 root tbf rate 80mbit burst 64kbit latency 200ms")
    code, output = nodes.launch("ssh", "doctor", "--folder", "runs")
    assert code == 2 and (nodes.folder / "failing_nodes.txt").read_text() == "node3\n", output
    assert output.count(" FAILS ") == 1 and " FAILS  pairs " in output


def test_the_doctor_names_a_node_that_does_not_reach_the_first_one(nodes):
    nodes.change(3, "ip route add blackhole 10.77.0.1/32")
    code, output = nodes.launch("ssh", "doctor")
    # The nodes connect to each other before the ranks do.
    sentence = "node3: the network between the nodes does not work: from node1, node3 does not answer: a firewall or"
    assert code == 2 and sentence in " ".join(output.split()), output
    assert (nodes.folder / "failing_nodes.txt").read_text() == "node3\n"


def test_a_link_that_goes_down_ends_the_run(nodes, run_file):
    settings = {"train.steps": 50_000, "train.hang_timeout": 5}
    process = nodes.start(*launch_words("ssh", "train", run_file(settings, name="cut")))
    read_output_until(process, "step 20 of")
    nodes.change(4, "ip link set e0 down")
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 70 and "Training has made no progress for" in output, output
    assert "rank 3 (node4)" in output and "The network between its node and that of rank 0 is down." in output, output
