"""Parts that mixers with a state share: the state, and norms with a gate.

Shapes: B rows, T tokens, E channels, L taps (the kernel length), H heads or groups of heads, V channels of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jingu.model.chunked_scan import wide_dtype
from jingu.model.layers import apply_batch_invariant
from jingu.model.parts import ModuleRow


class MixerState(NamedTuple):
    """What a mixer remembers of the tokens before. It can be copied, stored, and continued from at any token.

    Attributes:
        conv: [B, L − 1, E] the last inputs of the convolutions, in the dtype of the hidden states.
        recurrent: [B, H, …] the state of the recurrence, at least in fp32; None: the mixer is a convolution only.
    """

    conv: Tensor
    recurrent: Tensor | None = None


class GatedNorm(nn.Module):
    """RMSNorm of each head or group of heads, multiplied by an activated gate before or behind the norm.

    All heads share a weight of V elements, or each has one of its own.
    """

    def __init__(self, row: ModuleRow, eps: float, activation: Literal["silu", "sigmoid"], *, gate_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(row.shape))
        self.eps, self.gate_first = eps, gate_first
        self.activation: Callable[[Tensor], Tensor] = F.silu if activation == "silu" else torch.sigmoid

    def forward(self, x_BTHV: Tensor, gate_BTHV: Tensor) -> Tensor:
        wide = wide_dtype(x_BTHV)
        gate = apply_batch_invariant(self.activation, gate_BTHV.to(wide))
        y = x_BTHV.to(wide)
        y = y * gate if self.gate_first else y
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        y = y * self.weight.to(wide).view(-1, y.shape[-1])
        return (y if self.gate_first else y * gate).to(gate_BTHV.dtype)
