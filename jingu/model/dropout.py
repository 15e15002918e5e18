"""Randomness in training: noise on embeddings (NEFTune; Jain et al., 2023, arXiv:2310.05914), and dropout.

Both are pure functions of a seed per token, so they do not depend on the rank or the micro-batch that computes it.

Shapes: B rows, T tokens, I inputs, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Seeds are integers below this, so that fp64 represents them exactly.
SEED_RANGE = 1 << 52
# The constants of SplitMix64, as signed 64-bit integers.
_INCREMENT = -7046029254386353131
_FIRST_FACTOR = -4658895280553007687
_SECOND_FACTOR = -7723592293110705685


def splitmix64(x: Tensor) -> Tensor:
    """Hash 64-bit integers so that neighboring inputs have unrelated outputs (SplitMix64, Steele et al., 2014)."""
    x = x * _INCREMENT
    # PyTorch shifts signed integers arithmetically; the masks make it a logical shift.
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _FIRST_FACTOR
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _SECOND_FACTOR
    return x ^ (x >> 31 & (1 << 33) - 1)


def token_seeds(seed: int, first_row: int, rows: int, tokens: int) -> Tensor:
    """Return an int64 seed below SEED_RANGE for each token: [rows, tokens].

    Args:
        seed: seed of the run.
        first_row: number of the first row, counted over the whole run.
    """
    row_B1 = splitmix64(splitmix64(torch.tensor(seed)) + torch.arange(first_row, first_row + rows).unsqueeze(1))
    return splitmix64(row_B1 + torch.arange(tokens)) & SEED_RANGE - 1


class BlockDropoutSeeds:
    """The dropout seeds of the current tokens, which a block shares with its adapters.

    Attributes:
        own: [B, T] seeds of the block's tokens; None: no dropout.
        source: [B, S] seeds of the encoder's tokens, for the keys and values of cross-attention; None: no dropout.
    """

    own: Tensor | None = None
    source: Tensor | None = None


def seeded_dropout(x_BTI: Tensor, seed_BT: Tensor, salt: int, rate: float, first: int) -> Tensor:
    """Set a random share `rate` of the elements of `x` to zero, and divide the others by 1 - rate.

    Args:
        salt: a number per module, so that a token does not lose the same inputs in all modules.
        first: index of this rank's first input in the whole layer.
    """
    inputs_I = torch.arange(first, first + x_BTI.shape[-1], device=x_BTI.device)
    bits_BTI = splitmix64(splitmix64(seed_BT ^ salt).unsqueeze(-1) + inputs_I) & SEED_RANGE - 1
    return x_BTI * (bits_BTI >= int(rate * SEED_RANGE)) / (1 - rate)


class EmbeddingNoise(nn.Module):
    """Uniform noise for the embeddings (NEFTune)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, noise_2BT: Tensor) -> Tensor:
        """Return noise [B, T, D], uniform between ±scale / √D.

        Args:
            noise_2BT: seed and scale of each token, as in `Inputs.embedding_noise`.
        """
        seed_BT1 = noise_2BT[0].long().unsqueeze(-1)
        scale_BT1 = noise_2BT[1].unsqueeze(-1)
        dims_D = torch.arange(self.hidden_size, device=noise_2BT.device)
        bits_BTD = splitmix64(splitmix64(seed_BT1) + dims_D) & SEED_RANGE - 1
        uniform_BTD = bits_BTD.double() * (2.0 / SEED_RANGE) - 1.0
        return uniform_BTD * (scale_BT1 * self.hidden_size**-0.5)
