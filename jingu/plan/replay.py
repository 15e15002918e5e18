"""An exact record of a step: the peak memory of all tensors, and every collective by axis, operation and bytes.

The same recorder works on real ranks and on simulated ones (`jingu/compat/torch_distributed.py:pretend_ranks`), whose
collectives return at once; both give the same counts.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from jingu.compat.torch import TorchDispatchMode, storage_key, tree_leaves
from jingu.compat.torch_distributed import collective_group, unwrap_pending


@dataclass
class StepRecord:
    """The record of a step on a rank.

    Attributes:
        begin: bytes of tensors before the step; peak: their maximum during the step.
        calls: number of collectives by group and operation; sizes: their bytes.
    """

    begin: int = 0
    peak: int = 0
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    sizes: Counter[tuple[str, str]] = field(default_factory=Counter)


class _StepRecorder(TorchDispatchMode):
    """Intercepts every tensor operation, also those of the backward pass, which runs in the same thread on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.record = StepRecord()
        self._storages: dict[int, weakref.ref[Any]] = {}
        # Bytes of each storage when they were last counted, and their sum. A storage grows only in FSDP's operations,
        # so that the sum is at least what all storages have now.
        self._counted: dict[int, int] = {}
        self._bound = 0

    def watch(self, value: object) -> bool:
        """Count the storages of tensors, in any structure, as long as they live; return whether there are new ones."""
        before = len(self._storages)
        for key, storage in _storages(value):
            if key not in self._storages:
                self._storages[key] = weakref.ref(storage, partial(self._forget, key))
                self._bound += self._counted.setdefault(key, storage.nbytes())
        return len(self._storages) > before

    def _forget(self, key: int, _reference: object) -> None:
        self._storages.pop(key, None)
        self._bound -= self._counted.pop(key, 0)

    def total(self) -> int:
        """Return the bytes of all live storages."""
        references = list(self._storages.items())
        storages = ((key, reference()) for key, reference in references)
        self._counted = {key: storage.nbytes() for key, storage in storages if storage is not None}
        self._bound = sum(self._counted.values())
        return self._bound

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Operations on a DTensor arrive here a second time, on its local tensor: count only those.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        group = collective_group(func, args)
        if group is not None:
            key = (group, func.name().partition("::")[2].partition(".")[0])
            self.record.calls[key] += 1
            self.record.sizes[key] += sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        # Buffers that are reused may be older than this recorder: those in which pipeline stages receive, and those in
        # which FSDP gathers, which it resizes.
        self.watch([args, kwargs])
        result = func(*args, **(kwargs or {}))
        # FSDP allocates memory by resizing known storages before it gathers into them.
        if (self.watch(result) and self._bound > self.record.peak) or func.namespace == "fsdp":
            self.record.peak = max(self.record.peak, self.total())
        return result


def _storages(value: Any) -> list[tuple[int, torch.UntypedStorage]]:
    """Return the storages of all tensors in lists, tuples and dictionaries, with their keys; of a DTensor, its part's.

    Each operation asks for them. Weights in a layout of oneDNN have none.
    """
    if isinstance(value, Tensor):
        part = unwrap_pending(value.to_local() if isinstance(value, DTensor) else value)
        return [(storage_key(part.untyped_storage()), part.untyped_storage())] if part.layout == torch.strided else []
    if not isinstance(value, dict | list | tuple):
        return []
    parts = value.values() if isinstance(value, dict) else value
    return [pair for part in parts for pair in _storages(part)]


@contextmanager
def recording(state: object) -> Iterator[StepRecord]:
    """Record the step that is taken within the block.

    Args:
        state: tensors that exist before the step: parameters and optimizer state.
    """
    recorder = _StepRecorder()
    recorder.watch(state)
    # Neighboring stages of a rank replace their buffers in the step; a reference would keep the old ones.
    del state
    recorder.record.begin = recorder.record.peak = recorder.total()
    with recorder:
        yield recorder.record


def storage_bytes(state: object) -> int:
    """Return the bytes of the storages of all tensors in a value, each counted once."""
    return sum({key: storage.nbytes() for key, storage in _storages(state)}.values())
