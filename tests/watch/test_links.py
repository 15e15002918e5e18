"""Links between nodes: what Linux counts of them, and which one is slow; clocks that differ."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace

import pytest

from jingu.watch.activity import describe_clocks
from jingu.watch.diagnosis import RankReport, judge
from jingu.watch.links import Link, LinkMeter, describe_slow_link

USUAL = Link("node1", "10.0.0.1", "10.0.0.2", 10**9, 2.0, 10.0)


def links(*changes: dict[str, float]) -> list[Link]:
    """Links from each of three nodes to the next one."""
    return [
        replace(USUAL, host=f"node{own}", source=f"10.0.0.{own}", destination=f"10.0.0.{own % 3 + 1}", **change)
        for own, change in enumerate(changes, 1)
    ]


def test_the_slow_link_is_named_by_its_ends():
    slow = links({}, {"sent": 10_000_000, "busy": 8.0}, {"sent": 2 * 10**9})
    sentence = "the network from node2 to node3 delivers 1.25 MB/s (others: 750 MB/s), and is busy for 80% of the time."
    assert describe_slow_link(slow) == sentence == describe_slow_link(slow, "node2")
    assert describe_slow_link(slow, "node1") is None
    verdict = judge([RankReport(0, "node1", "running", links=slow)], 1, 60.0)
    assert verdict == f"Training has made no progress for 60 s in step 1.\n  Data is still under way: {sentence}"


def test_what_is_usual_is_no_slow_link():
    assert describe_slow_link([]) is None and describe_slow_link([USUAL]) is None
    assert describe_slow_link(links({}, {"sent": 3 * 10**8}, {})) is None
    # Rarely in use, or only by messages that wait for delayed acknowledgements.
    assert describe_slow_link(links({}, {"sent": 10_000_000, "busy": 1.0}, {})) is None
    assert describe_slow_link(links({}, {"sent": 500_000, "busy": 8.0}, {})) is None


@pytest.mark.parametrize("addresses", [("127.0.0.1", "127.0.0.2"), ("::ffff:127.0.0.1", "::ffff:127.0.0.2")])
def test_bytes_of_connections_are_those_that_arrived(addresses):
    size = 3_000_001
    family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
    with socket.socket(family) as listener, socket.socket(family) as client:
        listener.bind((addresses[0], 0))
        listener.listen()
        client.bind((addresses[1], 0))
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        client.sendall(b"before")
        assert server.recv(6, socket.MSG_WAITALL) == b"before"
        meter = LinkMeter("here", [os.getpid()])
        sender = threading.Thread(target=client.sendall, args=(bytes(size),))
        sender.start()
        assert len(server.recv(size, socket.MSG_WAITALL)) == size
        sender.join()
        server.sendall(b"back")
        client.recv(4, socket.MSG_WAITALL)
        measured = {(link.source, link.destination): link for link in meter.measure()}
        server.close()
    link = measured["127.0.0.2", "127.0.0.1"]
    # The kernel counts time in ticks of some milliseconds.
    assert link.sent == size and 0 <= link.busy <= link.seconds + 0.01 and link.host == "here"


def test_a_clock_that_differs_is_named():
    assert describe_clocks(["a", "a", "b", "c"], [100.0, 100.2, 400.0, 99.0]) == [
        "The clock of b is 300 s ahead of those of the other nodes: times in logs are wrong there, and connections "
        "with certificates fail. Let NTP set it."
    ]
    assert "clock of c is 60 s behind" in describe_clocks(["a", "b", "c"], [100.0, 100.0, 40.0])[0]
    assert describe_clocks(["a", "b"], [100.0, 101.0]) == []
