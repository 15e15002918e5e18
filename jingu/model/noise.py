"""Noise on embedded tokens while training (NEFTune; Jain et al., 2023, arXiv:2310.05914).

It is a function of a key for each token, so that it is the same wherever the token is computed.

Shapes: B rows, T tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

KEYS = 1 << 52
"""Keys are whole numbers below this, which floating numbers of 64 bits hold."""
_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685


def mixed(x: Tensor) -> Tensor:
    """Whole numbers of 64 bits, each stirred so that neighbours have nothing in common (SplitMix64, Steele et al.,
    2014)."""
    x = x * _STEP
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _FIRST
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _SECOND
    return x ^ (x >> 31 & (1 << 33) - 1)


def keys(seed: int, first_row: int, rows: int, tokens: int) -> Tensor:
    """[rows, tokens] a key for each token of the rows that are numbered from `first_row` over the whole run, int64."""
    row_B1 = mixed(mixed(torch.tensor(seed)) + torch.arange(first_row, first_row + rows).unsqueeze(1))
    return mixed(row_B1 + torch.arange(tokens)) & KEYS - 1


class EmbeddingNoise(nn.Module):
    """Uniform noise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, noise_2BT: Tensor) -> Tensor:
        """[B, T, D] noise up to scale / √D on either side, for keys and scales."""
        key_BT1, scale_BT1 = noise_2BT[0].long().unsqueeze(-1), noise_2BT[1].unsqueeze(-1)
        bits_BTD = mixed(mixed(key_BT1) + torch.arange(self.width, device=noise_2BT.device)) & KEYS - 1
        return (bits_BTD.double() * (2.0 / KEYS) - 1.0) * (scale_BT1 * self.width**-0.5)
