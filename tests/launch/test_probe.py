"""Nodes connect to each other before a start: which node explains what fails."""

from __future__ import annotations

import socket

import pytest

from jingu.launch import probe as probe_module
from jingu.launch.hosts import Node, NodeSelection
from jingu.launch.probe import (
    Failure,
    ProbeListener,
    Target,
    choose_targets,
    find_culprits,
    format_endpoint,
    is_loopback,
    probe,
)
from jingu.runtime.peer_watch import local_address

REFUSED = Failure("refuses connections", "target")
SILENT = Failure("does not answer", "target")
NO_ROUTE = Failure("cannot be reached (Invalid argument)", "source")
STALLED = Failure("accepts connections, but large packets do not arrive", "both")


@pytest.mark.parametrize(
    ("failures", "culprits"),
    [
        ({}, []),
        # A firewall on one node, seen by the others.
        ({("a", "b"): REFUSED, ("c", "b"): REFUSED}, ["b"]),
        ({("b", "a"): SILENT, ("c", "a"): SILENT}, ["a"]),
        # Two nodes: that which refuses.
        ({("b", "a"): REFUSED}, ["a"]),
        # A node without a route to another one, which does not get its answers back either.
        ({("c", "a"): NO_ROUTE, ("a", "c"): SILENT}, ["c"]),
        # Large packets pass to the healthy node, but not between those with a large MTU.
        ({("b", "c"): STALLED, ("c", "b"): STALLED}, ["b", "c"]),
        # Two firewalls.
        ({(x, y): REFUSED for x in "abcd" for y in "bd" if x != y}, ["b", "d"]),
        # Nobody reaches anybody.
        ({(x, y): SILENT for x in "abc" for y in "abc" if x != y}, ["a", "b", "c"]),
    ],
)
def test_the_fewest_nodes_that_explain_all_failures(failures, culprits):
    found = find_culprits(failures)
    assert sorted(found) == culprits
    assert all(" " in sentence for sentence in found.values())


def test_connections_are_tried_in_both_directions():
    nodes = [Target(str(number), "", 0) for number in range(30)]
    pairs = {(index, int(target.host)) for index in range(30) for target in choose_targets(index, nodes)}
    assert all((b, a) in pairs for a, b in pairs if 0 not in (a, b))
    assert all((index, 0) in pairs for index in range(1, 30)) and all(a != b for a, b in pairs)


def test_data_arrives_or_the_reason_is_known(monkeypatch):
    monkeypatch.setattr(probe_module, "PROBE_SECONDS", 0.2)
    listener = ProbeListener()
    with socket.create_server(("127.0.0.1", 0)) as deaf, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        targets = [Target("good", "127.0.0.1", listener.port), Target("six", "::1", listener.port)]
        targets += [Target("deaf", "127.0.0.1", deaf.getsockname()[1])]
        targets += [Target("closed", "127.0.0.1", closed.getsockname()[1]), Target("none", "no-such-host.invalid", 1)]
        failures = probe(targets)
    listener.close()
    failures.pop("six", None)  # some machines have no IPv6
    assert sorted(failures) == ["closed", "deaf", "none"]
    assert "large packets do not arrive" in failures["deaf"].text and "firewall" in failures["closed"].text
    assert probe([]) == {}


def test_addresses_that_only_this_machine_reaches():
    assert all(map(is_loopback, ("127.0.0.1", "127.0.1.1", "::1")))
    assert not any(map(is_loopback, ("10.77.0.1", "fd00::1", "node1", "")))


def test_addresses_of_both_families(tmp_path):
    assert local_address("127.0.0.1") == "127.0.0.1" and local_address("no-such-host.invalid") == ""
    assert format_endpoint("fd00::1", 5) == "[fd00::1]:5" and format_endpoint("node1", 5) == "node1:5"
    (tmp_path / "hosts").write_text("fd00::1 slots=2\nfd00::2 slots=2\nnode3 slots=1\n")

    def select(include: str) -> list[Node]:
        return NodeSelection(tmp_path / "hosts", include).nodes()

    assert select("fd00::1@node3") == [Node("fd00::1", (0, 1)), Node("node3", (0,))]
    assert select("[fd00::2]:1@fd00::1:0@node3:0") == [
        Node("fd00::2", (1,)),
        Node("fd00::1", (0,)),
        Node("node3", (0,)),
    ]
