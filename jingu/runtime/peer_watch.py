"""Watch the other ranks while all of them connect. Without it, gloo waits for a lost rank for most of an hour.

Each rank writes a count into the store of the rendezvous every few seconds. The first rank reads the counts of all
ranks, and the others only that of the first one, so that the traffic grows only linearly with their number. During
training, the watchdog watches instead (`jingu.watch`).
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from jingu.errors import JinguError, pluralize
from jingu.runtime.exit_codes import EXIT_LOST, EXIT_STALLED

# Seconds between two counts of a rank.
BEAT_SECONDS = 5.0
# A rank whose count has not changed for so long is lost or hangs. A busy machine must not look like that.
SILENT_SECONDS = 60.0
# How long ranks may take to write their first count: imports from a network file system may take minutes.
START_SECONDS = 600.0
# A machine that does not answer for so long is unreachable.
_REACH_SECONDS = 5.0
# Any port will do: a machine that is alive accepts or refuses the connection.
_ANY_PORT = 9
_VERDICT = "verdict"


class UnreachableError(JinguError):
    """The first node cannot be reached: a person must open a port, or the node is lost."""


class Verdict(NamedTuple):
    """Why the ranks cannot connect.

    Attributes:
        sentence: the reason, if nobody has printed it yet.
        ranks: the ranks that are the cause.
        code: exit code of the ranks that wait for them.
    """

    sentence: str
    ranks: list[int]
    code: int


class PeerWatch:
    """One rank and the counts of the others.

    Args:
        store: a connection to the store that nothing else uses: its calls wait for each other.
        address: under which other machines reach this one.
    """

    def __init__(self, store: Any, rank: int, world: int, address: str) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._address = address
        # Time is counted in polls of this rank: it stands still while this rank is suspended, perhaps with all others.
        self._count = 0
        # The last value of each rank, and the poll that first read it.
        self._values: dict[int, str] = {}
        self._polls: dict[int, int] = {}

    def poll(self) -> Verdict | None:
        """Write this rank's count, and read those of the others. Return why the ranks cannot connect, if so."""
        self._count += 1
        self._store.set(f"beat-{self._rank}", f"{self._count} {self._address} {socket.gethostname()}")
        self.read(range(1, self._world) if self._rank == 0 else [0])
        verdict = self._judge()
        if verdict is not None:
            self._store.set(_VERDICT, str(verdict.code))
        elif self._store.check([_VERDICT]):
            verdict = Verdict("", [], int(self._store.get(_VERDICT)))
        return verdict

    def read(self, ranks: Iterable[int]) -> dict[int, str]:
        """Read the values of other ranks; return the last ones by rank."""
        present = [rank for rank in ranks if self._store.check([f"beat-{rank}"])]
        values = self._store.multi_get([f"beat-{rank}" for rank in present]) if present else []
        for rank, value in zip(present, values, strict=True):
            if self._values.get(rank) != value.decode():
                self._values[rank], self._polls[rank] = value.decode(), self._count
        return dict(self._values)

    def _judge(self) -> Verdict | None:
        seconds = {rank: (self._count - poll) * BEAT_SECONDS for rank, poll in sorted(self._polls.items())}
        silent = [rank for rank, silence in seconds.items() if silence > SILENT_SECONDS]
        if silent:
            _, address, host = self._values[silent[0]].split(" ")
            name = f"rank {silent[0]} ({host}) has been silent for {SILENT_SECONDS:.0f} s while the ranks connect"
            if _answers(address):
                return Verdict(f"{name}: it hangs, or has ended.", silent, EXIT_STALLED)
            return Verdict(f"{name}, and its node cannot be reached.", silent, EXIT_LOST)
        absent = [rank for rank in range(self._world) if rank not in self._polls and rank != self._rank]
        if self._rank == 0 and absent and self._count * BEAT_SECONDS > START_SECONDS:
            names = f"rank {absent[0]}" + (f" and {pluralize(len(absent) - 1, 'other')}" if absent[1:] else "")
            return Verdict(f"{names} did not start within {START_SECONDS / 60:.0f} minutes.", absent, EXIT_STALLED)
        return None


def _answers(address: str) -> bool:
    """Return whether a machine answers."""
    try:
        socket.create_connection((address, _ANY_PORT), _REACH_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def all_peers_are_alive(store: Any, world: int) -> bool:
    """Return whether the counts of all ranks increase now."""
    watch = PeerWatch(store, -1, world, "")
    end = time.monotonic() + 3 * BEAT_SECONDS
    try:
        first = watch.read(range(world))
        while time.monotonic() < end:
            time.sleep(BEAT_SECONDS / 5)
            values = watch.read(range(world))
            if len(values) == world and all(first.get(rank) != value for rank, value in values.items()):
                return True
    except RuntimeError:  # the store is lost, and the first node with it
        return False
    return False


def local_address(address: str) -> str:
    """Return the address of this machine from which it reaches another address; empty if there is no route."""
    try:
        family, kind, protocol, _, endpoint = socket.getaddrinfo(address, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe_socket:
            # Connecting a datagram socket sends nothing, but makes the kernel choose the local address.
            probe_socket.connect(endpoint)
            return str(probe_socket.getsockname()[0])
    except OSError:
        return ""


def end_process(verdict: Verdict) -> None:
    """Print why the ranks cannot connect, and exit: the main thread waits in gloo, which nothing can interrupt."""
    if verdict.sentence:
        print(f"jingu: {verdict.sentence} Start the command again.", file=sys.stderr, flush=True)
    os._exit(verdict.code)


@contextmanager
def watch_peers(watch: PeerWatch, give_up: Callable[[Verdict], None]) -> Iterator[None]:
    """Watch the other ranks in a thread while the block runs.

    Args:
        give_up: ends this process; it is called in the thread.
    """
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.is_set():
            try:
                verdict = watch.poll()
            except RuntimeError:
                verdict = Verdict("the connection to the first node has ended while the ranks connect.", [0], EXIT_LOST)
            # The block may have ended in the meantime, and the store with it.
            if verdict is not None and not is_over.wait(BEAT_SECONDS / 5):
                give_up(verdict)
            is_over.wait(BEAT_SECONDS)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(BEAT_SECONDS)
