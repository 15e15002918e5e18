"""Grouped matmul: each group of rows is multiplied by its own matrix, as one operation for the compiler.

On CUDA one kernel multiplies all groups, and the host need not know their sizes. Elsewhere the groups are multiplied
one after another, directly into the result. So they are on CUDA for fp64 and for widths that the kernel does not
support; the host then waits for the device to read the sizes.

On 2 CPU cores this loop is as fast as PyTorch's grouped kernel, up to noise. Padding all groups to the same size for a
batched matmul would multiply many zeros.

Shapes: N rows sorted by group, G groups, I inputs, O outputs. `ends_G` has for each group the index after its last row;
the last one is N.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jingu.model.matmul_kernels import matmul_into
from jingu.model.quantized_weight import FrozenWeight, dequantize, num_columns
from jingu.model.spec import QuantizationFormat

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.library.custom_op("jingu::grouped_matmul", mutates_args=())
def grouped_matmul(x_NI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """Return [N, O]: each row of `x` times the transposed matrix of its group.

    Args:
        ends_G: int32, in ascending order; equal numbers are groups without rows.
    """
    if _one_kernel(x_NI, weight_GOI.shape[1]):
        return F.grouped_mm(x_NI, weight_GOI.transpose(1, 2), offs=ends_G)
    y_NO = x_NI.new_empty(x_NI.shape[0], weight_GOI.shape[1])
    for group, rows in iterate_groups(ends_G):
        matmul_into(y_NO[rows], x_NI[rows], weight_GOI[group].t())
    return y_NO


@torch.library.custom_op("jingu::grouped_outer", mutates_args=())
def grouped_outer_matmul(left_NO: Tensor, right_NI: Tensor, ends_G: Tensor) -> Tensor:
    """Return for each group the sum of the outer products of its rows [G, O, I]; zero for a group without rows."""
    if _one_kernel(right_NI, left_NO.shape[1]):
        # The kernel may leave the matrices of groups without rows unwritten.
        sums_GOI = F.grouped_mm(left_NO.t(), right_NI, offs=ends_G)
        empty_G = ends_G.diff(prepend=ends_G.new_zeros(1)) == 0
        return sums_GOI.masked_fill_(empty_G[:, None, None], 0)
    sums_GOI = left_NO.new_zeros(ends_G.shape[0], left_NO.shape[1], right_NI.shape[1])
    for group, rows in iterate_groups(ends_G):
        matmul_into(sums_GOI[group], left_NO[rows].t(), right_NI[rows])
    return sums_GOI


def _one_kernel(x_NI: Tensor, outputs: int) -> bool:
    """Return whether the device has a kernel for these widths. It requires rows of multiples of 16 bytes."""
    aligned = x_NI.shape[1] * x_NI.itemsize % 16 == 0 and outputs * x_NI.itemsize % 16 == 0
    return x_NI.is_cuda and x_NI.dtype in _KERNEL_DTYPES and aligned


def iterate_groups(ends_G: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the number and the rows of every group that has rows."""
    start = 0
    for group, end in enumerate(ends_G.tolist()):
        if end > start:
            yield group, slice(start, end)
        start = end


@grouped_matmul.register_fake
def _(x_NI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    return x_NI.new_empty(x_NI.shape[0], weight_GOI.shape[1])


@grouped_outer_matmul.register_fake
def _(left_NO: Tensor, right_NI: Tensor, ends_G: Tensor) -> Tensor:
    return left_NO.new_empty(ends_G.shape[0], left_NO.shape[1], right_NI.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, upstream_NO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_NI, weight_GOI, ends_G = ctx.saved_tensors
    upstream_NO = upstream_NO.contiguous()
    gradient_x, gradient_weight = None, None
    if ctx.needs_input_grad[0]:
        gradient_x = grouped_matmul(upstream_NO, weight_GOI.transpose(1, 2), ends_G)
    if ctx.needs_input_grad[1]:
        gradient_weight = grouped_outer_matmul(upstream_NO, x_NI, ends_G)
    return gradient_x, gradient_weight, None


grouped_matmul.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("jingu::grouped_matmul_packed", mutates_args=())
def _multiply_packed(x_NO: Tensor, values: Tensor, scales: Tensor, kind: str, ends_G: Tensor) -> Tensor:
    """Return each row times the quantized matrix of its group, which is not transposed: see `multiply_packed`."""
    whole_GOI = dequantize(values, scales, kind).to(x_NO.dtype)  # type: ignore[arg-type]
    return grouped_matmul(x_NO.contiguous(), whole_GOI.transpose(1, 2), ends_G)


@_multiply_packed.register_fake
def _(x_NO: Tensor, values: Tensor, scales: Tensor, kind: str, ends_G: Tensor) -> Tensor:
    return x_NO.new_empty(len(x_NO), num_columns(values, kind))


class QuantizedGroupedMatmul(torch.autograd.Function):
    """`grouped_matmul` with frozen quantized matrices. Forward and backward both dequantize them, to save memory."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, values: Tensor, scales: Tensor, kind: QuantizationFormat, ends_G: Tensor
    ) -> Tensor:
        ctx.save_for_backward(values, scales, ends_G)
        ctx.kind = kind
        return grouped_matmul(x_NI, dequantize(values, scales, kind).to(x_NI.dtype), ends_G)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        values, scales, ends_G = ctx.saved_tensors
        return _multiply_packed(upstream[0], values, scales, ctx.kind, ends_G), None, None, None, None


class StoredGroupedMatmul(torch.autograd.Function):
    """`grouped_matmul` with matrices that are dequantized in each use, one after another."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight: FrozenWeight, outputs: int, ends_G: Tensor) -> Tensor:
        ctx.save_for_backward(ends_G)
        ctx.weight, ctx.inputs = weight, x_NI.shape[1]
        y_NO = x_NI.new_empty(len(x_NI), outputs)
        for group, rows in iterate_groups(ends_G):
            matmul_into(y_NO[rows], x_NI[rows], weight.whole(group).to(x_NI.dtype).t())
        return y_NO

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (ends_G,) = ctx.saved_tensors
        upstream_NO = upstream[0].contiguous()
        gradient_NI = upstream_NO.new_empty(len(upstream_NO), ctx.inputs)
        for group, rows in iterate_groups(ends_G):
            matmul_into(gradient_NI[rows], upstream_NO[rows], ctx.weight.whole(group).to(upstream_NO.dtype))
        return gradient_NI, None, None, None


class GatherRows(torch.autograd.Function):
    """Compute `x[take]`, given the inverse index `back`: row i of `x` occurs in the rows back[i·times : (i+1)·times].

    With the inverse index, the backward pass gathers and sums rows in a fixed order. The usual backward of indexing
    adds rows in an order that may change from run to run.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, take_M: Tensor, back_M: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(back_M)
        ctx.times = times
        return x_ND.index_select(0, take_M)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (back_M,) = ctx.saved_tensors
        gradient_MD = upstream[0].index_select(0, back_M)
        if ctx.times > 1:
            gradient_MD = gradient_MD.unflatten(0, (-1, ctx.times)).sum(1)
        return gradient_MD, None, None, None
