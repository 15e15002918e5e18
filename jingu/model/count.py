"""Counting a model without making it: parameters, and operations a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from jingu.model.spec import Experts, ModelSpec

Shapes = Mapping[str, torch.Size]
# Parameters that are looked up rather than multiplied by.
_TABLES = ("embedding.weight", "positions.weight", "relative_bias.weight")


@dataclass(frozen=True)
class ParameterCount:
    """How many numbers a model has.

    Attributes:
        active: those that a token meets.
        embedding: those in tables of vectors, of which a token takes one; a tied head is among them.
    """

    total: int
    active: int
    embedding: int


def count_parameters(spec: ModelSpec, shapes: Shapes) -> ParameterCount:
    """From the names and shapes of a model's parameters."""
    total = sum(shape.numel() for shape in shapes.values())
    active = sum(_met(spec, shape) for shape in shapes.values())
    return ParameterCount(total, active, sum(shape.numel() for name, shape in shapes.items() if name.endswith(_TABLES)))


def flops_per_token(spec: ModelSpec, shapes: Shapes, sequence: int, source: int = 0) -> float:
    """Operations a token of forward and backward: 6 a weight that is multiplied, and attention to what it sees.

    Args:
        sequence: tokens a row, of the decoder where there is an encoder.
        source: tokens a row that the encoder reads; what they cost is shared among those of the decoder.
    """
    window = min(spec.attention.sliding_window or sequence, sequence)
    seen = window * (1 - window / (2 * sequence))  # on average; without a window, half of the sequence
    own, read = _multiplied(spec, shapes)
    share = source / sequence
    attended = spec.num_layers * (seen + source) + (spec.num_encoder_layers or 0) * source * share
    return 6.0 * (own + share * read) + 12.0 * _head_width(spec) * attended


def generation_flops(spec: ModelSpec, shapes: Shapes, past: int, source: int = 0) -> float:
    """Operations to generate the token that follows `past` others: 2 a weight, and attention to those it sees; and
    to a source that was read before."""
    seen = min(spec.attention.sliding_window or past, past) + source
    return 2.0 * _multiplied(spec, shapes)[0] + 4.0 * _head_width(spec) * spec.num_layers * seen


def layer_costs(spec: ModelSpec, shapes: Shapes, sequence: int) -> list[float]:
    """Operations a token of training, of the embedding, of each block (an encoder's first), and of norm and head.

    An embedding is looked up, and its norm and positions are added: next to nothing. Source and target are taken to
    be equally long.
    """
    attention = 12.0 * _head_width(spec) * sequence / 2
    costs = [6.0 * spec.hidden_size]
    for stack, layers in (("encoder.blocks.", spec.num_encoder_layers or 0), ("blocks.", spec.num_layers)):
        weights = sum(_met(spec, shape) for name, shape in shapes.items() if name.startswith(stack))
        costs += [6.0 * weights / max(layers, 1) + attention] * layers
    return [*costs, 6.0 * spec.vocab_size * spec.hidden_size]


def _multiplied(spec: ModelSpec, shapes: Shapes) -> tuple[int, int]:
    """Weights of matrices that a token is multiplied by (all but tables that serve as no head): those of the
    decoder's tokens, and those of the tokens that an encoder reads."""
    tables = () if spec.tie_word_embeddings else ("embedding.weight",)
    skipped = ("positions.weight", "relative_bias.weight", *tables)
    counts = [0, 0]
    for name, shape in shapes.items():
        if len(shape) >= 2 and not name.endswith(skipped):
            read = name.startswith("encoder.") or name.endswith(
                ("cross_attention.k.weight", "cross_attention.v.weight")
            )
            counts[read] += _met(spec, shape)
    return counts[0], counts[1]


def _met(spec: ModelSpec, shape: torch.Size) -> int:
    """Of a tensor's numbers those that a token meets: of a mixture's matrices (three dims), its experts'."""
    part = spec.feed_forward
    return (
        shape.numel() * part.num_experts_per_token // part.num_experts
        if isinstance(part, Experts) and len(shape) == 3
        else shape.numel()
    )


def _head_width(spec: ModelSpec) -> int:
    return spec.attention.num_heads * spec.attention.head_dim
