"""Rotary positions (RoPE, Su et al., 2021): frequencies, four ways to scale them to longer contexts, and the rotation.

Shapes: B rows, T tokens, H heads, K head size.
"""

from __future__ import annotations

from math import ceil, floor, log, pi

import torch
from torch import Tensor

from jingu.model.attention_specs import QueryScaling
from jingu.model.components import (
    AlphaScaling,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongropeScaling,
    Position,
    RotaryPositions,
    YarnScaling,
)

# The cosines and the signed sines of `apply_rotary`.
RotaryTables = tuple[Tensor, Tensor]


def rotary_tables(
    spec: RotaryPositions, head_size: int, positions: Tensor, dtype: torch.dtype, lasts: Tensor | None = None
) -> RotaryTables:
    """Return the two tables [..., T, 1, K] of `apply_rotary` in `dtype`. K is the number of rotated dims of a head.

    Each rotated pair has the angle position · frequency. The first table has its cosine for both elements. The second
    one has minus its sine for the first element, and its sine for the second.

    Args:
        lasts: if frequencies depend on the sequence length (dynamic scaling, longrope), the last position of each
            token's sequence, which broadcasts to [..., T]; None: all positions are of one sequence. A KV cache gives
            each position a sequence that ends with it, because its keys never change.
    """
    last = positions.max() if lasts is None else lasts[..., None]
    frequencies = rotary_frequencies(spec, spec.rotated_dims(head_size), last, dtype)
    if spec.proportional:
        # The first pairs of the whole head turn.
        turning = int(spec.partial_rotary_factor * head_size // 2)
        frequencies = frequencies * (torch.arange(head_size // 2, device=positions.device) < turning)
    angles = positions.to(dtype)[..., None] * frequencies
    cos, sin = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)
    if isinstance(spec.scaling, YarnScaling | LongropeScaling):
        cos, sin = cos * spec.scaling.attention_factor, sin * spec.scaling.attention_factor
    return _of_pairs(cos, cos, spec.interleaved), _of_pairs(-sin, sin, spec.interleaved)


def query_factors(scaling: QueryScaling, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factors [..., T, 1, 1] of queries at these positions."""
    turns = torch.floor((positions + scaling.offset).to(dtype) / scaling.length)
    return (1 + scaling.beta * torch.log1p(turns))[..., None, None]


def layer_rotary(
    spec: Position,
    head_size: int,
    positions: Tensor,
    dtype: torch.dtype,
    documents_BT: Tensor | None = None,
    parents_BT: Tensor | None = None,
) -> RotaryTables | None:
    """Return the rotary tables of a kind of layer; None if it has no rotary positions. See `rotary_tables`.

    Args:
        spec: the positions of the layer.
        positions: [B, T], or [T] for all rows.
        documents_BT: the document of each token; None: each row is one document.
        parents_BT: the document that each token's document continues; see `Inputs`.
    """
    if not isinstance(spec, RotaryPositions):
        return None
    lasts = None
    if isinstance(spec.scaling, DynamicScaling | LongropeScaling):
        # Documents that continue the same parent count as one, because they share its keys.
        lasts = last_positions(positions, documents_BT if parents_BT is None else parents_BT)
    return rotary_tables(spec, head_size, positions, dtype, lasts)


def last_positions(positions: Tensor, documents_BT: Tensor | None) -> Tensor:
    """Return the last position of each token's document, which broadcasts to [B, T].

    Args:
        positions: [B, T], or [T] for all rows.
        documents_BT: the document of each token; None: each row is one document.
    """
    if documents_BT is None:
        return positions.amax(-1, keepdim=True)
    # Number the documents of each row in the order of their ids, which may be any integers.
    sorted_BT, order_BT = documents_BT.sort(-1)
    is_next_BT = torch.zeros_like(sorted_BT)
    is_next_BT[:, 1:] = sorted_BT[:, 1:] != sorted_BT[:, :-1]
    number_BT = torch.zeros_like(order_BT).scatter(-1, order_BT, is_next_BT.cumsum(-1))
    last_BN = torch.zeros_like(number_BT).scatter_reduce(-1, number_BT, positions.expand_as(number_BT), "amax")
    return last_BN.gather(-1, number_BT)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """Return the first elements and the second elements of a head's pairs: two tensors [..., K/2]."""
    return x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)


def _of_pairs(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    """Join the first and the second elements of pairs to heads [..., K]: the inverse of `_pairs`."""
    return torch.stack((first, second), dim=-1).flatten(-2) if interleaved else torch.cat((first, second), dim=-1)


def rotary_frequencies(spec: RotaryPositions, size: int, last: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scaled frequencies theta^(-2i/size) for i from 0 to size/2 - 1.

    In fp32 they equal those of transformers bit by bit. Do not change the order of operations.

    Args:
        size: number of rotated dims of a head.
        last: position of the sequence's last token, for dynamic scaling.
    """
    steps = torch.arange(0, size, 2, device=last.device).to(dtype) / size
    scaling = spec.scaling
    if isinstance(scaling, DynamicScaling):
        return 1.0 / _stretched_base(spec.theta, scaling, size, last, dtype) ** steps
    if isinstance(scaling, AlphaScaling):
        return 1.0 / (spec.theta * scaling.alpha ** (size / (size - 2))) ** steps
    plain = 1.0 / spec.theta**steps
    if scaling is None:
        return plain
    if isinstance(scaling, LongropeScaling):
        short, long = (steps.new_tensor(factor) for factor in (scaling.short_factor, scaling.long_factor))
        is_long = last >= scaling.original_max_position_embeddings
        return 1.0 / (torch.where(is_long, long, short) * spec.theta**steps)
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor
    unscaled_shares = (
        _unscaled_shares_by_wavelength(plain, scaling)
        if isinstance(scaling, Llama3Scaling)
        else _unscaled_shares_by_turns(spec.theta, size, scaling)
    )
    unscaled_shares = unscaled_shares.to(plain)
    return (1 - unscaled_shares) * plain / scaling.factor + unscaled_shares * plain


def _stretched_base(base: float, scaling: DynamicScaling, size: int, last: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the base of dynamic scaling, which grows once the sequence is longer than the original context."""
    length = (last + 1).clamp(min=scaling.original_max_position_embeddings).to(dtype)
    stretch = scaling.factor * length / scaling.original_max_position_embeddings - (scaling.factor - 1)
    return base * stretch ** (size / (size - 2))


def _unscaled_shares_by_wavelength(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Return for each frequency the share that is not scaled (Llama 3.1): 1 for short wavelengths, 0 for long ones."""
    turns = scaling.original_max_position_embeddings / (2 * pi / plain)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return ((turns - low) / (high - low)).clamp(0, 1)


def _unscaled_shares_by_turns(base: float, size: int, scaling: YarnScaling) -> Tensor:
    """Return for each frequency the share that is not scaled (YaRN).

    It falls linearly with the index of the frequency from 1 to 0, between those that turn `beta_fast` times and
    `beta_slow` times over the original context.
    """

    def place(turns: float) -> float:
        # The (fractional) index of the frequency that turns so many times over the original context.
        return size * log(scaling.original_max_position_embeddings / (turns * 2 * pi)) / (2 * log(base))

    low, high = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 if low == high else 0
    return 1 - ((torch.arange(size // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)


def apply_rotary(x_BTHK: Tensor, rotary: RotaryTables, *, interleaved: bool = False) -> Tensor:
    """Rotate pairs of the first dims of each head; the other dims do not change.

    The rotation is computed in the dtype of the tables, and rounded once to that of `x`.

    Args:
        interleaved: whether the pairs are (x_2i, x_2i+1) instead of (x_i, x_{i+K/2}).
    """
    cos, sin = rotary
    turned = cos.shape[-1]
    x, rest = (
        (x_BTHK, None) if turned == x_BTHK.shape[-1] else x_BTHK.split((turned, x_BTHK.shape[-1] - turned), dim=-1)
    )
    # Training and compiled code use the first variant, which is faster once compiled. In eager inference the second one
    # is faster.
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        (first, second), (cos, _), (_, sin) = (_pairs(part, interleaved) for part in (x, cos, sin))
        y = _of_pairs(first * cos - second * sin, second * cos + first * sin, interleaved)
    else:
        x = x.to(cos.dtype)
        # In place of each element, the other one of its pair.
        other = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else x.roll(turned // 2, -1)
        y = (x * cos).add_(other.mul_(sin))
    y = y.to(x_BTHK.dtype)
    return y if rest is None else torch.cat((y, rest), dim=-1)
