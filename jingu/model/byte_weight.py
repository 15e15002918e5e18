"""Quantized matrices multiplied as 8-bit integers, for inference on CPUs without bf16 units (AVX2).

On these CPUs, PyTorch's kernels for quantized matrices emulate bf16. The kernels of fbgemm multiply 8-bit integers
instead. They read a quarter of the bytes of fp32, and sum integers exactly, so a row's result does not depend on other
rows.

Shapes: O outputs, I inputs, N rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from jingu.compat.torch import byte_matmul, pack_bytes

# Largest magnitude of an 8-bit integer, for weights and for activations.
_LIMIT = 127
# Each activation is split into two 8-bit integers, a high and a low limb: x = (high + low / 128) · power / 64, where
# `power` is the power of two of its row (`_power_of_two`). One unit of the high limb is 128 units of the low one.
_LOW_UNITS = 128
# The constants below are tensors because PyTorch creates a tensor for every Python number in an expression, which takes
# longer than multiplying a row.
# Factors of x / power for the high limb, and for minus the high limb in units of the low one.
_SCALES = torch.tensor([[64.0], [-64.0 * _LOW_UNITS]])
# Factors of x / power that are added to these: only the low limb has one.
_LOW_SCALES = torch.tensor([[0.0], [64.0 * _LOW_UNITS]])
# Adding and subtracting these rounds both rows of `_SCALES` to whole units of the high limb.
_ROUNDERS = 1.5 * 2**23 * torch.tensor([[1.0], [_LOW_UNITS]])
# The exponent bits of an fp32 number. Adding the carry to its bits raises the exponent if the magnitude is at least
# 255/256 of the next power of two.
_EXPONENT = torch.tensor(0x7F800000, dtype=torch.int32)
_CARRY = torch.tensor(0x10000, dtype=torch.int32)


@dataclass(frozen=True, eq=False)
class ByteWeight:
    """A matrix [O, I] rounded to int8 with a scale per row.

    Attributes:
        outputs: number of outputs O.
        packed: the matrix and its scales in fbgemm's layout.
    """

    outputs: int
    packed: object

    @staticmethod
    def pack(weight_OI: Tensor) -> ByteWeight:
        """Round and prepack a matrix. I must be even.

        AVX2 adds the products of two neighboring inputs in 16 bits. To exclude overflow, the scales are chosen such
        that neither the positive nor the negative values of two neighbors sum beyond 127. Activations multiply them by
        at most 255.
        """
        pairs = weight_OI.float().unflatten(1, (-1, 2))
        sums_O = torch.maximum(pairs.clamp_min(0).sum(-1).amax(1), pairs.clamp_max(0).sum(-1).amin(1).neg())
        scale_O = (sums_O / _LIMIT).clamp_min(1e-30)
        values_OI = (pairs / scale_O[:, None, None]).round_().flatten(1).to(torch.int8)
        return ByteWeight(len(values_OI), pack_bytes(values_OI, scale_O))

    def times(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x @ self.T + bias`.

        Each element of x is rounded to two 8-bit limbs, in units that follow from the largest magnitude of its row. One
        limb would lose several times as much as the rounding of the weights. The units are powers of two, so only the
        final addition of both limbs rounds. A single row can therefore take a path with fewer operations, and gets the
        same result to the last bit.
        """
        x_NI = x if x.dtype == torch.float32 else x.float()
        rows = x.numel() // x.shape[-1]
        units = _row_units(x_NI) if rows == 1 else None
        if units is not None:
            # One row: a small matmul scales and adds the results of both limbs.
            *scales_21, units_12 = units
            y_NO = torch.mm(units_12, byte_matmul(_split_limbs(x_NI.view(1, -1), _ROUNDERS, *scales_21), self.packed))
        else:
            # Several rows: both limbs of all rows in one call of the kernel.
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
    """Return for each magnitude the power of two p with 255/256 · p ≤ magnitude < 255/128 · p; 0 for 0.

    A magnitude that is not finite gives NaN, and so does the row's result.
    """
    power = ((magnitude.view(torch.int32) + _CARRY) & _EXPONENT).view(torch.float32)
    return power + (magnitude - magnitude)


def _row_units(row: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the scales of a single row (`_SCALES`, `_LOW_SCALES`) and the units [1, 2] of its limbs.

    Returns None for a row of zeros, of numbers that are not finite, or of very large or small magnitudes.
    """
    least, greatest = torch.aminmax(row)
    mantissa, exponent = math.frexp(max(-least.item(), greatest.item()))
    if not 0 < mantissa < 1 or abs(exponent) > 100:
        return None
    # The mantissa is in [0.5, 1), so the power of two is the one below unless the mantissa is at least 255/256.
    return _units_of(exponent if mantissa >= 255 / 256 else exponent - 1)


@lru_cache(maxsize=256)
def _units_of(exponent: int) -> tuple[Tensor, Tensor, Tensor]:
    power = 2.0**exponent
    return _SCALES / power, _LOW_SCALES / power, (power / _SCALES.abs()).T.contiguous()


def _split_limbs(x: Tensor, rounders: Tensor, scales: Tensor, low_scales: Tensor) -> Tensor:
    """Return the high and low limbs [2, ...]. High limbs are whole numbers; the kernel rounds the low ones."""
    limbs = torch.addcmul(rounders, x, scales).sub_(rounders)
    return limbs.addcmul_(x, low_scales)
