"""Full activation checkpointing for pipeline schedules that split backward passes.

Such a schedule calls `torch.autograd.grad` once for the gradients of a stage's inputs, and once for each group of its
weights. `torch.utils.checkpoint` would recompute the block in each of these calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Recomputation:
    """The tensors that the backward passes of a block need: recomputed on first use, and freed with the graph.

    Args:
        forward: computes the block; must save the same tensors in the same order each time.
    """

    def __init__(self, forward: Callable[[], Any]) -> None:
        self._forward = forward
        self._num_saved = 0
        self._tensors: list[Tensor] = []

    def pack(self, _tensor: Tensor) -> int:
        """Return the number of a tensor that an operation saves, in place of the tensor."""
        self._num_saved += 1
        return self._num_saved - 1

    def unpack(self, number: int) -> Tensor:
        """Return the saved tensor of a number."""
        if not self._tensors:
            # The graph of the recomputation is not used, so its tensors need not stay connected to it.
            with torch.enable_grad(), saved_tensors_hooks(lambda x: self._tensors.append(x.detach()), lambda x: x):
                self._forward()
            assert len(self._tensors) == self._num_saved, "the recomputation of a block saves other tensors"
        return self._tensors[number]


def checkpoint_for_split_backward(forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Run `forward` without storing its activations, and recompute them once for all parts of its backward pass."""
    recomputation = _Recomputation(partial(forward, *arguments, **keywords))
    with saved_tensors_hooks(recomputation.pack, recomputation.unpack):
        return forward(*arguments, **keywords)
