"""Attention within the documents of packed rows, if possible without a mask of size T².

A document may continue another one, its parent, and attends to that, too. For example, several answers continue one
prompt.

On CUDA this is one kernel that skips fully masked blocks (PyTorch's FlexAttention). On CPU, attention is computed
document by document, which also takes less arithmetic.

Shapes: B rows, T tokens, H query heads in groups for G key-value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from jingu.compat.torch_attention import cpu_attention, cpu_attention_backward
from jingu.model.blockwise_attention import BlockwiseCausalAttention
from jingu.model.matmul_kernels import dot_product_attention, matmul_dtype, use_blockwise_attention

# The smallest head size that the kernel on CUDA supports.
MIN_HEAD_DIM = 16


# Devices for which PyTorch compiles FlexAttention.
_FLEX_DEVICES = ("cuda", "xpu")


class DocumentMask(NamedTuple):
    """A mask with which tokens attend to their own document and to its parent.

    Attributes:
        numbers: [B, T] document of each token. The tokens of a document are adjacent.
        causal: whether tokens attend to earlier tokens only.
        blocks: block mask of FlexAttention, if the device uses it.
        parents: [B, T] the document that each token's document continues; None: no document does. Parents stand before
            the documents that continue them, and the documents that continue the same parent are adjacent.
    """

    numbers: Tensor
    causal: bool
    blocks: Any = None
    parents: Tensor | None = None

    @staticmethod
    def of(
        numbers_BT: Tensor, head_size: int, dtype: torch.dtype, *, causal: bool, parents_BT: Tensor | None = None
    ) -> DocumentMask:
        """Create the mask of a forward pass, with FlexAttention's block mask if device, dtype and Triton allow it."""
        kernel = head_size >= MIN_HEAD_DIM and dtype != torch.float64 and find_spec("triton") is not None
        blocks = (
            create_document_block_mask(numbers_BT, parents_BT, causal=causal)
            if numbers_BT.device.type in _FLEX_DEVICES and kernel
            else None
        )
        return DocumentMask(numbers_BT, causal, blocks, parents_BT)

    def mask(self) -> Tensor:
        """Return the mask as booleans [B, 1, T, T]: true where a query (second to last dim) attends to a key."""
        seen = same_document(self.numbers, self.parents)
        return (seen.tril() if self.causal else seen).unsqueeze(1)

    def attend(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scale: float | None) -> Tensor:
        """Return attention [B, H, T, K] within documents."""
        if self.blocks is not None:
            return flex_attend(q_BHTK, k_BGTK, v_BGTK, self.blocks, scale)
        if self.causal and scale is None and use_blockwise_attention(q_BHTK):
            blocked: Tensor = BlockwiseCausalAttention.apply(q_BHTK, k_BGTK, v_BGTK, self.numbers, self.parents)
            return blocked
        # Other devices use a full mask, and so does compiled code: it is specialized for shapes, and the lengths of
        # documents differ in every batch.
        if q_BHTK.device.type != "cpu" or torch.compiler.is_compiling():
            return dot_product_attention(q_BHTK, k_BGTK, v_BGTK, self.mask(), causal=False, scale=scale)
        spans = list(_spans(self.numbers, self.parents, self.causal))
        y_BHTK: Tensor = _SpanAttention.apply(q_BHTK, k_BGTK, v_BGTK, spans, scale)
        return y_BHTK


def same_document(numbers_BT: Tensor, parents_BT: Tensor | None) -> Tensor:
    """Return booleans [B, T, T]: whether the second token is in the document of the first one, or in its parent."""
    same_BTS = numbers_BT.unsqueeze(2) == numbers_BT.unsqueeze(1)
    if parents_BT is not None:
        same_BTS = same_BTS | (parents_BT.unsqueeze(2) == numbers_BT.unsqueeze(1))
    return same_BTS


class _Span(NamedTuple):
    """A range of queries of a row, and a range of keys that all of them attend to (if `causal`, up to themselves)."""

    row: int
    queries: slice
    keys: slice
    causal: bool


def _spans(numbers_BT: Tensor, parents_BT: Tensor | None, causal: bool) -> Iterator[_Span]:
    """Yield spans that together cover the mask.

    First each document of a row with itself, then the documents that continue the same parent with that parent.
    """
    for row, number_T in enumerate(numbers_BT):
        numbers, counts_N = torch.unique_consecutive(number_T, return_counts=True)
        ends = counts_N.cumsum(0).tolist()
        places = [slice(end - count, end) for end, count in zip(ends, counts_N.tolist(), strict=True)]
        for place in places:
            yield _Span(row, place, place, causal)
        if parents_BT is None:
            continue
        place_of = dict(zip(numbers.tolist(), places, strict=True))
        parents = parents_BT[row].tolist()
        for parent, children in groupby(places, key=lambda place: parents[place.start]):
            own = [place for place in children if place is not place_of.get(parent)]
            if own and parent in place_of:
                yield _Span(row, slice(own[0].start, own[-1].stop), place_of[parent], False)


