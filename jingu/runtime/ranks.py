"""The ranks of a run: rendezvous, the process group, and the exchange of small values.

Only this package and `jingu.launch` read environment variables.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import torch
import torch.distributed as dist

from jingu.config.sections.parallel import DeviceType
from jingu.errors import JinguError, join_words
from jingu.runtime.device import device_module, find_device_type, retain_freed_memory
from jingu.runtime.exit_codes import EXIT_LOST
from jingu.runtime.gpus import nccl_environment, num_usable_cores
from jingu.runtime.peer_watch import (
    PeerWatch,
    UnreachableError,
    Verdict,
    all_peers_are_alive,
    end_process,
    local_address,
    watch_peers,
)
from jingu.runtime.signals import exits_path, stop_with_launcher

# How long a collective waits for other ranks.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
# Seconds between two collectives of ranks that wait for each other's work (`wait_until_all_done`).
_PATIENCE = 30.0
# Seconds between two checks of ranks that wait for the first one (`run_first`).
_POLL_SECONDS = 1.0
# Seconds between two checks of the first rank for arriving ranks (`agree_on_attempt`).
_RENDEZVOUS_SECONDS = 0.05
# What PyTorch, gloo and NCCL say of a connection to a process that has ended, or to a machine that is gone.
_LOST_CONNECTION = re.compile(
    r"Connection (reset|closed) by peer|Broken pipe|Socket (closed|Timeout)|Connection was likely closed"
    r"|Connection timed out|No route to host|remote process exited|Application timeout caused pair closure"
    # All ranks were connected to each other when they joined the process group.
    r"|connectFullMesh failed",
    re.IGNORECASE,
)
_UNREACHABLE = re.compile(
    r"Connection refused|No route to host|Network is unreachable|Connection timed out", re.IGNORECASE
)
# Seconds after which a machine counts as unreachable if its name is unknown or it does not answer.
REACH_SECONDS = 8.0


@dataclass(frozen=True)
class RankInfo:
    """This process as a rank of the run.

    Attributes:
        rank: number of this rank, from 0.
        world: number of ranks.
        device: the device of this rank.
        host: name of the machine.
        notes: messages about the setup of this machine, to be logged.
    """

    rank: int
    world: int
    device: torch.device
    host: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def is_launched() -> bool:
    """Return whether torchrun, or another launcher that sets its environment variables, started this process.

    Raises:
        JinguError: only some of these variables are set, or their values contradict each other.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    present = [name for name in names if os.environ.get(name)]
    # An address alone does not make this process a rank, and neither does a world of one.
    if "RANK" not in present and ("WORLD_SIZE" not in present or _variable("WORLD_SIZE", 1) == 1):
        return False
    missing = [name for name in names if name not in present]
    rank, world = _variable("RANK", 0), _variable("WORLD_SIZE", 1)
    problem = f"{join_words(missing, 'and')} {'is' if len(missing) == 1 else 'are'} not" if missing else ""
    if not missing and not 0 <= rank < world:
        problem = f"RANK is {rank}, which is no rank of {world}"
    if problem:
        is_set = f"{join_words(present, 'and')} {'is' if len(present) == 1 else 'are'} set in the environment, and "
        raise JinguError(
            f"{is_set}{problem}.",
            where="environment variables",
            fix="Start the ranks with torchrun or `jingu train --processes N`, which set all of them; or, if they are "
            f"left over from a scheduler, remove them (`unset {' '.join(present)}`).",
        )
    return True


def count_ranks(processes: int | None) -> tuple[int, int]:
    """Return how many ranks a command has, and how many of them are on this machine.

    Args:
        processes: value of `--processes`, which counts unless a launcher has started the ranks.
    """
    if not is_launched():
        return processes or 1, processes or 1
    world = _variable("WORLD_SIZE", 1)
    return world, _variable("LOCAL_WORLD_SIZE", world)


def is_first_process() -> bool:
    """Return whether this process is the first rank, will become it, or will launch it."""
    return _variable("RANK", 0) == 0


def is_first_on_node() -> bool:
    """Return whether this process is the first rank of its node, will become it, or will launch it."""
    return _variable("LOCAL_RANK", 0) == 0


