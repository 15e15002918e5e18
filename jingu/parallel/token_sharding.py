"""Divide the tokens of rows over the ranks of `context` and `tensor`, and gather them again.

Shapes: B rows, T tokens of a row, C of them on a context rank, S on a rank, D hidden size, H heads here, K head dim,
F = H × K features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jingu.compat.torch_distributed import all_gather, all_to_all, reduce_scatter


def compose(first: Callable[..., Any], then: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a function that calls `then` with the result of `first`."""
    return lambda *arguments: then(first(*arguments))


class TokenSharding:
    """How a row's tokens are divided over the ranks of `context` and `tensor`.

    A row is padded so that its tokens divide evenly. The padding is removed before attention and routers.

    Attributes:
        tokens: T, the tokens per row without padding; set at the beginning of each forward pass.
        context, tensor: numbers of ranks of the two axes.
        context_group, tensor_group: their process groups.
        context_rank, tensor_rank: this process's rank on the two axes.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.tokens = 0
        self.context = mesh["context"].size()
        self.tensor = mesh["tensor"].size()
        self.context_group = mesh.get_group("context")
        self.tensor_group = mesh.get_group("tensor")
        self.context_rank = mesh.get_local_rank("context")
        self.tensor_rank = mesh.get_local_rank("tensor")

    def padded_length(self, tokens: int) -> int:
        """Return a number of tokens, rounded up to a multiple of the ranks of `context` × `tensor`."""
        ranks = self.context * self.tensor
        return -(-tokens // ranks) * ranks

    def shard_context(self, x: Tensor, fill: int = 0) -> Tensor:
        """Return this context rank's C of the tokens [..., T]. Without context parallelism, return all T, unpadded.

        Args:
            fill: value of the padding.
        """
        if self.context == 1:
            return x
        return self._pad(x, fill).chunk(self.context, -1)[self.context_rank]

    def shard_tokens(self, x: Tensor) -> Tensor:
        """Return this rank's S of the tokens [..., T], padded with zeros."""
        rank = self.context_rank * self.tensor + self.tensor_rank
        return self._pad(x, 0).chunk(self.context * self.tensor, -1)[rank]

    def _pad(self, x: Tensor, fill: int) -> Tensor:
        return F.pad(x, (0, self.padded_length(x.shape[-1]) - x.shape[-1]), value=fill)

    # Over the ranks of `tensor`

    def gather(self, x_BSD: Tensor) -> Tensor:
        """All-gather the C tokens of this context rank. Without context parallelism, padding is removed: T tokens."""
        x_BCD = all_gather(x_BSD, 1, self.tensor_group) if self.tensor > 1 else x_BSD
        return x_BCD if self.context > 1 else x_BCD[:, : self.tokens]

    def scatter(self, y_BCD: Tensor) -> Tensor:
        """Reduce-scatter over `tensor`: return this rank's S tokens of the sum."""
        missing = -y_BCD.shape[1] % self.tensor
        if missing:  # without rows to add, F.pad would copy the tensor
            y_BCD = F.pad(y_BCD, (0, 0, 0, missing))
        return reduce_scatter(y_BCD, 1, self.tensor_group) if self.tensor > 1 else y_BCD

    # Over the ranks of `context`

    def gather_all(self, x_BSD: Tensor) -> Tensor:
        """Return all T tokens on every rank, gathered over `tensor` and `context`."""
        x_BCD = all_gather(x_BSD, 1, self.tensor_group) if self.tensor > 1 else x_BSD
        return self.gather_context(x_BCD)

    def gather_context(self, x_BCD: Tensor) -> Tensor:
        """Return all T tokens, gathered over `context`."""
        x_BTD = all_gather(x_BCD, 1, self.context_group) if self.context > 1 else x_BCD
        return x_BTD[:, : self.tokens]

    def tokens_to_heads(self, x_BCF: Tensor, head_dim: int) -> Tensor:
        """Exchange C tokens of all heads for all T tokens of this rank's heads (all-to-all over `context`).

        If there are fewer heads than context ranks, heads are repeated.
        """
        x_BCHK = x_BCF.unflatten(-1, (-1, head_dim))
        if x_BCHK.shape[2] < self.context:
            x_BCHK = x_BCHK.repeat_interleave(self.context // x_BCHK.shape[2], 2)
        batch, tokens, heads, _ = x_BCHK.shape
        # Move the dim of the destination ranks to the front.
        parts = x_BCHK.unflatten(2, (self.context, -1)).permute(2, 0, 1, 3, 4)
        parts = all_to_all(parts.flatten(0, 1), self.context_group).unflatten(0, (self.context, batch))
        # Each rank has sent its tokens; concatenate them in the order of the ranks.
        x_BTF = parts.permute(1, 0, 2, 3, 4).reshape(batch, self.context * tokens, heads // self.context * head_dim)
        return x_BTF[:, : self.tokens]

    def heads_to_tokens(self, y_BTF: Tensor) -> Tensor:
        """Exchange all T tokens of some heads for the C tokens of all heads: the inverse of `tokens_to_heads`."""
        y_BTF = F.pad(y_BTF, (0, 0, 0, self.padded_length(y_BTF.shape[1]) - y_BTF.shape[1]))
        parts = y_BTF.unflatten(1, (self.context, -1)).permute(1, 0, 2, 3)
        parts = all_to_all(parts.flatten(0, 1), self.context_group).unflatten(0, (self.context, -1))
        return parts.permute(1, 2, 0, 3).flatten(2)

    def shard_heads(self, x_NGK: Tensor) -> Tensor:
        """Return the heads of [N, G, K] that `tokens_to_heads` leaves on this rank, along the second dim."""
        if x_NGK.shape[1] < self.context:
            x_NGK = x_NGK.repeat_interleave(self.context // x_NGK.shape[1], 1)
        return x_NGK.chunk(self.context, 1)[self.context_rank]
