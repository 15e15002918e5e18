"""Causal attention on CPUs with bf16 units, computed per block of queries and all keys up to the block's end.

PyTorch's CPU kernel multiplies small tiles, and reaches a sixth of these CPUs' speed for large matmuls. The matmuls
here are large. The probabilities are computed in at least fp32, as in PyTorch's kernel, and kept for the backward pass
in the dtype of the hidden states, which halves their memory.

Shapes: B rows, H query heads in G groups of R = H / G that share a key-value head, T tokens, K head size; C queries of
a block and E keys up to its end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Queries per block. It is halved for sequences that would have two blocks or fewer.
BLOCK_SIZE = 128


class BlockwiseCausalAttention(torch.autograd.Function):
    """Causal attention of the tokens of a row, limited to their document and its parent if `documents_BT` is given.

    The scores are divided by √K.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BHTK: Tensor,
        k_BGTK: Tensor,
        v_BGTK: Tensor,
        documents_BT: Tensor | None = None,
        parents_BT: Tensor | None = None,
    ) -> Tensor:
        y_BHTK = torch.empty_like(q_BHTK)
        probabilities = []
        for first, last in _blocks(q_BHTK.shape[2]):
            # The softmax of a block's scores, for all keys up to the block's end.
            scores_BGCE = _scores(q_BHTK, k_BGTK, documents_BT, parents_BT, first, last)
            share_BGCE = (scores_BGCE - scores_BGCE.amax(-1, keepdim=True)).exp()
            probability = (share_BGCE / share_BGCE.sum(-1, keepdim=True)).to(q_BHTK.dtype)
            y_BHTK[:, :, first:last] = _heads(probability @ v_BGTK[:, :, :last], q_BHTK, last - first)
            probabilities.append(probability)
        ctx.save_for_backward(q_BHTK, k_BGTK, v_BGTK, y_BHTK, *probabilities)
        return y_BHTK

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTK, k_BGTK, v_BGTK, y_BHTK, *probabilities = ctx.saved_tensors
        dtype, wide, groups = q_BHTK.dtype, _wide(q_BHTK), k_BGTK.shape[1]
        # The gradient of softmax needs the sum over keys of probability times its gradient. It equals the sum over K of
        # output times its gradient (Dao et al., 2022).
        inner_BHT1 = (upstream[0].to(wide) * y_BHTK).sum(-1, keepdim=True)
        gradient_q = torch.empty_like(q_BHTK)
        gradient_k, gradient_v = (torch.zeros_like(part, dtype=wide) for part in (k_BGTK, v_BGTK))
        for (first, last), probability in zip(_blocks(q_BHTK.shape[2]), probabilities, strict=True):
            block = slice(first, last)
            q, g, inner = (_groups(part[:, :, block], groups) for part in (q_BHTK, upstream[0], inner_BHT1))
            # Backward through the matmul with the values, through softmax, and through the matmul with the keys.
            gradient_p = (g @ v_BGTK[:, :, :last].transpose(2, 3)).to(wide)
            gradient_s = (probability.to(wide) * (gradient_p - inner) * q.shape[-1] ** -0.5).to(dtype)
            gradient_q[:, :, block] = _heads(gradient_s @ k_BGTK[:, :, :last], q_BHTK, last - first)
            gradient_k[:, :, :last] += gradient_s.transpose(2, 3) @ q
            gradient_v[:, :, :last] += probability.transpose(2, 3) @ g
        return gradient_q, gradient_k.to(dtype), gradient_v.to(dtype), None, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _blocks(tokens: int) -> list[tuple[int, int]]:
    size = BLOCK_SIZE if tokens > 2 * BLOCK_SIZE else BLOCK_SIZE // 2
    return [(first, min(first + size, tokens)) for first in range(0, tokens, size)]


def _groups(x_BHCK: Tensor, groups: int) -> Tensor:
    """Return [B, G, R·C, K]: the R query heads of a group are concatenated along the queries."""
    return x_BHCK.unflatten(1, (groups, -1)).flatten(2, 3)


def _heads(x: Tensor, q_BHTK: Tensor, queries: int) -> Tensor:
    """Return [B, H, C, …] from [B, G, R·C, …]: the inverse of `_groups`."""
    return x.unflatten(2, (-1, queries)).flatten(1, 2)


def _scores(
    q_BHTK: Tensor, k_BGTK: Tensor, documents_BT: Tensor | None, parents_BT: Tensor | None, first: int, last: int
) -> Tensor:
    """Return the scaled scores [B, G, R·C, E] of a block's queries, in at least fp32; -inf for masked keys."""
    wide, device = _wide(q_BHTK), q_BHTK.device
    q = _groups(q_BHTK[:, :, first:last], k_BGTK.shape[1]).to(wide)
    scores = q @ k_BGTK[:, :, :last].to(wide).transpose(2, 3) * q.shape[-1] ** -0.5
    # The query heads of a group are concatenated, so each place occurs R times.
    repeats = q.shape[2] // (last - first)
    place_C = torch.arange(first, last, dtype=torch.int32, device=device).repeat(repeats)
    hidden = torch.arange(last, dtype=torch.int32, device=device) > place_C[:, None]
    if documents_BT is not None:
        others_BE = documents_BT[:, None, None, :last]
        is_other = documents_BT[:, first:last].repeat(1, repeats)[:, None, :, None] != others_BE
        if parents_BT is not None:
            is_other = is_other & (parents_BT[:, first:last].repeat(1, repeats)[:, None, :, None] != others_BE)
        hidden = hidden | is_other
    return scores.masked_fill(hidden, -torch.inf)
