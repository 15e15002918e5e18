"""The rows at hand, divided over the ranks of `context` and `tensor`.

Shapes: B rows, T tokens of a row, C of them on a context rank, S on a rank, D width, H heads here, K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jingu.parallel.collectives import all_gather, all_to_all, reduce_scatter


def chained(first: Callable[..., Any], then: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function that hands on to `then` what `first` gives."""
    return lambda *given: then(first(*given))


class Rows:
    """The rows at hand, divided over the ranks of `context` and `tensor`.

    Rows are filled up so that T divides, and cut again before attention and routers see them.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.tokens = 0  # T; set when a forward pass begins
        self.context, self.tensor = mesh["context"].size(), mesh["tensor"].size()
        self.context_group, self.tensor_group = mesh.get_group("context"), mesh.get_group("tensor")
        self.context_rank, self.tensor_rank = mesh.get_local_rank("context"), mesh.get_local_rank("tensor")

    def filled(self, tokens: int) -> int:
        """T, filled up."""
        ranks = self.context * self.tensor
        return -(-tokens // ranks) * ranks

    def of_context(self, x: Tensor, filler: int = 0) -> Tensor:
        """From [..., T] the C tokens of this context rank; where that is alone, all T."""
        return self._filled_up(x, filler).chunk(self.context, -1)[self.context_rank] if self.context > 1 else x

    def of_rank(self, x: Tensor) -> Tensor:
        """From [..., T] the S tokens of this rank."""
        ranks, rank = self.context * self.tensor, self.context_rank * self.tensor + self.tensor_rank
        return self._filled_up(x, 0).chunk(ranks, -1)[rank]

    def _filled_up(self, x: Tensor, filler: int) -> Tensor:
        return F.pad(x, (0, self.filled(x.shape[-1]) - x.shape[-1]), value=filler)

    def gather(self, x_BSD: Tensor) -> Tensor:
        """The C tokens of this context rank; where that is alone, cut to the row's T."""
        x_BCD = all_gather(x_BSD, 1, self.tensor_group) if self.tensor > 1 else x_BSD
        return x_BCD if self.context > 1 else x_BCD[:, : self.tokens]

    def scatter(self, y_BCD: Tensor) -> Tensor:
        """The sum over `tensor` of what its ranks have computed, for this rank's S tokens."""
        y_BCD = F.pad(y_BCD, (0, 0, 0, -y_BCD.shape[1] % self.tensor))
        return reduce_scatter(y_BCD, 1, self.tensor_group) if self.tensor > 1 else y_BCD

    def whole(self, x_BSD: Tensor) -> Tensor:
        """All T tokens, on every rank."""
        x_BCD = all_gather(x_BSD, 1, self.tensor_group) if self.tensor > 1 else x_BSD
        return self.row(x_BCD)

    def row(self, x_BCD: Tensor) -> Tensor:
        """All T tokens, from those of each context rank."""
        return (all_gather(x_BCD, 1, self.context_group) if self.context > 1 else x_BCD)[:, : self.tokens]

    def to_heads(self, x_BCF: Tensor, head_size: int) -> Tensor:
        """All T tokens of some of the heads, for the C tokens of all of them. Heads that are too few are repeated."""
        x_BCHK = x_BCF.unflatten(-1, (-1, head_size))
        if x_BCHK.shape[2] < self.context:
            x_BCHK = x_BCHK.repeat_interleave(self.context // x_BCHK.shape[2], 2)
        batch, tokens, heads, _ = x_BCHK.shape
        parts = x_BCHK.unflatten(2, (self.context, -1)).permute(2, 0, 1, 3, 4)
        parts = all_to_all(parts.flatten(0, 1), self.context_group).unflatten(0, (self.context, batch))
        x_BTF = parts.permute(1, 0, 2, 3, 4).reshape(batch, self.context * tokens, heads // self.context * head_size)
        return x_BTF[:, : self.tokens]

    def of_heads(self, x_NGK: Tensor) -> Tensor:
        """Of what there is of each head, that of the heads which `to_heads` leaves on this rank."""
        if x_NGK.shape[1] < self.context:
            x_NGK = x_NGK.repeat_interleave(self.context // x_NGK.shape[1], 1)
        return x_NGK.chunk(self.context, 1)[self.context_rank]

    def from_heads(self, y_BTF: Tensor) -> Tensor:
        """The way back: the C tokens of all heads."""
        y_BTF = F.pad(y_BTF, (0, 0, 0, self.filled(y_BTF.shape[1]) - y_BTF.shape[1]))
        parts = y_BTF.unflatten(1, (self.context, -1)).permute(1, 0, 2, 3)
        parts = all_to_all(parts.flatten(0, 1), self.context_group).unflatten(0, (self.context, -1))
        return parts.permute(1, 2, 0, 3).flatten(2)
