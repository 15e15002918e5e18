"""Counts of a model's parameters and of its floating-point operations per token, without building it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from jingu.model.feed_forward_specs import Experts
from jingu.model.parts import attended_tokens, attention_width, cached_tokens
from jingu.model.spec import ModelSpec

Shapes = Mapping[str, tuple[int, ...]]
# Parameters whose rows are looked up instead of multiplied. A tied head multiplies by the embedding, however.
_TABLES = ("embedding.weight", "positions.weight", "relative_bias.weight", "per_layer_embedding.weight")
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
    active = sum(_num_active(spec, name, shape) for name, shape in shapes.items())
    return ParameterCount(total, active, sum(prod(shape) for name, shape in shapes.items() if name.endswith(_TABLES)))


def flops_per_token(spec: ModelSpec, shapes: Shapes, sequence: int, source: int = 0) -> float:
    """Return the FLOPs of forward and backward per token of the decoder: 6 per weight of a matrix, and attention.

    Args:
        sequence: tokens per row of the decoder.
        source: tokens per row of the encoder. Their cost is divided over the tokens of the decoder.
    """
    own, read = _count_multiplications(spec, shapes)
    share = source / sequence
    attended = sum(attention_width(layer) * (attended_tokens(layer, sequence) + source) for layer in spec.layers)
    attended += (spec.num_encoder_layers or 0) * attention_width(spec.default_layer) * source * share
    return 6.0 * (own + share * read) + 12.0 * attended


def generation_flops(spec: ModelSpec, shapes: Shapes, past: int, source: int = 0) -> float:
    """Return the FLOPs to generate one token: 2 per weight of a matrix, and attention.

    Args:
        past: tokens before it.
        source: tokens of the encoder, whose hidden states are already computed.
    """
    attended = sum(attention_width(layer, cached=True) * (cached_tokens(layer, past) + source) for layer in spec.layers)
    return 2.0 * _count_multiplications(spec, shapes)[0] + 4.0 * attended


def layer_costs(spec: ModelSpec, shapes: Shapes, sequence: int) -> list[float]:
    """Return the training FLOPs per token of the embedding, of each block (the encoder's first), and of the head.

    The embedding costs almost nothing. Encoder and decoder are assumed to have equally many tokens.
    """
    layers = {f"encoder.blocks.{n}.": spec.default_layer for n in range(spec.num_encoder_layers or 0)}
    layers |= {f"blocks.{n}.": layer for n, layer in enumerate(spec.layers)}
    weights = dict.fromkeys(layers, 0)
    for name, shape in shapes.items():
        head, is_block, block = name.partition("blocks.")
        if is_block:
            weights[f"{head}blocks.{block.partition('.')[0]}."] += _num_active(spec, name, shape)
    costs = [
        6.0 * weights[name] + 12.0 * attention_width(layer) * attended_tokens(layer, sequence)
        for name, layer in layers.items()
    ]
    return [6.0 * spec.hidden_size, *costs, 6.0 * spec.vocab_size * spec.hidden_size]


def _count_multiplications(spec: ModelSpec, shapes: Shapes) -> tuple[int, int]:
    """Return how many active weights multiply tokens of the decoder, and how many multiply tokens of the encoder."""
    skipped = _TABLES[1:] if spec.tie_word_embeddings else _TABLES
    counts = [0, 0]
    for name, shape in shapes.items():
        if len(shape) >= 2 and not name.endswith(skipped):
            reads_source = name.startswith("encoder.") or name.endswith(_READ_STATES)
            counts[reads_source] += _num_active(spec, name, shape)
    return counts[0], counts[1]


def _num_active(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> int:
    """Return how many elements of a parameter one token uses: of experts' matrices (three dims), only its experts'."""
    if len(shape) < 3:
        return prod(shape)
    part = spec.layer_of(name).feed_forward
    return prod(shape) * part.num_experts_per_token // part.num_experts if isinstance(part, Experts) else prod(shape)
