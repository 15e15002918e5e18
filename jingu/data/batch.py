"""What a step of training or evaluation sees."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Source:
    """What an encoder reads, all [rows, source sequence] int64."""

    tokens: Tensor
    documents: Tensor | None = None
    """As those of the batch, which the decoder's tokens see by their own number; -1 where the row is padded."""


@dataclass(frozen=True)
class Batch:
    """Rows of token ids with what they must predict, all [rows, sequence] int64."""

    tokens: Tensor
    labels: Tensor
    """The id to predict at each place, that is, the next token (already shifted); -100 where not trained."""
    positions: Tensor | None = None
    """Position of each token; None: 0 … sequence - 1."""
    documents: Tensor | None = None
    """Attention stays within equal numbers; None: each row is one document."""
    source: Source | None = None
    """For encoder-decoders; the fields above are then the decoder's side."""
