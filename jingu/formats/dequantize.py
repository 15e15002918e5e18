"""Arithmetic of quantized matrices: codes in bytes and words become numbers, a few rows at a time.

A number is (code - zero point) * scale, computed in fp32 and rounded once. Scales of 16 bits have exact products with
codes in fp32, so that the result is also that of a library that computes in the dtype of the scales.

Shapes: O rows, I columns (input channels), S groups of columns that share a scale, W words of 32 bits, B bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from jingu.compat.torch import unpack_halves
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
_CPU = torch.device("cpu")

# A function that returns some rows of a matrix: their codes, or the bytes that hold these.
ReadRows = Callable[[slice], Tensor]
# The number of columns in a group; or the group of each column.
Groups = int | Tensor


@dataclass(frozen=True)
class Codes:
    """The codes of a matrix, and what makes numbers of them.

    Attributes:
        shape: of the matrix, or of matrices [E, O, I].
        dtype: of the numbers.
        read: returns the codes of some rows [rows, I] in fp32, as new memory.
        scale: scales [O, S], of any dtype. If one group holds all rows, its scales have one row; likewise for columns.
            None: the codes are multiplied already.
        groups: number of columns in a group, of which the last one may be cut; or the group of each column.
        zero: zero points [O, S]; None: 0.
        columns: I, if rows are not those of the matrix; the last one may then be cut.
        factor: by which the product is multiplied after it was rounded.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: ReadRows
    scale: Tensor | None
    groups: Groups
    zero: Tensor | None = None
    columns: int = 0
    factor: float = 1.0


