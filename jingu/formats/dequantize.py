"""Arithmetic of quantized matrices: codes in bytes and words become numbers, a few rows at a time.

A number is (code - zero point) * scale, computed in fp32 and rounded once. Scales of 16 bits have exact products with
codes in fp32, so that the result is also that of a library that computes in the dtype of the scales.

Shapes: O rows, I columns (input channels), S groups of columns that share a scale, W words of 32 bits, B bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from jingu.runtime.device import request_huge_pages

# Numbers that are computed at a time, chosen to fit into a CPU's cache.
_CHUNK = 1 << 18
# Chunks have a multiple of so many rows: forms that pack several rows into a word hold eight of them.
_ROWS = 16
# The positive numbers of FP4 (E2M1) by their codes; the fourth bit is the sign.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_NUMBERS = torch.tensor((*FP4_VALUES, *(-value for value in FP4_VALUES)))
FP8_NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
_EXPONENT_BIAS = 127
# Shifts of the eight outputs in a word of AWQ.
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)

# `fill(rows, values)` writes the codes of some rows of a matrix into `values` [rows, I], fp32 and contiguous.
Fill = Callable[[slice, Tensor], object]
# The number of columns in a group; or the group of each column.
Groups = int | Tensor


def dequantize(
    shape: torch.Size, dtype: torch.dtype, fill: Fill, scale_OS: Tensor, groups: Groups, zero_OS: Tensor | None = None
) -> Tensor:
    """Return the matrix (codes - zero points) * scales, in `dtype`.

    Args:
        shape: O and I.
        fill: returns the codes.
        scale_OS: scales, of any dtype. If one group holds all rows, its scales have one row; likewise for columns.
        groups: number of columns in a group, of which the last one may be cut; or the group of each column.
        zero_OS: zero points; None: 0.
    """
    matrix_OI = _empty_matrix(shape, dtype)
    rows = max(1, _CHUNK // max(1, shape[1]) // _ROWS) * _ROWS
    buffer = torch.empty(0 if dtype == torch.float32 else rows * shape[1])
    scale_OS = scale_OS.float().expand(shape[0], -1)
    zero_OS = None if zero_OS is None else zero_OS.float().expand(shape[0], -1)
    for first in range(0, shape[0], rows):
        part = slice(first, min(first + rows, shape[0]))
        target = matrix_OI[part]
        values = target if dtype == torch.float32 else buffer[: target.numel()].view(target.shape)
        fill(part, values)
        if zero_OS is not None:
            _apply(torch.Tensor.sub_, values, zero_OS[part], groups)
        _apply(torch.Tensor.mul_, values, scale_OS[part], groups)
        if values is not target:
            target.copy_(values)
    return matrix_OI


def _empty_matrix(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return memory for a matrix. In 2 MB pages, writing to it for the first time takes about half as long."""
    matrix = torch.empty(shape, dtype=dtype)
    request_huge_pages(matrix.data_ptr(), matrix.nbytes)
    return matrix


def _apply(operation: Callable[[Tensor, Tensor], Tensor], values: Tensor, scale: Tensor, groups: Groups) -> None:
    """Change values [O, I] in place by the scales [O, S] of their groups."""
    if isinstance(groups, Tensor):
        operation(values, scale.index_select(1, groups))
        return
    complete = values.shape[1] // groups
    if complete:
        operation(values[:, : complete * groups].unflatten(1, (-1, groups)), scale[:, :complete].unsqueeze(2))
    if complete * groups < values.shape[1]:
        operation(values[:, complete * groups :], scale[:, complete:])


# Codes


def spread_bits(code_bytes: Tensor, num_bits: int) -> Tensor:
    """Return the codes of 2, 4 or 8 bits in bytes [..., B], [..., 8 B / bits], from the lowest bits of each byte."""
    width = 8
    while width > num_bits:
        width //= 2
        # Two halves of a byte become two bytes, of which the lower one is the first in memory.
        pairs = code_bytes.to(torch.int16)
        mask = (2**width - 1) * 0x0101
        code_bytes = pairs.bitwise_or_(pairs << (8 - width)).bitwise_and_(mask).view(torch.uint8)
    return code_bytes


def integers(bytes_OB: Tensor, num_bits: int, zero: int = 0) -> Fill:
    """Return the function that reads unsigned integers, which follow each other in a row, and subtracts a number."""

    def fill(rows: slice, values: Tensor) -> None:
        values.copy_(spread_bits(bytes_OB[rows], num_bits)[:, : values.shape[1]])
        if zero:
            values.sub_(zero)

    return fill


def words_of_inputs(words_WO: Tensor, num_bits: int) -> Fill:
    """Return the function that reads a matrix of GPTQ, whose words hold integers of successive inputs."""

    def fill(rows: slice, values: Tensor) -> None:
        bytes_OB = words_WO[:, rows].t().contiguous().view(torch.uint8)
        values.copy_(spread_bits(bytes_OB, num_bits))

    return fill


def words_of_outputs(words_IW: Tensor) -> Fill:
    """Return the function that reads a matrix of AWQ, whose words hold 4-bit integers of eight outputs."""
    shifts = torch.tensor(_AWQ_SHIFTS, dtype=torch.int32).unsqueeze(1)

    def fill(rows: slice, values: Tensor) -> None:
        words_WI = words_IW[:, rows.start // 8 : -(-rows.stop // 8)].t().contiguous()
        values.copy_((words_WI.unsqueeze(1) >> shifts).bitwise_and_(15).flatten(0, 1))

    return fill


def awq_integers(words_SW: Tensor) -> Tensor:
    """Return the 4-bit integers [O, S] of words [S, W] of AWQ."""
    values = torch.empty(words_SW.shape[1] * 8, words_SW.shape[0])
    words_of_outputs(words_SW)(slice(0, len(values)), values)
    return values


def code_table(numbers: Tensor, *, low_first: bool = True) -> Tensor:
    """Return a table of the numbers in each byte: [256, 1] for codes of 8 bits, [256, 2] for 16 codes of 4 bits.

    Args:
        numbers: the numbers by their codes.
        low_first: whether the lower four bits are the first code.
    """
    numbers = numbers.float()
    if len(numbers) == 256:
        return numbers.unsqueeze(1)
    pairs = torch.cartesian_prod(numbers, numbers)
    return (pairs.flip(1) if low_first else pairs).contiguous()


def codes(bytes_OB: Tensor, table: Tensor) -> Fill:
    """Return the function that reads the numbers of bytes from a table (`code_table`)."""
    # A pair of numbers is looked up as one of 64 bits.
    items = table.view(torch.int64 if table.shape[1] == 2 else torch.int32).flatten()

    def fill(rows: slice, values: Tensor) -> None:
        indices = bytes_OB[rows].to(torch.int32).flatten()
        torch.index_select(items, 0, indices, out=values.view(-1).view(items.dtype))

    return fill


def exponents(scale: Tensor) -> Tensor:
    """Return the powers of two of scales in E8M0, as torch's dtype or as bytes. Raises ValueError for NaN."""
    scale_bytes = scale.view(torch.uint8)
    if bool((scale_bytes == 255).any()):
        raise ValueError("a scale is no number (the code 255 of E8M0)")
    return torch.ldexp(torch.ones(scale.shape), scale_bytes.int() - _EXPONENT_BIAS)
