"""The parts of a model: for each, the shapes, sharding, initial values and cost of its parameters, without PyTorch.

This is the only place that knows them. Modules create their parameters from these rows, and the parameter table,
initial weights, counts and plans read them. To add a part, add its fields to the spec, its rows here, and its module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jingu.model.sharding_table import ShardingStyle, ShardingTable
from jingu.model.spec import (
    Experts,
    FeedForward,
    GatedFeedForward,
    LayerNorm,
    LayerSpec,
    LearnedPositions,
    ModelSpec,
    Norm,
    PlainFeedForward,
    RandomProjectionRouter,
    RelativeBias,
)


class ModuleRow(NamedTuple):
    """A child module with a weight and perhaps a bias. Biases start at zero.

    Attributes:
        shape: shape of the weight: outputs and inputs, of experts the number of experts first.
        style: how it can be sharded; None: not at all.
        bias: whether it has a bias.
        initial: initial value of all elements of the weight; None: they are normally distributed.
        std: their standard deviation; None: `ModelSpec.initializer_range`.
        is_trained: whether it is ever trained.
    """

    shape: tuple[int, ...]
    style: ShardingStyle | None = None
    bias: bool = False
    initial: float | None = None
    std: float | None = None
    is_trained: bool = True


# The rows of a module, by the names of its children; those of a block have the paths of grandchildren.
Rows = Mapping[str, ModuleRow]


def styles(rows: Rows) -> ShardingTable:
    """Return how the children of a module can be sharded, without their own children."""
    return {name: row.style for name, row in rows.items() if row.style is not None and "." not in name}


def child_rows(rows: Rows, name: str) -> dict[str, ModuleRow]:
    """Return the rows of the child `name` of a module."""
    return {path.removeprefix(f"{name}."): row for path, row in rows.items() if path.startswith(f"{name}.")}


def norm_row(norm: Norm, width: int) -> ModuleRow:
    """Return the row of a norm of `width` elements."""
    return ModuleRow((width,), bias=isinstance(norm, LayerNorm), initial=1.0)


def attention_rows(spec: ModelSpec, layer: LayerSpec) -> dict[str, ModuleRow]:
    """Return the rows of self-attention or cross-attention."""
    part, width = layer.attention, spec.hidden_size
    inner, kv_inner = part.num_heads * part.head_dim, part.num_kv_heads * part.head_dim
    # If scores are not scaled, the query matrix is.
    q_std = None if part.scale_scores else spec.initializer_range * part.head_dim**-0.5
    rows = {
        "q": ModuleRow((inner, width), "heads", part.qkv_bias, std=q_std),
        "k": ModuleRow((kv_inner, width), "kv_heads", part.qkv_bias),
        "v": ModuleRow((kv_inner, width), "kv_heads", part.qkv_bias),
        "output": ModuleRow((width, inner), "from_heads", part.output_bias, std=residual_std(spec)),
    }
    if part.qk_norm:
        rows |= {"q_norm": norm_row(layer.norm, part.head_dim), "k_norm": norm_row(layer.norm, part.head_dim)}
    return rows


def residual_std(spec: ModelSpec) -> float:
    """Return the standard deviation of matrices whose outputs are added to the hidden states.

    It is smaller by 1/√(2·layers), so that the variance of the hidden states does not grow with depth (Radford et al.,
    2019).
    """
    return spec.initializer_range / (2 * spec.num_layers) ** 0.5


def feed_forward_rows(part: FeedForward, width: int, std: float | None = None) -> dict[str, ModuleRow]:
    """Return the rows of a feed-forward, or of a mixture of experts.

    Args:
        width: the hidden size.
        std: standard deviation of the initial weights of `down`.
    """
    size = part.intermediate_size
    if not isinstance(part, Experts):
        gate = {"gate": ModuleRow((size, width), "column", part.bias)} if isinstance(part, GatedFeedForward) else {}
        up, down = ModuleRow((size, width), "column", part.bias), ModuleRow((width, size), "row", part.bias, std=std)
        return {**gate, "up": up, "down": down}
    experts = part.num_experts
    rows = {
        "router": ModuleRow((experts, width), is_trained=not isinstance(part.router, RandomProjectionRouter)),
        "gate": ModuleRow((experts, size, width), "column"),
        "up": ModuleRow((experts, size, width), "column"),
        "down": ModuleRow((experts, width, size), "row", std=std),
    }
    shared = shared_expert(part)
    if shared is not None:
        rows |= _prefixed("shared", feed_forward_rows(shared, width, std))
        if part.shared_expert_gate:
            rows["shared_gate"] = ModuleRow((1, width))
    return rows


def shared_expert(part: Experts) -> GatedFeedForward | None:
    """Return the feed-forward of the shared expert; None if there is none."""
    if part.shared_intermediate_size is None:
        return None
    return GatedFeedForward(intermediate_size=part.shared_intermediate_size, activation=part.activation)


def block_rows(spec: ModelSpec, layer: LayerSpec, *, has_source: bool) -> dict[str, ModuleRow]:
    """Return the rows of a block; with `has_source`, it also attends to an encoder."""
    norm = norm_row(layer.norm, spec.hidden_size)
    rows = {"attention_norm": norm, **_prefixed("attention", attention_rows(spec, layer))}
    if has_source:
        rows |= {"cross_attention_norm": norm, **_prefixed("cross_attention", attention_rows(spec, layer))}
    feed_forward = feed_forward_rows(layer.feed_forward, spec.hidden_size, residual_std(spec))
    return {**rows, "feed_forward_norm": norm, **_prefixed("feed_forward", feed_forward)}


def stack_rows(spec: ModelSpec) -> dict[str, ModuleRow]:
    """Return the rows of a stack (decoder or encoder) before its blocks, without the embedding that both share."""
    rows = {}
    if isinstance(spec.position, LearnedPositions):
        rows["positions"] = ModuleRow((spec.max_position_embeddings, spec.hidden_size), "tokens")
    if isinstance(spec.position, RelativeBias):
        rows["relative_bias"] = ModuleRow((spec.position.num_buckets, spec.attention.num_heads))
    if spec.embedding_norm:
        rows["embedding_norm"] = norm_row(spec.norm, spec.hidden_size)
    return rows


def end_rows(spec: ModelSpec) -> dict[str, ModuleRow]:
    """Return the rows of the embedding and of the heads."""
    # A scaled head divides the hidden states so that such an embedding can be tied (Raffel et al., 2020).
    shape = (spec.vocab_size, spec.hidden_size)
    rows = {"embedding": ModuleRow(shape, "vocabulary", std=1.0 if spec.scale_lm_head else None)}
    if not spec.tie_word_embeddings and not spec.score_head:
        rows["head"] = ModuleRow(shape, "vocabulary")
    if spec.score_head or spec.value_head:
        rows["score"] = ModuleRow((1, spec.hidden_size))
    return rows


def model_rows(spec: ModelSpec) -> Iterator[tuple[str, ModuleRow]]:
    """Yield the rows of a model by their full names, in module order."""
    ends = end_rows(spec)
    yield "embedding", ends.pop("embedding")
    yield from _stack(spec, spec.layers, has_source=spec.num_encoder_layers is not None)
    yield from ends.items()
    if spec.num_encoder_layers:
        encoder = _stack(spec, (spec.default_layer,) * spec.num_encoder_layers, has_source=False)
        yield from ((f"encoder.{name}", row) for name, row in encoder)


def _stack(spec: ModelSpec, layers: tuple[LayerSpec, ...], *, has_source: bool) -> Iterator[tuple[str, ModuleRow]]:
    yield from stack_rows(spec).items()
    blocks = {layer: block_rows(spec, layer, has_source=has_source) for layer in dict.fromkeys(layers)}
    for number, layer in enumerate(layers):
        yield from _prefixed(f"blocks.{number}", blocks[layer]).items()
    yield "norm", norm_row(spec.norm, spec.hidden_size)


def _prefixed(prefix: str, rows: Rows) -> dict[str, ModuleRow]:
    return {f"{prefix}.{name}": row for name, row in rows.items()}


# Costs


def saved_bytes(spec: ModelSpec, layer: LayerSpec, size: float) -> float:
    """Return the bytes per token that autograd saves in a block whose parameters are all trained.

    A mixture of experts counts as a feed-forward of the size that a token uses, plus the permuted rows.

    Args:
        size: bytes of the compute dtype.
    """
    part, feed_forward = layer.attention, layer.feed_forward
    stacks = 1 + (spec.num_encoder_layers is not None)
    inner = part.num_heads * part.head_dim
    # Tensors saved by norms, and their outputs, which are inputs of matmuls.
    saved = (stacks + 1) * (_saved_by_norm(layer.norm, spec.hidden_size, 1, size) + spec.hidden_size * size)
    # Queries, keys and values in fp32 and repeated for all heads, as without a fused kernel; and the input of the
    # output projection.
    saved += stacks * inner * (3 * max(size, 4.0) + size)
    if part.qk_norm:
        heads = part.num_heads + part.num_kv_heads
        saved += stacks * _saved_by_norm(layer.norm, heads * part.head_dim, heads, size)
    return saved + _saved_by_feed_forward(dense_equivalent(feed_forward), size) + routed_bytes(spec, layer, size)


def dense_equivalent(part: FeedForward) -> PlainFeedForward | GatedFeedForward:
    """Return the feed-forward of the size that a token uses of a mixture of experts; a dense one as it is."""
    if not isinstance(part, Experts):
        return part
    size = part.num_experts_per_token * part.intermediate_size + (part.shared_intermediate_size or 0)
    return GatedFeedForward(intermediate_size=size, activation=part.activation)


def routed_bytes(spec: ModelSpec, layer: LayerSpec, size: float) -> float:
    """Return the bytes per token that a mixture of experts saves beside its matmuls: the permuted rows."""
    part = layer.feed_forward
    if not isinstance(part, Experts):
        return 0.0
    return part.num_experts_per_token * 2.0 * spec.hidden_size * size + 8.0 * part.num_experts


def _saved_by_feed_forward(part: PlainFeedForward | GatedFeedForward, size: float) -> float:
    # The input (for ReLU, the output) of the activation, both factors of the gate, and the input of the last matmul.
    tensors = 2 * isinstance(part, GatedFeedForward) + 1 + (part.activation != "relu")
    return tensors * part.intermediate_size * size


def _saved_by_norm(norm: Norm, width: int, groups: int, size: float) -> float:
    """Return the bytes per token that a norm over `groups` groups of together `width` elements saves."""
    wide = max(size, 4.0)
    if isinstance(norm, LayerNorm):
        return width * size + 2 * groups * wide
    # Inputs, and results before the multiplication with the weight, in at least fp32.
    return 2 * width * wide + groups * wide


def attended_tokens(layer: LayerSpec, sequence: int) -> float:
    """Return the mean number of tokens that a token of a sequence attends to: without a window, half of them."""
    window = min(layer.attention.sliding_window or sequence, sequence)
    return window * (1 - window / (2 * sequence))


def cached_tokens(layer: LayerSpec, past: int) -> int:
    """Return how many of `past` tokens a layer attends to in generation."""
    return min(layer.attention.sliding_window or past, past)


def attention_width(layer: LayerSpec) -> int:
    """Return the number of elements of all query heads together."""
    return layer.attention.num_heads * layer.attention.head_dim


def cached_numbers(layer: LayerSpec) -> int:
    """Return the numbers that a layer caches for each token: its keys and values."""
    return 2 * layer.attention.num_kv_heads * layer.attention.head_dim
