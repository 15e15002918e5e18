"""Collectives that gradients flow through.

Each backward pass is the exact counterpart of the forward one, for gradients of which every rank holds a share.
"""

from __future__ import annotations

import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed import ProcessGroup

# The names until PyTorch 2.12.
_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
_scatter = getattr(collectives, "reduce_scatter_single_autograd", None) or collectives.reduce_scatter_tensor_autograd


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The parts of all ranks along `dim`; going back, their gradients are added up and scattered again."""
    gathered: Tensor = _gather(x.contiguous(), dim, group)
    return gathered


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's part along `dim` of the sum over ranks; going back, the gradient is gathered."""
    scattered: Tensor = _scatter(x.contiguous(), "sum", dim, group)
    return scattered


def all_to_all(
    x: Tensor, group: ProcessGroup, received: list[int] | None = None, sent: list[int] | None = None
) -> Tensor:
    """Part i along the first dim goes to rank i; without sizes the parts are equal."""
    exchanged: Tensor = collectives.all_to_all_single_autograd(x.contiguous(), received, sent, group)
    return exchanged


def all_reduce(x: Tensor, op: str, group: ProcessGroup) -> Tensor:
    """The sum ("sum") or largest ("max") over ranks; no gradient flows through."""
    return collectives.all_reduce(x, op, group)
