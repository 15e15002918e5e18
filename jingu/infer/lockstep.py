"""One engine on several ranks, each of which holds a part of the model.

Every rank has an engine of its own, is given the same requests and takes the same steps: their schedules are alike
because nothing in them depends on the rank, and the scores that tokens are chosen by are gathered to the same bits. The
first rank alone is called; at the beginning of each step it hands out what was submitted and cancelled since the last.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from jingu.errors import JinguError
from jingu.infer.engine import Engine, EngineStats
from jingu.infer.request import Event, Request
from jingu.runtime.log import one_voice
from jingu.runtime.ranks import Ranks, joined, under_launcher
from jingu.runtime.signals import STOP_SIGNALS, handling

_REQUEST = TypeAdapter(Request)
_IDLE = timedelta(days=3650)
"""How long a rank waits for the next step: a server may be idle. One that ends is noticed at once."""


class Lockstep:
    """The first rank's engine, called as `jingu.infer.engine.Engine` is; the others run `follow`. Both are made by all
    ranks together.

    Raises:
        JinguError: the ranks' engines are not alike.
    """

    def __init__(self, engine: Engine) -> None:
        self.loaded = engine.loaded
        self._engine = engine
        self._orders = _Orders(engine)
        self._waiting: list[tuple[str, Any]] = []
        self._broken = False

    def submit(self, request: Request) -> int:
        """As the engine's. What it refuses is not handed on."""
        number = self._engine.submit(request)
        self._waiting.append(("submit", _REQUEST.dump_python(request)))
        return number

    def cancel(self, number: int) -> None:
        """As the engine's."""
        self._engine.cancel(number)
        self._waiting.append(("cancel", number))

    def step(self) -> list[Event]:
        """As the engine's, on all ranks. After one that failed, they are no longer in step."""
        if self._broken:
            raise RuntimeError("a step has failed, and the ranks are no longer in step")
        orders, self._waiting = self._waiting, []
        try:
            self._orders.hand_out(orders)
            return self._engine.step()
        except BaseException:
            self._broken = True
            raise

    @property
    def busy(self) -> bool:
        return self._engine.busy

    def stats(self) -> EngineStats:
        """As the engine's."""
        return self._engine.stats()

    def close(self) -> None:
        """Let the other ranks leave; after a failed step they leave by themselves."""
        if not self._broken:
            self._orders.hand_out(None)


Driven = Engine | Lockstep
"""What is called to generate."""


def follow(engine: Engine) -> None:
    """Take the steps that the first rank takes, until it leaves. Signals are its to answer."""
    orders = _Orders(engine)
    with handling(signal.SIG_IGN, *STOP_SIGNALS):
        while (told := orders.receive()) is not None:
            for kind, value in told:
                if kind == "submit":
                    engine.submit(_REQUEST.validate_python(value))
                else:
                    engine.cancel(value)
            engine.step()


class _Orders:
    """JSON from the first rank to all others, as plain bytes behind their number: orders, or null to leave."""

    def __init__(self, engine: Engine) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_IDLE)
        pages = engine.stats().pages_total
        counts = torch.tensor([pages, -pages])
        dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=self._group)
        if counts[0] != -counts[1]:
            raise JinguError(
                f"the ranks have memory for caches of {-int(counts[1])} to {int(counts[0])} pages, and must all have "
                "the same.",
                fix="Use machines that are alike.",
            )

    def hand_out(self, orders: list[tuple[str, Any]] | None) -> None:
        content = b"" if orders == [] else json.dumps(orders).encode()
        self._broadcast(torch.tensor(len(content)))
        if content:
            self._broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def receive(self) -> list[tuple[str, Any]] | None:
        size = int(self._broadcast(torch.tensor(0)))
        content = self._broadcast(torch.empty(size, dtype=torch.uint8)).numpy().tobytes() if size else b"[]"
        orders: list[tuple[str, Any]] | None = json.loads(content)
        return orders

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=0, group=self._group)
        return tensor


# Starting


@contextmanager
def ranks_of(device: str) -> Iterator[Ranks | None]:
    """The ranks that a launcher has started; None where there is none, or it has started one."""
    with joined(device, None) if under_launcher() else nullcontext(None) as ranks:
        if ranks is None or ranks.world == 1:
            yield None
            return
        with one_voice(ranks):
            yield ranks


@contextmanager
def in_lockstep(engine: Engine, ranks: Ranks | None) -> Iterator[Driven | None]:
    """The engine to call, on the first of the ranks; on the others None, when that has left."""
    if ranks is None:
        yield engine
        return
    if not ranks.is_first:
        follow(engine)
        yield None
        return
    leader = Lockstep(engine)
    try:
        yield leader
    finally:
        leader.close()
