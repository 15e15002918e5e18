"""The doctor finds what is planted, and passes a healthy machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from jingu.launch import doctor as doctor_module
from jingu.launch.doctor import CHECKS, FAILING_NODES, CheckError, compare_nodes, doctor, find_slow, run_check
from jingu.launch.network import check_network, pair_nodes
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
    monkeypatch.setattr(doctor_module, "CHECKS", {"memory": None, "disk": None})
    Path("runs").write_text("a file where the folder should be")
    assert doctor(Path("runs")) == 2
    memory, disk, summary = capsys.readouterr().out.splitlines()
    assert " ok " in memory and " FAILS  disk " in disk and "File exists" in disk
    assert summary.startswith("1 of 1 nodes fail")
    assert FAILING_NODES.read_text() == f"{disk.split()[0]}\n"


def test_a_check_that_hangs_or_dies_fails(tmp_path, monkeypatch):
    assert run_check("memory", tmp_path, seconds=0.001)["text"] == "no answer in 0 s"
    result = run_check("no such check", tmp_path)
    assert not result["passed"] and "KeyError" in result["text"]


def test_a_machine_with_too_little_of_something_fails(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr(doctor_module.shutil, "disk_usage", lambda _: usage)
    for name, text in (("disk", "has room for only 1 MiB"), ("shared memory", "/dev/shm has only 1 MiB")):
        with pytest.raises(CheckError, match=text):
            CHECKS[name](tmp_path)


def test_rdma_needs_locked_memory(tmp_path, monkeypatch):
    limits = [2**23, 64]
    monkeypatch.setattr(doctor_module.resource, "getrlimit", lambda _: (limits[0], limits[0]))
    monkeypatch.setattr(doctor_module, "RDMA_DEVICES", tmp_path / "infiniband")
    assert CHECKS["locked memory"](tmp_path)[0] == "8 MiB, and no RDMA device needs it"
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    with pytest.raises(CheckError, match="only 8 MiB may be locked"):
        CHECKS["locked memory"](tmp_path)
    limits[0] = doctor_module.resource.RLIM_INFINITY
    assert CHECKS["locked memory"](tmp_path) == ("unlimited", {})


def test_nodes_that_differ_from_the_others_fail(tmp_path):
    def node(driver: str, tflops: float) -> list[dict[str, Any]]:
        versions = {"check": "versions", "passed": True, "text": f"torch 2.13.0, driver {driver}", "figures": {}}
        figures = {"matmul_tflops": tflops, "memory_gbs": 3000.0}
        return [versions, {"check": "devices", "passed": True, "text": "", "figures": figures}]

    by_host = {"a": node("570", 700.0), "b": node("570", 300.0), "c": node("550", 690.0), "d": node("570", 710.0)}
    compare_nodes(by_host)
    failures = {host: [row["text"] for row in rows if not row["passed"]] for host, rows in by_host.items()}
    assert failures == {
        "a": [],
        "b": ["matmul_tflops is 300.00, and 695.00 on other nodes"],
        "c": ["most nodes have torch 2.13.0, driver 570"],
        "d": [],
    }
    text, _ = CHECKS["versions"](tmp_path)
    assert f"torch {torch.__version__}" in text and "cores " in text


def test_the_slow_node_of_slow_pairs():
    rates = {("a", "b"): 10.0, ("b", "c"): 1.0, ("c", "d"): 1.1, ("d", "a"): 9.0, ("a", "c"): 1.0, ("b", "d"): 11.0}
    assert find_slow(rates) == ["c"]
    assert find_slow({("a", "b"): 1.0}) == [] and find_slow({}) == []


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 33])
def test_nodes_meet_in_disjoint_pairs(count):
    rounds = pair_nodes(count)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert len(set(pairs)) == len(pairs) and all(0 <= a < b < count for a, b in pairs)
    for own in rounds:
        assert len({node for pair in own for node in pair}) == 2 * len(own) >= count - 1
    if count <= 4:
        assert len(pairs) == count * (count - 1) // 2


def network(rank: int, world: int, folder: str) -> dict[str, list[dict[str, object]]]:
    from dataclasses import replace

    ranks = replace(this_rank(rank, world), host=f"node{rank // 2}")
    # The second node has another folder of the same name.
    # Its own /etc/hosts lacks the first one.
    with mock.patch("jingu.launch.network.has_address", lambda name: rank < 2 or name == "node1"):
        results, figures = check_network(ranks, Path(folder) / ("other" if rank > 1 else "shared"))
    assert figures["nic_gbs"] > 0
    return results


def test_a_folder_that_is_not_shared_is_named(ranks, tmp_path):
    for name in ("other", "shared"):
        (tmp_path / name).mkdir()
    results = ranks.run(network, 4, str(tmp_path))
    assert results[0].keys() == {"node0", "node1"}
    checks = {host: {row["check"]: row["passed"] for row in rows} for host, rows in results[0].items()}
    names = {"names of nodes": True}
    assert checks["node0"] == {"clock": True, "shared folder": True, "pairs": True, "all-reduce": True} | names
    assert checks["node1"] == {"clock": True, "shared folder": False, "pairs": True, "names of nodes": False}
    assert any("no address is known for node0" in row["text"] for row in results[0]["node1"])
    assert list((tmp_path / "shared").iterdir()) == []


def test_the_machine_file_is_what_the_planner_reads():
    from jingu.plan.machine import Machine, measure_machine

    text = yaml.safe_dump(measure_machine().model_dump(mode="json") | {"disk_gbs": 0.5, "nic_gbs": 2.0})
    assert Machine.model_validate(yaml.safe_load(text)).nic_gbs == 2.0
