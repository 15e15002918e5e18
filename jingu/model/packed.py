"""Matrices of 8 or 4 bits an element, for inference: rounded once as they are read, multiplied by PyTorch's kernels.

8 bits: each row has a scale. 4 bits: each group of 32 elements of a row has a scale and a middle (as Q4_1 of GGUF).
Scales are of the dtype that is computed in. A row of the result depends on its row of `x` alone, to the last bit.

Shapes: O outputs, I inputs, G groups of a row, N rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Bits = Literal[8, 4]
GROUP = 32
_SHRINKS = (0.95, 0.9, 0.85, 0.8)
"""Shares of a group's range that are tried: what lies beyond is cut off, and the rest is finer."""

STEADY_ROWS = 4
"""On CPUs, kernels add up in another order where rows are fewer."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix [O, I].

    Attributes:
        values: [O, I] in int8; or two elements a byte in the order that PyTorch's kernel for CPUs has them in; or,
            elsewhere, [O, I / 2] with the even elements in the low halves.
        scales: [O] of 8 bits; [G, O, 2] of 4 bits, with the middles.
    """

    bits: Bits
    values: Tensor
    scales: Tensor

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return self.values.nbytes + self.scales.nbytes

    def times(self, x: Tensor) -> Tensor:
        """`x @ self.T`."""
        x_NI = x.reshape(-1, x.shape[-1]).to(self.scales.dtype).contiguous()
        if not on_cpu(self.values):
            y_NO = F.linear(x_NI, self.whole())
        elif self.bits == 8:
            y_NO = torch._weight_int8pack_mm(x_NI, self.values, self.scales)
        else:
            y_NO = torch.ops.aten._weight_int4pack_mm_for_cpu(x_NI, self.values, GROUP, self.scales)
        return y_NO.view(*x.shape[:-1], -1).to(x.dtype)

    def whole(self) -> Tensor:
        """The matrix that it stands for; not of 4 bits on CPU, whose order is the kernel's own."""
        if self.bits == 8:
            return self.values.to(self.scales.dtype) * self.scales[:, None]
        nibbles_OI = torch.stack([self.values & 15, self.values >> 4], -1).flatten(1)
        scale_OG1, middle_OG1 = self.scales.transpose(0, 1).unsqueeze(-1).unbind(2)
        groups_OGI = nibbles_OI.unflatten(1, (-1, GROUP)).to(self.scales.dtype) - 8
        return (groups_OGI * scale_OG1 + middle_OG1).flatten(1)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of a matrix of 8 bits."""
        return self.values[ids].to(self.scales.dtype) * self.scales[ids].unsqueeze(-1)


@dataclass(frozen=True, eq=False)
class Reordered:
    """A matrix [O, I] as it is, in the order that oneDNN's kernels for CPUs read at once: nearly twice as fast for few
    rows, and the result is the same. A row of it depends on its row of `x` alone, to the last bit.

    Attributes:
        values: oneDNN's own.
    """

    values: Tensor

    @staticmethod
    def of(weight_OI: Tensor) -> Reordered:
        """A copy of a matrix."""
        return Reordered(torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), STEADY_ROWS))

    @property
    def block(self) -> tuple[int, int]:
        """Where it lies in memory: address and bytes."""
        return torch.ops.mkldnn.data_ptr(self.values), torch.ops.mkldnn._nbytes(self.values)

    def times(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ self.T + bias`."""
        rows = x.numel() // x.shape[-1]
        if spare := -rows % STEADY_ROWS:
            y_NO = self.times(F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, spare)), bias)
            return y_NO[:rows].view(*x.shape[:-1], -1)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.values, bias, "none", [], "")
        return y


def on_cpu(tensor: Tensor) -> bool:
    """Whether the kernels for CPUs multiply it; elsewhere it is made whole for each product."""
    return tensor.device.type == "cpu"


def packs(outputs: int, inputs: int, bits: Bits) -> bool:
    """Whether the kernels take matrices of a shape."""
    return not (outputs % 16 or inputs % (16 if bits == 8 else GROUP))


def pack(weight_OI: Tensor, bits: Bits, dtype: torch.dtype) -> Packed:
    """Round a matrix.

    Args:
        dtype: that it will be multiplied in.
    """
    wide_OI = weight_OI.float()
    if bits == 8:
        scale_O = (wide_OI.abs().amax(1) / 127).clamp_min(1e-12).to(dtype)
        values_OI = (wide_OI / scale_O.float()[:, None]).round().clamp(-127, 127)
        return Packed(8, values_OI.to(torch.int8), scale_O)
    values_OI, scales_GO2 = _groups(wide_OI, dtype)
    if not on_cpu(weight_OI):
        return Packed(4, values_OI[:, ::2] | values_OI[:, 1::2] << 4, scales_GO2)
    # The second argument is for kernels of other devices.
    return Packed(4, torch.ops.aten._convert_weight_to_int4pack_for_cpu(values_OI.int(), 1), scales_GO2)


def _groups(wide_OI: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values from 0 to 15 [O, I], scales and middles [G, O, 2]: of each group, those that are off the least."""
    groups_OGI = wide_OI.unflatten(1, (-1, GROUP))
    kept = _rounded(groups_OGI, 1.0, dtype)
    for shrink in _SHRINKS:
        found = _rounded(groups_OGI, shrink, dtype)
        better_OG1 = found[0] < kept[0]
        kept = tuple(torch.where(better_OG1, new, old) for new, old in zip(found, kept, strict=True))
    _, scale_OG1, middle_OG1, values_OGI = kept
    scales_GO2 = torch.cat([scale_OG1, middle_OG1], -1).transpose(0, 1).contiguous().to(dtype)
    return values_OGI.flatten(1).to(torch.uint8), scales_GO2


def _rounded(groups_OGI: Tensor, shrink: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """How far groups are off, their scales and middles, and values."""
    low_OG1, high_OG1 = groups_OGI.aminmax(dim=-1, keepdim=True)
    scale_OG1 = ((high_OG1 - low_OG1) * shrink / 15).clamp_min(1e-12).to(dtype).float()
    middle_OG1 = ((high_OG1 + low_OG1 + scale_OG1) / 2).to(dtype).float()
    values_OGI = ((groups_OGI - middle_OG1) / scale_OG1 + 8).round().clamp(0, 15)
    off_OG1 = ((values_OGI - 8) * scale_OG1 + middle_OG1 - groups_OGI).square().sum(-1, keepdim=True)
    return off_OG1, scale_OG1, middle_OG1, values_OGI
