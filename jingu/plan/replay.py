"""Record a step exactly: the peak of all tensors, and every collective by axis, operation and bytes.

The same recorder watches a step on real ranks and one on ranks that do not exist (`jingu/compat/torch_distributed.py:
pretend_ranks`), where collectives return at once; both count the same.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from jingu.compat.torch import TorchDispatchMode, storage_key, tree_leaves
from jingu.compat.torch_distributed import collective_group


@dataclass
class StepRecord:
    """What a step did on a rank.

    Attributes:
        peak: most bytes of tensors at a time; begin: bytes before the step.
        calls: number of collectives, and `sent`: their bytes, by group and operation.
    """

    begin: int = 0
    peak: int = 0
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)


class _StepRecorder(TorchDispatchMode):
    """Sees every operation on tensors, also those of the backward pass, which runs in the same thread on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.record = StepRecord()
        self._storages: dict[int, weakref.ref[Any]] = {}

    def watch(self, value: object, others: Container[int] = ()) -> bool:
        """Count the storages of tensors from now on, as long as they live; return whether there are new ones.

        Args:
            others: keys of storages that do not count.
        """
        before = len(self._storages)
        for key, storage in _storages(value).items():
            if key not in self._storages and key not in others:
                self._storages[key] = weakref.ref(storage, partial(self._forget, key))
        return len(self._storages) > before

    def _forget(self, key: int, _reference: object) -> None:
        self._storages.pop(key, None)

    def total(self) -> int:
        """Return the bytes of all storages that live."""
        storages = [reference() for reference in list(self._storages.values())]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What a DTensor does comes here again, as operations on its local tensor.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        group = collective_group(func, args)
        if group is not None:
            key = (group, func.name().partition("::")[2].partition(".")[0])
            self.record.calls[key] += 1
            self.record.sent[key] += sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            # Stages of a pipeline receive into tensors of the first step.
            self.watch(args)
        # Views of storages that nobody has allocated here: gloo's own buffers, which others do not need.
        others = _storages(args).keys()
        result = func(*args, **(kwargs or {}))
        # FSDP allocates by resizing storages, before it gathers into them.
        if self.watch(result, others) or func.namespace == "fsdp":
            self.record.peak = max(self.record.peak, self.total())
        return result


def _storages(value: object) -> dict[int, torch.UntypedStorage]:
    """Return the storages of all tensors in a value, by key."""
    leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    storages = [(leaf.to_local() if isinstance(leaf, DTensor) else leaf).untyped_storage() for leaf in leaves]
    return {storage_key(storage): storage for storage in storages}


def record_step(step: Callable[[], object], state: object) -> StepRecord:
    """Run a step, and return what it did.

    Args:
        state: tensors that live before the step: parameters and optimizer state.
    """
    recorder = _StepRecorder()
    recorder.watch(state)
    recorder.record.begin = recorder.record.peak = recorder.total()
    with recorder:
        step()
    return recorder.record
