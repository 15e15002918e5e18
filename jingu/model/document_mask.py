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

from jingu.model.blockwise_attention import BlockwiseCausalAttention
from jingu.model.matmul_kernels import dot_product_attention, use_blockwise_attention

# Head size from which on the kernel on CUDA works.
MIN_HEAD_DIM = 16


# Devices for which PyTorch compiles FlexAttention.
_FLEX_DEVICES = ("cuda", "xpu")


class DocumentMask(NamedTuple):
    """Which tokens see each other: those of their own document (up to themselves, where `causal`).

    Attributes:
        numbers: [B, T] document of each token; those of one stand together.
        blocks: flexAttention's, where that is the way.
    """

    numbers: Tensor
    causal: bool
    blocks: Any

    @staticmethod
    def of(numbers_BT: Tensor, head_size: int, dtype: torch.dtype, *, causal: bool) -> DocumentMask:
        """Create the mask that all blocks share in a forward pass."""
        kernel = head_size >= MIN_HEAD_DIM and dtype != torch.float64 and find_spec("triton") is not None
        blocks = (
            create_document_block_mask(numbers_BT, causal=causal)
            if numbers_BT.device.type in _FLEX_DEVICES and kernel
            else None
        )
        return DocumentMask(numbers_BT, causal, blocks)

    def mask(self) -> Tensor:
        """Return the mask as booleans [B, 1, T, T]."""
        seen = self.numbers[:, :, None] == self.numbers[:, None, :]
        return (seen.tril() if self.causal else seen).unsqueeze(1)

    def attend(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scale: float | None) -> Tensor:
        """Return attention [B, H, T, K] within documents."""
        if self.blocks is not None:
            return flex_attend(q_BHTK, k_BGTK, v_BGTK, self.blocks, scale)
        if self.causal and scale is None and use_blockwise_attention(q_BHTK):
            blocked: Tensor = BlockwiseCausalAttention.apply(q_BHTK, k_BGTK, v_BGTK, self.numbers)
            return blocked
        # Compiled code is for one shape, and documents have others in every batch.
        if q_BHTK.device.type != "cpu" or torch.compiler.is_compiling():
            return dot_product_attention(q_BHTK, k_BGTK, v_BGTK, self.mask(), causal=False, scale=scale)
        rows = []
        for number, its in enumerate(self.numbers):
            lengths = torch.unique_consecutive(its, return_counts=True)[1].tolist()
            qs, ks, vs = (x[number : number + 1].split(lengths, 2) for x in (q_BHTK, k_BGTK, v_BGTK))
            documents = zip(qs, ks, vs, strict=True)
            rows.append(
                torch.cat(
                    [dot_product_attention(q, k, v, None, causal=self.causal, scale=scale) for q, k, v in documents], 2
                )
            )
        return torch.cat(rows)


def create_document_block_mask(numbers_BT: Tensor, *, causal: bool) -> Any:
    """Create FlexAttention's block mask of documents; on cards it is compiled and allocates nothing of size T²."""

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = numbers_BT[row, query] == numbers_BT[row, key]
        return same & (query >= key) if causal else same

    rows, tokens = numbers_BT.shape
    make = _compiled(create_block_mask) if numbers_BT.device.type in _FLEX_DEVICES else create_block_mask
    return make(seen, rows, None, tokens, tokens, device=numbers_BT.device)


def flex_attend(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, blocks: Any, scale: float | None) -> Tensor:
    """Run FlexAttention, compiled by itself or as a part of compiled code around it."""
    alone = q_BHTK.device.type in _FLEX_DEVICES and not torch.compiler.is_compiling()
    kernel = _compiled(flex_attention) if alone else flex_attention
    grouped = q_BHTK.shape[1] != k_BGTK.shape[1]
    heads_BHTK: Tensor = kernel(q_BHTK, k_BGTK, v_BGTK, block_mask=blocks, scale=scale, enable_gqa=grouped)
    return heads_BHTK


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function)
