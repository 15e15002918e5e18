"""Make all ranks stop or save at the same step, even if only some of them received the signal."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from jingu.runtime.signals import StopRequest


class StopDecision(NamedTuple):
    """The decision for a step, the same on all ranks.

    Attributes:
        stop: exit code with which to stop; 0: continue.
        save: whether any rank wants to save.
        busy: whether any rank is still saving.
    """

    stop: int
    save: bool
    busy: bool


class CollectiveStop:
    """Makes all ranks stop or save at the same step, even if only some of them received the signal.

    The all-reduce of one step runs in the background, and its result is read at the next step. So no step waits for
    it, and with several ranks a decision takes effect one step later.

    Attributes:
        code: exit code with which all ranks stop; 0: they continue.

    Args:
        request: this process's request to stop, which a signal sets.
        world: number of ranks.
    """

    def __init__(self, request: StopRequest, world: int) -> None:
        self._request = request
        self._world = world
        self._flags = torch.zeros(3, dtype=torch.int32)
        self._work: dist.Work | None = None
        self.code = 0

    def agree(self, save: bool = False, busy: bool = False) -> StopDecision:
        """Return the common decision, and start the all-reduce for the next one. Call this once per step on every rank.

        With several ranks it is the decision of the previous call, so the first call decides nothing.

        Args:
            save: whether this rank wants to save.
            busy: whether this rank is still saving.
        """
        agreed_flags = local_flags = [self._request.code, int(save), int(busy)]
        if self._world > 1:
            if self._work is not None:
                self._work.wait()
            agreed_flags = self._flags.tolist()
            self._flags = torch.tensor(local_flags, dtype=torch.int32)
            self._work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, async_op=True)
        self.code = agreed_flags[0]
        return StopDecision(agreed_flags[0], bool(agreed_flags[1]), bool(agreed_flags[2]))

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait for the all-reduce in flight. Call this before leaving the process group.

        Args:
            limit: give up after this time, for example because another rank may have failed; None: no limit.
        """
        work = self._work
        self._work = None
        if work is not None and limit is not None:
            with contextlib.suppress(RuntimeError):
                work.wait(limit)
        elif work is not None:
            work.wait()
