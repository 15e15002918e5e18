"""Measure the terms of a step while it runs, to compare them with the plan."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from jingu.compat.torch import TorchDispatchMode, tree_leaves
from jingu.compat.torch_distributed import collective_group

_PRODUCTS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_int_mm", "_grouped_mm", "grouped_product", "grouped_outer")
)
_AXES = ("tensor", "context", "expert", "pipeline")
# Phases of a step (`jingu.watch.slot.PHASES`) whose operations belong to one term.
_PHASES = {"optimizer": "optimizer", "gradients": "optimizer", "data": "launch"}
# Those that are a term with all that happens in them, as the plan counts them: collectives, and what the host does.
_WHOLE_PHASES = {
    "rollout": "generation",
    "log-probs": "log-probabilities",
    **{name: name for name in ("reference", "teacher", "critic")},
}


class StepTimer(TorchDispatchMode):
    """Sums up the seconds of the operations of a step by term, on a CPU, where an operation ends when it returns.

    Args:
        phase: returns the present phase of the step.
        waits: whether collectives end before the next operation begins, so that their time counts. Only where all
            ranks call the same collectives in the same order: stages of a pipeline would wait for each other forever.

    Attributes:
        seconds: by term of `jingu.plan.step_time.TERMS` and of `jingu.plan.alignment`. What Python takes between
            operations is not among them, except in the phases of learning from rewards.
    """

    def __init__(self, phase: Callable[[], str], *, waits: bool) -> None:
        super().__init__()
        self._waits = waits
        self.seconds: dict[str, float] = defaultdict(float)
        self._phase = phase
        self._collective = "data"
        self._last = ("", 0.0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What a DTensor does comes here again, as operations on its local tensor.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        term = self._term(func, args)
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        # A send ends when its peer receives, which may come later.
        if self._waits and func.namespace == "c10d" and not func.name().startswith(("c10d::send", "c10d::recv")):
            works: list[Any] = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.ScriptObject)]
            for work in works:
                work.wait()
        end = time.perf_counter()
        last_term, last_end = self._last
        self.seconds[term] += end - (last_end if term == last_term and term in _WHOLE_PHASES.values() else start)
        self._last = (term, end)
        return result

    def _term(self, func: Any, args: Any) -> str:
        whole = _WHOLE_PHASES.get(self._phase())
        if whole is not None:
            return whole
        group = collective_group(func, args)
        if group is not None:
            axis = group.removeprefix("mesh_")
            if axis not in _AXES:
                # Data, or experts over all ranks, which PyTorch lets use the default group. They alone exchange rows.
                axis = "expert" if "all_to_all" in func.name() or "alltoall" in func.name() else "data"
            self._collective = axis
            return self._collective
        name = func.name().partition("::")[2].partition(".")[0]
        if name == "wait_tensor":
            return self._collective
        phase = _PHASES.get(self._phase())
        if phase is not None:
            return phase
        if name in _PRODUCTS:
            return "matmuls"
        return "attention" if "scaled_dot_product" in name else "elementwise"


def complete_terms(measured: Mapping[str, float], step: float, *, is_pipeline: bool) -> dict[str, float]:
    """Return the seconds of a step by term: those measured, and what is left, a pipeline's idle time or the host's.

    Where the measured step was slower than others, its terms are shortened.

    Args:
        step: seconds of a step that nobody measured in detail.
    """
    total = max(step, sum(measured.values()))
    rest = "bubble" if is_pipeline else "launch"
    terms = {rest: 0.0, **measured}
    terms[rest] += total - sum(measured.values())
    return {term: seconds * step / total for term, seconds in terms.items()}
