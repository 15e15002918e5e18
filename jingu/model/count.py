"""Parameters of a model and operations per token, counted without building it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from jingu.model.spec import Experts, ModelSpec

Shapes = Mapping[str, tuple[int, ...]]
# Parameters whose rows are looked up; no token is multiplied by them.
_TABLES = ("embedding.weight", "positions.weight", "relative_bias.weight")
# Matrices of the decoder that are multiplied with an encoder's states.
_READ_STATES = ("cross_attention.k.weight", "cross_attention.v.weight")


@dataclass(frozen=True)
class ParameterCount:
    """Number of parameters of a model.

    Attributes:
        active: those that a token uses.
        embedding: those in tables of vectors, among them a tied head.
    """

    total: int
    active: int
    embedding: int


def count_parameters(spec: ModelSpec, shapes: Shapes) -> ParameterCount:
    """Count a model's parameters, given their names and shapes."""
    total = sum(map(prod, shapes.values()))
    active = sum(_num_active(spec, shape) for shape in shapes.values())
    return ParameterCount(total, active, sum(prod(shape) for name, shape in shapes.items() if name.endswith(_TABLES)))


def flops_per_token(spec: ModelSpec, shapes: Shapes, sequence: int, source: int = 0) -> float:
    """Return the operations of forward and backward per token: 6 per weight of a matrix, and attention.

    Args:
        sequence: tokens in a row; if there is an encoder, of the decoder.
        source: tokens in a row that the encoder reads; their cost is divided among those of the decoder.
    """
    window = min(spec.attention.sliding_window or sequence, sequence)
    # On average; without a window, half of the sequence.
    seen = window * (1 - window / (2 * sequence))
    own, read = _count_multiplications(spec, shapes)
    share = source / sequence
    attended = spec.num_layers * (seen + source) + (spec.num_encoder_layers or 0) * source * share
    return 6.0 * (own + share * read) + 12.0 * _head_width(spec) * attended


def generation_flops(spec: ModelSpec, shapes: Shapes, past: int, source: int = 0) -> float:
    """Return the operations to generate a token after `past` others and a source: 2 per weight, and attention."""
    seen = min(spec.attention.sliding_window or past, past) + source
    return 2.0 * _count_multiplications(spec, shapes)[0] + 4.0 * _head_width(spec) * spec.num_layers * seen


def layer_costs(spec: ModelSpec, shapes: Shapes, sequence: int) -> list[float]:
    """Return the operations per token of training: of the embedding, of each block (an encoder's first), of the head.

    The embedding costs next to nothing. Source and target are assumed to be equally long.
    """
    attention = 12.0 * _head_width(spec) * sequence / 2
    costs = [6.0 * spec.hidden_size]
    for stack, layers in (("encoder.blocks.", spec.num_encoder_layers or 0), ("blocks.", spec.num_layers)):
        weights = sum(_num_active(spec, shape) for name, shape in shapes.items() if name.startswith(stack))
        costs += [6.0 * weights / max(layers, 1) + attention] * layers
    return [*costs, 6.0 * spec.vocab_size * spec.hidden_size]


def _count_multiplications(spec: ModelSpec, shapes: Shapes) -> tuple[int, int]:
    """Return the number of weights that are multiplied with the decoder's tokens, and with those of an encoder."""
    skipped = _TABLES[1:] if spec.tie_word_embeddings else _TABLES
    counts = [0, 0]
    for name, shape in shapes.items():
        if len(shape) >= 2 and not name.endswith(skipped):
            reads_source = name.startswith("encoder.") or name.endswith(_READ_STATES)
            counts[reads_source] += _num_active(spec, shape)
    return counts[0], counts[1]


def _num_active(spec: ModelSpec, shape: tuple[int, ...]) -> int:
    """Return how many elements of a parameter a token uses: of a mixture's matrices (three dims), its experts'."""
    part = spec.feed_forward
    if isinstance(part, Experts) and len(shape) == 3:
        return prod(shape) * part.num_experts_per_token // part.num_experts
    return prod(shape)


def _head_width(spec: ModelSpec) -> int:
    return spec.attention.num_heads * spec.attention.head_dim
