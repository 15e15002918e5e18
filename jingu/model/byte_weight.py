"""Quantized matrices as products of 8-bit integers, for inference on CPUs without units for bf16 (AVX2).

PyTorch's kernels for quantized matrices compute there in emulated bf16. fbgemm's multiply bytes: they read a quarter of
what fp32 reads, and sum exactly, so that a row's result does not depend on its neighbors.

Shapes: O outputs, I inputs, N rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from jingu.compat.torch import byte_matmul, pack_bytes

# Largest magnitude of a byte, of weights and of activations.
_LIMIT = 127
# Units of the low limb in one of the high limb, which is off by half at most. Tensors, as PyTorch makes one of a number
# each time that it occurs, which takes longer than to multiply a row.
_LOW_UNITS = torch.tensor(2.0 * _LIMIT)
_LOW_UNIT = torch.tensor(0.5 / _LIMIT)
_UNIT = torch.tensor(1.0 / _LIMIT)


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

        Each row of x is rounded to two bytes an element, in units of its largest magnitude: one byte alone would lose
        several times as much as the rounding of the weights.
        """
        x_NI = x.reshape(-1, x.shape[-1]).float()
        rows, inputs = x_NI.shape
        # A row of zeros has unit 0: what it is divided to does not matter, since the result is multiplied by 0.
        unit_N1 = torch.linalg.vector_norm(x_NI, math.inf, -1, True).mul_(_UNIT)
        # High limbs above low ones; the kernel rounds both to whole numbers.
        limbs = x_NI.new_empty(2 * rows, inputs)
        high_NI, low_NI = limbs.view(2, rows, inputs).unbind()
        torch.div(x_NI, unit_N1, out=high_NI)
        torch.round(high_NI, out=low_NI)
        torch.sub(high_NI, low_NI, out=low_NI)
        low_NI.mul_(_LOW_UNITS)
        high_NO, low_NO = byte_matmul(limbs, self.packed).view(2, rows, self.outputs).unbind()
        # Without `alpha`, with which the last elements of a tensor may be rounded otherwise.
        y = high_NO.add_(low_NO.mul_(_LOW_UNIT)).mul_(unit_N1).view(*x.shape[:-1], self.outputs).to(x.dtype)
        return y if bias is None else y + bias.to(x.dtype)
