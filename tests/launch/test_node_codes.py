"""The exit code of a Slurm job from the files of its nodes, and from what Slurm and slurmd say of a node."""

from __future__ import annotations

import socket

import pytest

from jingu.launch.node_codes import NodeCodes, find_lost_node, main, read_code
from tests.launch.programs import install

# What Slurm 22.05 prints, with fewer fields.
SCONTROL = """
if sys.argv[1:] == ["show", "config"]:
    print("SlurmctldPort           = 6817\\nSlurmdPort              = 1\\nSlurmdTimeout           = 300 sec")
else:
    assert sys.argv[1:] == ["--oneliner", "show", "node", "n[0-1]"]
    for name, port, state in NODES:
        print(f"NodeName={name} Arch=x86_64 NodeAddr=127.0.0.1 NodeHostName=vm Port={port} State={state} Weight=1")
"""


@pytest.fixture
def slurm(monkeypatch, tmp_path):
    """Return a function that says what Slurm knows about the nodes: name, port and state of each."""

    def show(*nodes: tuple[str, int, str]) -> None:
        install(monkeypatch, tmp_path / "bin", "scontrol", f"NODES = {nodes!r}\n{SCONTROL}")

    return show


def test_a_node_is_lost_when_slurmd_ends_or_slurm_says_so(slurm):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port, closed_port = server.getsockname()[1], closed.getsockname()[1]
        slurm(("n0", port, "ALLOCATED"), ("n1", port, "IDLE+DRAIN"))
        assert find_lost_node("n[0-1]", 0) is None
        slurm(("n0", port, "ALLOCATED"), ("n1", closed_port, "ALLOCATED"))
        assert find_lost_node("n[0-1]", 0) == "n1"
        for state in ("DOWN", "ALLOCATED+NOT_RESPONDING", "DOWN*", "MIXED+REBOOT_ISSUED"):
            slurm(("n0", port, state), ("n1", port, "ALLOCATED"))
            assert find_lost_node("n[0-1]", 0) == "n0"


def test_nothing_is_lost_where_slurm_does_not_answer(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_lost_node("n[0-1]", 0) is None


@pytest.mark.parametrize(("state", "printed"), [("ALLOCATED", "137 counted"), ("DOWN", "69 always")])
def test_a_killed_rank_on_a_lost_node_is_a_lost_node(slurm, monkeypatch, tmp_path, capsys, state, printed):
    monkeypatch.setattr("jingu.launch.node_codes._STEADY_SECONDS", 0.0)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-1]")
    codes = tmp_path / "codes"
    codes.mkdir()
    NodeCodes(codes, 0).finish(69)
    NodeCodes(codes, 1).finish(137)
    assert read_code(codes, 1) == 137
    with socket.create_server(("127.0.0.1", 0)) as server:
        slurm(("n0", server.getsockname()[1], "ALLOCATED"), ("n1", server.getsockname()[1], state))
        main([str(codes), "1"])
    assert capsys.readouterr().out.strip() == printed


def test_a_node_without_a_code_is_lost_unless_a_person_must_fix_another(tmp_path):
    first, second = NodeCodes(tmp_path, 0), NodeCodes(tmp_path, 1)
    first.finish(143)
    assert read_code(tmp_path, 137) == 69
    first.finish(2)
    assert read_code(tmp_path, 137) == 2
    second.finish(0)
    assert read_code(tmp_path, 0) == 2
