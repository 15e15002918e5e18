"""Chance while training: noise on embedded tokens (NEFTune; Jain et al., 2023, arXiv:2310.05914), and dropout.

Either is a function of a key for each token, so that it is the same wherever the token is computed.

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


class Draw:
    """The keys of the tokens at hand, for the parts of a block that drop some of their inputs."""

    own: Tensor | None = None
    """[B, T] those of the block's tokens; None: nothing is dropped."""
    source: Tensor | None = None
    """[B, S] those of the tokens that an encoder reads."""


def dropped(x_BTI: Tensor, key_BT: Tensor, salt: int, rate: float, first: int) -> Tensor:
    """`x` with a share of its numbers zero and the others larger by as much.

    Args:
        salt: tells apart what the same token is given at several places.
        first: number of the first input here, where a rank has some of them.
    """
    inputs_I = torch.arange(first, first + x_BTI.shape[-1], device=x_BTI.device)
    bits_BTI = mixed(mixed(key_BT ^ salt).unsqueeze(-1) + inputs_I) & KEYS - 1
    return x_BTI * (bits_BTI >= int(rate * KEYS)) / (1 - rate)


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
