"""Quantized weights: matrices of 8 or 4 bits per element, for inference and as the frozen base of adapters.

int8 and fp8 (E4M3): each row has a scale. int4: each group of 32 elements of a row has a scale and a midpoint (as Q4_1
of GGUF). nf4: each group of 64 has a scale, and its elements are among 16 levels (Dettmers et al., 2023), by
bitsandbytes. The dequantized matrix depends on the stored bits only, neither on the device nor on the dtype of the
activations.

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
    int4_matmul_on_card,
    int8_matmul,
    pack_int4,
    pack_int4_on_card,
    prepack_weight,
    prepacked_linear,
    prepacked_memory,
    unpack_int4,
)
from jingu.errors import JinguError
from jingu.model import scaled_matmul
from jingu.model.spec import QuantizationFormat

TensorReader = Callable[[str], Tensor]
# Elements of a row that share a scale; for int8 and fp8 the number that kernels process at once.
GROUP_SIZES: dict[QuantizationFormat, int] = {"int8": 16, "int4": 32, "nf4": 64, "fp8": scaled_matmul.SIZE_MULTIPLE}
# Shares of a group's range to try: values beyond it are clipped, and the others are rounded more finely.
_SHRINKS = (0.95, 0.9, 0.85, 0.8)

# On CPUs, the kernels for few rows sum in another order than those for more. In multiples of these numbers, a row's
# result does not depend on how many rows there are. Plain matrices: MKL has special kernels for up to 15 rows with
# AVX-512, and on AMD's CPUs for up to 3. (On Intel's, `jingu.runtime` asks MKL for one order for any number.)
BATCH_INVARIANT_ROWS = 16
# Below this number of outputs, the kernels for AMD's CPUs sum a row in an order that depends on its address.
BATCH_INVARIANT_OUTPUTS = 16
# Matrices in oneDNN's order: only a single row is summed differently.
PREPACKED_ROWS = 2


class QuantizedWeight(nn.Module):
    """A quantized matrix [O, I], or one for each expert [E, O, I], in place of a module's weight. It is not trained.

    Attributes:
        values: int8 and fp8 [O, I]; 4 bits [O, I / 2], with the even elements in the low halves of bytes.
        scales: int8 [O, 1] and int4 [O, 2 G] (scale and midpoint alternate) in bf16; nf4 [O, G] and fp8 [O, 1] in fp32.

    Both are stored as integers of the same bits, so that casting the model to another dtype leaves them alone.
    """

    def __init__(self, kind: QuantizationFormat, shape: Sequence[int], *, unit_rows: bool = False) -> None:
        """
        Args:
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
        """Return the dequantized matrix in fp32, or that of one expert."""
        if number is None:
            return dequantize(self.values, self.scales, self.kind)
        return dequantize(self.values[number], self.scales[number], self.kind)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of an int8 matrix, dequantized to fp32."""
        return dequantize(self.values[ids], self.scales[ids], self.kind)


class PromptRows:
    """Which rows of a forward pass are tokens of long prompts.

    The kernels for quantized matrices take time for each row, so for many rows it is faster to dequantize the matrix.
    That rounds differently. So it depends on the row alone, not on how many there are, which of both is done.

    Attributes:
        min_tokens: of a long prompt. For a shorter one it would take longer to dequantize the matrices.
        dequantized: indices of the rows that are multiplied by dequantized matrices; None: there are none.
        others: indices of the others.
    """

    def __init__(self, kind: QuantizationFormat) -> None:
        self.min_tokens = 64 if kind == "int8" else 128
        self.dequantized: Tensor | None = None
        self.others: Tensor | None = None

    @contextmanager
    def select(self, ranges: Iterable[range], rows: int) -> Iterator[None]:
        """Select ranges of the rows of the forward passes inside of this context."""
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

    CPUs have kernels for it: each row of the result depends on its own row of `x` only, to the last bit. On other
    devices it is dequantized for each product.

    Attributes:
        values: on CPU in the layout of the kernel.
        scales: on CPU in the dtype of the activations; for 4 bits [G, O, 2], with the midpoints.
        prompt_rows: which rows are multiplied by the dequantized matrix; None: none ever.
    """

    kind: QuantizationFormat
    values: Tensor
    scales: Tensor
    prompt_rows: PromptRows | None = None

    @staticmethod
    def quantize(weight_OI: Tensor, kind: QuantizationFormat, dtype: torch.dtype) -> PrepackedQuantizedWeight:
        """Quantize and prepack a matrix; `dtype` is that of the activations."""
        return PrepackedQuantizedWeight.pack(kind, *quantize(weight_OI, kind), dtype)

    @staticmethod
    def pack(
        kind: QuantizationFormat,
        values: Tensor,
        scales: Tensor,
        dtype: torch.dtype,
        prompt_rows: PromptRows | None = None,
    ) -> PrepackedQuantizedWeight:
        """Prepack the values and scales of a quantized matrix; `dtype` is that of the activations."""
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
        """Return the matrix [O, I], on CPU."""
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


