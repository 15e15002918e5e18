"""Common parts of recurrences with decay that are computed chunk by chunk: chunks, decays, and resets at documents.

A row is divided into chunks of equal length. Within a chunk, all pairs of tokens are computed by matmuls, as in
attention; a loop over the chunks passes the state on. The time therefore grows linearly with the length.

A recurrence starts with an empty state at every document start, which may lie anywhere in a chunk. What a document
becomes does not depend on the numbers of another one in the row, to the last bit.

Shapes: B rows, T tokens, N chunks, C tokens of a chunk, H heads, K key head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of states and of the computations with them: fp32, or fp64 if `x` is fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def document_starts(documents_BT: Tensor) -> Tensor:
    """Return booleans [B, T]: whether a token is the first of its document, given each token's document number.

    It is false for the first token of a row, which continues the state that the row is given, if any.
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


# A smaller logarithm of a decay is replaced by this one: exp(-128) is zero in fp32.
MIN_LOG_DECAY = -128.0

# The coarse part of a logarithm is a multiple of 1/256. Sums of up to 512 coarse parts are exact in fp32.
COARSE_STEPS = 256


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
        log_from_start = log_decay_NBHCK.cumsum(3)
        # The decay to the end is that of all later tokens, summed from the end: as a difference of two sums it would
        # depend on earlier documents, and its gradients would be less precise.
        log_to_end = F.pad(log_decay_NBHCK[..., 1:, :], (0, 0, 0, 1)).flip(3).cumsum(3).flip(3)
        if chunks.numbers is not None:
            is_behind, is_before = chunks.numbers > 0, chunks.numbers != chunks.numbers[..., -1:]
            log_from_start = log_from_start.masked_fill(is_behind[:, :, None, :, None], -torch.inf)
            log_to_end = log_to_end.masked_fill(is_before[:, :, None, :, None], -torch.inf)
        from_state = log_from_start.exp()
        return Decays(from_state, log_to_end.exp(), from_state[..., -1, :].unsqueeze(-1))


def log_sums(log_decay_NBHCK: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Return a coarse and a fine part of the sums of logarithms of decays over the tokens of a chunk up to each one.

    Differences of large sums would lose precision. The coarse part of a logarithm is therefore rounded to a multiple of
    a power of two, so that sums and differences are exact. The fine part is small. Its sums begin with each document,
    so that nothing depends on other documents, not even by rounding. Gradients pass through the fine part.
    """
    clamped = log_decay_NBHCK.clamp_min(MIN_LOG_DECAY)
    coarse = (clamped.detach() * COARSE_STEPS).round() / COARSE_STEPS
    fine = clamped - coarse
    # Sum within documents: each step doubles the number of tokens that a sum covers.
    shift = 1
    while shift < chunks.size:
        earlier = fine[..., :-shift, :]
        if chunks.numbers is not None:
            is_other = chunks.numbers[..., shift:] != chunks.numbers[..., :-shift]
            earlier = earlier.masked_fill(is_other[:, :, None, :, None], 0)
        fine = fine + F.pad(earlier, (0, 0, shift, 0))
        shift *= 2
    return coarse.cumsum(3), fine


class PairDecays(torch.autograd.Function):
    """The decay [N, B, H, C, C] from the second token of a pair to the first; 0 for hidden pairs.

    It is the exponential of the sum of the logarithms [N, B, H, C, 1] of the tokens behind the second one up to the
    first one.
    """

    @staticmethod
    def forward(ctx: Any, log_decay_NBHC1: Tensor, chunks: Chunks) -> Tensor:
        coarse, fine = log_sums(log_decay_NBHC1, chunks)
        difference = (coarse - coarse.transpose(3, 4)) + (fine - fine.transpose(3, 4))
        # Hidden pairs are masked before exp, which would overflow: their differences are positive.
        pairs = difference.masked_fill_(chunks.hidden_pairs(difference.device), -torch.inf).exp_()
        ctx.save_for_backward(pairs)
        return pairs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (pairs,) = ctx.saved_tensors
        # The gradient of a token's logarithm is the sum over the pairs that it lies between. Differences of sums over
        # more pairs would cancel.
        lower_CC = pairs.new_ones(pairs.shape[-2:]).tril_()
        later_firsts = lower_CC.t() @ (upstream[0] * pairs)
        return (later_firsts * lower_CC.tril(-1)).sum(-1, keepdim=True), None
