"""The doctor finds what is planted, and passes a healthy machine."""

from __future__ import annotations

import errno
import re
import socket
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml

from jingu.config.load import dump_yaml, load_config
from jingu.launch import node_checks
from jingu.launch.doctor import FAILING_NODES, compare_nodes, doctor
from jingu.launch.network import check_network, describe_groups, find_slow_hosts, pair_nodes
from jingu.launch.node_checks import CHECKS, KERNEL, CheckError, check_name, check_names, find_slow, run_check
from tests.conftest import this_rank


@pytest.mark.slow
def test_a_healthy_machine_passes_and_can_be_planned_for(tmp_path, monkeypatch, capsys):
    from jingu.plan.machine import find_machine

    monkeypatch.chdir(tmp_path)
    assert doctor(Path("runs"), Path("machine.yaml")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[: len(CHECKS)]] == ["ok"] * len(CHECKS)
    machine = find_machine("machine.yaml")
    assert machine.disk_gbs > 0 and machine.matmul_tflops > 0
    assert not FAILING_NODES.exists() and not list(Path("runs").iterdir())


def test_a_failing_check_names_the_node(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(node_checks, "CHECKS", {"load": None, "disk": None})
    Path("runs").write_text("a file where the folder should be")
    assert doctor(Path("runs")) == 2
    load, disk, summary = capsys.readouterr().out.splitlines()
    assert " ok " in load and " FAILS  disk " in disk and "File exists" in disk
    assert summary.startswith("1 of 1 nodes fail")
    assert FAILING_NODES.read_text() == f"{disk.split()[0]}\n"


def test_a_check_that_hangs_or_dies_fails(tmp_path, monkeypatch):
    assert run_check("memory", str(tmp_path), seconds=0.001)["text"] == "no answer in 0 s"
    result = run_check("no such check", str(tmp_path))
    assert not result["passed"] and "KeyError" in result["text"]


def test_a_machine_with_too_little_of_something_fails(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr(node_checks.shutil, "disk_usage", lambda _: usage)
    for name, text in (("disk", "has room for only 1 MiB"), ("shared memory", "/dev/shm has only 1 MiB")):
        with pytest.raises(CheckError, match=text):
            CHECKS[name](tmp_path)


def test_rdma_needs_locked_memory(tmp_path, monkeypatch):
    limits = [2**23, 64]
    monkeypatch.setattr(node_checks.resource, "getrlimit", lambda _: (limits[0], limits[0]))
    monkeypatch.setattr(node_checks, "RDMA_DEVICES", tmp_path / "infiniband")
    assert CHECKS["locked memory"](tmp_path)[0] == "8 MiB, and no RDMA device needs it"
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    with pytest.raises(CheckError, match="only 8 MiB may be locked"):
        CHECKS["locked memory"](tmp_path)
    limits[0] = node_checks.resource.RLIM_INFINITY
    assert CHECKS["locked memory"](tmp_path) == ("unlimited", {})


def test_nodes_that_differ_from_the_others_fail(tmp_path):
    def node(driver: str, tflops: float) -> list[dict[str, Any]]:
        versions = {"check": "versions", "passed": True, "text": f"torch 2.13.0, driver {driver}", "figures": {}}
        figures = {"matmul_tflops": tflops, "memory_gbs": 3000.0}
        devices = f"{7 if tflops == 710 else 8} × H100, {tflops:,.2f} TFLOP/s"
        return [versions, {"check": "devices", "passed": True, "text": devices, "figures": figures}]

    by_host = {"a": node("570", 700.0), "b": node("570", 300.0), "c": node("550", 690.0), "d": node("570", 710.0)}
    compare_nodes(by_host)
    failures = {host: [row["text"] for row in rows if not row["passed"]] for host, rows in by_host.items()}
    assert failures == {
        "a": [],
        "b": ["matmul_tflops is 300.00, and 695.00 on other nodes"],
        "c": ["most nodes have torch 2.13.0, driver 570"],
        "d": ["most nodes have 8 × H100"],
    }
    text, _ = CHECKS["versions"](tmp_path)
    assert f"torch {torch.__version__}" in text and "cores " in text


def test_containers_of_a_machine_are_as_fast_as_the_machine():
    """They measure at the same time, and disturb each other."""

    def node(kernel: str, rate: float) -> list[dict[str, Any]]:
        figures = {KERNEL: kernel, "memory_gbs": rate}
        return [{"check": "devices", "passed": True, "text": "1 × CPU", "figures": figures}]

    by_host = {"a": node("x", 30.0), "b": node("x", 8.0), "c": node("y", 31.0), "d": node("z", 9.0)}
    compare_nodes(by_host)
    failures = {host: [row["text"] for row in rows if not row["passed"]] for host, rows in by_host.items()}
    assert failures == {"a": [], "b": [], "c": [], "d": ["memory_gbs is 9.00, and 30.00 on other nodes"]}


def test_a_folder_that_cannot_be_written_is_a_reason_and_no_traceback(tmp_path, monkeypatch):
    """On a read-only file system the removal of what does not exist fails too, and must not hide the reason."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckError, match="cannot be written"):
        CHECKS["disk"](tmp_path)
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CheckError, match="cannot be created"):
        CHECKS["disk"](tmp_path)


def test_an_oversubscribed_machine_is_said_and_a_slow_disk_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(node_checks.os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    assert "the machine is oversubscribed" in CHECKS["load"](tmp_path)[0]
    monkeypatch.setattr(node_checks, "_DISK_BYTES", 2**20)
    monkeypatch.setattr(node_checks, "_MIN_DISK_GBS", 1e9)
    with pytest.raises(CheckError, match="too slow for checkpoints"):
        CHECKS["disk"](tmp_path)


def test_the_slow_node_of_slow_pairs():
    rates = {("a", "b"): 10.0, ("b", "c"): 1.0, ("c", "d"): 1.1, ("d", "a"): 9.0, ("a", "c"): 1.0, ("b", "d"): 11.0}
    assert find_slow(rates) == ["c"]
    assert find_slow({("a", "b"): 1.0}) == [] and find_slow({}) == []
    # Two nodes have nobody to compare with, but less than 10 MB/s is broken.
    assert find_slow({("a", "b"): 0.001}) == ["a", "b"]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 33])
def test_nodes_meet_in_disjoint_pairs(count):
    rounds = pair_nodes(count)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert len(set(pairs)) == len(pairs) and all(0 <= a < b < count for a, b in pairs)
    for own in rounds:
        assert len({node for pair in own for node in pair}) == 2 * len(own) >= count - 1
    if count <= 4:
        assert len(pairs) == count * (count - 1) // 2


@pytest.fixture
def name_service(monkeypatch) -> tuple[dict[str, str], dict[str, str]]:
    """Addresses of names, and names of addresses, of two nodes."""
    addresses = {"node1": "10.0.0.1", "node2": "10.0.0.2"}
    names = {"10.0.0.1": "node1.cluster", "10.0.0.2": "node2"}

    def find(table: dict[str, str], key: str) -> str:
        if key not in table:
            raise OSError
        return table[key]

    monkeypatch.setattr(
        node_checks.socket, "getaddrinfo", lambda name, *_, **__: [(0, 0, 0, "", (find(addresses, name), 0))]
    )
    monkeypatch.setattr(node_checks.socket, "gethostbyaddr", lambda address: (find(names, address), [], [address]))
    return addresses, names


def test_a_name_that_leads_elsewhere_fails(tmp_path, monkeypatch):
    assert check_name(tmp_path)[0].startswith(f"{socket.gethostname()} is ")
    monkeypatch.setattr(node_checks, "_find_address", lambda _: "192.0.2.1")
    refuse = Mock(side_effect=OSError)
    monkeypatch.setattr(node_checks.socket, "create_connection", refuse)
    with pytest.raises(CheckError, match=r"is 192\.0\.2\.1, which does not lead to this machine"):
        check_name(tmp_path)
    assert refuse.call_args.args[0][0] == "192.0.2.1"


def test_names_and_addresses_lead_to_each_other(name_service):
    addresses, names = name_service
    assert check_names("node1", "node2")[0] == "2 names and addresses"
    # Nobody needs the name of an address, and a machine may have several of them.
    names |= {"10.0.0.1": "login.cluster"}
    del names["10.0.0.2"]
    assert check_names("node1", "node2")[0] == "2 names and addresses; no name is known for 10.0.0.2"
    names["10.0.0.2"] = "node1"
    with pytest.raises(CheckError, match=r"node2 is 10\.0\.0\.2, and 10\.0\.0\.2 is node1; change DNS or /etc/hosts"):
        check_names("node1", "node2")
    del addresses["node1"]
    with pytest.raises(CheckError, match="no address is known for node1; add it to /etc/hosts"):
        check_names("node1", "node2")


def test_the_slow_group_of_an_axis_names_its_node():
    hosts = ["a", "a", "b", "b", "c", "c"]
    within = {(0, 1): 9.0, (2, 3): 1.0, (4, 5): 10.0}
    assert find_slow_hosts(within, hosts) == ["b"]
    assert describe_groups(within) == (
        "1.00 GB/s on the bus of ranks 2 and 3, the slowest of 3 groups; the median is 9.00 GB/s"
    )
    # A node with a healthy group of the axis is not at fault, nor is anybody beside equals.
    assert find_slow_hosts({(0, 2): 9.0, (1, 4): 1.0, (3, 5): 9.0}, hosts) == []
    assert find_slow_hosts({(0, 1, 2, 3, 4, 5): 0.1}, hosts) == []
    # A whole axis can be slow beside what cards of this kind usually reach.
    assert find_slow_hosts({(0, 1): 9.0, (2, 3): 9.0}, hosts[:4], usual_rate=100.0) == ["a", "b"]
    assert describe_groups({(0, 1): 9.0}, 100.0) == "9.00 GB/s on the bus of 2 ranks; 100.00 GB/s are expected"


def network(rank: int, world: int, folder: str, file: str | None) -> dict[str, list[dict[str, object]]]:
    from dataclasses import replace

    ranks = replace(this_rank(rank, world), host=f"node{rank // 2}")
    config = None if file is None else load_config(Path(file), [])
    # The second node has another folder of the same name.
    results, figures = check_network(ranks, Path(folder) / ("other" if rank > 1 else "shared"), config)
    assert figures["nic_gbs"] > 0
    return results


def test_folders_names_and_axes_of_nodes_are_checked(ranks, tmp_path, tiny_run):
    for name in ("other", "shared"):
        (tmp_path / name).mkdir()
    results = ranks.run(network, 4, str(tmp_path), None)
    assert results[0].keys() == {"node0", "node1"}
    checks = {host: {row["check"]: row["passed"] for row in rows} for host, rows in results[0].items()}
    # Nodes of these names do not exist. How fast groups are beside each other says nothing on a busy machine.
    for host, is_shared in (("node0", True), ("node1", False)):
        own = {check: passed for check, passed in checks[host].items() if not check.startswith("all-reduce")}
        assert own == {"clock": True, "names of nodes": False, "shared folder": is_shared, "pairs": True}
    assert checks["node0"]["all-reduce: all ranks"]
    assert any("no address is known for node0" in str(row["text"]) for row in results[0]["node1"])
    assert list((tmp_path / "shared").iterdir()) == []
    axes = describe_axes(results[0])
    assert axes.keys() == {"all ranks", "across nodes", "within a node"}
    # The axes of a run.
    (tmp_path / "run.yaml").write_text(dump_yaml(tiny_run({"parallel.tensor": 2})))
    axes = describe_axes(ranks.run(network, 4, str(tmp_path), str(tmp_path / "run.yaml"))[0])
    assert axes.keys() == {"all ranks", "shard", "tensor"}
    assert re.search(r"of ranks (0 and 2|1 and 3), the slowest of 2 groups", axes["shard"])
    assert re.search(r"of ranks (0 and 1|2 and 3), the slowest of 2 groups", axes["tensor"])


def describe_axes(results: dict[str, list[dict[str, object]]]) -> dict[str, str]:
    """What the doctor says about each axis."""
    rows = [row for own in results.values() for row in own]
    return {
        str(row["check"]).removeprefix("all-reduce: "): str(row["text"])
        for row in rows
        if str(row["check"]).startswith("all-reduce: ")
    }


def test_the_machine_file_is_what_the_planner_reads():
    from jingu.plan.machine import Machine, measure_machine

    text = yaml.safe_dump(measure_machine().model_dump(mode="json") | {"disk_gbs": 0.5, "nic_gbs": 2.0})
    assert Machine.model_validate(yaml.safe_load(text)).nic_gbs == 2.0
