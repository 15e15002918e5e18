"""All ranks stop, or save, at the same step, whichever of them received the signal."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from jingu.runtime.signals import StopRequest


class StopDecision(NamedTuple):
    """What all ranks agree on at a step."""

    # Exit code with which to stop; 0: continue.
    stop: int
    # Whether some rank wants to save.
    save: bool
    # Whether some rank is still saving.
    busy: bool


class CollectiveStop:
    """Makes all ranks stop (or save) at the same step, whichever of them received the signal.

    The all-reduce of one step runs in the background and is read at the next step, so that no step waits for it.
    """

    def __init__(self, request: StopRequest, world: int) -> None:
        self._request = request
        self._world = world
        self._flags = torch.zeros(3, dtype=torch.int32)
        self._work: dist.Work | None = None
        # Exit code with which all ranks stop; 0: they continue.
        self.code = 0

    def ask(self, save: bool = False, busy: bool = False) -> StopDecision:
        """Return what all ranks agreed on. Every rank must call this once a step."""
        agreed = own = [self._request.code, int(save), int(busy)]
        if self._world > 1:
            if self._work is not None:
                self._work.wait()
            agreed = self._flags.tolist()
            self._flags = torch.tensor(own, dtype=torch.int32)
            self._work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, async_op=True)
        self.code = agreed[0]
        return StopDecision(agreed[0], bool(agreed[1]), bool(agreed[2]))

    def settle(self, limit: timedelta | None = None) -> None:
        """Wait for the all-reduce in flight; call this before leaving the group.

        Args:
            limit: give up after this time, because another rank may have failed; None: wait for it.
        """
        work = self._work
        self._work = None
        if work is not None and limit is not None:
            with contextlib.suppress(RuntimeError):
                work.wait(limit)
        elif work is not None:
            work.wait()
