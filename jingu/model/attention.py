"""Causal self-attention, its rotary tables and its masks.

Shapes: B rows, T tokens, S keys (T and what a cache holds), D width, H heads, G key-value heads, K head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from jingu.model import spec as specs
from jingu.model.layers import Linear
from jingu.model.products import attend

Rotary = tuple[Tensor, Tensor]


class LayerCache(Protocol):
    """Keys and values of one layer's earlier tokens."""

    def extend(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Append these, and return all keys and values [B, G, S, K]."""


class Cache(Protocol):
    """Keys and values of earlier tokens, for generation."""

    length: int
    """Tokens held."""

    def layer(self, number: int) -> LayerCache:
        """The part of one block."""

    def advance(self, tokens: int) -> None:
        """Count tokens as held, once every layer has them."""


class SelfAttention(nn.Module):
    """Multi-head or grouped-query attention over earlier tokens."""

    def __init__(self, spec: specs.Attention, width: int) -> None:
        super().__init__()
        self.head_size = spec.head_size
        self.q = Linear(width, spec.heads * spec.head_size, bias=spec.qkv_bias)
        self.k = Linear(width, spec.kv_heads * spec.head_size, bias=spec.qkv_bias)
        self.v = Linear(width, spec.kv_heads * spec.head_size, bias=spec.qkv_bias)
        self.output = Linear(spec.heads * spec.head_size, width, bias=spec.output_bias)

    def forward(self, x_BTD: Tensor, rotary: Rotary | None, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        # The number of heads is left open (-1): under tensor parallelism a rank holds only some of them.
        q, k, v = (part(x_BTD).unflatten(-1, (-1, self.head_size)) for part in (self.q, self.k, self.v))
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        q_BHTK, k_BGSK, v_BGSK = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k_BGSK, v_BGSK = cache.extend(k_BGSK, v_BGSK)
        # Without a mask, either queries and keys are the same tokens, or one new token sees all that came before.
        causal = mask is None and q_BHTK.shape[2] == k_BGSK.shape[2]
        y_BHTK = attend(q_BHTK, k_BGSK, v_BGSK, mask, causal=causal)
        return self.output(y_BHTK.transpose(1, 2).flatten(2))


def rotary_tables(base: float, head_size: int, positions: Tensor, dtype: torch.dtype) -> Rotary:
    """Cosines and sines [..., T, 1, K/2] of position times base^(-2i/K), in `dtype` (Su et al., 2021)."""
    steps = torch.arange(0, head_size, 2, device=positions.device).to(dtype)
    # In this order of operations fp32 tables are bitwise those of transformers.
    angles = positions.to(dtype)[..., None] * (1.0 / base ** (steps / head_size))
    return angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)


def rotate(x_BTHK: Tensor, rotary: Rotary) -> Tensor:
    """Turn the pairs (x_i, x_{i+K/2}) of each head, in the tables' dtype, rounded once."""
    cos, sin = rotary
    first, second = x_BTHK.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHK.dtype)


def document_mask(documents_BT: Tensor) -> Tensor:
    """[B, 1, T, T], true where the key is no later than the query and of the same document."""
    tokens = documents_BT.shape[1]
    same = documents_BT[:, :, None] == documents_BT[:, None, :]
    return (same & causal_mask(tokens, 0, documents_BT.device)).unsqueeze(1)


def causal_mask(tokens: int, past: int, device: torch.device) -> Tensor:
    """[T, past + T], true where the key is no later than the query, when `past` tokens came before."""
    return torch.ones(tokens, past + tokens, dtype=torch.bool, device=device).tril(past)
