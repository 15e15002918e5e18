"""Matrix products. On a CPU without units for bf16 or fp16, such products are computed in fp32 and rounded once.

That is what a unit with fp32 accumulation gives, and many times faster there than the stock kernels.
Everywhere else these are the stock operations.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jingu.model.causal import CausalAttention
from jingu.model.packed import STEADY_ROWS, Arranged, Packed, Reordered, unpack
from jingu.model.spec import Kind

# Facts of the processor, read once; constants so that compiled code folds them.
CPU_HAS_BF16_UNITS = bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
CPU_HAS_FP16_UNITS = bool(torch.cpu._is_amx_fp16_supported())


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What products of this dtype are computed in: fp32 where it is narrower and the device has no unit for it."""
    lacking = (dtype == torch.bfloat16 and not CPU_HAS_BF16_UNITS) or (
        dtype == torch.float16 and not CPU_HAS_FP16_UNITS
    )
    return torch.float32 if lacking and device.type == "cpu" else dtype


def computes_wide(x: Tensor) -> bool:
    """Whether products of this tensor are computed in fp32 although it is narrower."""
    return product_dtype(x.dtype, x.device) != x.dtype


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, rounded once to the dtype of `a`."""
    if computes_wide(a):
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def product_into(result: Tensor, a: Tensor, b: Tensor) -> None:
    """`result[...] = a @ b`, where all have one dtype."""
    if computes_wide(a):
        result.copy_(a.float() @ b.float())
    else:
        torch.mm(a, b, out=result)


def accumulate_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`, where `total` is as wide as the accumulation or wider than `a` and `b`."""
    if computes_wide(a):
        total.addmm_(a.float(), b.float())
    elif total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def linear(x: Tensor, weight: Tensor | Packed | Arranged | Reordered, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, rounded once to the dtype of `x`; so are weight and bias before, where they are wider.

    Without gradients, on CPUs, a row's result does not depend on how many rows there are: the kernels for very few
    rows add up in another order than those for more, so rows are filled up to a multiple of STEADY_ROWS.
    """
    if isinstance(weight, Arranged | Reordered):
        return weight.times(x, bias)
    if isinstance(weight, Packed):
        y: Tensor = _PackedLinear.apply(x, weight.values, weight.scales, weight.kind)
        return y if bias is None else y + bias.to(x.dtype)
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if x.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        rows = x.numel() // x.shape[-1]
        if spare := -rows % STEADY_ROWS:
            y = linear(F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, spare)), weight, bias)
            return y[:rows].view(*x.shape[:-1], -1)
    if computes_wide(x):
        wide: Tensor = _WideLinear.apply(x, weight, bias)
        return wide
    return F.linear(x, weight, bias)


def in_blocks(q_BHTK: Tensor) -> bool:
    """Whether `CausalAttention` beats torch's kernel: compiled, on CPUs with bf16 units, for sequences not too long."""
    narrow = q_BHTK.dtype == torch.bfloat16 and q_BHTK.device.type == "cpu" and CPU_HAS_BF16_UNITS
    return narrow and q_BHTK.shape[2] <= 1024 and torch.compiler.is_compiling()


def attend(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None = None
) -> Tensor:
    """Scaled dot-product attention; G key-value heads serve H query heads in groups of H / G.

    Args:
        mask: true where a query may look, or what is added to its scores, broadcast to [B, H, T, S]; None for all
            (or `causal`).
        scale: multiplies the scores; None: 1/√K.
    """
    dtype = q_BHTK.dtype
    if causal and scale is None and in_blocks(q_BHTK):
        blocked: Tensor = CausalAttention.apply(q_BHTK, k_BGSK, v_BGSK)
        return blocked
    if computes_wide(q_BHTK):
        q_BHTK, k_BGSK, v_BGSK = q_BHTK.float(), k_BGSK.float(), v_BGSK.float()
    if mask is not None and mask.dtype != torch.bool and (mask.is_cuda or torch.is_grad_enabled()):
        mask = mask.to(q_BHTK.dtype)
    grouped = q_BHTK.shape[1] != k_BGSK.shape[1]
    y = F.scaled_dot_product_attention(
        q_BHTK, k_BGSK, v_BGSK, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return y.to(dtype)


class _PackedLinear(torch.autograd.Function):
    """By a packed matrix, which is made whole for each product, forward and backward, and not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scales: Tensor, kind: Kind) -> Tensor:
        ctx.save_for_backward(values, scales)
        ctx.kind = kind
        return linear(x, unpack(values, scales, kind))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        values, scales = ctx.saved_tensors
        whole = unpack(values, scales, ctx.kind).to(upstream[0].dtype)
        return matmul(upstream[0], whole), None, None, None


class _WideLinear(torch.autograd.Function):
    """Narrow in and out, fp32 inside; keeps the narrow tensors for the backward pass, not their fp32 copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias = bias is not None
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g_NO = upstream[0].flatten(0, -2).float()
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        gradient_x = (g_NO @ weight.float()).to(x.dtype).view(x.shape) if wants_x else None
        gradient_weight = (g_NO.t() @ x.flatten(0, -2).float()).to(weight.dtype) if wants_weight else None
        gradient_bias = g_NO.sum(0).to(weight.dtype) if ctx.bias and wants_bias else None
        return gradient_x, gradient_weight, gradient_bias
