"""Quantized matrices as products of 8-bit integers, for inference on CPUs without units for bf16 (AVX2).

PyTorch's kernels for quantized matrices compute there in emulated bf16. fbgemm's multiply bytes: they read a quarter of
what fp32 reads, and sum exactly, so that a row's result does not depend on its neighbors.

Shapes: O outputs, I inputs, N rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from jingu.compat.torch import byte_matmul, pack_bytes

# Largest magnitude of a byte, of weights and of activations.
_LIMIT = 127
# Units of the low limb in one of the high limb.
_LOW_UNITS = 128
# Tensors, as PyTorch makes one of a number each time that it occurs, which takes longer than to multiply a row.
# What values are multiplied by: for the high limb, and for the part of the low limb that is in the high one.
_SCALES = torch.tensor([[64.0], [-64.0 * _LOW_UNITS]])
_LOW_SCALES = torch.tensor([[0.0], [64.0 * _LOW_UNITS]])
# Added and subtracted again, they round both to units of the high limb.
_ROUNDERS = 1.5 * 2**23 * torch.tensor([[1.0], [_LOW_UNITS]])
# Of a float: added to its bits, the second carries magnitudes from 255/256 of a power of two on to the next one.
_EXPONENT = torch.tensor(0x7F800000, dtype=torch.int32)
_CARRY = torch.tensor(0x10000, dtype=torch.int32)


@dataclass(frozen=True, eq=False)
class ByteWeight:
    """A matrix [O, I] rounded to int8 with a scale for each row.

    Attributes:
        outputs: O.
        packed: the matrix in the layout of the kernel.
    """

    outputs: int
    packed: object

    @staticmethod
    def pack(weight_OI: Tensor) -> ByteWeight:
        """Round and prepack a matrix; I is even.

        AVX2 adds the products of two neighbors in 16 bits. They cannot overflow: neither the positive nor the negative
        values of two neighbors sum beyond 127, which activations multiply by 255 at most.
        """
        pairs = weight_OI.float().unflatten(1, (-1, 2))
        sums_O = torch.maximum(pairs.clamp_min(0).sum(-1).amax(1), pairs.clamp_max(0).sum(-1).amin(1).neg())
        scale_O = (sums_O / _LIMIT).clamp_min(1e-30)
        values_OI = (pairs / scale_O[:, None, None]).round_().flatten(1).to(torch.int8)
        return ByteWeight(len(values_OI), pack_bytes(values_OI, scale_O))

    def times(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x @ self.T + bias`.

        Each row of x is rounded to two bytes an element, in units that follow from its largest magnitude: one byte
        alone would lose several times as much as the rounding of the weights. As units are powers of two, the last
        addition alone rounds, so that a row by itself may take another path with fewer operations.
        """
        x_NI = x if x.dtype == torch.float32 else x.float()
        rows = x.numel() // x.shape[-1]
        units = _row_units(x_NI) if rows == 1 else None
        if units is not None:
            *scales_21, units_12 = units
            y_NO = torch.mm(units_12, byte_matmul(_split_limbs(x_NI.view(1, -1), _ROUNDERS, *scales_21), self.packed))
        else:
            x_1NI = x_NI.reshape(1, rows, -1)
            power_N1 = _power_of_two(torch.linalg.vector_norm(x_1NI[0], math.inf, -1, True))
            scales_2N1 = (_SCALES[..., None] / power_N1, _LOW_SCALES[..., None] / power_N1)
            limbs_NI = _split_limbs(x_1NI, _ROUNDERS[..., None], *scales_2N1).flatten(0, 1)
            high_NO, low_NO = byte_matmul(limbs_NI, self.packed).view(2, rows, -1).unbind()
            y_NO = low_NO.add_(high_NO, alpha=_LOW_UNITS).mul_(power_N1 / _LOW_SCALES[1])
        y = y_NO.view(*x.shape[:-1], self.outputs)
        y = y if x.dtype == torch.float32 else y.to(x.dtype)
        return y if bias is None else y + bias.to(x.dtype)


def _power_of_two(magnitude: Tensor) -> Tensor:
    """Return powers of two, of which magnitudes are at least 255/256 and less than 255/128 times; 0 of 0.

    Magnitudes that are not finite give NaN, and so does the row's result.
    """
    power = ((magnitude.view(torch.int32) + _CARRY) & _EXPONENT).view(torch.float32)
    return power + (magnitude - magnitude)


def _row_units(row: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the scales of a single row and the units [1, 2] of its limbs; None if it is not an ordinary row."""
    least, greatest = torch.aminmax(row)
    mantissa, exponent = math.frexp(max(-least.item(), greatest.item()))
    if not 0 < mantissa < 1 or abs(exponent) > 100:
        return None
    # The mantissa is from 0.5 on.
    return _units_of(exponent if mantissa >= 255 / 256 else exponent - 1)


@lru_cache(maxsize=256)
def _units_of(exponent: int) -> tuple[Tensor, Tensor, Tensor]:
    power = 2.0**exponent
    return _SCALES / power, _LOW_SCALES / power, (power / _SCALES.abs()).T.contiguous()


def _split_limbs(x: Tensor, rounders: Tensor, scales: Tensor, low_scales: Tensor) -> Tensor:
    """Return high and low limbs [2, ...]. The high ones are whole numbers, and the kernel rounds the low ones."""
    limbs = torch.addcmul(rounders, x, scales).sub_(rounders)
    return limbs.addcmul_(x, low_scales)
