"""Counting a model without making it: parameters, and operations a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from jingu.model.spec import Experts, ModelSpec

Shapes = Mapping[str, torch.Size]
_TABLES = ("embedding.weight", "positions.weight")


@dataclass(frozen=True)
class Parameters:
    """How many numbers a model has.

    Attributes:
        active: those that a token meets.
        embedding: those in tables of vectors, of which a token takes one; a tied head is among them.
    """

    total: int
    active: int
    embedding: int


def count_parameters(spec: ModelSpec, shapes: Shapes) -> Parameters:
    """From the names and shapes of a model's parameters."""
    total = sum(shape.numel() for shape in shapes.values())
    active = sum(_met(spec, shape) for shape in shapes.values())
    return Parameters(total, active, sum(shapes[name].numel() for name in _TABLES if name in shapes))


def flops_per_token(spec: ModelSpec, shapes: Shapes, sequence: int) -> float:
    """Operations a token of forward and backward: 6 a weight that is multiplied, and attention to what it sees."""
    window = min(spec.attention.window or sequence, sequence)
    seen = window * (1 - window / (2 * sequence))  # on average; without a window, half of the sequence
    return 6.0 * _multiplied(spec, shapes) + 12.0 * _attention(spec) * seen


def generation_flops(spec: ModelSpec, shapes: Shapes, past: int) -> float:
    """Operations to generate the token that follows `past` others: 2 a weight, and attention to those it sees."""
    return 2.0 * _multiplied(spec, shapes) + 4.0 * _attention(spec) * min(spec.attention.window or past, past)


def _multiplied(spec: ModelSpec, shapes: Shapes) -> int:
    """Weights of matrices that a token is multiplied by: all but tables that serve as no head."""
    tables = () if spec.tied_embeddings else ("embedding.weight",)
    skipped = {"positions.weight", *tables}
    return sum(_met(spec, shape) for name, shape in shapes.items() if len(shape) >= 2 and name not in skipped)


def _met(spec: ModelSpec, shape: torch.Size) -> int:
    """Of a tensor's numbers those that a token meets: of a mixture's matrices (three dims), its experts'."""
    part = spec.feed_forward
    return (
        shape.numel() * part.active // part.number if isinstance(part, Experts) and len(shape) == 3 else shape.numel()
    )


def _attention(spec: ModelSpec) -> int:
    return spec.layers * spec.attention.heads * spec.attention.head_size
