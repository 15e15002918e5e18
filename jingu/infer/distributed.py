"""Inference with a model that is sharded over several ranks.

Every rank has an engine of its own, receives the same requests and takes the same steps. The schedules are equal,
because scheduling does not depend on the rank, and all ranks gather bitwise equal logits. Callers use the first rank
only. At the start of each step it broadcasts the requests that were submitted or cancelled since the last step.
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

from jingu.config.sections.parallel import DeviceType
from jingu.errors import JinguError
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineStats, StepEngine
from jingu.infer.request import Event, Request
from jingu.runtime.log import report_first_failure
from jingu.runtime.ranks import RankInfo, is_launched, join_process_group
from jingu.runtime.signals import STOP_SIGNALS, handle_signals

_REQUEST = TypeAdapter(Request)
# Time that a rank waits for the next step. It is long, because a server may be idle; the end of another rank is an
# error without any timeout.
_IDLE_TIMEOUT = timedelta(days=3650)


class DistributedEngine:
    """The engine of all ranks, for callers on the first rank. The other ranks call `run_follower` at the same time,
    since both constructors run collectives.

    Args:
        engine: the first rank's own engine.

    Raises:
        JinguError: the ranks have different numbers of KV cache blocks.
    """

    def __init__(self, engine: Engine) -> None:
        self.model = engine.model
        self._engine = engine
        self._channel = _CommandChannel(engine)
        self._commands: list[tuple[str, Any]] = []
        self._failed = False

    def submit(self, request: Request) -> int:
        """See `Engine`. Requests that the first rank refuses are not broadcast."""
        request_id = self._engine.submit(request)
        self._commands.append(("submit", _REQUEST.dump_python(request)))
        return request_id

    def max_new_tokens(self, prompt_tokens: int) -> int:
        """See `Engine`. All ranks have equal KV caches."""
        return self._engine.max_new_tokens(prompt_tokens)

    def cancel(self, request_id: int) -> None:
        """See `Engine`."""
        self._engine.cancel(request_id)
        self._commands.append(("cancel", request_id))

    def step(self) -> list[Event]:
        """Take a step on all ranks; see `Engine`. After a failed step no other one is possible, as ranks may differ."""
        if self._failed:
            raise RuntimeError("a step failed, and the ranks are out of step")
        # Cleared at the end, so that any exception below marks the engine as failed.
        self._failed = True
        self._channel.broadcast(self._commands)
        self._commands = []
        events = self._engine.step()
        self._failed = False
        return events

    @property
    def busy(self) -> bool:
        """See `Engine`."""
        return self._engine.busy

    def stats(self) -> EngineStats:
        """Return the first rank's statistics; see `Engine`."""
        return self._engine.stats()

    def close(self) -> None:
        """Make `run_follower` return on the other ranks. After a failed step they end by themselves."""
        if not self._failed:
            self._channel.broadcast(None)


def run_follower(engine: Engine) -> None:
    """Repeat the first rank's steps until it closes its engine. Ignore stop signals, which the first rank handles."""
    channel = _CommandChannel(engine)
    with handle_signals(signal.SIG_IGN, *STOP_SIGNALS):
        while (commands := channel.receive()) is not None:
            for name, value in commands:
                if name == "submit":
                    engine.submit(_REQUEST.validate_python(value))
                else:
                    engine.cancel(value)
            engine.step()


class _CommandChannel:
    """Broadcasts commands as JSON: the number of bytes, then the bytes. Zero bytes mean no commands, and null means
    that followers return."""

    def __init__(self, engine: Engine) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
        num_blocks = engine.stats().total_blocks
        range_ = torch.tensor([num_blocks, -num_blocks])
        dist.all_reduce(range_, op=dist.ReduceOp.MAX, group=self._group)
        if range_[0] != -range_[1]:
            raise JinguError(
                f"the ranks have memory for {-int(range_[1])} to {int(range_[0])} KV cache blocks, and must all have "
                "the same number.",
                fix="Use machines with equal memory.",
            )

    def broadcast(self, commands: list[tuple[str, Any]] | None) -> None:
        content = b"" if commands == [] else json.dumps(commands).encode()
        self._broadcast(torch.tensor(len(content)))
        if content:
            self._broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def receive(self) -> list[tuple[str, Any]] | None:
        size = int(self._broadcast(torch.tensor(0)))
        if not size:
            return []
        content = self._broadcast(torch.empty(size, dtype=torch.uint8)).numpy().tobytes()
        commands: list[tuple[str, Any]] | None = json.loads(content)
        return commands

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=0, group=self._group)
        return tensor


@contextmanager
def inference_ranks(device: DeviceType) -> Iterator[RankInfo | None]:
    """Join the ranks that a launcher started; yield None without a launcher, or with a single rank."""
    with join_process_group(device, None) if is_launched() else nullcontext(None) as ranks:
        if ranks is None or ranks.world == 1:
            yield None
            return
        with report_first_failure(ranks):
            yield ranks


@contextmanager
def distributed_engine(engine: Engine, ranks: RankInfo | None) -> Iterator[StepEngine | None]:
    """On the first rank, yield the engine to call. On the others, follow the first rank to its end, then yield None."""
    if ranks is None:
        yield engine
        return
    if not ranks.is_first:
        run_follower(engine)
        yield None
        return
    leader = DistributedEngine(engine)
    try:
        yield leader
    finally:
        leader.close()