class _SpanAttention(torch.autograd.Function):
    """Attention over spans.

    The first span of a query (its own document) writes the result. Later spans are merged into it with the
    log-sum-exp of their scores, as in ring attention.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, spans: list[_Span], scale: float | None
    ) -> Tensor:
        dtype = matmul_dtype(q_BHTK.dtype, q_BHTK.device)
        y_BHTK = torch.empty_like(q_BHTK, dtype=torch.promote_types(dtype, torch.float32))
        logsumexp_BHT = y_BHTK.new_full(y_BHTK.shape[:3], -torch.inf)
        for span in spans:
            q, k, v, y, logsumexp = _parts(span, q_BHTK, k_BGTK, v_BGTK, y_BHTK, logsumexp_BHT)
            part, part_logsumexp = cpu_attention(q.to(dtype), k.to(dtype), v.to(dtype), causal=span.causal, scale=scale)
            if span.queries == span.keys:
                y.copy_(part)
                logsumexp.copy_(part_logsumexp)
                continue
            # The share of these keys in the softmax over all keys so far.
            share = torch.sigmoid(part_logsumexp - logsumexp).unsqueeze(-1)
            y.lerp_(part.to(y.dtype), share)
            logsumexp.copy_(torch.logaddexp(logsumexp, part_logsumexp))
        y_BHTK = y_BHTK.to(q_BHTK.dtype)
        ctx.save_for_backward(q_BHTK, k_BGTK, v_BGTK, y_BHTK, logsumexp_BHT)
        ctx.spans = spans
        ctx.scale = scale
        return y_BHTK

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        q_BHTK, k_BGTK, v_BGTK = saved[:3]
        dtype = matmul_dtype(q_BHTK.dtype, q_BHTK.device)
        wide = torch.promote_types(dtype, torch.float32)
        sums = [torch.zeros_like(x, dtype=wide) for x in (q_BHTK, k_BGTK, v_BGTK)]
        for span in ctx.spans:
            q, k, v, y, logsumexp, gradient = _parts(span, *saved, upstream[0])
            q, k, v, y, gradient = (x.to(dtype) for x in (q, k, v, y, gradient))
            parts = cpu_attention_backward(gradient, q, k, v, y, logsumexp, causal=span.causal, scale=ctx.scale)
            for total, place, part in zip(sums, (span.queries, span.keys, span.keys), parts, strict=True):
                total[span.row, :, place] += part[0]
        return (*(total.to(q_BHTK.dtype) for total in sums), None, None)


def _parts(span: _Span, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> list[Tensor]:
    """Return slices [1, H or G, …] for a span: of queries, keys, values, and `others`, which have a row per query."""
    places = [span.queries, span.keys, span.keys, *(span.queries for _ in others)]
    return [x[span.row : span.row + 1, :, place] for x, place in zip((q, k, v, *others), places, strict=True)]


def create_document_block_mask(numbers_BT: Tensor, parents_BT: Tensor | None = None, *, causal: bool) -> Any:
    """Create FlexAttention's block mask of documents. On GPUs it is compiled, and allocates nothing of size T²."""

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = numbers_BT[row, query] == numbers_BT[row, key]
        if parents_BT is not None:
            same = same | (parents_BT[row, query] == numbers_BT[row, key])
        return same & (query >= key) if causal else same

    rows, tokens = numbers_BT.shape
    make = _compiled(create_block_mask) if numbers_BT.device.type in _FLEX_DEVICES else create_block_mask
    return make(seen, rows, None, tokens, tokens, device=numbers_BT.device)


def flex_attend(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, blocks: Any, scale: float | None) -> Tensor:
    """Run FlexAttention: compiled on its own, or as a part of the compiled code that calls it."""
    alone = q_BHTK.device.type in _FLEX_DEVICES and not torch.compiler.is_compiling()
    kernel = _compiled(flex_attention) if alone else flex_attention
    grouped = q_BHTK.shape[1] != k_BGTK.shape[1]
    heads_BHTK: Tensor = kernel(q_BHTK, k_BGTK, v_BGTK, block_mask=blocks, scale=scale, enable_gqa=grouped)
    return heads_BHTK


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function)
