"""Quantized weights: matrices of 8 or 4 bits per element, for inference and as the frozen base of adapters.

- int8 and fp8 (E4M3) have one scale per row.
- int4 has a scale and a midpoint per group of 32 elements of a row, like Q4_1 of GGUF.
- nf4 has a scale per group of 64 elements, and each element is one of 16 levels (Dettmers et al., 2023). bitsandbytes
  computes it.

The dequantized matrix depends only on the stored bits, not on the device or the dtype of the activations.

Shapes: O outputs, I inputs, E experts, G groups of a row, N rows.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import normalize

from jingu.compat.torch import (
    int4_matmul,
    int4_matmul_on_gpu,
    int8_matmul,
    interrupt_compiled_code,
    pack_int4,
    pack_int4_on_gpu,
    prepack_weight,
    prepacked_linear,
    prepacked_memory,
    unpack_int4,
)
from jingu.errors import JinguError
from jingu.model import scaled_matmul
from jingu.model.spec import QuantizationFormat

TensorReader = Callable[[str], Tensor]
# Elements of a row that share a scale (int4, nf4). int8 and fp8 have a scale per row; for these it is the number of
# elements that the kernels process at once.
GROUP_SIZES: dict[QuantizationFormat, int] = {"int8": 16, "int4": 32, "nf4": 64, "fp8": scaled_matmul.SIZE_MULTIPLE}
# Factors by which int4 tries to shrink a group's range. A smaller range clips the outermost values, and rounds the
# others more finely.
_SHRINKS = (0.95, 0.9, 0.85, 0.8)

# On CPUs, matmul kernels for few rows sum in a different order than kernels for many rows. If the number of rows is
# padded to a multiple of the constants below, a row's result does not depend on the number of rows.
# Unpacked matrices: MKL has special kernels for up to 15 rows with AVX-512, and for up to 3 rows on AMD's CPUs. (On
# Intel's CPUs, `jingu.runtime` asks MKL for the same order for any number of rows.)
BATCH_INVARIANT_ROWS = 16
# With fewer outputs than this, the kernels for AMD's CPUs sum a row in an order that depends on its address.
BATCH_INVARIANT_OUTPUTS = 16
# Matrices in oneDNN's layout: only a single row is summed in a different order.
PREPACKED_ROWS = 2


class FrozenWeight(nn.Module):
    """A matrix [O, I], or one per expert [E, O, I], in a form of its own, which replaces a module's `weight`.

    It is not trained.
    """

    def whole(self, number: int | None = None) -> Tensor:
        """Return the dequantized matrix; with a `number`, the matrix of that expert only."""
        raise NotImplementedError


class StoredWeight(FrozenWeight):
    """A quantized matrix that stays as another tool has stored it, and is dequantized in each use.

    It has no parameters. Its bytes remain in the model's files, which are mapped into memory, or on a device.

    Attributes:
        shape: of the dequantized matrix.
        parts: returns the tensors that hold it. Several matrices may share them.
        experts: returns the matrices of a range of experts, of matrices of all experts.
    """

    def __init__(
        self,
        shape: torch.Size,
        dequantize: Callable[[int | None], Tensor],
        parts: Callable[[], list[Tensor]],
        experts: Callable[[range], StoredWeight] | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.parts, self.experts = shape, parts, experts
        self._dequantize = dequantize

    @interrupt_compiled_code
    def whole(self, number: int | None = None) -> Tensor:
        # If the compiler saw that forward and backward pass dequantize the same matrix, it would keep the result.
        return self._dequantize(number)


class QuantizedWeight(FrozenWeight):
    """A matrix, or one per expert, quantized to a format of jingu.

    Attributes:
        values: int8 and fp8: [O, I]. int4 and nf4: [O, I / 2] bytes with two elements each; int4 has the even elements
            in the low halves.
        scales: int8: [O, 1] in bf16. int4: [O, 2 G] in bf16, with scale and midpoint alternating. nf4: [O, G] in fp32.
            fp8: [O, 1] in fp32.

    Both are stored as integers with the same bits. Otherwise casting the model to another dtype would convert them.
    """

    def __init__(self, kind: QuantizationFormat, shape: Sequence[int], *, unit_rows: bool = False) -> None:
        """
        Args:
            shape: shape of the unquantized matrix.
            unit_rows: whether the rows are normalized to length 1 before they are quantized.
        """
        super().__init__()
        self.kind: QuantizationFormat = kind
        self.unit_rows = unit_rows
        if kind == "nf4":
            import_bitsandbytes()
        *before, inputs = shape
        groups = inputs // GROUP_SIZES[kind]
        packed = inputs // 2
        sizes = {"int8": (inputs, 1), "fp8": (inputs, 1), "int4": (packed, 2 * groups), "nf4": (packed, groups)}[kind]
        scale_dtype = torch.int32 if kind in ("nf4", "fp8") else torch.int16
        dtypes = (torch.int8 if kind == "int8" else torch.uint8, scale_dtype)
        self.values, self.scales = (
            nn.Parameter(torch.empty(*before, size, dtype=dtype), requires_grad=False)
            for size, dtype in zip(sizes, dtypes, strict=True)
        )

    def whole(self, number: int | None = None) -> Tensor:
        if number is None:
            return dequantize(self.values, self.scales, self.kind)
        return dequantize(self.values[number], self.scales[number], self.kind)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows `ids`, dequantized to fp32."""
        return dequantize(self.values[ids], self.scales[ids], self.kind)


