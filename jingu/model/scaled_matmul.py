"""FP8 matmuls with scales (Micikevicius et al., 2022, arXiv:2209.05433), forward and backward.

Each operand is divided by a scale that maps its largest magnitude to the largest number of the FP8 format. There is one
scale per matrix, or one per row of the left operand and per column of the right one. The formats are those of torchao:
E4M3, and E5M2 for gradients with one scale per matrix.

Shapes: N rows of inputs, I inputs, O outputs. M, K, L are the sizes of any matmul.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# row: a scale per row and column; tensor: a scale per matrix.
Scaling = Literal["row", "tensor"]
# The FP8 kernels need matrices whose sizes are multiples of this.
SIZE_MULTIPLE = 16
# Lower bound of the largest magnitude, so that zeros are not divided by zero.
_SMALLEST = 1e-12


def scaled_linear(x: Tensor, weight_OI: Tensor, bias: Tensor | None, scaling: Scaling) -> Tensor:
    """Return `x @ weight.T + bias` in the dtype of `x`, with all matmuls of forward and backward in FP8."""
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
        return multiply_scaled(x_NI, weight_OI, scaling, fast=True)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        (g_NO,) = upstream
        wants_x, wants_weight, _ = ctx.needs_input_grad
        left = torch.float8_e5m2 if ctx.scaling == "tensor" else torch.float8_e4m3fn
        gradient_x = multiply_scaled(g_NO, weight_OI.t(), ctx.scaling, left) if wants_x else None
        gradient_weight = multiply_scaled(g_NO.t(), x_NI.t(), ctx.scaling, left) if wants_weight else None
        return gradient_x, gradient_weight, None


def multiply_scaled(
    a_MK: Tensor, b_LK: Tensor, scaling: Scaling, left: torch.dtype = torch.float8_e4m3fn, *, fast: bool = False
) -> Tensor:
    """Round both operands to FP8, and return `a @ b.T` in the dtype of `a`.

    Args:
        left: FP8 format of `a`; that of `b` is E4M3.
        fast: whether a GPU may accumulate with less precision than fp32 (`use_fast_accum`).
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
    """Return `a @ b.T` in `dtype`, for two matrices and their scales from `quantize`.

    All sizes, M included, must be multiples of SIZE_MULTIPLE.
    """
    recipe = F.ScalingType.RowWise if scaling == "row" else F.ScalingType.TensorWise
    return F.scaled_mm(a8_MK, b8_LK.t(), a_scale, recipe, b_scale.t(), recipe, output_dtype=dtype, use_fast_accum=fast)


def quantize(x_MK: Tensor, dtype: torch.dtype, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Return a contiguous FP8 matrix, and the fp32 scale that multiplies it: [M, 1], or a scalar.

    An infinity or NaN makes its row (or with one scale per matrix, the whole matrix) NaN.
    """
    largest = x_MK.abs().amax(1, keepdim=True) if scaling == "row" else x_MK.abs().amax()
    scale = largest.float().clamp_min(_SMALLEST) / torch.finfo(dtype).max
    return (x_MK / scale).to(dtype).contiguous(), scale
