"""Products of matrices rounded to FP8 with scales (Micikevicius et al., 2022, arXiv:2209.05433), forward and backward.

Each operand is divided by a scale that brings its largest number to the largest one of the format: one scale for the
whole matrix, or one for each row (of the left operand) and column (of the right one). The formats are those of torchao:
E4M3, and E5M2 for gradients with a single scale.

Shapes: N rows of inputs, I inputs, O outputs; M, K, L in any product.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Scaling = Literal["row", "tensor"]
# Kernels take matrices whose sizes are multiples of this.
SIZE_MULTIPLE = 16
# The smallest scale: zeros are divided by it.
_SMALLEST = 1e-12


def scaled_linear(x: Tensor, weight_OI: Tensor, bias: Tensor | None, scaling: Scaling) -> Tensor:
    """Return `x @ weight.T + bias` in the dtype of `x`, with all products of forward and backward in FP8."""
    x_NI = x.reshape(-1, x.shape[-1])
    count = len(x_NI)
    if spare := -count % SIZE_MULTIPLE:
        x_NI = F.pad(x_NI, (0, 0, 0, spare))
    y_NO: Tensor = _ScaledLinear.apply(x_NI, weight_OI.to(x.dtype), scaling)
    y = y_NO[:count].view(*x.shape[:-1], -1)
    return y if bias is None else y + bias.to(x.dtype)


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, scaling: Scaling) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.scaling = scaling
        return scaled_product(x_NI, weight_OI, scaling, fast=True)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        (g_NO,) = upstream
        wants_x, wants_weight, _ = ctx.needs_input_grad
        left = torch.float8_e5m2 if ctx.scaling == "tensor" else torch.float8_e4m3fn
        gradient_x = scaled_product(g_NO, weight_OI.t(), ctx.scaling, left) if wants_x else None
        gradient_weight = scaled_product(g_NO.t(), x_NI.t(), ctx.scaling, left) if wants_weight else None
        return gradient_x, gradient_weight, None


def scaled_product(
    a_MK: Tensor, b_LK: Tensor, scaling: Scaling, left: torch.dtype = torch.float8_e4m3fn, *, fast: bool = False
) -> Tensor:
    """Return `a @ b.T` of operands rounded to FP8, in the dtype of `a`.

    Args:
        left: format of `a`.
        fast: let a GPU sum with fewer bits.
    """
    a8_MK, a_scale = quantize(a_MK, left, scaling)
    b8_LK, b_scale = quantize(b_LK, torch.float8_e4m3fn, scaling)
    return multiply_fp8(a8_MK, a_scale, b8_LK, b_scale, scaling, a_MK.dtype, fast=fast)


def multiply_fp8(
    a8_MK: Tensor,
    a_scale: Tensor,
    b8_LK: Tensor,
    b_scale: Tensor,
    scaling: Scaling,
    dtype: torch.dtype,
    *,
    fast: bool = False,
) -> Tensor:
    """Return the product `a @ b.T` of what `quantize` returned for both; M is a multiple of SIZE_MULTIPLE, too."""
    recipe = F.ScalingType.RowWise if scaling == "row" else F.ScalingType.TensorWise
    return F.scaled_mm(a8_MK, b8_LK.t(), a_scale, recipe, b_scale.t(), recipe, output_dtype=dtype, use_fast_accum=fast)


def quantize(x_MK: Tensor, dtype: torch.dtype, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Return a matrix in FP8, contiguous, and what it is to be multiplied by: [M, 1], or a scalar.

    Numbers that are not finite make their row, or the whole matrix, NaN.
    """
    largest = x_MK.abs().amax(1, keepdim=True) if scaling == "row" else x_MK.abs().amax()
    scale = largest.float().clamp_min(_SMALLEST) / torch.finfo(dtype).max
    return (x_MK / scale).to(dtype).contiguous(), scale