class PromptRows:
    """The rows of a forward pass that are tokens of long prompts.

    The time of the kernels for quantized matrices grows with the number of rows. For many rows it is faster to
    dequantize the matrix first, but this rounds differently. To keep results batch-invariant, the choice between the
    two depends on the prompt that a row belongs to, not on the number of rows in the batch.

    Attributes:
        min_tokens: the fewest tokens of a long prompt. For a shorter prompt, dequantizing takes longer than it saves.
        dequantized: indices of the rows that are multiplied by dequantized matrices; None: there are none.
        others: indices of all other rows; None if `dequantized` is.
    """

    def __init__(self, kind: QuantizationFormat) -> None:
        self.min_tokens = 64 if kind == "int8" else 128
        self.dequantized: Tensor | None = None
        self.others: Tensor | None = None

    @contextmanager
    def select(self, ranges: Iterable[range], rows: int) -> Iterator[None]:
        """Select the rows to multiply by dequantized matrices in the forward passes inside this context.

        Args:
            ranges: the selected rows, one range per long prompt.
            rows: number of all rows of a forward pass.
        """
        mask_N = torch.zeros(rows, dtype=torch.bool)
        for selected in ranges:
            mask_N[selected.start : selected.stop] = True
        if mask_N.any():
            self.dequantized = mask_N.nonzero().flatten()
            self.others = (~mask_N).nonzero().flatten()
        try:
            yield
        finally:
            self.dequantized = self.others = None


