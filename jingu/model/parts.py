"""The rows and costs of a whole model and of its layers, without PyTorch.

What a part of a layer has and costs is in its spec (`norm_specs`, `attention_specs`, `feed_forward_specs`,
`mixer_specs`); here stands how blocks and stacks are put together. The parameter table, initial weights, counts and
plans read these rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from jingu.model.components import LayerSpec, LearnedPositions, RelativeBias
from jingu.model.feed_forward_specs import NoFeedForward
from jingu.model.mixer_specs import StateMixer
from jingu.model.norm_specs import LayerNorm
from jingu.model.part_spec import ModuleRow, Rows, with_prefix
from jingu.model.spec import ModelSpec


def residual_std(spec: ModelSpec) -> float:
    """Return the standard deviation of matrices whose outputs are added to the hidden states.

    It is smaller by 1/√(2·layers), so that the variance of the hidden states does not grow with depth (Radford et al.,
    2019).
    """
    return spec.initializer_range / (2 * spec.num_layers) ** 0.5


def block_rows(spec: ModelSpec, layer: LayerSpec, *, has_source: bool) -> dict[str, ModuleRow]:
    """Return the rows of a block; with `has_source`, it also attends to an encoder."""
    std = residual_std(spec)
    branches: dict[str, Rows] = {"attention": attention_rows(spec, layer) if layer.has_attention else {}}
    if has_source:
        branches["cross_attention"] = branches["attention"]
    branches["feed_forward"] = layer.feed_forward.rows(spec.hidden_size, std)
    rows: dict[str, ModuleRow] = {}
    for branch, branch_rows in branches.items():
        before, behind = norm_places(layer, branch)
        rows |= layer.norm.rows(f"{branch}_norm", spec.hidden_size) if before else {}
        rows |= with_prefix(branch, branch_rows)
        if layer.state_mixer is not None and branch == "attention":
            rows |= with_prefix("mixer", layer.state_mixer.rows(spec.hidden_size, std))
        rows |= layer.norm.rows(f"{branch}_output_norm", spec.hidden_size) if behind else {}
    return rows | _further_rows(spec, layer)


def _further_rows(spec: ModelSpec, layer: LayerSpec) -> dict[str, ModuleRow]:
    """Return the rows of a feed-forward beside the experts, of the inputs of a layer, and of its scale."""
    width, std = spec.hidden_size, residual_std(spec)
    rows: dict[str, ModuleRow] = {}
    dense = layer.feed_forward.parallel_branch()
    if dense is not None:
        rows |= with_prefix("dense", dense.rows(width, std))
        rows |= layer.norm.rows("dense_output_norm", width) | layer.norm.rows("experts_output_norm", width)
    size = spec.per_layer_inputs
    if size is not None:
        rows["input_gate"] = ModuleRow((size, width))
        rows["input_projection"] = ModuleRow((width, size), std=std)
        rows |= layer.norm.rows("input_output_norm", width)
    if layer.scale:
        rows["scale"] = ModuleRow((1,), initial=1.0, is_trained=False)
    return rows


def attention_rows(spec: ModelSpec, layer: LayerSpec) -> dict[str, ModuleRow]:
    """Return the rows of the self-attention or cross-attention of a layer."""
    return layer.attention.rows(spec.hidden_size, layer.norm, spec.initializer_range, residual_std(spec))


def norm_places(layer: LayerSpec, branch: str) -> tuple[bool, bool]:
    """Return whether a branch of a block has a norm before it, and one behind it; a mixer has those of attention."""
    has_branch = {
        "attention": layer.has_attention or layer.state_mixer is not None,
        "feed_forward": not isinstance(layer.feed_forward, NoFeedForward),
    }
    if not has_branch.get(branch, True):
        return False, False
    is_shared = layer.block_order == "parallel_one_norm" and branch == "feed_forward"
    return layer.norm_placement != "behind" and not is_shared, layer.norm_placement != "before"


def stack_rows(spec: ModelSpec) -> dict[str, ModuleRow]:
    """Return the rows of a stack (decoder or encoder) before its blocks, without the embedding that both share."""
    rows: dict[str, ModuleRow] = {}
    if isinstance(spec.position, LearnedPositions):
        number = spec.position.offset + spec.max_position_embeddings
        rows["positions"] = ModuleRow((number, spec.hidden_size), "tokens")
    if isinstance(spec.position, RelativeBias):
        rows["relative_bias"] = ModuleRow((spec.position.num_buckets, spec.attention.num_heads))
    if spec.embedding_norm:
        rows |= spec.norm.rows("embedding_norm", spec.hidden_size)
    if spec.per_layer_inputs is not None:
        size = spec.num_layers * spec.per_layer_inputs
        rows["per_layer_embedding"] = ModuleRow((spec.vocab_size, size), "vocabulary")
        rows["per_layer_projection"] = ModuleRow((size, spec.hidden_size))
        rows |= spec.norm.rows("per_layer_norm", spec.per_layer_inputs)
    return rows


def end_rows(spec: ModelSpec) -> dict[str, ModuleRow]:
    """Return the rows of the embedding and of the heads."""
    # A scaled head divides the hidden states so that such an embedding can be tied (Raffel et al., 2020).
    shape = (spec.vocab_size, spec.hidden_size)
    rows = {"embedding": ModuleRow(shape, "vocabulary", std=1.0 if spec.scale_lm_head else None)}
    if not spec.tie_word_embeddings and not spec.score_head:
        rows["head"] = ModuleRow(shape, "vocabulary", spec.head_bias)
    if spec.score_head or spec.value_head:
        rows["score"] = ModuleRow((1, spec.hidden_size))
    return rows


def prediction_rows(spec: ModelSpec) -> dict[str, ModuleRow]:
    """Return the rows of a layer of multi-token prediction, without its block."""
    width = spec.hidden_size
    rows = spec.norm.rows("embedding_norm", width) | spec.norm.rows("hidden_norm", width)
    return {**rows, "projection": ModuleRow((width, 2 * width))}


def model_rows(spec: ModelSpec) -> Iterator[tuple[str, ModuleRow]]:
    """Yield the rows of a model by their full names, in module order."""
    ends = end_rows(spec)
    yield "embedding", ends.pop("embedding")
    yield from _stack(spec, spec.layers, has_source=spec.num_encoder_layers is not None)
    yield from ends.items()
    for number in range(spec.mtp_layers):
        rows = prediction_rows(spec) | with_prefix("block", block_rows(spec, spec.prediction_layer, has_source=False))
        yield from with_prefix(f"mtp.{number}", rows | spec.norm.rows("norm", spec.hidden_size)).items()
    if spec.num_encoder_layers:
        encoder = _stack(spec, (spec.default_layer,) * spec.num_encoder_layers, has_source=False)
        yield from ((f"encoder.{name}", row) for name, row in encoder)


def _stack(spec: ModelSpec, layers: tuple[LayerSpec, ...], *, has_source: bool) -> Iterator[tuple[str, ModuleRow]]:
    yield from stack_rows(spec).items()
    blocks = {layer: block_rows(spec, layer, has_source=has_source) for layer in dict.fromkeys(layers)}
    for number, layer in enumerate(layers):
        yield from with_prefix(f"blocks.{number}", blocks[layer]).items()
    yield from spec.norm.rows("norm", spec.hidden_size).items()


# Costs


def saved_bytes(
    spec: ModelSpec, layer: LayerSpec, size: float, stacks: int | None = None, *, is_compiled: bool = False
) -> float:
    """Return the bytes per token that autograd saves in a block whose parameters are all trained.

    A mixture of experts counts as a feed-forward of the size that a token uses, plus the permuted rows.

    Args:
        size: bytes of the compute dtype.
        stacks: stacks of blocks that a block attends to; None: as many as one of the decoder.
        is_compiled: whether the block is compiled. Then it computes again what is no result of a matmul.
    """
    assert layer.mixer is None and not isinstance(layer.feed_forward, NoFeedForward)
    width = spec.hidden_size
    if stacks is None:
        stacks = 1 + (spec.num_encoder_layers is not None)
    # Tensors saved by norms, and the inputs of matmuls.
    branches = ["attention"] * stacks + ["feed_forward"]
    norms = sum(sum(norm_places(layer, branch)) for branch in branches)
    inputs = stacks + 1 - (layer.block_order == "parallel_one_norm")
    saved = norms * layer.norm.saved_bytes(width, 1, size, is_compiled=is_compiled) + inputs * width * size
    if layer.block_order == "parallel" and isinstance(layer.norm, LayerNorm):
        saved -= width * size  # both norms save the same input
    if is_compiled and all(norm_places(layer, "feed_forward")) and layer.block_order == "sequential":
        # The input of the feed-forward's norm is the sum of the block's input and of a norm's result.
        saved -= width * size
    saved += stacks * layer.attention.saved_bytes(layer.norm, size, is_compiled=is_compiled)
    if spec.per_layer_inputs is not None:
        # The hidden states, the gate before and behind its activation, its factor, and the product; and what computes
        # the inputs.
        saved += (width + 4 * spec.per_layer_inputs) * size + layer.norm.saved_bytes(
            width, 1, size, is_compiled=is_compiled
        )
        saved += spec.norm.saved_bytes(spec.per_layer_inputs, 1, size, is_compiled=is_compiled)
    if layer.feed_forward.parallel_branch() is not None:
        saved += 2 * layer.norm.saved_bytes(width, 1, size, is_compiled=is_compiled)
    return saved + layer.feed_forward.saved_bytes(width, size, is_compiled=is_compiled)


def score_bytes(layer: LayerSpec, size: float, *, is_compiled: bool = False) -> float:
    """Return the bytes that a layer saves for each attention score of a head."""
    return layer.attention.score_bytes(size, is_compiled=is_compiled) if layer.has_attention else 0.0


def attended_tokens(layer: LayerSpec, sequence: int) -> float:
    """Return the mean number of tokens that a token of a sequence attends to: without a window, half of them.

    A state counts as in `cached_tokens`.
    """
    state = _state_tokens(layer)
    if not layer.has_attention:
        return state
    window = cached_tokens(layer, sequence) - state
    if layer.attention.chunk_size == layer.attention.reach is not None:
        return window / 2 + state
    return window * (1 - window / (2 * sequence)) + state


def cached_tokens(layer: LayerSpec, past: int) -> float:
    """Return how many of `past` tokens a layer attends to in generation.

    A mixer with a state counts as attention to as many tokens as its state has rows, and half of them again: the state
    decays, is read for the key and for the query, and is written.
    """
    attended = min(layer.attention.reach or past, past) if layer.has_attention else 0
    return attended + _state_tokens(layer)


def _state_tokens(layer: LayerSpec) -> float:
    """Return the tokens of `attention_width` elements that a state counts as."""
    if layer.state_mixer is None:
        return 0.0
    rows, elements = _state_size(layer.state_mixer)
    tokens = float(rows * 3 // 2)
    return tokens * elements / attention_width(layer) if layer.has_attention else tokens


def _state_size(part: StateMixer) -> tuple[int, int]:
    """Return the rows of the state of a recurrence, and the elements of a row in all heads; (0, 0) if there is none."""
    shapes = part.state_shapes(0)
    if len(shapes) < 2:
        return 0, 0
    heads, rows, size = shapes[1]
    return rows, heads * size


def attention_width(layer: LayerSpec, *, cached: bool = False) -> float:
    """Return the number of elements of all query heads together: the mean of those of keys and those of values.

    Args:
        cached: in generation, where queries meet the latent vectors themselves.
    """
    part = layer.attention
    if not layer.has_attention:
        return 0 if layer.state_mixer is None else _state_size(layer.state_mixer)[1]
    if cached and part.latent is not None:
        return part.num_heads * (part.latent.rank + part.latent.rotary_dim / 2)
    return part.num_heads * (part.head_dim + part.value_size) / 2


def cached_numbers(layer: LayerSpec) -> int:
    """Return the numbers that a layer caches for each token: its keys and values, or the latent vector of both."""
    return layer.attention.cached_numbers if layer.has_attention else 0


def kv_heads(layer: LayerSpec, name: str) -> int:
    """Return the number of key-value heads that divide a parameter of a layer; of a mixer, its heads of keys or groups.

    Args:
        name: name of the parameter.
    """
    if ".mixer." not in name or layer.state_mixer is None:
        return layer.attention.num_kv_heads
    return layer.state_mixer.heads[1]


def state_bytes(spec: ModelSpec, layer: LayerSpec, size: float) -> float:
    """Return the bytes of the state that a layer keeps for each sequence in generation: none without a state.

    Args:
        size: bytes of the compute dtype; the state of a recurrence has at least fp32.
    """
    if layer.state_mixer is None:
        return 0.0
    conv, *recurrent = (prod(shape) for shape in layer.state_mixer.state_shapes(spec.hidden_size))
    return conv * size + sum(recurrent) * max(size, 4.0)
