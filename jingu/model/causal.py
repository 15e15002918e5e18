"""Causal attention on CPUs with bf16 units: blocks of queries, each with the keys that it may see.

torch's own CPU kernel multiplies small tiles and reaches a sixth of the rate that these processors have for matrix
products; here the products are large, and nothing of size T² is kept (Dao, 2023): the backward pass computes the
probabilities again. Scores are computed in fp32 at least, as the kernel does.

Shapes: B rows, H query heads in G groups of R = H / G that share a key-value head, T tokens, K head size;
C queries of a block and E keys that they see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK = 128
"""Queries of a block, at least; more where a sequence would have more than BLOCKS blocks."""
BLOCKS = 16


class CausalAttention(torch.autograd.Function):
    """Attention to the keys up to a query's own place; queries and keys are the same T tokens."""

    @staticmethod
    def forward(ctx: Any, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        y_BHTK = torch.empty_like(q_BHTK)
        wide_k, scale = k_BGTK.to(_wide(k_BGTK)), q_BHTK.shape[-1] ** -0.5
        lse_BHT1 = wide_k.new_empty(*q_BHTK.shape[:3], 1)
        for first, last in _blocks(q_BHTK.shape[2]):
            scores_BGCE = _scores(q_BHTK, wide_k, first, last, scale)
            lse = torch.logsumexp(scores_BGCE, dim=-1, keepdim=True)
            probability = (scores_BGCE - lse).exp().to(q_BHTK.dtype)
            y_BHTK[:, :, first:last] = _heads(probability @ v_BGTK[:, :, :last], q_BHTK, last - first)
            lse_BHT1[:, :, first:last] = _heads(lse, q_BHTK, last - first)
        ctx.save_for_backward(q_BHTK, k_BGTK, v_BGTK, y_BHTK, lse_BHT1)
        return y_BHTK

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BHTK, k_BGTK, v_BGTK, y_BHTK, lse_BHT1 = ctx.saved_tensors
        dtype, groups, scale = q_BHTK.dtype, k_BGTK.shape[1], q_BHTK.shape[-1] ** -0.5
        wide_k = k_BGTK.to(_wide(k_BGTK))
        inner_BHT1 = (upstream[0].to(wide_k) * y_BHTK).sum(-1, keepdim=True)
        gradient_q = torch.empty_like(q_BHTK)
        gradient_k, gradient_v = (torch.zeros_like(part, dtype=wide_k.dtype) for part in (k_BGTK, v_BGTK))
        for first, last in _blocks(q_BHTK.shape[2]):
            block = slice(first, last)
            q, g = (_groups(part[:, :, block], groups) for part in (q_BHTK, upstream[0]))
            lse, inner = (_groups(part[:, :, block], groups) for part in (lse_BHT1, inner_BHT1))
            probability = (_scores(q_BHTK, wide_k, first, last, scale) - lse).exp()
            gradient_p = (g @ v_BGTK[:, :, :last].transpose(2, 3)).to(wide_k)
            gradient_s = (probability * (gradient_p - inner) * scale).to(dtype)
            gradient_q[:, :, block] = _heads(gradient_s @ k_BGTK[:, :, :last], q_BHTK, last - first)
            gradient_k[:, :, :last] += gradient_s.transpose(2, 3) @ q
            gradient_v[:, :, :last] += probability.to(dtype).transpose(2, 3) @ g
        return gradient_q, gradient_k.to(dtype), gradient_v.to(dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _blocks(tokens: int) -> Iterator[tuple[int, int]]:
    size = max(BLOCK, -(-tokens // BLOCKS))
    return ((first, min(first + size, tokens)) for first in range(0, tokens, size))


def _groups(x_BHCK: Tensor, groups: int) -> Tensor:
    """[B, G, R·C, K]: the query heads of a group under each other."""
    return x_BHCK.unflatten(1, (groups, -1)).flatten(2, 3)


def _heads(x: Tensor, q_BHTK: Tensor, queries: int) -> Tensor:
    """[B, H, C, …] of [B, G, R·C, …]."""
    return x.unflatten(2, (-1, queries)).flatten(1, 2)


def _scores(q_BHTK: Tensor, wide_k_BGTK: Tensor, first: int, last: int, scale: float) -> Tensor:
    """Scaled scores [B, G, R·C, E] of a block's queries, -inf for keys after them."""
    q = _groups(q_BHTK[:, :, first:last], wide_k_BGTK.shape[1]).to(wide_k_BGTK) * scale
    scores = q @ wide_k_BGTK[:, :, :last].transpose(2, 3)
    place = torch.arange(first, last, device=q.device).repeat(q.shape[2] // (last - first))
    return scores.masked_fill(torch.arange(last, device=q.device) > place[:, None], -torch.inf)