def master_address() -> tuple[str, int]:
    """Return the address and port of the rendezvous (`MASTER_ADDR`, `MASTER_PORT`); "" and 0 if they are not set."""
    return os.environ.get("MASTER_ADDR", ""), _variable("MASTER_PORT", 0)


def _variable(name: str, default: int) -> int:
    """Return the integer value of an environment variable. Raises JinguError if it is not an integer."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise JinguError(
            f"the environment variable {name} is {text!r}, which is not a whole number.",
            fix="It is set by torchrun; start the run with `jingu train run.yaml --processes N` or torchrun, or remove "
            f"the variable (`unset {name}`).",
        ) from None


def choose_device(kind: DeviceType, local_rank: int) -> torch.device:
    """Return the device of this process.

    Args:
        kind: the setting `device.type`.
        local_rank: number of this rank on its node; accelerators are assigned by it.

    Raises:
        JinguError: there is no such device, or none for this local rank.
    """
    device_type = find_device_type(kind)
    if device_type == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise JinguError(
            f"local rank {local_rank} needs a device of its own, and this machine has {count} ({device_type}).",
            fix="Start fewer processes, or set device.type=cpu.",
        )
    return torch.device(device_type, local_rank)


@contextmanager
def join_process_group(
    device_type: DeviceType, threads: int | None, give_up: Callable[[Verdict], None] = end_process
) -> Iterator[RankInfo]:
    """Join the process group, and leave it after the block. Without a launcher, the group has one rank.

    Args:
        device_type: the setting `device.type`.
        threads: CPU threads of this process; None: the usable cores divided by the local ranks.
        give_up: ends this process if ranks are lost while they connect.
    """
    # Set up this process: device, threads, memory, backend.
    stop_with_launcher()
    rank = _variable("RANK", 0)
    world = _variable("WORLD_SIZE", 1)
    local_rank = _variable("LOCAL_RANK", 0)
    device = choose_device(device_type, local_rank)
    torch.set_num_threads(threads or max(1, num_usable_cores() // _variable("LOCAL_WORLD_SIZE", 1)))
    backend = "gloo"
    if device.type == "cpu":
        retain_freed_memory()
    elif device.type != "mps":  # MPS has one device and no collectives
        device_module(device).set_device(device)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    if world > 1:
        _check_interface(has_other_nodes=_variable("LOCAL_WORLD_SIZE", world) < world)
    notes = _prepare_nccl() if device.type == "cuda" else ()
    # Rendezvous with the other ranks.
    if is_launched():
        store = _open_store(rank, world)
        # A command that trains several runs joins several groups with this store, so each group has its own prefix.
        store = dist.PrefixStore(f"rendezvous-{store.add(f'rendezvous-of-{rank}', 1)}", store)  # type: ignore[attr-defined]
    else:
        rank, world, store = 0, 1, dist.HashStore()  # type: ignore[attr-defined]
    # A process group's threads end when nothing refers to the group, so collect garbage before the interpreter shuts
    # down: a thread that then frees a tensor would abort the process.
    # Once, however many groups this process joins.
    atexit.unregister(gc.collect)
    atexit.register(gc.collect)
    try:
        with _watch_peers(store, rank, world, give_up) if world > 1 else nullcontext():
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
            # Wait until all ranks are connected. Otherwise, if one rank failed now, ranks that are still connecting
            # would report a failed connection instead of its error.
            all_ranks_agree(True)
    except RuntimeError as error:
        _explain_connection(error)
        raise
    try:
        yield RankInfo(rank, world, device, socket.gethostname(), notes)
    finally:
        dist.destroy_process_group()
        clear_mesh_caches()


def _check_interface(has_other_nodes: bool) -> None:
    """Raise JinguError if gloo is told to use a network interface that this machine lacks, or that leads nowhere."""
    value = os.environ.get("GLOO_SOCKET_IFNAME", "")
    usable = [name for _, name in socket.if_nameindex() if not (has_other_nodes and name == "lo")]
    if any(name not in usable for name in value.split(",") if name):
        what = f"GLOO_SOCKET_IFNAME is {value}, which does not lead to the other nodes from here."
        fix = f"Name one of {join_words(usable)}, or remove the variable: jingu launch finds the interface."
        raise JinguError(what, where=socket.gethostname(), fix=fix)


@contextmanager
def _watch_peers(store: Any, rank: int, world: int, give_up: Callable[[Verdict], None]) -> Iterator[None]:
    """Watch the other ranks while they connect: they are lost, or hang, or a firewall is between them.

    Raises:
        SystemExit: a connection has failed, and not all ranks are alive.
    """
    beats = dist.PrefixStore("beats", store.clone())  # type: ignore[attr-defined]
    address, _ = master_address()
    with watch_peers(PeerWatch(beats, rank, world, local_address(address)), give_up):
        try:
            yield
        except RuntimeError as error:
            others = dist.PrefixStore("beats", store)  # type: ignore[attr-defined]
            if _is_unreachable(error) and not all_peers_are_alive(others, world):
                _exit_lost()
            raise


def _exit_lost() -> NoReturn:
    """Say that this rank is not the cause, and exit."""
    text = f"a rank on {socket.gethostname()} lost its connection to another rank, which has exited."
    print(f"jingu: {text}", file=sys.stderr)
    raise SystemExit(EXIT_LOST) from None


def _is_unreachable(error: RuntimeError) -> bool:
    """Return whether an error says that this rank cannot connect to another one."""
    return "connectFullMesh" in str(error) or _UNREACHABLE.search(str(error)) is not None


def _explain_connection(error: RuntimeError) -> None:
    """Raise a readable error for ranks that cannot connect to each other, if this is the error.

    Raises:
        JinguError: a machine cannot be reached.
        SystemExit: another rank has exited; it has said why.
    """
    host, text = socket.gethostname(), str(error)
    if _is_unreachable(error):
        address = re.search(r"remote=\[([^\]]+)\]", text)
        peer = f" to {address[1]}" if address else ""
        reason = (_UNREACHABLE.search(text) or ["no connection"])[0].lower()
        fix = (
            "Open all ports between the nodes, or name the interface that connects them (GLOO_SOCKET_IFNAME); "
            "`jingu doctor`, launched like this command, finds the node at fault."
        )
        raise JinguError(f"this rank cannot connect{peer} ({reason}).", where=host, fix=fix) from error
    if is_lost_connection(error):
        _exit_lost()


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error says that the connection to another rank has ended, so that its cause is elsewhere."""
    is_network_error = isinstance(error, (RuntimeError, OSError)) and not isinstance(error, torch.OutOfMemoryError)
    return is_network_error and _LOST_CONNECTION.search(str(error)) is not None


