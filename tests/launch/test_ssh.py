"""`jingu launch ssh` with a stand-in for ssh: nodes that are not reached, do not answer, or differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jingu.cli import main
from jingu.launch import node_connection, ssh
from jingu.launch.hosts import Node, NodeSelection
from jingu.launch.node import HANDSHAKE
from jingu.launch.start import installed_versions
from jingu.runtime import ranks
from tests.launch.programs import install

# node1 answers as a node does; node2 as the variable says.
SSH = """
words = sys.argv[1:]
json.dump(words, open(RECORD, "w"))
host = words[-2]
print("Welcome!", flush=True)
if host == "node2" and os.environ["NODE2"] == "silent":
    signal.pause()
if host == "node2" and os.environ["NODE2"] == "locked":
    print("Permission denied (publickey).")
    sys.exit(255)
print("a line without an end", end=" ", flush=True)  # as `.bashrc` may print
versions = json.loads(os.environ["VERSIONS"]) | ({"torch": "1.2.3"} if host == "node2" else {})
print("HANDSHAKE" + json.dumps({"host": host, "address": host, "port": 1, "versions": versions}), flush=True)
sys.stdin.read()
""".replace("HANDSHAKE", HANDSHAKE)


@pytest.fixture
def ssh_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in leaves the words that it was called with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERSIONS", json.dumps(installed_versions()))
    Path("hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    return install(monkeypatch, tmp_path / "bin", "ssh", SSH)


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ("locked", "node2: the host cannot be reached by ssh (Permission denied (publickey))."),
        ("silent", "node2: the host cannot be reached by ssh (it does not answer)."),
        ("other", "node2: the node has torch 1.2.3 ("),
    ],
)
def test_a_node_with_a_fault_is_one_sentence_and_in_the_file_of_the_doctor(
    ssh_words, monkeypatch, capsys, state, sentence
):
    monkeypatch.setenv("NODE2", state)
    if state == "silent":
        monkeypatch.setattr(ssh, "_ANSWER_SECONDS", 0.0)
        Path("hosts").write_text("node2 slots=1\n")
    Path("failing_nodes.txt").write_text("of an earlier doctor\n")
    assert main(["launch", "ssh", "--hostfile", "hosts", "doctor"]) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.splitlines()) == 1
    assert Path("failing_nodes.txt").read_text() == "node2\n"


def test_who_is_unreachable_is_known_within_ten_seconds(ssh_words, monkeypatch):
    """Each way to a host has a limit of its own: connecting to it, and to the place where the ranks meet."""
    monkeypatch.setenv("NODE2", "locked")
    assert main(["launch", "ssh", "--hostfile", "hosts", "--ssh-options=-p 22", "doctor"]) == 2
    words = json.loads(ssh_words.read_text())
    assert words[:-2] == [*node_connection.SSH_OPTIONS, "-o", "ServerAliveInterval=15", "-p", "22"]
    assert "BatchMode=yes" in words and f"ConnectTimeout={node_connection.CONNECT_SECONDS}" in words
    assert node_connection.CONNECT_SECONDS + 1 < 10 > ranks.REACH_SECONDS


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("node1:2@node2@node1:0", None, [Node("node1", (0, 2)), Node("node2", (0,))]),
        ("node1@node1:0", None, [Node("node1", (0, 1, 2))]),
        (None, "node1:0@node1:1", [Node("node1", (2,)), Node("node2", (0,))]),
        (None, "node1:0@node1:1,2", [Node("node2", (0,))]),
    ],
)
def test_entries_of_one_host_are_merged(tmp_path, include, exclude, expected):
    (tmp_path / "hosts").write_text("node1 slots=3\nnode2 slots=1\n")
    assert NodeSelection(tmp_path / "hosts", include, exclude).nodes() == expected


def test_wrong_options_of_ssh_and_a_missing_ssh_are_one_sentence(ssh_words, monkeypatch, capsys):
    command = ["launch", "ssh", "--hostfile", "hosts", "--ssh-options", "-i 'key", "doctor"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "--ssh-options:" in error and "cannot be divided into words (no closing quotation)" in error
    monkeypatch.setenv("PATH", "")
    assert main(command) == 2
    assert "there is no ssh on this machine." in capsys.readouterr().err