@dataclass(frozen=True, eq=False)
class PrepackedQuantizedWeight:
    """A quantized matrix [O, I] for inference only.

    On CPUs it uses kernels for quantized matrices. Each row of their result depends only on its own row of `x`, to the
    last bit. On other devices it is dequantized for each matmul; `GpuQuantizedWeight` avoids that.

    Attributes:
        values: on CPU, in the layout of the kernel; elsewhere as `QuantizedWeight` stores them.
        scales: on CPU, in the dtype of the activations: int8 [O], int4 [G, O, 2] with scale and midpoint. Elsewhere as
            `QuantizedWeight` stores them.
        prompt_rows: selects the rows that are multiplied by the dequantized matrix; None: the kernel takes all rows.
    """

    kind: QuantizationFormat
    values: Tensor
    scales: Tensor
    prompt_rows: PromptRows | None = None

    @staticmethod
    def quantize(weight_OI: Tensor, kind: QuantizationFormat, dtype: torch.dtype) -> PrepackedQuantizedWeight:
        """Quantize and prepack a matrix for activations of `dtype`."""
        return PrepackedQuantizedWeight.pack(kind, *quantize(weight_OI, kind), dtype)

    @staticmethod
    def pack(
        kind: QuantizationFormat,
        values: Tensor,
        scales: Tensor,
        dtype: torch.dtype,
        prompt_rows: PromptRows | None = None,
    ) -> PrepackedQuantizedWeight:
        """Prepack the values and scales of a quantized matrix for activations of `dtype`.

        Returns a `ScaledWeight` for fp8, on any device.
        """
        if kind == "fp8":
            return ScaledWeight(kind, values.detach().view(torch.float8_e4m3fn), scales.detach().view(torch.float32))
        if values.device.type != "cpu":
            return PrepackedQuantizedWeight(kind, values, scales)
        wide = scales.detach().view(torch.bfloat16).to(dtype)
        if kind == "int8":
            return PrepackedQuantizedWeight(kind, values.detach(), wide.squeeze(-1), prompt_rows)
        ordered = pack_int4(_unpack_nibbles(values).int())
        ordered_scales = wide.unflatten(-1, (-1, 2)).transpose(0, 1).contiguous()
        return PrepackedQuantizedWeight(kind, ordered, ordered_scales, prompt_rows)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.values.nbytes + self.scales.nbytes

    @property
    def memory(self) -> tuple[int, int]:
        """Address and size in bytes of the values."""
        return self.values.data_ptr(), self.values.nbytes

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix [O, I] in `dtype`. It must be on CPU, in the layout of the kernel."""
        if self.kind == "int8":
            return self.values.to(dtype) * self.scales.to(dtype)[:, None]
        scale_OG1, midpoint_OG1 = self.scales.to(dtype).transpose(0, 1).unsqueeze(-2).unbind(-1)
        groups = unpack_int4(self.values).unflatten(-1, (-1, GROUP_SIZES["int4"])).to(dtype)
        return groups.sub_(8).mul_(scale_OG1).add_(midpoint_OG1).flatten(1)

    def times(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x @ self.T + bias`."""
        if self.values.device.type != "cpu":
            return F.linear(x, dequantize(self.values, self.scales, self.kind).to(x.dtype), bias)
        x_NI = x.reshape(-1, x.shape[-1]).to(self.scales.dtype).contiguous()
        if self.kind == "int8":
            y_NO = int8_matmul(x_NI, self.values, self.scales)
        else:
            y_NO = int4_matmul(x_NI, self.values, GROUP_SIZES["int4"], self.scales)
        y = y_NO.view(*x.shape[:-1], -1).to(x.dtype)
        return y if bias is None else y + bias.to(x.dtype)