class Board:
    """Values of the ranks in the store of the rendezvous: unlike a collective, it needs no process group.

    Attributes:
        rank: number of this rank.
        world: number of ranks.
    """

    def __init__(self) -> None:
        self.rank, self.world = _variable("RANK", 0), _variable("WORLD_SIZE", 1)
        self._store = dist.PrefixStore("board", _open_store(self.rank, self.world))  # type: ignore[attr-defined]

    def post(self, key: str, value: Any) -> None:
        """Set this rank's value of a key; it must be JSON-serializable."""
        self._store.set(f"{key}-{self.rank}", json.dumps(value))

    def read(self, key: str, seconds: float) -> dict[int, Any]:
        """Return the values of all ranks by their number, once all are there or the time is over."""
        end = time.monotonic() + seconds
        keys = {rank: f"{key}-{rank}" for rank in range(self.world)}
        while not self._store.check(list(keys.values())) and time.monotonic() < end:
            time.sleep(_RENDEZVOUS_SECONDS)
        return {rank: json.loads(self._store.get(name)) for rank, name in keys.items() if self._store.check([name])}


@cache
def _open_store(rank: int, world: int) -> Any:
    """Return the key-value store for the rendezvous of a launched command. It stays open until the process ends."""
    # The store is in rank 0, or in its launcher. Wait for it, unless it is in this process.
    if "MASTER_ADDR" in os.environ and (rank or "TORCHELASTIC_USE_AGENT_STORE" in os.environ):
        _wait_for_store()
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=COLLECTIVE_TIMEOUT))  # type: ignore[attr-defined]
    # When torchrun restarts ranks, its store may still have the addresses of the previous ranks. So each attempt has a
    # prefix of its own.
    if _variable("GROUP_WORLD_SIZE", 1) == 1:
        attempt = _variable("TORCHELASTIC_RESTART_COUNT", 0)
    else:
        attempt = agree_on_attempt(store, rank, world)
    return dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]


