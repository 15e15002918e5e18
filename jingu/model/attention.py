"""Causal self-attention and its masks.

Shapes: B rows, T tokens, S keys (T and what a cache holds), D width, H heads, G key-value heads, K head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from jingu.model import spec as specs
from jingu.model.layers import Linear, make_norm
from jingu.model.products import attend
from jingu.model.rotary import Rotary, rotate


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

    def __init__(self, model: specs.ModelSpec) -> None:
        super().__init__()
        spec, width = model.attention, model.width
        self.head_size = spec.head_size
        self.interleaved = isinstance(model.position, specs.RotaryPositions) and model.position.interleaved
        self.q = Linear(width, spec.heads * spec.head_size, bias=spec.qkv_bias)
        self.k = Linear(width, spec.kv_heads * spec.head_size, bias=spec.qkv_bias)
        self.v = Linear(width, spec.kv_heads * spec.head_size, bias=spec.qkv_bias)
        self.output = Linear(spec.heads * spec.head_size, width, bias=spec.output_bias)
        self.q_norm = make_norm(model.norm, spec.head_size) if spec.qk_norm else None
        self.k_norm = make_norm(model.norm, spec.head_size) if spec.qk_norm else None

    def forward(self, x_BTD: Tensor, rotary: Rotary | None, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        # The number of heads is left open (-1): under tensor parallelism a rank holds only some of them.
        q, k, v = (part(x_BTD).unflatten(-1, (-1, self.head_size)) for part in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = (rotate(part, rotary, interleaved=self.interleaved) for part in (q, k))
        q_BHTK, k_BGSK, v_BGSK = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k_BGSK, v_BGSK = cache.extend(k_BGSK, v_BGSK)
        # Without a mask, either queries and keys are the same tokens, or one new token sees all that came before.
        causal = mask is None and q_BHTK.shape[2] == k_BGSK.shape[2]
        y_BHTK = attend(q_BHTK, k_BGSK, v_BGSK, mask, causal=causal)
        return self.output(y_BHTK.transpose(1, 2).flatten(2))


def attention_mask(
    spec: specs.ModelSpec, tokens: int, past: int, documents_BT: Tensor | None, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """Which of all keys each new query sees, where a causal kernel cannot say it by itself.

    Returns:
        None where it can; else booleans that broadcast to [B, H, T, S], or with ALiBi what is added to the scores.
    """
    window, alibi = spec.attention.window, isinstance(spec.position, specs.AlibiPositions)
    narrow = window is not None and past + tokens > window
    if documents_BT is None and not narrow and not alibi and (tokens == 1 or not past):
        return None
    queries = torch.arange(past, past + tokens, device=device)
    distance_TS = queries[:, None] - torch.arange(past + tokens, device=device)
    seen = distance_TS >= 0
    if window is not None:
        seen &= distance_TS < window
    if documents_BT is not None:
        seen = (seen & (documents_BT[:, :, None] == documents_BT[:, None, :])).unsqueeze(1)
    if not alibi:
        return seen
    slopes = torch.tensor(alibi_slopes(spec.attention.heads), dtype=dtype, device=device)
    return (-slopes[:, None, None] * distance_TS).masked_fill(~seen, -torch.inf)


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8/n), its square and so on for n heads; where n is no power of two, every other one of the next fills up."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * number / power) for number in range(1, power + 1)]
    return slopes if power == heads else slopes + alibi_slopes(2 * power)[::2][: heads - power]
