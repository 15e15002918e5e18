"""Test whether the nodes of a run can connect to each other, before anything starts. Does not import torch.

Each node listens on a port, connects to others, and sends them one packet of the largest size and then much data: some
faults, such as different MTUs, let connections pass but no large packets.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from jingu.runtime.peer_watch import local_address

# Time to connect, and time for the data to arrive.
PROBE_SECONDS = 5.0
_BYTES = 2**18
# A node tests this many of the nodes after it, besides the first one.
_PARTNERS = 8
_DONE = b"\n"
# Errors of the machine that connects; others point at the machine that should answer.
_OWN_ERRORS = (errno.ENETUNREACH, errno.EINVAL, errno.EACCES, errno.EPERM, errno.ENETDOWN, errno.EADDRNOTAVAIL)


class Target(NamedTuple):
    """A node to connect to."""

    host: str
    address: str
    port: int


class Failure(NamedTuple):
    """A connection that failed.

    Attributes:
        text: what happened, after the name of the target, such as `refuses connections`.
        suspect: source, target, or both.
    """

    text: str
    suspect: str


class ProbeListener:
    """Accepts the connections of other nodes, and reads their data.

    Attributes:
        port: the port on which it listens, on all addresses.
    """

    def __init__(self) -> None:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    @staticmethod
    def _read(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.settimeout(2 * PROBE_SECONDS)
            for _ in range(2):
                while not (data := connection.recv(_BYTES)).endswith(_DONE):
                    if not data:
                        return
                connection.sendall(_DONE)

    def close(self) -> None:
        self._server.close()


def probe(targets: Sequence[Target]) -> dict[str, Failure]:
    """Connect to all targets at once; return the failures by host."""
    if not targets:
        return {}
    with ThreadPoolExecutor(len(targets)) as pool:
        failures = zip(targets, pool.map(_probe_one, targets), strict=True)
        return {target.host: failure for target, failure in failures if failure is not None}


def _probe_one(target: Target) -> Failure | None:
    try:
        connection = socket.create_connection((target.address, target.port), timeout=PROBE_SECONDS)
    except ConnectionRefusedError:
        return Failure("refuses connections: a firewall blocks all ports but that of ssh", "target")
    except TimeoutError:
        return Failure("does not answer: a firewall or the network drops its packets", "target")
    except OSError as error:
        reason = error.strerror or str(error)
        # A rejecting firewall can answer that the host is unreachable, and so does a machine without a route to it.
        return Failure(f"cannot be reached ({reason})", "source" if error.errno in _OWN_ERRORS else "both")
    with connection:
        try:
            # The largest payload of a packet. Much data at once would not do: network cards (and virtual networks)
            # divide it into packets of another size.
            packet = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            for size in (packet, _BYTES):
                connection.sendall(bytes(size - 1) + _DONE)
                if connection.recv(1) != _DONE:
                    break
            else:
                return None
        except OSError:
            pass
    return Failure("accepts connections, but large packets do not arrive: the MTU is too large for the network", "both")


def choose_targets(index: int, nodes: Sequence[Target]) -> list[Target]:
    """Return the nodes that a node tests: the first one, and some of those after it."""
    count = len(nodes)
    numbers = {0, *((index + offset) % count for offset in range(1, _PARTNERS + 1))} - {index}
    # Both directions: also the nodes that test this one.
    numbers |= {(index - offset) % count for offset in range(1, _PARTNERS + 1)} - {index}
    return [nodes[number] for number in sorted(numbers)]


def find_culprits(failures: Mapping[tuple[str, str], Failure]) -> dict[str, str]:
    """Return the fewest nodes that explain all failures, each with a sentence.

    Args:
        failures: failed connections by their source and target.
    """
    culprits: dict[str, str] = {}
    remaining = dict(failures)
    while remaining:
        scores: Counter[str] = Counter()
        for (source, target), failure in remaining.items():
            scores[source] += 1 + (failure.suspect == "source")
            scores[target] += 1 + (failure.suspect == "target")
        worst = max(scores.values())
        suspects = [host for host, score in scores.items() if score == worst]
        for host in suspects:
            pairs = [pair for pair in remaining if host in pair]
            # Prefer to say what others see of it.
            source, target = next((pair for pair in pairs if pair[1] == host), pairs[0])
            culprits[host] = f"from {source}, {target} {remaining[source, target].text}"
        remaining = {pair: failure for pair, failure in remaining.items() if not set(pair) & set(suspects)}
    return culprits


def format_endpoint(address: str, port: int) -> str:
    """Return an address with its port; IPv6 addresses stand in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def is_loopback(address: str) -> bool:
    """Return whether an address reaches this machine only. On many machines, that is so of the address of its name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False


def find_interface(address: str) -> str:
    """Return the network interface that leads to an address, or else to the network; empty if it is unknown.

    Without it, gloo takes the interface of the host name's address, which is the loopback interface on many machines.
    """
    interfaces = _interfaces()
    # These addresses are reserved for documentation: the route to them is the default route.
    local_addresses = [local_address(each) for each in (address, "192.0.2.1", "2001:db8::1")]
    return next((interfaces[each] for each in local_addresses if each in interfaces and not is_loopback(each)), "")


def _interfaces() -> dict[str, str]:
    """Return the network interfaces of this machine by their addresses."""
    interfaces = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                # 0x8915 is SIOCGIFADDR on Linux: get the address of an interface.
                reply = fcntl.ioctl(any_socket.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
                interfaces[socket.inet_ntop(socket.AF_INET, reply[20:24])] = name
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines():
            digits, *_, name = line.split()
            interfaces[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))] = name
    return interfaces
