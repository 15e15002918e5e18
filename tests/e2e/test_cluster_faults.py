"""Faults planted into runs on several machines: the cause is named, the exit code is right, and the run goes on."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest

from tests.launch.nodes import Nodes, launch_words, read_output_until
from tests.limits import PATIENCE

pytestmark = pytest.mark.slow
ENDLESS: dict[str, Any] = {"train.steps": 100_000, "schedule": {"type": "constant", "warmup": 3}}
FINITE: dict[str, Any] = {"train.steps": 100, "checkpoint.every": 3, "train.hang_timeout": 20}


def failing_nodes(nodes: Nodes) -> list[str]:
    return (nodes.folder / "failing_nodes.txt").read_text().split()


def ranks_on(nodes: Nodes, number: int) -> list[psutil.Process]:
    """The ranks on a node."""
    processes = [process for process in nodes.processes(number) if "train" in process.cmdline()]
    return [process for process in processes if "LOCAL_RANK" in process.environ()]


def kill_node(nodes: Nodes, number: int) -> None:
    for process in nodes.processes(number):
        process.kill()


@pytest.mark.parametrize("lost", [1, 3])
def test_a_run_goes_on_with_the_nodes_that_divide_its_batch(nodes, run_file, tiny_run, done, train_on, lost):
    """Three of four nodes cannot divide 8 sequences, so two go on and one is idle. The first node may be lost."""
    settings = FINITE | {"batch.global_batch_size": 8}
    train_on(1, tiny_run(settings, name="local"))
    words = ["--min-nodes", "2", run_file(settings, name="fewer")]
    process = nodes.start(*launch_words("ssh", *words))
    text = read_output_until(process, "step 10 of")
    kill_node(nodes, lost)
    nodes.change(lost, "ip link set e0 down")
    output, _ = process.communicate(timeout=PATIENCE)
    text += output
    assert process.returncode == 0 and "Traceback" not in text, text
    used = ["node1", "node2", "node3", "node4"]
    used.remove(f"node{lost}")
    sentence = (
        f"the run goes on with 2 nodes of 4: {used[0]} and {used[1]}. {used[2]} is idle: batch.global_batch_size 8"
    )
    assert sentence in text, text
    fewer, local = (done(tiny_run(settings, name=name)) for name in ("fewer", "local"))
    assert fewer.column("ranks", "start") == [4, 2]
    assert fewer.column("loss") == pytest.approx(local.column("loss"), rel=1e-9)


def test_a_batch_that_no_smaller_number_divides_is_refused_at_the_start(nodes, run_file):
    begin = time.monotonic()
    words = ["--min-nodes", "3", run_file({"batch.global_batch_size": 8}, name="refused")]
    code, output = nodes.launch("ssh", *words)
    assert code == 2 and "--min-nodes 3: with fewer than 4 nodes the run could not go on (" in output, output
    assert "Take --min-nodes 1 or 2" in output and len(output.splitlines()) == 1
    assert time.monotonic() - begin < PATIENCE


@pytest.mark.parametrize("launcher", ["local", "ssh"])
def test_a_killed_rank_has_one_code_and_starts_again_only_if_it_may(nodes, run_file, tiny_run, done, launcher):
    file = run_file(ENDLESS, name="killed")
    words = ["-m", "jingu", "train", file, "--processes", "2"]
    command = launch_words("ssh", "--include", "node1@node2", file)
    process = nodes.start(command[0], *words, node=1) if launcher == "local" else nodes.start(*command)
    read_output_until(process, "step 5 of")
    ranks_on(nodes, 1 if launcher == "local" else 2)[-1].kill()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 137 and "was killed by SIGKILL" in output and "Traceback" not in output, output
    if launcher == "local":
        return
    settings = FINITE | {"batch.global_batch_size": 24}
    process = nodes.start(*launch_words("ssh", "--max-restarts", "1", run_file(settings, name="again")))
    read_output_until(process, "step 10 of")
    ranks_on(nodes, 2)[-1].kill()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and "Resuming from step" in output, output
    assert len(done(tiny_run(settings, name="again")).column("loss")) == settings["train.steps"]


def test_a_persons_error_ends_the_run_at_once_and_never_starts_it_again(nodes, run_file):
    file = run_file({"batch.global_batch_size": 8}, name="wrong")
    begin = time.monotonic()
    code, output = nodes.launch("ssh", "--include", "node1@node2@node3", "--max-restarts", "3", file)
    assert code == 2 and output.count("cannot be divided over 3 ranks") == 1 and "Traceback" not in output, output
    assert "start again" not in output and time.monotonic() - begin < PATIENCE


def test_a_node_that_reboots_comes_back(nodes, run_file, tiny_run, done):
    """All its processes are gone, and ssh does not reach it for a while; the run waits for it."""
    process = nodes.start(
        *launch_words("ssh", "--max-restarts", "1", run_file(FINITE | {"batch.global_batch_size": 24}, name="reboots"))
    )
    text = read_output_until(process, "step 10 of")
    nodes.change(3, "ip link set e0 down")
    kill_node(nodes, 3)
    text += read_output_until(process, "waiting for nodes to come back: node3: the host cannot be reached by ssh")
    nodes.change(3, "ip link set e0 up")
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and "Resuming from step" in output, text + output
    assert done(tiny_run(name="reboots")).column("ranks", "start") == [4, 4]


def test_a_lost_node_without_restarts_is_one_paragraph(nodes, run_file):
    process = nodes.start(*launch_words("ssh", run_file(ENDLESS | {"batch.global_batch_size": 24}, name="lost")))
    text = read_output_until(process, "step 5 of")
    kill_node(nodes, 1)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 69 and "Traceback" not in text + output, text + output
    assert "the run has lost a node" in output and "node1: the connection has ended" in output


FIREWALL = "iptables -A INPUT -i e0 -p tcp --syn ! --dport 22 -j "


@pytest.mark.parametrize("rule", ["REJECT --reject-with tcp-reset", "REJECT", "DROP"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_firewall_is_named_at_once(nodes, run_file, rule, number):
    nodes.change(number, FIREWALL + rule)
    begin = time.monotonic()
    code, output = nodes.launch("ssh", "--include", "node1@node2@node3", run_file(name="blocked"))
    assert code == 2 and len(output.splitlines()) == 1, output
    assert output.startswith(f"jingu: node{number}: the network between the nodes does not work: from node"), output
    assert time.monotonic() - begin < 60
