"""Matmuls and attention. A CPU without bf16 or fp16 units computes such matmuls in fp32, and rounds the result once.

The result is the same as with hardware that accumulates in fp32, and this is many times faster than PyTorch's kernels
on such CPUs. Otherwise, unquantized matmuls are PyTorch's own operations; inference on CPUs pads them (`linear`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jingu.compat.torch import cpu_has_bf16_units, cpu_has_fp16_units
from jingu.model.blockwise_attention import BlockwiseCausalAttention
from jingu.model.byte_weight import ByteWeight
from jingu.model.quantized_weight import (
    BATCH_INVARIANT_OUTPUTS,
    BATCH_INVARIANT_ROWS,
    FrozenWeight,
    PrepackedQuantizedWeight,
    PrepackedWeight,
    PromptRows,
    QuantizedWeight,
    dequantize,
    num_columns,
)
from jingu.model.spec import QuantizationFormat

# Properties of the CPU, read once. They are constants so that `torch.compile` treats them as such.
CPU_HAS_BF16_UNITS = cpu_has_bf16_units()
CPU_HAS_FP16_UNITS = cpu_has_fp16_units()


def matmul_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype that matmuls of `dtype` are computed in: fp32 if the device has no units for a narrower one."""
    lacking = (dtype == torch.bfloat16 and not CPU_HAS_BF16_UNITS) or (
        dtype == torch.float16 and not CPU_HAS_FP16_UNITS
    )
    return torch.float32 if lacking and device.type == "cpu" else dtype


def upcasts_matmul(x: Tensor) -> bool:
    """Return whether matmuls with this tensor are computed in fp32 although its dtype is narrower."""
    return matmul_dtype(x.dtype, x.device) != x.dtype


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b`, rounded once to the dtype of `a`."""
    if upcasts_matmul(a):
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def matmul_into(result: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute `result[...] = a @ b`; all have one dtype."""
    if upcasts_matmul(a):
        result.copy_(a.float() @ b.float())
    else:
        torch.mm(a, b, out=result)


def matmul_accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute `total += a @ b`; `total` is as wide as `a` and `b` or wider."""
    if upcasts_matmul(a):
        total.addmm_(a.float(), b.float())
    elif total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def linear(
    x: Tensor,
    weight: Tensor | FrozenWeight | PrepackedQuantizedWeight | PrepackedWeight | ByteWeight,
    bias: Tensor | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias`, rounded once to the dtype of `x`. Wider weights and biases are first rounded to it.

    On CPUs without gradients the result is batch-invariant: a row's result depends neither on the number of rows nor on
    the row's place among them. Kernels for few rows or few outputs sum in a different order than those for many, so
    rows are padded to a multiple of BATCH_INVARIANT_ROWS, and outputs to at least BATCH_INVARIANT_OUTPUTS.
    """
    # Weights in formats of their own.
    if isinstance(weight, PrepackedQuantizedWeight) and weight.prompt_rows is not None:
        return _linear_by_row(x, weight, weight.prompt_rows, bias)
    if isinstance(weight, PrepackedQuantizedWeight | PrepackedWeight | ByteWeight):
        return weight.times(x, None if bias is None else bias.to(x.dtype))
    if isinstance(weight, QuantizedWeight):
        y: Tensor = _PackedLinear.apply(x, weight.values, weight.scales, weight.kind)
        return y if bias is None else y + bias.to(x.dtype)
    if isinstance(weight, FrozenWeight):
        if torch.is_grad_enabled():
            product: Tensor = _StoredLinear.apply(x, bias, weight)
            return product
        weight = weight.whole()
    # Plain weights. For batch invariance, pad the rows, then the outputs.
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if x.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        rows = x.numel() // x.shape[-1]
        if spare := -rows % BATCH_INVARIANT_ROWS:
            y = linear(F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, spare)), weight, bias)
            return y[:rows].view(*x.shape[:-1], -1)
        outputs = len(weight)
        if outputs < BATCH_INVARIANT_OUTPUTS:
            spare = BATCH_INVARIANT_OUTPUTS - outputs
            bias = None if bias is None else F.pad(bias, (0, spare))
            return linear(x, F.pad(weight, (0, 0, 0, spare)), bias)[..., :outputs].contiguous()
    if upcasts_matmul(x):
        wide: Tensor = _WideLinear.apply(x, weight, bias)
        return wide
    return F.linear(x, weight, bias)


def _linear_by_row(x: Tensor, weight: PrepackedQuantizedWeight, rows: PromptRows, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias`. The rows that `rows` selects are multiplied by the dequantized matrix."""
    if rows.dequantized is None or rows.others is None:
        return weight.times(x, bias)
    x_NI = x.reshape(-1, x.shape[-1])
    whole_OI = weight.dequantize(matmul_dtype(x.dtype, x.device))
    y_NO = x_NI.new_empty(len(x_NI), len(whole_OI))
    y_NO[rows.dequantized] = linear(x_NI[rows.dequantized].to(whole_OI.dtype), whole_OI, bias).to(x.dtype)
    if len(rows.others):
        y_NO[rows.others] = weight.times(x_NI[rows.others], bias)
    return y_NO.view(*x.shape[:-1], -1)


