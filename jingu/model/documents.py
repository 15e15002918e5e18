"""Attention that stays inside documents, without a mask of size T² where the device has a way.

On CUDA it is one kernel that passes over blocks in which nothing is seen (PyTorch's FlexAttention). On CPU attention is
computed document by document, which is also less arithmetic.

Shapes: B rows, T tokens, H query heads in groups for G key-value heads, K head size.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from jingu.model.causal import CausalAttention
from jingu.model.products import attend, in_blocks

LEAST_HEAD = 16
"""Head size from which on the kernel on CUDA works."""


class Documents(NamedTuple):
    """Which tokens see each other: those of their own document (up to themselves, where `causal`)."""

    numbers: Tensor
    """[B, T] document of each token; those of one stand together."""
    causal: bool
    blocks: Any
    """FlexAttention's, where that is the way."""

    @staticmethod
    def of(numbers_BT: Tensor, head_size: int, dtype: torch.dtype, *, causal: bool) -> Documents:
        """What all blocks of a model share in a forward pass."""
        kernel = head_size >= LEAST_HEAD and dtype != torch.float64 and find_spec("triton") is not None
        made = block_mask(numbers_BT, causal=causal) if numbers_BT.device.type == "cuda" and kernel else None
        return Documents(numbers_BT, causal, made)

    def mask(self) -> Tensor:
        """Booleans [B, 1, T, T]."""
        seen = self.numbers[:, :, None] == self.numbers[:, None, :]
        return (seen.tril() if self.causal else seen).unsqueeze(1)

    def attend(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scale: float | None) -> Tensor:
        """[B, H, T, K]: what each token sees."""
        if self.blocks is not None:
            return flex(q_BHTK, k_BGTK, v_BGTK, self.blocks, scale)
        if self.causal and scale is None and in_blocks(q_BHTK):
            blocked: Tensor = CausalAttention.apply(q_BHTK, k_BGTK, v_BGTK, self.numbers)
            return blocked
        # Compiled code is for one shape, and documents have others in every batch.
        if q_BHTK.device.type != "cpu" or torch.compiler.is_compiling():
            return attend(q_BHTK, k_BGTK, v_BGTK, self.mask(), causal=False, scale=scale)
        rows = []
        for number, its in enumerate(self.numbers):
            lengths = torch.unique_consecutive(its, return_counts=True)[1].tolist()
            qs, ks, vs = (x[number : number + 1].split(lengths, 2) for x in (q_BHTK, k_BGTK, v_BGTK))
            each = zip(qs, ks, vs, strict=True)
            rows.append(torch.cat([attend(q, k, v, None, causal=self.causal, scale=scale) for q, k, v in each], 2))
        return torch.cat(rows)


def block_mask(numbers_BT: Tensor, *, causal: bool) -> Any:
    """What FlexAttention makes of documents; nothing of size T² on CUDA, where it is compiled."""

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = numbers_BT[row, query] == numbers_BT[row, key]
        return same & (query >= key) if causal else same

    rows, tokens = numbers_BT.shape
    make = _compiled(create_block_mask) if numbers_BT.device.type == "cuda" else create_block_mask
    return make(seen, rows, None, tokens, tokens, device=numbers_BT.device)


def flex(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, blocks: Any, scale: float | None) -> Tensor:
    """FlexAttention; where the code around it is compiled, a part of that."""
    alone = q_BHTK.device.type == "cuda" and not torch.compiler.is_compiling()
    kernel = _compiled(flex_attention) if alone else flex_attention
    grouped = q_BHTK.shape[1] != k_BGTK.shape[1]
    found: Tensor = kernel(q_BHTK, k_BGTK, v_BGTK, block_mask=blocks, scale=scale, enable_gqa=grouped)
    return found


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function)