class GpuQuantizedWeight(PrepackedQuantizedWeight):
    """A quantized matrix [O, I] for inference on a GPU, with matmuls that read the integers.

    Without a kernel for the format, it is dequantized for each matmul.

    Attributes:
        values: int8: as stored. int4: in the layout of the kernel (int32). nf4, and int4 without a kernel: as stored.
        scales: int8: [O] in the dtype of the activations. int4 with a kernel: [G, O, 2] in bf16. Otherwise: as stored.
    """

    def times(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x @ self.T + bias`."""
        if self.kind == "int8":
            # Every floating dtype represents integers up to 127 exactly, so this cast rounds nothing.
            y = F.linear(x, self.values.to(x.dtype)) * self.scales
        elif self.values.dtype == torch.int32:
            x_NI = x.reshape(-1, x.shape[-1]).contiguous()
            y_NO = int4_matmul_on_gpu(x_NI, self.values, GROUP_SIZES["int4"], self.scales)
            y = y_NO.view(*x.shape[:-1], -1)
        else:
            y = F.linear(x, dequantize(self.values, self.scales, self.kind).to(x.dtype))
        return y if bias is None else y + bias.to(x.dtype)


def pack_for_gpu(kind: QuantizationFormat, values: Tensor, scales: Tensor, dtype: torch.dtype) -> GpuQuantizedWeight:
    """Prepack an int8, int4 or nf4 matrix on a GPU, as `PrepackedQuantizedWeight.pack` does on CPU."""
    values = values.detach()
    scales = scales.detach()
    if kind == "int8":
        return GpuQuantizedWeight(kind, values, scales.view(torch.bfloat16).to(dtype).squeeze(-1))
    if kind == "int4" and dtype == torch.bfloat16 and has_int4_kernel(values.device):
        return GpuQuantizedWeight(kind, *_pack_for_int4_kernel(values, scales))
    return GpuQuantizedWeight(kind, values, scales)


def _pack_for_int4_kernel(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    # The kernel expects the even elements in the high halves of bytes, and they are stored in the low ones.
    packed = pack_int4_on_gpu((values & 15) << 4 | values >> 4)
    return packed, scales.view(torch.bfloat16).unflatten(-1, (-1, 2)).transpose(0, 1).contiguous()


class ScaledWeight(PrepackedQuantizedWeight):
    """A matrix [O, I] in FP8 for inference. Its inputs are rounded to FP8, too, with one scale per row.

    GPUs with FP8 hardware multiply these numbers directly. CPUs multiply the same numbers in fp32.

    Attributes:
        values: FP8 (E4M3).
        scales: [O, 1] in fp32.
    """

    def times(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x @ self.T + bias`."""
        x_NI = x.reshape(-1, x.shape[-1])
        rows = len(x_NI)
        # Pad the rows, for the FP8 kernel of GPUs and for batch invariance on CPUs.
        x_NI = F.pad(x_NI, (0, 0, 0, -rows % max(scaled_matmul.SIZE_MULTIPLE, BATCH_INVARIANT_ROWS)))
        x8_NI, scale_N1 = scaled_matmul.quantize(x_NI, torch.float8_e4m3fn, "row")
        if x.device.type == "cpu":
            y_NO = F.linear(x8_NI.float(), self.values.float()) * (scale_N1 * self.scales.t())
        else:
            y_NO = scaled_matmul.multiply_fp8(x8_NI, scale_N1, self.values, self.scales, "row", x.dtype)
        y = y_NO[:rows].to(x.dtype).view(*x.shape[:-1], -1)
        return y if bias is None else y + bias.to(x.dtype)


@cache
def has_int4_kernel(device: torch.device) -> bool:
    """Return whether a device has an int4 matmul kernel whose result agrees with `dequantize`.

    The first call for a device multiplies a small matrix; later calls return the cached answer.
    """
    if device.type != "cuda":
        return False
    weight_OI = torch.arange(16 * 64, device=device, dtype=torch.float32).sin().view(16, 64)
    values, scales = quantize(weight_OI, "int4")
    expected_OI = dequantize(values, scales, "int4").to(torch.bfloat16)
    one_II = torch.eye(64, device=device, dtype=torch.bfloat16)
    try:
        packed, packed_scales = _pack_for_int4_kernel(values, scales)
        product_IO = int4_matmul_on_gpu(one_II, packed, GROUP_SIZES["int4"], packed_scales)
    except RuntimeError:
        # The GPU is too old, or PyTorch was built without the kernel.
        return False
    return torch.allclose(product_IO.t().float(), expected_OI.float(), rtol=2e-2, atol=2e-2)


@dataclass(frozen=True, eq=False)
class PrepackedWeight:
    """An unquantized matrix [O, I] in the layout of oneDNN's CPU kernels: nearly twice as fast for few rows.

    Each row of the result depends only on its own row of `x`, to the last bit.

    Attributes:
        values: an opaque oneDNN tensor.
    """

    values: Tensor

    @staticmethod
    def pack(weight_OI: Tensor) -> PrepackedWeight:
        """Prepack a copy of a matrix."""
        return PrepackedWeight(prepack_weight(weight_OI.detach().contiguous(), PREPACKED_ROWS))

    @property
    def memory(self) -> tuple[int, int]:
        """Address and size in bytes of the matrix."""
        return prepacked_memory(self.values)

    def times(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x @ self.T + bias`."""
        rows = x.numel() // x.shape[-1]
        if spare := -rows % PREPACKED_ROWS:
            y_NO = self.times(F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, spare)), bias)
            return y_NO[:rows].view(*x.shape[:-1], -1)
        return prepacked_linear(x, self.values, bias)


def require_bitsandbytes(what: str, where: str, other: str) -> None:
    """Raise JinguError if bitsandbytes is not installed.

    Args:
        what: start of the message: what bitsandbytes does, such as "moments are kept in 8 bits".
        where: the setting that needs it.
        other: a value of that setting that does not need it.
    """
    if find_spec("bitsandbytes") is None:
        raise JinguError(
            f"{what} by the bitsandbytes package, which is not installed.",
            where=where,
            fix=f"Install it (`pip install bitsandbytes`), or set it to {other}.",
        )


