"""Counts of a model's parameters and of its floating-point operations per token, without building it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from jingu.model.spec import Experts, ModelSpec

Shapes = Mapping[str, tuple[int, ...]]
# Parameters whose rows are looked up instead of multiplied. A tied head multiplies by the embedding, however.
_TABLES = ("embedding.weight", "positions.weight", "relative_bias.weight")
# Matrices of the decoder whose inputs are an encoder's hidden states.
_READ_STATES = ("cross_attention.k.weight", "cross_attention.v.weight")


@dataclass(frozen=True)
class ParameterCount:
    """Number of parameters of a model.

    Attributes:
        total: all parameters.
        active: the parameters that one token uses; fewer than all only with a mixture of experts.
        embedding: the parameters in lookup tables. A tied head counts as one, since it is the embedding.
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
    """Return the FLOPs of forward and backward per token of the decoder: 6 per weight of a matrix, and attention.

    Args:
        sequence: tokens per row of the decoder.
        source: tokens per row of the encoder. Their cost is divided over the tokens of the decoder.
    """
    window = min(spec.attention.sliding_window or sequence, sequence)
    # The mean number of tokens that a token attends to: without a window, half of the sequence.
    seen = window * (1 - window / (2 * sequence))
    own, read = _count_multiplications(spec, shapes)
    share = source / sequence
    attended = spec.num_layers * (seen + source) + (spec.num_encoder_layers or 0) * source * share
    return 6.0 * (own + share * read) + 12.0 * _head_width(spec) * attended


def generation_flops(spec: ModelSpec, shapes: Shapes, past: int, source: int = 0) -> float:
    """Return the FLOPs to generate one token: 2 per weight of a matrix, and attention.

    Args:
        past: tokens before it.
        source: tokens of the encoder, whose hidden states are already computed.
    """
    seen = min(spec.attention.sliding_window or past, past) + source
    return 2.0 * _count_multiplications(spec, shapes)[0] + 4.0 * _head_width(spec) * spec.num_layers * seen


def layer_costs(spec: ModelSpec, shapes: Shapes, sequence: int) -> list[float]:
    """Return the training FLOPs per token of the embedding, of each block (the encoder's first), and of the head.

    The embedding costs almost nothing. Encoder and decoder are assumed to have equally many tokens.
    """
    attention = 12.0 * _head_width(spec) * sequence / 2
    costs = [6.0 * spec.hidden_size]
    for stack, layers in (("encoder.blocks.", spec.num_encoder_layers or 0), ("blocks.", spec.num_layers)):
        weights = sum(_num_active(spec, shape) for name, shape in shapes.items() if name.startswith(stack))
        costs += [6.0 * weights / max(layers, 1) + attention] * layers
    return [*costs, 6.0 * spec.vocab_size * spec.hidden_size]


def _count_multiplications(spec: ModelSpec, shapes: Shapes) -> tuple[int, int]:
    """Return how many active weights multiply tokens of the decoder, and how many multiply tokens of the encoder."""
    skipped = _TABLES[1:] if spec.tie_word_embeddings else _TABLES
    counts = [0, 0]
    for name, shape in shapes.items():
        if len(shape) >= 2 and not name.endswith(skipped):
            reads_source = name.startswith("encoder.") or name.endswith(_READ_STATES)
            counts[reads_source] += _num_active(spec, shape)
    return counts[0], counts[1]


def _num_active(spec: ModelSpec, shape: tuple[int, ...]) -> int:
    """Return how many elements of a parameter one token uses: of experts' matrices (three dims), only its experts'."""
    part = spec.feed_forward
    if isinstance(part, Experts) and len(shape) == 3:
        return prod(shape) * part.num_experts_per_token // part.num_experts
    return prod(shape)


def _head_width(spec: ModelSpec) -> int:
    return spec.attention.num_heads * spec.attention.head_dim
