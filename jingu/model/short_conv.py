"""Short causal convolutions: each channel of a token is a weighted sum of that channel of the last few tokens.

The delta rule and Mamba-2 apply one to their projections; in LFM2 (Liquid AI, 2025) a gated one is the mixer itself.

Shapes: B rows, T tokens, D hidden size, E channels, L taps (the kernel length).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jingu.model.chunked_scan import wide_dtype
from jingu.model.layers import apply_batch_invariant, build_linear
from jingu.model.mixer_parts import Mixer, MixerState
from jingu.model.mixer_specs import ShortConv
from jingu.model.part_spec import ModuleRow, Rows, styles


def causal_convolution(
    x_BTE: Tensor,
    weight_EL: Tensor,
    bias_E: Tensor | None = None,
    starts_BT: Tensor | None = None,
    state_BLE: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve the tokens of each row with the L − 1 tokens before them in the same document.

    Args:
        weight_EL: the weights of each channel; the last one belongs to the token itself.
        starts_BT: whether a document starts at a token; None: nowhere.
        state_BLE: [B, L − 1, E] the last inputs before the first token; None: zeros.

    Returns:
        The outputs [B, T, E], summed in at least fp32 and rounded once, and the last L − 1 inputs [B, L − 1, E] of the
        last document, zeros before its start.
    """
    wide, tokens, before = wide_dtype(x_BTE), x_BTE.shape[1], weight_EL.shape[1] - 1
    if state_BLE is None:
        state_BLE = x_BTE.new_zeros(len(x_BTE), before, x_BTE.shape[2])
    # Number the documents, so that a token can tell whether an earlier one belongs to its own.
    padded_BTE = torch.cat((state_BLE.to(x_BTE.dtype), x_BTE), 1)
    numbers_BT = None if starts_BT is None else F.pad(starts_BT.cumsum(1), (before, 0))
    weight_LE = weight_EL.to(wide).t()
    # Add one tap after another, the nearest token first.
    y_BTE = x_BTE.to(wide) * weight_LE[before]
    for distance in range(1, before + 1):
        first = before - distance
        earlier_BTE = padded_BTE[:, first : first + tokens].to(wide)
        if numbers_BT is not None:
            is_other_BT = numbers_BT[:, first : first + tokens] != numbers_BT[:, before:]
            earlier_BTE = earlier_BTE.masked_fill(is_other_BT.unsqueeze(-1), 0)
        y_BTE = torch.addcmul(y_BTE, earlier_BTE, weight_LE[first])
    if bias_E is not None:
        y_BTE = y_BTE + bias_E.to(wide)
    # The state after the last token, as a copy, so that whoever keeps it does not keep the inputs.
    state_BLE = padded_BTE[:, tokens:].clone()
    if numbers_BT is not None:
        is_other_BL = numbers_BT[:, tokens:] != numbers_BT[:, -1:]
        state_BLE = state_BLE.masked_fill(is_other_BL.unsqueeze(-1), 0)
    return y_BTE.to(x_BTE.dtype), state_BLE


class Convolution(nn.Module):
    """A causal convolution of each channel.

    Attributes:
        decays: whether weight decay applies to its kernels.
    """

    def __init__(self, row: ModuleRow) -> None:
        super().__init__()
        self.decays = row.decays
        self.weight = nn.Parameter(torch.empty(row.shape))
        self.bias = nn.Parameter(torch.empty(row.shape[0])) if row.bias else None

    def forward(self, x_BTE: Tensor, starts_BT: Tensor | None, state_BLE: Tensor | None) -> tuple[Tensor, Tensor]:
        return causal_convolution(x_BTE, self.weight, self.bias, starts_BT, state_BLE)


def convolve(
    parts: Sequence[Tensor], convolutions: Sequence[Convolution], starts_BT: Tensor | None, state_BLE: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """Convolve several tensors [B, T, E] and apply SiLU; their states are concatenated along the channels."""
    states = [None] * len(parts) if state_BLE is None else state_BLE.split([part.shape[-1] for part in parts], -1)
    results = [conv(x, starts_BT, state) for conv, x, state in zip(convolutions, parts, states, strict=True)]
    outputs = [apply_batch_invariant(F.silu, y) for y, _ in results]
    return outputs, torch.cat([state for _, state in results], -1)


class ShortConvMixer(Mixer):
    """The gated short convolution of LFM2: gate_out · convolution(gate_in · x), between projections."""

    def __init__(self, spec: ShortConv, rows: Rows) -> None:
        super().__init__()
        self.spec = spec
        self.sharding = styles(rows)
        self.gate_in, self.gate_out, self.x, self.output = (
            build_linear(rows[name]) for name in ("gate_in", "gate_out", "x", "output")
        )
        self.conv = Convolution(rows["conv"])

    def project(self, x_BTD: Tensor) -> tuple[list[Tensor], Tensor]:
        return [self.gate_in(x_BTD) * self.x(x_BTD)], self.gate_out(x_BTD)

    def mix(
        self, parts: list[Tensor], starts_BT: Tensor | None, state: MixerState | None, decode: bool
    ) -> tuple[Tensor, MixerState]:
        y_BTE, conv_state = self.conv(parts[0], starts_BT, None if state is None else state.conv)
        return y_BTE, MixerState(conv_state)

    def finish(self, y_BTE: Tensor, gate: Tensor) -> Tensor:
        return self.output(gate * y_BTE)
