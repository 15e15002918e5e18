"""Causal attention on CPUs with bf16 units: blocks of queries, each with the keys that it may see.

torch's own CPU kernel multiplies small tiles and reaches a sixth of the rate that these processors have for matrix
products; here the products are large. The probabilities are kept for the backward pass, in the dtype of the states:
half as many bytes as the scores, of which they are made in fp32 at least, as the kernel does.

Shapes: B rows, H query heads in G groups of R = H / G that share a key-value head, T tokens, K head size;
C queries of a block and E keys that they see.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Queries of a block; half as many where that makes two blocks or fewer.
BLOCK_SIZE = 128


class BlockwiseCausalAttention(torch.autograd.Function):
    """Causal attention of T tokens to each other, within documents and their parents if there are any."""

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
            # Softmax of a block's scores: its queries see the keys up to the block's end.
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
        # The sum over keys of probability times its gradient, which softmax's gradient needs (Dao et al., 2022).
        inner_BHT1 = (upstream[0].to(wide) * y_BHTK).sum(-1, keepdim=True)
        gradient_q = torch.empty_like(q_BHTK)
        gradient_k, gradient_v = (torch.zeros_like(part, dtype=wide) for part in (k_BGTK, v_BGTK))
        for (first, last), probability in zip(_blocks(q_BHTK.shape[2]), probabilities, strict=True):
            block = slice(first, last)
            q, g, inner = (_groups(part[:, :, block], groups) for part in (q_BHTK, upstream[0], inner_BHT1))
            # Back through the product with the values, then through softmax, then through that with the keys.
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
    """[B, G, R·C, K]: the query heads of a group under each other."""
    return x_BHCK.unflatten(1, (groups, -1)).flatten(2, 3)


def _heads(x: Tensor, q_BHTK: Tensor, queries: int) -> Tensor:
    """[B, H, C, …] of [B, G, R·C, …]."""
    return x.unflatten(2, (-1, queries)).flatten(1, 2)


def _scores(
    q_BHTK: Tensor, k_BGTK: Tensor, documents_BT: Tensor | None, parents_BT: Tensor | None, first: int, last: int
) -> Tensor:
    """Scaled scores [B, G, R·C, E] of a block's queries, in fp32 at least; -inf for keys that they do not see."""
    wide, device = _wide(q_BHTK), q_BHTK.device
    q = _groups(q_BHTK[:, :, first:last], k_BGTK.shape[1]).to(wide)
    scores = q @ k_BGTK[:, :, :last].to(wide).transpose(2, 3) * q.shape[-1] ** -0.5
    # The query heads of a group stand below each other, so each place comes several times.
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
