"""The throughput of connections to other nodes, from the counters that Linux keeps for each TCP connection.

The measurement sends nothing. RDMA traffic is not included.
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
# Layout of a reply: the addresses and the inode of the socket; in tcp_info: the acknowledged bytes (tcpi_bytes_acked)
# and the µs with data in flight (tcpi_busy_time).
_ADDRESSES = struct.Struct("=8x16s16s")
_INODE_OFFSET, _MESSAGE_BYTES = 68, 72
_ACKED_OFFSET, _BUSY_OFFSET = 120, 168
_SIZE = struct.Struct("=Q")

# A link is slow if its rate is below this share of the others' rate and it is busy for at least this share of the time.
_SLOW_SHARE = 0.2
_BUSY_SHARE = 0.25
# With fewer bytes, the busy time may be mostly delayed acknowledgements.
_MIN_BYTES = 2**20


@dataclass(frozen=True)
class Link:
    """The traffic from the ranks of a node to another node.

    Attributes:
        host: name of the sender.
        source, destination: addresses.
        sent: acknowledged bytes.
        busy: seconds with data in flight.
        seconds: duration of the measurement.
    """

    host: str
    source: str
    destination: str
    sent: int
    busy: float
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second while data is in flight."""
        return self.sent / max(self.busy, 1e-9)


def describe_slow_link(links: Sequence[Link], host: str | None = None) -> str | None:
    """Return a sentence about the slowest link if it is slow compared with the others, else None.

    Args:
        host: report only a link from this node; None reports any.
    """
    used_links = [link for link in links if link.sent >= _MIN_BYTES]
    if len(used_links) < 2:
        return None
    slowest = min(used_links, key=lambda link: link.rate)
    usual = median(link.rate for link in used_links if link is not slowest)
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
        host: name of the node.
        pids: process ids of the ranks.
    """

    def __init__(self, host: str, pids: Sequence[int]) -> None:
        self._host = host
        self._pids = pids
        self.begin()

    def begin(self) -> None:
        """Start a measurement."""
        self._start = time.monotonic()
        self._before = _read_connections(self._pids)

    def measure(self) -> list[Link]:
        """Return the traffic since the start of the measurement."""
        seconds = time.monotonic() - self._start
        totals: dict[tuple[str, str], tuple[int, int]] = {}
        for inode, (source, destination, sent_bytes, busy) in _read_connections(self._pids).items():
            *_, sent_before, busy_before = self._before.get(inode, ("", "", 0, 0))
            # Connections may be busy at the same time, so their busy times must not be added up.
            all_sent, longest = totals.get((source, destination), (0, 0))
            totals[source, destination] = (all_sent + sent_bytes - sent_before, max(longest, busy - busy_before))
        return [Link(self._host, *ends, sent_bytes, busy / 1e6, seconds) for ends, (sent_bytes, busy) in totals.items()]


def _read_connections(pids: Sequence[int]) -> dict[int, tuple[str, str, int, int]]:
    """Return connections of processes to other machines by inode: addresses, acknowledged bytes, and busy µs."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    name = os.fspath(path.readlink())
                    if name.startswith("socket:["):
                        inodes.add(int(name[len("socket:[") : -1]))
    connections: dict[int, tuple[str, str, int, int]] = {}
    # Some containers do not offer this interface: then there are no links.
    with suppress(OSError, struct.error):
        for family in (socket.AF_INET, socket.AF_INET6):
            for inode, source, destination, sent_bytes, busy in _dump(family):
                if inode in inodes and source != destination:
                    connections[inode] = (source, destination, sent_bytes, busy)
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
                    sent_bytes, busy = (_SIZE.unpack_from(info, offset)[0] for offset in (_ACKED_OFFSET, _BUSY_OFFSET))
                    yield inode, source, destination, sent_bytes, busy


def _format_address(data: bytes, family: int) -> str:
    if family == socket.AF_INET:
        return str(ip_address(data[:4]))
    address = IPv6Address(data)
    return str(address.ipv4_mapped or address)


def _find_attribute(data: bytes, kind: int) -> bytes:
    """Return the value of a netlink attribute; empty if there is none."""
    while len(data) >= 4:
        length, attribute_kind = struct.unpack_from("=HH", data)
        if attribute_kind == kind or length < 4:
            return data[4:length]
        data = data[-(-length // 4) * 4 :]
    return b""