def dequantize(codes: Codes, threads: int = 1, part: slice | None = None, device: torch.device = _CPU) -> Tensor:
    """Return the matrix (codes - zero points) * scales.

    Args:
        part: the rows to return; None: all. Forms whose rows are not those of the matrix compute all.
        device: of the codes.
        threads: number of threads, each of which computes a range of rows. With more than one, the caller limits
            PyTorch to one thread for each operation: small operations on several threads mostly wait for each other.
    """
    columns = codes.columns or codes.shape[-1]
    rows = -(-codes.shape.numel() // columns)
    first_row, last_row = 0, rows
    if part is not None and not codes.columns:
        # Forms that pack several rows into a word read whole words.
        first_row, last_row = part.start // _ROWS * _ROWS, min(-(-part.stop // _ROWS) * _ROWS, rows)
    scale_OS, zero_OS = (None if each is None else each.float().expand(rows, -1) for each in (codes.scale, codes.zero))
    step = max(1, _CHUNK // columns // _ROWS) * _ROWS
    begins = range(first_row, last_row, step)
    matrix_OI = _empty_matrix(last_row - first_row, columns, codes.dtype, device)

    def convert(begins: range) -> None:
        for begin in begins:
            chunk = slice(begin, min(begin + step, last_row))
            place_OI = matrix_OI[begin - first_row : chunk.stop - first_row]
            values = codes.read(chunk)
            if zero_OS is not None:
                _apply(torch.sub, values, zero_OS[chunk], codes.groups, values)
            if scale_OS is not None:
                # Write numbers in fp32 to their place.
                target = place_OI if codes.dtype == torch.float32 else values
                _apply(torch.mul, values, scale_OS[chunk], codes.groups, target)
                values = target
            if codes.factor != 1.0:
                values.mul_(codes.factor)
            if scale_OS is None or codes.dtype != torch.float32:
                place_OI.copy_(values)

    count = -(-len(begins) // threads)
    if threads == 1 or len(begins) <= count:
        convert(begins)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(convert, (begins[start : start + count] for start in range(0, len(begins), count))))
    if part is not None and not codes.columns:
        return matrix_OI[part.start - first_row : part.stop - first_row]
    matrix = matrix_OI.flatten()[: codes.shape.numel()].view(codes.shape)
    return matrix if part is None else matrix[part]


def _empty_matrix(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for a matrix. In 2 MB pages, writing to it for the first time takes about a fifth of the time."""
    matrix = torch.empty(rows, columns, dtype=dtype, device=device)
    if device.type == "cpu":
        request_huge_pages(matrix.data_ptr(), matrix.nbytes)
    return matrix


def _apply(operation: Callable[..., Tensor], values: Tensor, scale: Tensor, groups: Groups, out: Tensor) -> None:
    """Apply an operation to values [O, I] and the scales [O, S] of their groups."""
    if isinstance(groups, Tensor):
        operation(values, scale.index_select(1, groups), out=out)
        return
    complete = values.shape[1] // groups
    columns = complete * groups
    if complete:
        views = [each[:, :columns].unflatten(1, (-1, groups)) for each in (values, out)]
        operation(views[0], scale[:, :complete].unsqueeze(2), out=views[1])
    if columns < values.shape[1]:
        operation(values[:, columns:], scale[:, complete:], out=out[:, columns:])


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


def integers(
    shape: torch.Size, read_bytes: ReadRows, num_bits: int, scale: Tensor, groups: Groups, zero: Tensor | int
) -> Codes:
    """Return a matrix of unsigned integers, which follow each other in the bytes of a row, in the scales' dtype.

    Args:
        read_bytes: returns the bytes of some rows, of which the last one may have more integers.
        zero: zero points [O, S], or that of all integers.
    """
    rows, columns = shape
    if isinstance(zero, Tensor) and bool((zero == zero[0, 0]).all()):
        zero = int(zero[0, 0])
    constant = zero if isinstance(zero, int) else 0
    # PyTorch's kernel for 4 bits is one for CPUs.
    has_kernel = num_bits == 4 and scale.device.type == "cpu"

    def read(part: slice) -> Tensor:
        code_bytes = read_bytes(part)
        if has_kernel:
            pair = torch.tensor([1.0, -constant], dtype=torch.float16)
            return unpack_halves(code_bytes, pair[:1], pair[1:])[:, :columns]
        return spread_bits(code_bytes, num_bits)[:, :columns].float().sub_(constant)

    scale_OS = scale.half().expand(rows, -1)
    is_exact = torch.equal(scale_OS.float(), scale.float().expand(rows, -1))
    if not has_kernel or isinstance(groups, Tensor) or columns % groups or groups % 2 or not is_exact:
        return Codes(shape, scale.dtype, read, scale, groups, zero if isinstance(zero, Tensor) else None)
    # PyTorch's kernel can multiply, too. All of these products have at most 15 bits, and so have their sums: where they
    # fit into fp16, the zero points are subtracted as well.
    product_OS = scale_OS.float() * zero
    offset_OS = product_OS.neg().half()
    if not torch.equal(offset_OS.float(), -product_OS):
        offset_OS = torch.zeros_like(offset_OS)

    def read_products(part: slice) -> Tensor:
        code_bytes = read_bytes(part).reshape(-1, groups // 2)
        numbers = unpack_halves(code_bytes, scale_OS[part].flatten(), offset_OS[part].flatten())
        return numbers.view(-1, columns)

    is_subtracted = bool(offset_OS.any()) or not bool(product_OS.any())
    return Codes(shape, scale.dtype, read_products, None, groups, None if is_subtracted else product_OS)


def words_of_inputs(words_WO: Tensor) -> ReadRows:
    """Return the function that reads the bytes of a matrix of GPTQ, whose words hold integers of successive inputs."""
    # Copied before it is transposed, a part of the rows is in the cache.
    return lambda rows: words_WO[:, rows].contiguous().t().contiguous().view(torch.uint8)


def words_of_outputs(words_IW: Tensor) -> ReadRows:
    """Return the function that reads a matrix of AWQ, whose words hold 4-bit integers of eight outputs.

    From the lowest bits, these are the outputs 0, 2, 4, 6, 1, 3, 5, 7.
    """
    bytes_IB = words_IW.view(torch.uint8)

    def read(rows: slice) -> Tensor:
        bytes_BI = bytes_IB[:, rows.start // 2 : rows.stop // 2].contiguous().t().contiguous()
        # The bytes of a word are outputs 0 and 2, 4 and 6, 1 and 3, 5 and 7. An output is 4 a + 2 b + c: the bytes
        # follow each other by c and a, and b tells their halves apart.
        bytes_WACI = bytes_BI.view(-1, 2, 2, bytes_BI.shape[1]).transpose(1, 2)
        codes_WABCI = torch.empty(len(bytes_WACI), 2, 2, 2, bytes_BI.shape[1], device=words_IW.device)
        codes_WABCI[:, :, 0] = bytes_WACI & 15
        codes_WABCI[:, :, 1] = bytes_WACI >> 4
        return codes_WABCI.flatten(0, 3)

    return read


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


def look_up(bytes_OB: Tensor, table: Tensor) -> ReadRows:
    """Return the function that reads the numbers of bytes from a table (`code_table`)."""
    # A pair of numbers is looked up as one of 64 bits.
    items = table.view(torch.int64 if table.shape[1] == 2 else torch.int32).flatten().to(bytes_OB.device)

    def read(rows: slice) -> Tensor:
        part = bytes_OB[rows]
        return items.index_select(0, part.int().flatten()).view(torch.float32).view(len(part), -1)

    return read


def signed_bytes(values_OB: Tensor) -> ReadRows:
    """Return the function that reads rows of signed bytes as fp32."""
    return lambda rows: values_OB[rows].float()


def exponents(scale: Tensor) -> Tensor:
    """Return the powers of two of scales in E8M0, as torch's dtype or as bytes. Raises ValueError for NaN."""
    scale_bytes = scale.view(torch.uint8)
    if bool((scale_bytes == 255).any()):
        raise ValueError("a scale is no number (the code 255 of E8M0)")
    return torch.ldexp(torch.ones(scale.shape, device=scale.device), scale_bytes.int() - _EXPONENT_BIAS)
