"""Randomness in training: noise on embedded tokens (NEFTune; Jain et al., 2023, arXiv:2310.05914), and dropout.

Both are pure functions of a seed for each token, so that they are the same wherever the token is computed.

Shapes: B rows, T tokens, I inputs, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Seeds are integers below this, which fp64 represents exactly.
SEED_RANGE = 1 << 52
# The constants of SplitMix64, as signed 64-bit integers.
_INCREMENT = -7046029254386353131
_FIRST_FACTOR = -4658895280553007687
_SECOND_FACTOR = -7723592293110705685


def splitmix64(x: Tensor) -> Tensor:
    """Hash 64-bit integers so that neighbours have nothing in common (SplitMix64, Steele et al., 2014)."""
    x = x * _INCREMENT
    # The masks turn PyTorch's arithmetic shift of signed integers into a logical one.
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _FIRST_FACTOR
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _SECOND_FACTOR
    return x ^ (x >> 31 & (1 << 33) - 1)


def token_seeds(seed: int, first_row: int, rows: int, tokens: int) -> Tensor:
    """Return a seed [rows, tokens] for each token, int64.

    Args:
        first_row: number of the first row, counted over the whole run.
    """
    row_B1 = splitmix64(splitmix64(torch.tensor(seed)) + torch.arange(first_row, first_row + rows).unsqueeze(1))
    return splitmix64(row_B1 + torch.arange(tokens)) & SEED_RANGE - 1


class BlockDropoutSeeds:
    """The seeds of the present tokens, for those modules of a block that drop some of their inputs.

    Attributes:
        own: [B, T] of the block's tokens; None: nothing is dropped.
        source: [B, S] of the tokens that an encoder reads.
    """

    own: Tensor | None = None
    source: Tensor | None = None


def seeded_dropout(x_BTI: Tensor, seed_BT: Tensor, salt: int, rate: float, first: int) -> Tensor:
    """Set a share of the elements of `x` to zero, and scale the others up.

    Args:
        salt: differs between modules, so that a token does not lose the same inputs in all of them.
        first: number of the first input here, if a rank has only some of them.
    """
    inputs_I = torch.arange(first, first + x_BTI.shape[-1], device=x_BTI.device)
    bits_BTI = splitmix64(splitmix64(seed_BT ^ salt).unsqueeze(-1) + inputs_I) & SEED_RANGE - 1
    return x_BTI * (bits_BTI >= int(rate * SEED_RANGE)) / (1 - rate)


class EmbeddingNoise(nn.Module):
    """Uniform noise on embedded tokens."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, noise_2BT: Tensor) -> Tensor:
        """Return noise [B, T, D] between ±scale / √D, for each token's seed and scale."""
        seed_BT1 = noise_2BT[0].long().unsqueeze(-1)
        scale_BT1 = noise_2BT[1].unsqueeze(-1)
        dims_D = torch.arange(self.hidden_size, device=noise_2BT.device)
        bits_BTD = splitmix64(splitmix64(seed_BT1) + dims_D) & SEED_RANGE - 1
        uniform_BTD = bits_BTD.double() * (2.0 / SEED_RANGE) - 1.0
        return uniform_BTD * (scale_BT1 * self.hidden_size**-0.5)
