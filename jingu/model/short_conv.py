"""Short causal convolutions: each channel of a token is a weighted sum of that channel of the last few tokens.

The delta rule and Mamba-2 apply one to their projections; in LFM2 (Liquid AI, 2025) a gated one is the mixer itself.

Shapes: B rows, T tokens, E channels, L taps (the kernel length).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from jingu.model.chunked_scan import wide_dtype


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
    # The state after the last token.
    state_BLE = padded_BTE[:, tokens:]
    if numbers_BT is not None:
        is_other_BL = numbers_BT[:, tokens:] != numbers_BT[:, -1:]
        state_BLE = state_BLE.masked_fill(is_other_BL.unsqueeze(-1), 0)
    return y_BTE.to(x_BTE.dtype), state_BLE


def gated_short_convolution(
    projected_BTE: Tensor,
    weight_EL: Tensor,
    bias_E: Tensor | None = None,
    starts_BT: Tensor | None = None,
    state_BLE: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return c · convolution(b · x), and the state of the convolution.

    Args:
        projected_BTE: b, c and x, which are concatenated: [B, T, 3 · E].
    """
    b_BTE, c_BTE, x_BTE = projected_BTE.chunk(3, -1)
    y_BTE, state_BLE = causal_convolution(b_BTE * x_BTE, weight_EL, bias_E, starts_BT, state_BLE)
    return c_BTE * y_BTE, state_BLE
