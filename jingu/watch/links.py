"""Connections to other nodes: how fast they deliver, as Linux counts it for each TCP connection.

Nothing is sent for this. RDMA does not appear here.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from statistics import median

# man 7 netlink and sock_diag; linux/inet_diag.h and linux/tcp.h. A request for the established TCP connections of a
# family, with their tcp_info.
_SOCK_DIAG = 4
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48x")
_BY_FAMILY, _ERROR, _DONE = 20, 2, 3
_DUMP = 0x301
_WITH_INFO, _INFO = 2, 2
_ESTABLISHED = 1 << 1
# Of an answer: the addresses, and the inode of the socket; of tcp_info: bytes that arrived, and µs with data under way.
_ADDRESSES = struct.Struct("=8x16s16s")
_INODE_OFFSET, _MESSAGE_BYTES = 68, 72
_ACKED_OFFSET, _BUSY_OFFSET = 120, 168
_SIZE = struct.Struct("=Q")

# A slow link delivers at less than this share of the rate of others, and is busy for so large a share of the time.
_SLOW_SHARE = 0.2
_BUSY_SHARE = 0.25
# Less than this may wait for delayed acknowledgements alone.
_MIN_BYTES = 2**20


@dataclass(frozen=True)
class Link:
    """What the ranks of a node sent to another node.

    Attributes:
        host: of the sender.
        source, destination: addresses.
        sent: bytes that arrived.
        busy: seconds in which data was under way.
        seconds: for which this was measured.
    """

    host: str
    source: str
    destination: str
    sent: int
    busy: float
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second while it is busy."""
        return self.sent / max(self.busy, 1e-9)


def describe_slow_link(links: Sequence[Link], host: str | None = None) -> str | None:
    """Return a sentence about a link that is slow beside the others; None if there is none.

    Args:
        host: only links from this node count.
    """
    used = [link for link in links if link.sent >= _MIN_BYTES]
    if len(used) < 2:
        return None
    slowest = min(used, key=lambda link: link.rate)
    usual = median(link.rate for link in used if link is not slowest)
    share = slowest.busy / slowest.seconds
    if slowest.rate > _SLOW_SHARE * usual or share < _BUSY_SHARE or host not in (None, slowest.host):
        return None
    hosts = {link.source: link.host for link in links}
    target = hosts.get(slowest.destination, slowest.destination)
    return (
        f"the network from {slowest.host} to {target} delivers {slowest.rate / 1e6:,.3g} MB/s (others: "
        f"{usual / 1e6:,.3g} MB/s), and is busy for {min(share, 1.0):.0%} of the time."
    )


class LinkMeter:
    """Measures the links of a node's ranks.

    Args:
        pids: of the ranks.
    """

    def __init__(self, host: str, pids: Sequence[int]) -> None:
        self._host = host
        self._pids = pids
        self.begin()

    def begin(self) -> None:
        """Begin to measure."""
        self._start = time.monotonic()
        self._before = _read_connections(self._pids)

    def measure(self) -> list[Link]:
        """Return what was sent since the begin."""
        seconds = time.monotonic() - self._start
        totals: dict[tuple[str, str], tuple[int, int]] = {}
        for inode, (source, destination, sent, busy) in _read_connections(self._pids).items():
            *_, sent_before, busy_before = self._before.get(inode, ("", "", 0, 0))
            # Connections that are busy at the same time share the link.
            all_sent, longest = totals.get((source, destination), (0, 0))
            totals[source, destination] = (all_sent + sent - sent_before, max(longest, busy - busy_before))
        return [Link(self._host, *ends, sent, busy / 1e6, seconds) for ends, (sent, busy) in totals.items()]


def _read_connections(pids: Sequence[int]) -> dict[int, tuple[str, str, int, int]]:
    """Return connections of processes to other machines, by inode: addresses, bytes that arrived, and busy µs."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    name = os.fspath(path.readlink())
                    if name.startswith("socket:["):
                        inodes.add(int(name[len("socket:[") : -1]))
    connections: dict[int, tuple[str, str, int, int]] = {}
    # Systems without this interface have no links to tell about.
    with suppress(OSError, struct.error):
        for family in (socket.AF_INET, socket.AF_INET6):
            for inode, source, destination, sent, busy in _dump(family):
                if inode in inodes and source != destination:
                    connections[inode] = (source, destination, sent, busy)
    return connections


def _dump(family: int) -> Iterator[tuple[int, str, str, int, int]]:
    """Yield inode, addresses, bytes and busy µs of all connections of a family."""
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, _WITH_INFO, 0, _ESTABLISHED)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as netlink:
        netlink.settimeout(1.0)
        netlink.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _DUMP, 1, 0) + request)
        while True:
            data = netlink.recv(2**18)
            while data:
                length, kind, *_ = _HEADER.unpack_from(data)
                if kind in (_ERROR, _DONE):
                    return
                message, data = data[_HEADER.size : length], data[-(-length // 4) * 4 :]
                inode = int.from_bytes(message[_INODE_OFFSET:_MESSAGE_BYTES], "little")
                info = _find_attribute(message[_MESSAGE_BYTES:], _INFO)
                if len(info) >= _BUSY_OFFSET + _SIZE.size:
                    source, destination = (_format_address(end, family) for end in _ADDRESSES.unpack_from(message))
                    sent, busy = (_SIZE.unpack_from(info, offset)[0] for offset in (_ACKED_OFFSET, _BUSY_OFFSET))
                    yield inode, source, destination, sent, busy


def _format_address(data: bytes, family: int) -> str:
    if family == socket.AF_INET:
        return str(ip_address(data[:4]))
    address = IPv6Address(data)
    return str(address.ipv4_mapped or address)


def _find_attribute(data: bytes, kind: int) -> bytes:
    """Return the value of a netlink attribute; empty if there is none."""
    while len(data) >= 4:
        length, own = struct.unpack_from("=HH", data)
        if own == kind or length < 4:
            return data[4:length]
        data = data[-(-length // 4) * 4 :]
    return b""
