"""Processes of a run: finding one's rank, joining the group, agreeing.

This is the only room (with `launch/`) that reads environment variables.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from jingu.errors import JinguError
from jingu.runtime.device import keep_freed_memory
from jingu.runtime.devices import nccl_settings, usable_cores

TIMEOUT = timedelta(minutes=10)
"""How long a collective waits for the others."""
_PATIENCE = 30.0


@dataclass(frozen=True)
class Ranks:
    """Who this process is among the processes of the run."""

    rank: int
    world: int
    device: torch.device
    host: str = ""
    notes: tuple[str, ...] = ()
    """What was arranged for this machine, to be said."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def under_launcher() -> bool:
    """Whether torchrun (or whatever speaks its language) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _variable(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise JinguError(
            f"the environment variable {name} is {text!r}, which is not a whole number.",
            fix="It is set by torchrun; start the run with `jingu train run.yaml --processes N` or torchrun.",
        ) from None


def choose_device(kind: str, local_rank: int) -> torch.device:
    """The device of this process for `device.type` auto, cpu or cuda.

    Raises:
        JinguError: CUDA was asked for and there is no card for this local rank.
    """
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and cards == 0):
        return torch.device("cpu")
    if local_rank >= cards:
        raise JinguError(
            f"local rank {local_rank} needs a CUDA card of its own, and this machine has {cards}.",
            fix="Start fewer processes, or set device.type=cpu.",
        )
    return torch.device("cuda", local_rank)


@contextmanager
def joined(device_type: str, threads: int | None) -> Iterator[Ranks]:
    """Join the process group (a group of one without a launcher), and leave it at the end.

    Args:
        device_type: auto, cpu or cuda.
        threads: CPU threads of this process; None: the usable cores divided by the local ranks.
    """
    rank, world = _variable("RANK", 0), _variable("WORLD_SIZE", 1)
    local_rank, local_world = _variable("LOCAL_RANK", 0), _variable("LOCAL_WORLD_SIZE", 1)
    device = choose_device(device_type, local_rank)
    torch.set_num_threads(threads or max(1, usable_cores() // local_world))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    notes = _prepare_nccl() if device.type == "cuda" else ()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if under_launcher():
        store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=TIMEOUT))  # type: ignore[attr-defined]
        # torchrun may keep the store when it starts ranks again, with the addresses of those before.
        attempt = _variable("TORCHELASTIC_RESTART_COUNT", 0)
        store = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
    else:
        rank, world, store = 0, 1, dist.HashStore()  # type: ignore[attr-defined]
    # Groups end with their last references, and their threads with them: one that gives a tensor back while the
    # interpreter ends would abort the process.
    atexit.register(gc.collect)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        all_agree(True)  # a rank that fails at once would break off those that still connect, which would tell of that
        yield Ranks(rank, world, device, socket.gethostname(), notes)
    finally:
        dist.destroy_process_group()
        forget_groups()


def forget_groups() -> None:
    """Empty what DTensor remembers of meshes, which refer to their groups."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _prepare_nccl() -> tuple[str, ...]:
    """Set what NCCL needs for the cards of this machine, where the environment does not say otherwise."""
    settings, why = nccl_settings([torch.cuda.get_device_name(card) for card in range(torch.cuda.device_count())])
    missing = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(missing)
    return (why,) if missing else ()


def all_agree(mine: bool) -> bool:
    """True where every rank says True. A barrier, too."""
    return all(from_all(mine))


def until_all(done: Callable[[float], bool]) -> None:
    """Wait, together, until every rank is done, however long that takes: a collective waits for `TIMEOUT` only.

    Args:
        done: tells whether this rank is done; waits for that at most so many seconds.
    """
    while not all_agree(done(_PATIENCE)):
        pass


def from_first(value: int) -> int:
    """The first rank's whole number, on every rank."""
    return int(from_all(value)[0])


def from_all(mine: Any) -> list[Any]:
    """Every rank's JSON value, by rank, on every rank."""
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(text)]))
    boxes = [torch.zeros(int(max(sizes)), dtype=torch.uint8) for _ in sizes]
    dist.all_gather(boxes, torch.nn.functional.pad(text, (0, len(boxes[0]) - len(text))))
    return [json.loads(bytes(box[: int(size)].tolist())) for box, size in zip(boxes, sizes, strict=True)]


def first_to_fail(ranks: Ranks) -> bool:
    """Whether this rank is the first that asks. A failing rank can ask: it does not depend on the others."""
    if ranks.world == 1:
        return True
    try:
        store = dist.distributed_c10d._get_default_store()
        if ranks.is_first:
            store.set("jingu/first-rank-fails", "")
        first = bool(store.compare_set("jingu/first-to-fail", "", str(ranks.rank)) == str(ranks.rank).encode())
        if first and not ranks.is_first:
            # Where the first rank fails as well, its progress bar is closed by then.
            store.wait(["jingu/first-rank-fails"], timedelta(seconds=2))
        return first
    except RuntimeError:  # the first rank goes on, or whoever held the store is gone
        return True