def _wait_for_store() -> None:
    """Wait for the store. Raises SystemExit if it is lost, and JinguError if it was never there."""
    address, port = master_address()
    if not exits_path():
        wait_for_master(address, port)
        return
    try:
        wait_for_master(address, port, refused_seconds=REACH_SECONDS)
    except JinguError:  # jingu's launcher has reached it from this machine, before it started this rank
        _exit_lost()


def agree_on_attempt(store: Any, rank: int, world: int) -> int:
    """Return a number that is equal on all ranks of this attempt, and that no earlier attempt had.

    torchrun's own restart count differs between nodes: it does not increase on nodes whose ranks were ended because
    another node left.

    Rank 0 increments a counter in the store, and answers each rank that announces itself with the counter's value.

    Args:
        store: the key-value store; it may have keys of earlier attempts.
    """
    if rank > 0:
        # Announce a unique name, so that an answer to an earlier process with the same rank is not mistaken for ours.
        name = uuid4().hex
        store.set(f"process-{rank}", name)
        attempt = int(store.get(f"attempt-of-{name}"))
        store.add(f"arrived-{attempt}", 1)
        return attempt
    attempt = int(store.add("attempts", 1))
    # Answer the announced names until all ranks have confirmed. A name may be of an earlier process: then the rank's
    # new name is answered in a later round.
    end = time.monotonic() + COLLECTIVE_TIMEOUT.total_seconds()
    while store.add(f"arrived-{attempt}", 0) < world - 1:
        if time.monotonic() > end:
            raise TimeoutError("the ranks did not meet")
        names = [name.decode() for name in store.multi_get([f"process-{index}" for index in range(1, world)])]
        store.multi_set([f"attempt-of-{name}" for name in names], [str(attempt)] * len(names))
        time.sleep(_RENDEZVOUS_SECONDS)
    return attempt


def run_first(function: Callable[[], None]) -> None:
    """Call a function in the first process of a launched command, while the others wait for it without a timeout.

    Without a launcher, this only calls the function.
    """
    if not is_launched():
        function()
        return
    rank = _variable("RANK", 0)
    store = _open_store(rank, _variable("WORLD_SIZE", 1))
    key = f"turn-{store.add(f'turns-{rank}', 1)}"
    if rank == 0:
        function()
        store.set(key, "")
    while not store.check([key]):
        time.sleep(_POLL_SECONDS)


def wait_for_master(
    address: str,
    port: int,
    reach_seconds: float = REACH_SECONDS,
    refused_seconds: float | None = None,
) -> None:
    """Wait until the store of the rendezvous answers at its address.

    Args:
        reach_seconds: how long the machine may be unknown or silent.
        refused_seconds: how long it may refuse the connection, as rank 0 may start later than this rank; None: as long
            as a collective waits.

    Raises:
        UnreachableError: the machine cannot be reached, or nothing has started there within the timeout.
        JinguError: another program answers.
    """
    # Imported here, because the import is slow (DTensor).
    from jingu.compat.torch_distributed import may_be_store

    if refused_seconds is None:
        refused_seconds = COLLECTIVE_TIMEOUT.total_seconds()
    start = time.monotonic()
    is_announced = False
    while True:
        try:
            with socket.create_connection((address, port), timeout=REACH_SECONDS) as connection:
                if may_be_store(connection):
                    return
            what = f"what answers at the master address {address}:{port} is not rank 0, but another program."
            raise JinguError(what, fix="Check MASTER_ADDR, and choose a MASTER_PORT that nothing else uses.")
        except OSError as error:
            seconds = time.monotonic() - start
            if seconds > (refused_seconds if isinstance(error, ConnectionRefusedError) else reach_seconds):
                fix = "Check MASTER_ADDR and MASTER_PORT, that rank 0 has started, and that no firewall is in the way."
                what = f"the master address {address}:{port} cannot be reached ({error.strerror or error})."
                raise UnreachableError(what, where=socket.gethostname(), fix=fix) from error
        if seconds > REACH_SECONDS and not is_announced:
            print(f"jingu: waiting for rank 0 to start at {address}:{port}.", file=sys.stderr)
            is_announced = True
        time.sleep(0.2)


