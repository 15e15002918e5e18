"""Faults planted into runs on several machines: the cause is named, the exit code is right, and the run goes on."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest

from tests.launch.nodes import Nodes, kill_all, launch_words, read_output_until
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
    kill_all(nodes.processes(number))


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


DOCTOR_FAULTS = {
    "memory and disk": (
        {2: "mount -t tmpfs -o size=32m none /dev/shm", 3: "mkdir -p runs && mount -t tmpfs -o ro none runs"},
        ["node2", "node3"],
        ["/dev/shm has only 32 MiB", "runs cannot be written"],
    ),
    "read-only": ({3: "mkdir -p runs && mount -t tmpfs -o ro none runs"}, ["node3"], ["runs cannot be written"]),
    "mtu": (
        {2: "ip link set e0 mtu 9000", 3: "ip link set e0 mtu 9000"},
        ["node2", "node3"],
        ["large packets do not arrive: the MTU is too large"],
    ),
    "port": ({2: FIREWALL + "REJECT"}, ["node2"], ["node2 refuses connections"]),
    "first port": ({1: FIREWALL + "DROP"}, ["node1"], ["node1 does not answer"]),
    "full": ({2: "mkdir -p runs && mount -t tmpfs -o size=10m none runs"}, ["node2"], ["has room for only 10 MiB"]),
    "name": (
        {2: "sed 's/^10.77.0.2 .*/10.77.0.92 node2/' /etc/hosts > own && mount --bind own /etc/hosts"},
        ["node2"],
        ["node2 is 10.77.0.92, which does not lead to this machine"],
    ),
    "locked": ({1: "mkdir -p runs && mount --bind /proc runs"}, ["node1"], [" FAILS  disk"]),
}


@pytest.mark.parametrize("fault", DOCTOR_FAULTS)
def test_the_doctor_lists_the_nodes_at_fault_and_no_healthy_ones(nodes, fault):
    changes, expected, sentences = DOCTOR_FAULTS[fault]
    for number, command in changes.items():
        nodes.change(number, command)
    code, output = nodes.launch("ssh", "--include", "node1@node2@node3", "doctor")
    assert code == 2 and "Traceback" not in output, output
    assert failing_nodes(nodes) == expected, output
    assert all(sentence in output for sentence in sentences), output
    assert all(f"node{number}  " in output for number in (1, 2, 3)), output  # the first results of all nodes


def test_a_healthy_cluster_passes_the_doctor(nodes):
    code, output = nodes.launch("ssh", "doctor")
    assert code == 0 and " FAILS " not in output and not (nodes.folder / "failing_nodes.txt").exists(), output


@pytest.mark.parametrize("first", ["node1", "localhost"])
def test_the_first_node_can_launch_although_its_name_is_a_loopback_address(nodes, run_file, tiny_run, done, first):
    """As Debian's installer writes /etc/hosts."""
    nodes.change(1, "sed 's/^10.77.0.1 .*/127.0.1.1 node1/' /etc/hosts > own && mount --bind own /etc/hosts")
    (nodes.folder / "hosts").write_text(f"{first} slots=1\nnode2 slots=1\n")
    code, output = nodes.run(*launch_words("ssh", run_file({"train.steps": 4}, name="loopback")), node=1)
    assert code == 0 and f"{first}: 1 rank, rendezvous at 10.77.0.1:" in output, output
    assert len(done(tiny_run(name="loopback")).column("loss")) == 4


@pytest.mark.parametrize("name", ["eth7", "lo"])
def test_a_wrong_interface_is_one_sentence(nodes, run_file, name):
    (nodes.folder / "variables").write_text(f"GLOO_SOCKET_IFNAME={name}\n")
    words = ["--include", "node1@node2", "--environment", "variables", run_file(name="interface")]
    code, output = nodes.launch("ssh", *words)
    assert code == 2 and "Traceback" not in output, output
    assert f"GLOO_SOCKET_IFNAME is {name}, which does not lead to the other nodes from here. Name one of e0" in output


def test_nodes_with_ipv6_only_train(nodes, run_file, tiny_run, done):
    for number in range(1, 5):
        nodes.change(number, f"ip addr flush dev e0 && ip addr add fd00::{number}/64 dev e0 nodad")
    names = "sed 's/^10.77.0.\\([1-4]\\) /fd00::\\1 /' /etc/hosts > hosts6 && cat hosts6 > /etc/hosts"
    code, output = nodes.run("bash", "-c", f"ip addr add fd00::fe/64 dev br0 nodad && {names}")
    assert code == 0, output
    (nodes.folder / "hosts").write_text("fd00::1 slots=1\nfd00::2 slots=1\n")
    code, output = nodes.launch("ssh", run_file({"train.steps": 4}, name="six"))
    assert code == 0 and "rendezvous at [fd00::1]:" in output and "Traceback" not in output, output
    assert len(done(tiny_run(name="six")).column("loss")) == 4
    code, output = nodes.launch("ssh", "doctor")
    assert code == 0 and " FAILS " not in output, output
