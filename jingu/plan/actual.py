"""Measurement of the terms of a running step, to compare them with the plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from jingu.compat.torch import TorchDispatchMode, tree_leaves
from jingu.compat.torch_distributed import collective_group
from jingu.parallel.mesh import AxisSizes
from jingu.watch.activity import Activity

_MATMULS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_int_mm", "_grouped_mm", "grouped_matmul", "grouped_outer")
)
_AXES = ("tensor", "context", "expert", "pipeline")
# Phases of a step (`jingu.watch.slot.PHASES`) all of whose local operations count towards one term.
_PHASES = {"optimizer": "optimizer", "gradients": "optimizer", "data": "launch"}
# Phases that are a term as a whole, as in the plan: their wall-clock time with collectives and work of the host.
_WHOLE_PHASES = {
    "rollout": "generation",
    "log-probs": "log-probabilities",
    **{name: name for name in ("reference", "teacher", "critic")},
}


@dataclass
class StepSeconds:
    """The seconds of a step on a rank, by term.

    Attributes:
        computing: seconds of local operations, by this rank's own clock (`computing_clock`).
        waiting: wall-clock seconds of collectives, and of phases that are terms as a whole.
        busy_waiting: the part of `waiting` that the rank's own clock counts as computation.
    """

    computing: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, float] = field(default_factory=dict)
    busy_waiting: float = 0.0


def widest_axis(sizes: AxisSizes) -> str:
    """Return the axis that spans all ranks: data, unless another axis does."""
    ranks = prod(sizes.shape)
    return next((axis for axis in _AXES if getattr(sizes, axis) == ranks > 1 and axis != "expert"), "data")


def computing_clock() -> float:
    """Return the CPU seconds of this thread, or wall-clock seconds if the rank has several threads."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


class StepTimer(TorchDispatchMode):
    """Sums up the seconds of a step's operations by term, on CPUs, where operations are synchronous.

    Args:
        activity: has the current phase of the step.
        waits: whether to wait for each collective, to measure its time. This requires that all ranks call the same
            collectives in the same order: pipeline stages would deadlock.
        widest: the axis that spans all ranks; PyTorch uses the default group for it.

    Attributes:
        seconds: seconds by term of `jingu.plan.step_time.TERMS` and of `jingu.plan.alignment`. They do not include
            the time of Python code between operations, except in phases that are terms as a whole.
    """

    def __init__(self, activity: Activity, *, waits: bool, widest: str) -> None:
        super().__init__()
        self._waits = waits
        self.seconds = StepSeconds()
        self._activity = activity
        self._collective = self._widest = widest
        self._last = ("", 0.0, 0.0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Operations on a DTensor arrive here a second time, on its local tensor: count only those.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        term, is_local = self._term(func, args)
        start, own_start = time.perf_counter(), computing_clock()
        result = func(*args, **(kwargs or {}))
        # Never wait for a send: it ends only when its peer receives.
        if self._waits and func.namespace == "c10d" and not func.name().startswith(("c10d::send", "c10d::recv")):
            works: list[Any] = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.ScriptObject)]
            for work in works:
                work.wait()
        own_end, end = computing_clock(), time.perf_counter()
        if is_local:
            computing = self.seconds.computing
            computing[term] = computing.get(term, 0.0) + own_end - own_start
            return result
        last_term, last_end, last_own = self._last
        if term == last_term and term in _WHOLE_PHASES.values():
            start, own_start = last_end, last_own
        self.seconds.waiting[term] = self.seconds.waiting.get(term, 0.0) + end - start
        self.seconds.busy_waiting += own_end - own_start
        self._last = (term, end, own_end)
        return result

    def _term(self, func: Any, args: Any) -> tuple[str, bool]:
        """Return the term of an operation, and whether it is local rather than a collective or a whole phase."""
        phase_term = _WHOLE_PHASES.get(self._activity.phase)
        if phase_term is not None:
            return phase_term, False
        group = collective_group(func, args)
        if group is not None:
            axis = group.removeprefix("mesh_")
            if axis not in _AXES:
                # The default group: the widest axis, or experts over all ranks, which are alone in using all-to-all.
                is_exchange = self._widest == "data" and ("all_to_all" in func.name() or "alltoall" in func.name())
                axis = "expert" if is_exchange else self._widest
            self._collective = axis
            return axis, False
        name = func.name().partition("::")[2].partition(".")[0]
        if name == "wait_tensor":
            return self._collective, False
        phase = _PHASES.get(self._activity.phase)
        if phase is not None:
            return phase, True
        if name in _MATMULS:
            return "matmuls", True
        return "attention" if "scaled_dot_product" in name else "elementwise", True


def complete_terms(
    ranks: Sequence[StepSeconds], computing: float, step: float, *, ranks_per_core: float, is_pipeline: bool
) -> dict[str, float]:
    """Return the seconds of a step by term: operations (mean over ranks), Python ("launch"), and collectives.

    Ranks that share cores compute in turns, so their CPU seconds are multiplied by `ranks_per_core`. The wall-clock
    time of a collective includes waiting for the computation of other ranks; collectives therefore share only the rest
    of the step, in which no rank computes.

    Args:
        ranks: the measurements of each rank in one step.
        computing: mean seconds of a step by the ranks' own clocks, without the overhead of timing each operation.
        step: wall-clock seconds of such a step.
    """
    terms = {term: ranks_per_core * _mean(ranks, "computing", term) for term in _terms(ranks, "computing")}
    waiting = {term: _mean(ranks, "waiting", term) for term in _terms(ranks, "waiting")}
    host = ranks_per_core * (computing - sum(rank.busy_waiting for rank in ranks) / len(ranks)) - sum(terms.values())
    terms["launch"] = terms.get("launch", 0.0) + max(0.0, host)
    # Collectives, and in a pipeline the bubble, share the rest of the step.
    remainder = max(0.0, step - sum(terms.values()))
    if is_pipeline:
        waiting["bubble"] = max(0.0, remainder - sum(waiting.values()))
    scale = remainder / (sum(waiting.values()) or 1.0)
    terms |= {term: seconds * scale for term, seconds in waiting.items()}
    total = sum(terms.values())
    if not waiting:
        terms["launch"] += max(0.0, step - total)
    return {term: seconds * min(1.0, step / total) for term, seconds in terms.items()}


def _terms(ranks: Sequence[StepSeconds], kind: str) -> set[str]:
    return {term for rank in ranks for term in getattr(rank, kind)}


def _mean(ranks: Sequence[StepSeconds], kind: str, term: str) -> float:
    return sum(getattr(rank, kind).get(term, 0.0) for rank in ranks) / len(ranks)