def clear_mesh_caches() -> None:
    """Clear DTensor's caches of meshes: they keep process groups alive. Does nothing if DTensor was not imported."""
    if "torch.distributed.tensor" in sys.modules:
        from jingu.compat.torch_distributed import clear_sharding_cache

        clear_sharding_cache()


def _prepare_nccl() -> tuple[str, ...]:
    """Set the environment variables that NCCL needs for this machine's GPUs, unless they are set; return notes."""
    settings, why = nccl_environment([torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())])
    missing = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(missing)
    return (why,) if missing else ()


def all_ranks_agree(value: bool) -> bool:
    """Return whether the value is true on every rank. Every rank must call this; it is also a barrier."""
    return all(gather_from_all(value))


def wait_until_all_done(poll: Callable[[float], bool]) -> None:
    """Wait until every rank is done, without a timeout. (A single collective would wait for `COLLECTIVE_TIMEOUT`.)

    Args:
        poll: a function that waits at most the given number of seconds, and returns whether this rank is done.
    """
    while not all_ranks_agree(poll(_PATIENCE)):
        pass


def broadcast_from_first(value: int) -> int:
    """Return the first rank's integer on every rank."""
    return int(gather_from_all(value)[0])


def gather_from_all(value: Any) -> list[Any]:
    """Return the values of all ranks, in the order of ranks, on every rank. Values must be JSON-serializable."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(text)]))
    # All-gather needs equal sizes, so texts are padded to the longest.
    buffers = [torch.zeros(int(max(sizes)), dtype=torch.uint8) for _ in sizes]
    dist.all_gather(buffers, torch.nn.functional.pad(text, (0, len(buffers[0]) - len(text))))
    return [json.loads(bytes(buffer[: int(size)].tolist())) for buffer, size in zip(buffers, sizes, strict=True)]


def find_ranks_that_share(folder: Path) -> list[bool] | None:
    """Return for each rank whether it shares a folder with the first rank. Every rank must call this.

    The first rank creates and renames a file in the folder; the others check whether they see it.

    Returns:
        None if the first rank cannot write there; other checks report that with more detail.
    """
    path = folder / f".shared-{broadcast_from_first(time.time_ns())}"
    if dist.get_rank() == 0:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".partial").write_bytes(b"")
            path.with_suffix(".partial").rename(path)
    if not broadcast_from_first(path.exists()):
        return None
    visible_to = gather_from_all(path.exists())
    with suppress(OSError):
        path.unlink(missing_ok=True)
    return visible_to


def check_equal_on_all_ranks(values: Mapping[str, Any], host: str) -> None:
    """Raise JinguError on every rank if the values differ between ranks. The message names keys, values and hosts.

    Args:
        values: JSON-serializable values by their names.
        host: name of this rank's machine.
    """
    # First compare digests, so that ranks with equal values exchange little.
    digests = gather_from_all(sha256(json.dumps(values, sort_keys=True).encode()).hexdigest())
    rank = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if rank is None:
        return
    everywhere = gather_from_all([host, values])
    first_host, first = everywhere[0]
    other_host, other_value = everywhere[rank]
    differences = [
        f"{key} is {first.get(key)} on {first_host} (rank 0) and {other_value.get(key)} on {other_host} (rank {rank})"
        for key in sorted(first.keys() | other_value.keys())
        if first.get(key) != other_value.get(key)
    ]
    raise JinguError(
        f"the ranks were not started alike: {'; '.join(differences)}.",
        fix="Start every node with the same configuration, code, libraries, data and tokenizer.",
    )


def is_first_failure(ranks: RankInfo) -> bool:
    """Return whether this rank is the first to call this.

    It is not a collective, so a failing rank can call it. If the store does not answer, every rank counts as first.
    """
    if ranks.world == 1:
        return True
    from jingu.compat.torch_distributed import default_store

    try:
        store = default_store()
        if ranks.is_first:
            store.set("jingu/first-rank-fails", "")
        first = bool(store.compare_set("jingu/first-to-fail", "", str(ranks.rank)) == str(ranks.rank).encode())
        if first and not ranks.is_first:
            # If rank 0 fails as well, wait for it to close its progress bar.
            store.wait(["jingu/first-rank-fails"], timedelta(seconds=2))
        return first
    except RuntimeError:  # rank 0 goes on, or the process with the store is gone
        return True