def use_blockwise_attention(q_BHTK: Tensor) -> bool:
    """Return whether `BlockwiseCausalAttention` is faster than PyTorch's kernel.

    It is in compiled code, on CPUs with bf16 units, for up to 1024 tokens.
    """
    narrow = q_BHTK.dtype == torch.bfloat16 and q_BHTK.device.type == "cpu" and CPU_HAS_BF16_UNITS
    return narrow and q_BHTK.shape[2] <= 1024 and torch.compiler.is_compiling()


def additive_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Return a mask as biases of attention scores, in the dtype in which kernels add them for queries in that of x.

    PyTorch's kernels would do the same in each layer, and save a copy of each for the backward pass. In inference,
    booleans stay as they are, and biases on CPUs stay in fp32.
    """
    dtype, is_boolean = matmul_dtype(x.dtype, x.device), mask.dtype == torch.bool
    if not torch.is_grad_enabled() and (is_boolean or mask.device.type == "cpu"):
        return mask
    if is_boolean:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return mask.to(dtype)


def dot_product_attention(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None = None
) -> Tensor:
    """Return scaled dot-product attention [B, H, T, K]. Each of the G key-value heads serves H / G query heads.

    Args:
        mask: booleans (true where a query attends to a key) or biases that are added to the scores, broadcastable to
            [B, H, T, S]; None: all keys, or with `causal` the earlier ones.
        scale: multiplies the scores; None: 1/√K.
    """
    dtype = q_BHTK.dtype
    if causal and scale is None and use_blockwise_attention(q_BHTK):
        blocked: Tensor = BlockwiseCausalAttention.apply(q_BHTK, k_BGSK, v_BGSK)
        return blocked
    if upcasts_matmul(q_BHTK):
        q_BHTK, k_BGSK, v_BGSK = q_BHTK.float(), k_BGSK.float(), v_BGSK.float()
    if mask is not None:
        mask = additive_mask(mask, q_BHTK)
    grouped = q_BHTK.shape[1] != k_BGSK.shape[1]
    y = F.scaled_dot_product_attention(
        q_BHTK, k_BGSK, v_BGSK, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return y.to(dtype)


@torch.library.custom_op("jingu::multiply_packed", mutates_args=())
def multiply_packed(x: Tensor, values: Tensor, scales: Tensor, kind: str) -> Tensor:
    """Return `x` times a quantized matrix, which is not transposed, as one operation for the compiler.

    If it saw that forward and backward pass dequantize the same matrix, it would keep the result between them.
    """
    return matmul(x, dequantize(values, scales, kind).to(x.dtype))  # type: ignore[arg-type]


@multiply_packed.register_fake
def _(x: Tensor, values: Tensor, scales: Tensor, kind: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], num_columns(values, kind))


class _PackedLinear(torch.autograd.Function):
    """Multiply by a frozen quantized matrix. Forward and backward both dequantize it, to save memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scales: Tensor, kind: QuantizationFormat) -> Tensor:
        ctx.save_for_backward(values, scales)
        ctx.kind = kind
        return linear(x, dequantize(values, scales, kind))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        values, scales = ctx.saved_tensors
        return multiply_packed(upstream[0], values, scales, ctx.kind), None, None, None


class _StoredLinear(torch.autograd.Function):
    """`linear` by a matrix that is dequantized in each use, in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, weight: FrozenWeight) -> Tensor:
        ctx.weight = weight
        return _multiply(x, weight.whole().to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        wants_x, wants_bias, _ = ctx.needs_input_grad
        gradient_x = matmul(upstream[0], ctx.weight.whole().to(upstream[0].dtype)) if wants_x else None
        return gradient_x, upstream[0].flatten(0, -2).sum(0) if wants_bias else None, None


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias`, rounded once to the dtype of `x`."""
    if upcasts_matmul(x):
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return F.linear(x, weight, bias)


class _WideLinear(torch.autograd.Function):
    """`linear` of narrow tensors, computed in fp32. Only the narrow tensors are saved for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias = bias is not None
        return _multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g_NO = upstream[0].flatten(0, -2).float()
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        gradient_x = (g_NO @ weight.float()).to(x.dtype).view(x.shape) if wants_x else None
        gradient_weight = (g_NO.t() @ x.flatten(0, -2).float()).to(weight.dtype) if wants_weight else None
        gradient_bias = g_NO.sum(0).to(weight.dtype) if ctx.bias and wants_bias else None
        return gradient_x, gradient_weight, gradient_bias