def import_bitsandbytes() -> None:
    """Import bitsandbytes, and keep it from downloading code.

    On some CPUs, bitsandbytes downloads and runs code through the package `kernels`, if that is installed. The import
    of `kernels` is therefore blocked while bitsandbytes is imported.
    """
    if "bitsandbytes" in sys.modules:
        return
    # Suppress bitsandbytes' warning that `kernels` is missing.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    modules: dict[str, Any] = sys.modules
    before = modules.get("kernels")
    # None makes Python raise ImportError for the module.
    modules["kernels"] = None
    try:
        import_module("bitsandbytes")
    finally:
        del modules["kernels"]
        if before is not None:
            modules["kernels"] = before


def can_quantize(outputs: int, inputs: int, kind: QuantizationFormat) -> bool:
    """Return whether the kernels support a quantized matrix [outputs, inputs]."""
    return not (outputs % 16 or inputs % GROUP_SIZES[kind])


def quantize(weight: Tensor, kind: QuantizationFormat) -> tuple[Tensor, Tensor]:
    """Quantize a matrix [O, I], or one per expert [E, O, I]. Return values and scales as in `QuantizedWeight`."""
    if weight.dim() == 3:
        pairs = [quantize(matrix, kind) for matrix in weight]
        return torch.stack([values for values, _ in pairs]), torch.stack([scales for _, scales in pairs])
    wide_OI = weight.float()
    if kind == "int8":
        scale_O1 = (wide_OI.abs().amax(1, keepdim=True) / 127).clamp_min(1e-12).to(torch.bfloat16)
        values_OI = (wide_OI / scale_O1.float()).round().clamp(-127, 127)
        return values_OI.to(torch.int8), scale_O1.view(torch.int16)
    if kind == "int4":
        return _quantize_int4(wide_OI)
    if kind == "fp8":
        values_OI, scale_O1 = scaled_matmul.quantize(wide_OI, torch.float8_e4m3fn, "row")
        return values_OI.view(torch.uint8), scale_O1.view(torch.int32)
    from bitsandbytes.functional import quantize_4bit

    values, state = quantize_4bit(wide_OI.contiguous(), blocksize=GROUP_SIZES[kind], quant_type=kind)
    return values.view(len(weight), -1), state.absmax.view(len(weight), -1).view(torch.int32)


def dequantize(values: Tensor, scales: Tensor, kind: QuantizationFormat) -> Tensor:
    """Return the matrix [O, I], or matrices [E, O, I], in fp32: the inverse of `quantize` up to rounding."""
    if kind == "int8":
        return values.float() * scales.view(torch.bfloat16).float()
    if kind == "fp8":
        return values.view(torch.float8_e4m3fn).float() * scales.view(torch.float32)
    if kind == "int4":
        scale, midpoint = scales.view(torch.bfloat16).float().unflatten(-1, (-1, 2)).unsqueeze(-1).unbind(-2)
        groups = _unpack_nibbles(values).unflatten(-1, (-1, GROUP_SIZES[kind])).float() - 8
        return (groups * scale + midpoint).flatten(-2)
    from bitsandbytes.functional import QuantState, dequantize_4bit

    size, absmax = torch.Size((*values.shape[:-1], 2 * values.shape[-1])), scales.view(torch.float32).flatten()
    state = QuantState(absmax, size, blocksize=GROUP_SIZES[kind], quant_type=kind, dtype=torch.float32)
    whole: Tensor = dequantize_4bit(values.reshape(-1, 1), state)
    return whole


def num_columns(values: Tensor, kind: str) -> int:
    """Return the number of inputs of a matrix in a format."""
    return values.shape[-1] * (2 if kind in ("int4", "nf4") else 1)


def _unpack_nibbles(values: Tensor) -> Tensor:
    return torch.stack([values & 15, values >> 4], -1).flatten(-2)