class CardQuantizedWeight(PrepackedQuantizedWeight):
    """A quantized matrix [O, I] for inference on an accelerator, which reads the integers themselves.

    Attributes:
        values: int8; for 4 bits in the layout of the kernel (int32), or, where the device has none, as they are stored.
        scales: int8 [O] in the dtype of the activations; with the kernel for 4 bits [G, O, 2] in bf16.
    """

    def times(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x @ self.T + bias`."""
        if self.kind == "int8":
            # Whole numbers up to 127 are exact in every dtype.
            y = F.linear(x, self.values.to(x.dtype)) * self.scales
        elif self.values.dtype == torch.int32:
            x_NI = x.reshape(-1, x.shape[-1]).contiguous()
            y_NO = int4_matmul_on_card(x_NI, self.values, GROUP_SIZES["int4"], self.scales)
            y = y_NO.view(*x.shape[:-1], -1)
        else:
            y = F.linear(x, dequantize(self.values, self.scales, self.kind).to(x.dtype))
        return y if bias is None else y + bias.to(x.dtype)


def pack_for_card(kind: QuantizationFormat, values: Tensor, scales: Tensor, dtype: torch.dtype) -> CardQuantizedWeight:
    """Prepack a quantized matrix on an accelerator, as `PrepackedQuantizedWeight.pack` does on CPU."""
    values = values.detach()
    scales = scales.detach()
    if kind == "int8":
        return CardQuantizedWeight(kind, values, scales.view(torch.bfloat16).to(dtype).squeeze(-1))
    if kind == "int4" and dtype == torch.bfloat16 and has_int4_kernel(values.device):
        return CardQuantizedWeight(kind, *_pack_for_int4_kernel(values, scales))
    return CardQuantizedWeight(kind, values, scales)


def _pack_for_int4_kernel(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    # The kernel wants the first of two numbers in the high half of a byte.
    packed = pack_int4_on_card((values & 15) << 4 | values >> 4)
    return packed, scales.view(torch.bfloat16).unflatten(-1, (-1, 2)).transpose(0, 1).contiguous()


class ScaledWeight(PrepackedQuantizedWeight):
    """A matrix [O, I] in FP8 for inference, whose inputs are rounded to FP8, too, with a scale for each row.

    Cards with units for FP8 multiply it as it is. CPUs multiply the same numbers in fp32.

    Attributes:
        values: FP8.
        scales: [O, 1] in fp32.
    """

    def times(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x @ self.T + bias`."""
        x_NI = x.reshape(-1, x.shape[-1])
        rows = len(x_NI)
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
    """Return whether a device multiplies matrices of 4 bits, and as `dequantize` says: it is asked once."""
    if device.type != "cuda":
        return False
    weight_OI = torch.arange(16 * 64, device=device, dtype=torch.float32).sin().view(16, 64)
    values, scales = quantize(weight_OI, "int4")
    expected_OI = dequantize(values, scales, "int4").to(torch.bfloat16)
    one_II = torch.eye(64, device=device, dtype=torch.bfloat16)
    try:
        packed, packed_scales = _pack_for_int4_kernel(values, scales)
        product_IO = int4_matmul_on_card(one_II, packed, GROUP_SIZES["int4"], packed_scales)
    except RuntimeError:
        # The card is too old, or PyTorch was built without the kernel.
        return False
    return torch.allclose(product_IO.t().float(), expected_OI.float(), rtol=2e-2, atol=2e-2)


@dataclass(frozen=True, eq=False)
class PrepackedWeight:
    """An unquantized matrix [O, I] in the layout of oneDNN's kernels for CPUs: nearly twice as fast for few rows.

    Each row of the result depends on its own row of `x` only, to the last bit.

    Attributes:
        values: a tensor of oneDNN.
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
    """Raise JinguError if bitsandbytes is not installed, which the feature `what` (setting `where`) needs."""
    if find_spec("bitsandbytes") is None:
        raise JinguError(
            f"{what} by the bitsandbytes package, which is not installed.",
            where=where,
            fix=f"Install it (`pip install bitsandbytes`), or set it to {other}.",
        )


def import_bitsandbytes() -> None:
    """Import bitsandbytes, and keep it from downloading code.

    On some CPUs it uses the package `kernels`, if that is installed, to download and run code. It is hidden meanwhile.
    """
    if "bitsandbytes" in sys.modules:
        return
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # which says that it is missing
    modules: dict[str, Any] = sys.modules
    before = modules.get("kernels")
    modules["kernels"] = None
    try:
        import_module("bitsandbytes")
    finally:
        del modules["kernels"]
        if before is not None:
            modules["kernels"] = before


def can_quantize(outputs: int, inputs: int, kind: QuantizationFormat) -> bool:
    """Return whether the kernels support quantized matrices of a shape."""
    return not (outputs % 16 or inputs % GROUP_SIZES[kind])


def quantize(weight: Tensor, kind: QuantizationFormat) -> tuple[Tensor, Tensor]:
    """Quantize a matrix, or one for each expert: return values and scales."""
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
    """Return the matrix, or matrices, of quantized values and scales, in fp32."""
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


def _unpack_nibbles(values: Tensor) -> Tensor:
    return torch.stack([values & 15, values >> 4], -1).flatten(-2)


def _quantize_int4(wide_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to int4: for each group, choose the range with the smallest squared error."""
    groups_OGI = wide_OI.unflatten(1, (-1, GROUP_SIZES["int4"]))
    # Start with the full range.
    best = _round_groups(groups_OGI)
    if (_count_levels(groups_OGI[:4]) <= 16).all():
        # The matrix was dequantized from blocks of 4 bits (Q4_0, Q4_K of GGUF), whose levels may reach beyond their
        # values: take the same levels, which loses nothing.
        candidates = [_round_groups(groups_OGI, steps_OG1=(_count_levels(groups_OGI) - 1).clamp(1, 15))]
    else:
        # A smaller range may have a smaller error.
        candidates = [_round_groups(groups_OGI, shrink) for shrink in _SHRINKS]
    for candidate in candidates:
        better_OG1 = candidate[0] < best[0]
        best = [torch.where(better_OG1, new, old) for new, old in zip(candidate, best, strict=True)]
    _, scale_OG1, midpoint_OG1, values_OGI = best
    # Two values of 4 bits a byte: even elements in the low half.
    values_OI = values_OGI.flatten(1).to(torch.uint8)
    scales = torch.cat([scale_OG1, midpoint_OG1], -1).flatten(1).to(torch.bfloat16)
    return values_OI[:, ::2] | values_OI[:, 1::2] << 4, scales.view(torch.int16)


def _count_levels(groups_OGI: Tensor) -> Tensor:
    """Return how many equidistant levels [O, G, 1] reach from a group's lowest value to its highest.

    Their distance is the smallest between two different values. Values on no such levels give a large number.
    """
    sorted_OGI = groups_OGI.sort(-1).values
    range_OG1 = sorted_OGI[..., -1:] - sorted_OGI[..., :1]
    gaps_OGI = sorted_OGI.diff(dim=-1)
    # Equal values, up to the rounding of fp32, are on one level.
    step_OG1 = gaps_OGI.masked_fill(gaps_OGI <= range_OG1 * 1e-4, torch.inf).amin(-1, keepdim=True)
    return (range_OG1 / step_OG1).round() + 1


def _round_groups(groups_OGI: Tensor, shrink: float = 1.0, steps_OG1: Tensor | float = 15.0) -> list[Tensor]:
    """Return the squared error of groups, their scales, midpoints and values.

    Args:
        shrink: factor of the range.
        steps_OG1: how many steps divide the range; at most 15.
    """
    low_OG1, high_OG1 = groups_OGI.aminmax(dim=-1, keepdim=True)
    scale_OG1 = ((high_OG1 - low_OG1) * shrink / steps_OG1).clamp_min(1e-12).bfloat16().float()
    # The middle of the range is a level if the number of steps is even, else it is between two.
    midpoint_OG1 = ((high_OG1 + low_OG1 + scale_OG1 * (steps_OG1 % 2)) / 2).bfloat16().float()
    values_OGI = ((groups_OGI - midpoint_OG1) / scale_OG1 + 8).round().clamp(0, 15)
    error_OG1 = ((values_OGI - 8) * scale_OG1 + midpoint_OG1 - groups_OGI).square().sum(-1, keepdim=True)
    return [error_OG1, scale_OG1, midpoint_OG1, values_OGI]


def quantizing_reader(parts: Iterable[nn.Module], read: TensorReader) -> TensorReader:
    """Return a reader that also knows the values and scales of quantized matrices.

    A matrix is read and quantized when the first of the two is requested.
    """
    quantized = {
        name: module for part in parts for name, module in part.named_modules() if isinstance(module, QuantizedWeight)
    }
    # The other one of the two, until it is requested.
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
