"""Common parts of recurrences with decay that are computed chunk by chunk: chunks, decays, and resets at documents.

A row is divided into chunks of equal length. Within a chunk, all pairs of tokens are computed by matmuls, as in
attention; a loop over the chunks passes the state on. The time therefore grows linearly with the length.

A recurrence starts with an empty state at every document start, which may lie anywhere in a chunk. What a document
becomes does not depend on the numbers of another one in the row, to the last bit.

Shapes: B rows, T tokens, N chunks, C tokens of a chunk, H heads, K key head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens of a chunk, at most: other sizes divide it. A sequence that is divided between these chunks gets the same
# numbers, to the bit.
CHUNK_SIZE = 64


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of states and of the computations with them: fp32, or fp64 if `x` is fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def document_starts(documents_BT: Tensor) -> Tensor:
    """Return booleans [B, T]: whether a token is the first of its document, given each token's document number.

    It is false for the first token of a row, which continues the state that the row is given, if any. Call it before a
    row is divided over ranks or steps: a document may start with the first token of a piece.
    """
    starts_BT = torch.zeros_like(documents_BT, dtype=torch.bool)
    starts_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return starts_BT


def split_chunks(x_BT: Tensor, size: int) -> Tensor:
    """Return [N, B, C, …] of [B, T, …]: chunks of `size` tokens, the last one padded with zeros."""
    tokens = x_BT.shape[1]
    padding = [0, 0] * (x_BT.dim() - 2) + [0, -tokens % size]
    return F.pad(x_BT, padding).unflatten(1, (-1, size)).transpose(0, 1)


def join_chunks(x_NBC: Tensor, tokens: int) -> Tensor:
    """Return [B, T, …] of [N, B, C, …] without the padding: the inverse of `split_chunks`."""
    return x_NBC.transpose(0, 1).flatten(1, 2)[:, :tokens]


class Chunks(NamedTuple):
    """Where documents begin in the chunks of rows.

    Attributes:
        size: tokens of a chunk.
        numbers: [N, B, C] how many documents have started in the chunk up to a token; None: none starts anywhere.
    """

    size: int
    numbers: Tensor | None

    @staticmethod
    def of(starts_BT: Tensor | None, size: int) -> Chunks:
        """Return the chunks of rows whose documents begin at the tokens that `starts_BT` marks."""
        return Chunks(size, None if starts_BT is None else split_chunks(starts_BT, size).cumsum(-1))

    def hidden_pairs(self, device: torch.device) -> Tensor:
        """Return booleans, broadcastable to [N, B, H, C, C]: which pairs do not interact.

        The second token of such a pair comes after the first one, or belongs to another document.
        """
        place_C = torch.arange(self.size, device=device)
        later_CC = place_C > place_C.unsqueeze(1)
        if self.numbers is None:
            return later_CC[None, None, None]
        return (later_CC | (self.numbers.unsqueeze(-1) != self.numbers.unsqueeze(-2))).unsqueeze(2)


class Decays(NamedTuple):
    """By how much the state decays within chunks. K is 1 if all channels of a head decay alike.

    Attributes:
        from_state: [N, B, H, C, K] decay of the state before the chunk up to a token; 0 behind a document start.
        to_state: [N, B, H, C, K] decay from a token to the end of the chunk; 0 before a document start.
        across: [N, B, H, K, 1] decay of the state over the whole chunk; 0 if a document starts in it.
    """

    from_state: Tensor
    to_state: Tensor
    across: Tensor

    @staticmethod
    def of(log_decay_NBHCK: Tensor, chunks: Chunks) -> Decays:
        """Return the decays in chunks whose tokens have these logarithms of decays, which are at most zero."""
        log_from_start, log_to_end = log_decay_NBHCK.cumsum(3), sum_to_end(log_decay_NBHCK)
        if chunks.numbers is None:
            from_state, to_state = log_from_start.exp(), log_to_end.exp()
        else:
            from_state = decay(log_from_start, (chunks.numbers > 0).unsqueeze(2))
            to_state = decay(log_to_end, (chunks.numbers != chunks.numbers[..., -1:]).unsqueeze(2))
        return Decays(from_state, to_state, from_state[..., -1, :].unsqueeze(-1))


def sum_to_end(x: Tensor) -> Tensor:
    """Return for each of the tokens of [..., C, K] the sum over the tokens behind it."""
    return F.pad(x[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def pair_sums(x: Tensor) -> Tensor:
    """Return [..., C, C, K] of [..., C, K]: for each pair of tokens the sum behind the second one up to the first one.

    Zero if the second one is not before the first one. Differences of sums from the start would lose precision, more so
    in their gradients, and depend on the other documents of a chunk.
    """
    tokens, channels = x.shape[-2:]
    lower_CC = x.new_ones(tokens, tokens).tril_()
    behind = x.unsqueeze(-2) * lower_CC.tril(-1).unsqueeze(-1)
    return (lower_CC @ behind.flatten(-2)).unflatten(-1, (tokens, channels))


def decay(log: Tensor, hidden: Tensor) -> Tensor:
    """Return the decay of a logarithm [..., K]; 0 where `hidden` [...] is true."""
    return log.masked_fill(hidden.unsqueeze(-1), -torch.inf).exp()