def _quantize_int4(wide_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to int4: for each group, choose the range with the smallest squared error."""
    groups_OGI = wide_OI.unflatten(1, (-1, GROUP_SIZES["int4"]))
    # Start with the full range.
    best = _round_groups(groups_OGI)
    # Check about four rows, spread over the matrix: its first rows can be zeros.
    sample_OGI = groups_OGI[:: max(1, len(groups_OGI) // 4)]
    if (_count_levels(sample_OGI) <= 16).all():
        # These rows have at most 16 levels per group, so the matrix was dequantized from a 4-bit format (Q4_0, Q4_K
        # of GGUF). A group there need not use all of its 16 levels. Take the original levels: this loses nothing.
        candidates = [_round_groups(groups_OGI, steps_OG1=(_count_levels(groups_OGI) - 1).clamp(1, 15))]
    else:
        # A smaller range may have a smaller error, although it clips the outermost values.
        candidates = [_round_groups(groups_OGI, shrink) for shrink in _SHRINKS]
    for candidate in candidates:
        better_OG1 = candidate[0] < best[0]
        best = [torch.where(better_OG1, new, old) for new, old in zip(candidate, best, strict=True)]
    _, scale_OG1, midpoint_OG1, values_OGI = best
    # Two 4-bit values per byte, even elements in the low half.
    values_OI = values_OGI.flatten(1).to(torch.uint8)
    scales = torch.cat([scale_OG1, midpoint_OG1], -1).flatten(1).to(torch.bfloat16)
    return values_OI[:, ::2] | values_OI[:, 1::2] << 4, scales.view(torch.int16)


def _count_levels(groups_OGI: Tensor) -> Tensor:
    """Return the number of equidistant levels [O, G, 1] from a group's lowest value to its highest.

    The distance of two levels is the smallest difference between two values. If the values are not equidistant, the
    result is a large number.
    """
    sorted_OGI = groups_OGI.sort(-1).values
    range_OG1 = sorted_OGI[..., -1:] - sorted_OGI[..., :1]
    gaps_OGI = sorted_OGI.diff(dim=-1)
    # Values that differ only by the rounding of fp32 are on the same level.
    step_OG1 = gaps_OGI.masked_fill(gaps_OGI <= range_OG1 * 1e-4, torch.inf).amin(-1, keepdim=True)
    return (range_OG1 / step_OG1).round() + 1


def _round_groups(groups_OGI: Tensor, shrink: float = 1.0, steps_OG1: Tensor | float = 15.0) -> list[Tensor]:
    """Return the squared errors, scales and midpoints [O, G, 1] of groups, and their values [O, G, I] from 0 to 15.

    Args:
        shrink: factor of each group's range, up to 1.
        steps_OG1: number of steps that divide the range; at most 15.
    """
    low_OG1, high_OG1 = groups_OGI.aminmax(dim=-1, keepdim=True)
    scale_OG1 = ((high_OG1 - low_OG1) * shrink / steps_OG1).clamp_min(1e-12).bfloat16().float()
    # The middle of the range is a level if the number of steps is even; otherwise it is halfway between two levels.
    midpoint_OG1 = ((high_OG1 + low_OG1 + scale_OG1 * (steps_OG1 % 2)) / 2).bfloat16().float()
    values_OGI = ((groups_OGI - midpoint_OG1) / scale_OG1 + 8).round().clamp(0, 15)
    error_OG1 = ((values_OGI - 8) * scale_OG1 + midpoint_OG1 - groups_OGI).square().sum(-1, keepdim=True)
    return [error_OG1, scale_OG1, midpoint_OG1, values_OGI]


def quantizing_reader(parts: Iterable[nn.Module], read: TensorReader) -> TensorReader:
    """Return a reader of parameters that also returns the values and scales of the quantized matrices in `parts`.

    `read` must return the unquantized matrix. The first request for values or scales reads and quantizes the matrix,
    and the request for the other one follows.
    """
    quantized = {
        name: module for part in parts for name, module in part.named_modules() if isinstance(module, QuantizedWeight)
    }
    # Values and scales of the last matrix that are not yet requested. Only one matrix is kept, to save memory.
    pending: dict[str, Tensor] = {}

    def read_part(name: str) -> Tensor:
        weight_name = name.rpartition(".")[0]
        if weight_name not in quantized:
            return read(name)
        if name not in pending:
            weight = read(weight_name)
            module = quantized[weight_name]
            if module.unit_rows:
                weight = normalize(weight.float())
            values, scales = quantize(weight, module.kind)
            pending.clear()
            pending[f"{weight_name}.values"] = values
            pending[f"{weight_name}.scales"] = scales
        return pending.pop(name)

    return read_part
