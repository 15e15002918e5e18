"""The parts of a model: for each, the shapes, sharding, initial values and cost of its parameters, without PyTorch.

This is the only place that knows them. Modules create their parameters from these rows, and the parameter table,
initial weights, counts and plans read them. To add a part, add its fields to the spec, its rows here, and its module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import expm1, log, prod
from typing import Literal, NamedTuple

from jingu.model.components import (
    AttentionSpec,
    Experts,
    FeedForward,
    GatedDelta,
    GatedFeedForward,
    LatentAttention,
    LayerNorm,
    LayerSpec,
    LearnedPositions,
    NoFeedForward,
    Norm,
    PlainFeedForward,
    RandomProjectionRouter,
    RelativeBias,
    RmsNorm,
    ShortConv,
    StateMixer,
    StateSpace,
    TopKRouter,
)
from jingu.model.sharding_table import ShardingStyle, ShardingTable
from jingu.model.spec import ModelSpec, has_correction

# Initial values that differ between the elements of a vector: rates of decay, and lengths of steps.
InitialValues = Literal["rates", "steps"]


class ModuleRow(NamedTuple):
    """A child module with a weight and perhaps a bias. Biases start at zero.

    Attributes:
        shape: shape of the weight: outputs and inputs, of experts the number of experts first.
        style: how it can be sharded; None: not at all.
        bias: whether it has a bias.
        initial: initial value of all elements of the weight, or the name of values that differ (`weight_init`); None:
            they are normally distributed.
        std: their standard deviation; None: `ModelSpec.initializer_range`.
        is_trained: whether it is ever trained by gradients. A vector that is not keeps at least fp32, whatever the
            dtype of the model, and ZeRO does not shard it.
        is_wide: whether a vector that is trained keeps at least fp32, too.
    """

    shape: tuple[int, ...]
    style: ShardingStyle | None = None
    bias: bool = False
    initial: float | InitialValues | None = None
    std: float | None = None
    is_trained: bool = True
    is_wide: bool = False


# The rows of a module, by the names of its children; those of a block have the paths of grandchildren.
Rows = Mapping[str, ModuleRow]


def styles(rows: Rows) -> ShardingTable:
    """Return how the children of a module can be sharded, without their own children."""
    return {name: row.style for name, row in rows.items() if row.style is not None and "." not in name}


def child_rows(rows: Rows, name: str) -> dict[str, ModuleRow]:
    """Return the rows of the child `name` of a module."""
    return {path.removeprefix(f"{name}."): row for path, row in rows.items() if path.startswith(f"{name}.")}


def norm_rows(name: str, norm: Norm, width: int, style: ShardingStyle | None = None) -> dict[str, ModuleRow]:
    """Return the row of a norm of `width` elements by its name; none if it has no weight."""
    if isinstance(norm, LayerNorm):
        return {name: ModuleRow((width,), style, norm.bias, initial=1.0)}
    return {name: ModuleRow((width,), style, initial=0.0 if norm.offset else 1.0)} if norm.has_weight else {}


def qk_norm(layer: LayerSpec) -> Norm:
    """Return the norm of queries and keys."""
    norm = layer.norm
    has_weight = layer.attention.qk_norm_weight
    return norm if has_weight or isinstance(norm, LayerNorm) else norm.model_copy(update={"has_weight": False})


def attention_rows(spec: ModelSpec, layer: LayerSpec) -> dict[str, ModuleRow]:
    """Return the rows of self-attention or cross-attention."""
    part, width = layer.attention, spec.hidden_size
    inner, kv_inner = part.num_heads * part.head_dim, part.num_kv_heads * part.head_dim
    values = part.num_heads * part.value_size
    if part.latent is not None:
        rows = _latent_rows(part, part.latent, width)
    else:
        # If scores are not scaled, the query matrix is.
        q_std = None if part.scale_scores else spec.initializer_range * part.head_dim**-0.5
        rows = {
            "q": ModuleRow((inner, width), "heads", part.qkv_bias, std=q_std),
            "k": ModuleRow((kv_inner, width), "kv_heads", part.qkv_bias),
            "v": ModuleRow((part.num_kv_heads * part.value_size, width), "kv_heads", part.qkv_bias),
        }
    if part.output_gate:
        rows["gate"] = ModuleRow((values, width), "heads")
    rows["output"] = ModuleRow((width, values), "from_heads", part.output_bias, std=residual_std(spec))
    if part.sinks:
        rows["sinks"] = ModuleRow((part.num_heads,), "heads")
    if part.qk_norm and part.qk_norm_width == "head":
        rows |= norm_rows("q_norm", qk_norm(layer), part.head_dim) | norm_rows("k_norm", qk_norm(layer), part.head_dim)
    elif part.qk_norm:
        rows |= norm_rows("q_norm", qk_norm(layer), inner, "heads")
        rows |= norm_rows("k_norm", qk_norm(layer), kv_inner, "kv_heads")
    return rows


def _latent_rows(part: AttentionSpec, latent: LatentAttention, width: int) -> dict[str, ModuleRow]:
    """Return the rows of the projections of latent attention. Every rank has the whole latent vectors."""
    norm = RmsNorm(eps=latent.eps)
    rows: dict[str, ModuleRow] = {}
    query_inputs = width
    if latent.query_rank is not None:
        rows["q_down"] = ModuleRow((latent.query_rank, width), bias=part.qkv_bias)
        rows |= norm_rows("q_latent_norm", norm, latent.query_rank)
        query_inputs = latent.query_rank
    rows["q"] = ModuleRow((part.num_heads * part.head_dim, query_inputs), "heads")
    rows["kv_down"] = ModuleRow((latent.rank, width), bias=part.qkv_bias)
    rows["k_rotary"] = ModuleRow((latent.rotary_dim, width), bias=part.qkv_bias)
    rows |= norm_rows("kv_latent_norm", norm, latent.rank)
    # For each head the unrotated part of the key, then the value.
    rows["kv"] = ModuleRow(
        (part.num_heads * (part.head_dim - latent.rotary_dim + part.value_size), latent.rank), "heads"
    )
    return rows


def state_shapes(part: StateMixer, width: int) -> list[tuple[int, ...]]:
    """Return the shapes of the state of one sequence: the last inputs of the convolutions, and that of the recurrence.

    The first is stored in the dtype of the hidden states, the second in fp32. Their size does not depend on the number
    of tokens.

    Args:
        width: the hidden size.
    """
    before = part.num_taps - 1
    if isinstance(part, ShortConv):
        return [(before, width)]
    if isinstance(part, StateSpace):
        channels = part.num_heads * part.head_dim + 2 * part.num_groups * part.state_size
        return [(before, channels), (part.num_heads, part.state_size, part.head_dim)]
    channels = 2 * part.num_key_heads * part.key_head_dim + part.num_heads * part.value_head_dim
    return [(before, channels), (part.num_heads, part.key_head_dim, part.value_head_dim)]


def gated_delta_rows(part: GatedDelta, width: int, std: float | None = None) -> dict[str, ModuleRow]:
    """Return the rows of a gated delta rule.

    Args:
        width: the hidden size.
        std: standard deviation of the initial weights of `output`.
    """
    heads, keys = part.num_heads, part.num_key_heads * part.key_head_dim
    values = heads * part.value_head_dim
    decays = heads * part.key_head_dim if part.decay_per_channel else heads
    outputs: dict[str, tuple[int, ShardingStyle]] = {
        "q": (keys, "kv_heads"),
        "k": (keys, "kv_heads"),
        "v": (values, "heads"),
    }
    rows = {name: ModuleRow((size, width), style) for name, (size, style) in outputs.items()}
    rows |= {f"{name}_conv": ModuleRow((size, part.num_taps), style) for name, (size, style) in outputs.items()}
    for name, size in (("gate", values), ("decay", decays)):
        if part.gate_rank is not None:
            rows[f"{name}_down"] = ModuleRow((part.gate_rank, width))
        rows[name] = ModuleRow((size, part.gate_rank or width), "heads")
    return rows | {
        "beta": ModuleRow((heads, width), "heads"),
        "log_rate": ModuleRow((heads,), "heads", initial="rates", is_wide=True),
        "decay_bias": ModuleRow((decays,), "heads", initial="steps", is_wide=True),
        "norm": ModuleRow((part.value_head_dim,), initial=1.0),
        "output": ModuleRow((width, values), "from_heads", std=std),
    }


def state_space_rows(part: StateSpace, width: int, std: float | None = None) -> dict[str, ModuleRow]:
    """Return the rows of a Mamba-2 mixer. Arguments are those of `gated_delta_rows`."""
    inner, shared = part.num_heads * part.head_dim, part.num_groups * part.state_size
    rows = {"gate": ModuleRow((inner, width), "heads", part.bias)}
    outputs: dict[str, tuple[int, ShardingStyle]] = {
        "x": (inner, "heads"),
        "b": (shared, "kv_heads"),
        "c": (shared, "kv_heads"),
    }
    rows |= {name: ModuleRow((size, width), style, part.bias) for name, (size, style) in outputs.items()}
    rows |= {
        f"{name}_conv": ModuleRow((size, part.num_taps), style, part.conv_bias)
        for name, (size, style) in outputs.items()
    }
    rows |= {
        "step": ModuleRow((part.num_heads, width), "heads", part.bias),
        "step_bias": ModuleRow((part.num_heads,), "heads", initial="steps", is_wide=True),
        "log_rate": ModuleRow((part.num_heads,), "heads", initial="rates", is_wide=True),
        "skip": ModuleRow((part.num_heads,), "heads", initial=1.0, is_wide=True),
    }
    if part.norm != "none":
        rows["norm"] = ModuleRow((inner,), "heads", initial=1.0)
    return rows | {"output": ModuleRow((width, inner), "from_heads", part.output_bias, std=std)}


def short_conv_rows(part: ShortConv, width: int, std: float | None = None) -> dict[str, ModuleRow]:
    """Return the rows of a gated short convolution. Arguments are those of `gated_delta_rows`."""
    return {
        **{name: ModuleRow((width, width), "column", part.bias) for name in ("gate_in", "gate_out", "x")},
        "conv": ModuleRow((width, part.num_taps), "column", part.bias),
        "output": ModuleRow((width, width), "row", part.bias, std=std),
    }


# The order of the modules of a mixer.
_MIXER_ORDER = (
    *("q", "k", "v", "gate", "decay", "beta", "gate_in", "gate_out", "x", "b", "c", "step", "output", "conv"),
    *("q_conv", "k_conv", "v_conv", "gate_down", "decay_down", "x_conv", "b_conv", "c_conv"),
    *("step_bias", "log_rate", "decay_bias", "skip", "norm"),
)


def mixer_rows(part: StateMixer, width: int, std: float | None = None) -> dict[str, ModuleRow]:
    """Return the rows of a mixer.

    Args:
        width: the hidden size.
        std: standard deviation of the initial weights of `output`.
    """
    if isinstance(part, GatedDelta):
        rows = gated_delta_rows(part, width, std)
    elif isinstance(part, StateSpace):
        rows = state_space_rows(part, width, std)
    else:
        rows = short_conv_rows(part, width, std)
    return {name: rows[name] for name in _MIXER_ORDER if name in rows}


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
    if isinstance(part, NoFeedForward):
        return {}
    size = part.intermediate_size
    if not isinstance(part, Experts):
        gate = {"gate": ModuleRow((size, width), "column", part.bias)} if isinstance(part, GatedFeedForward) else {}
        up, down = ModuleRow((size, width), "column", part.bias), ModuleRow((width, size), "row", part.bias, std=std)
        # The two trained numbers of xIELU, before softplus: 0.8 and 0.8 - 0.5.
        numbers = {"alpha_p": log(expm1(0.8)), "alpha_n": log(expm1(0.3))} if part.activation == "xielu" else {}
        alphas = {name: ModuleRow((1,), initial=number) for name, number in numbers.items()}
        return {**gate, "up": up, "down": down, **alphas}
    experts, inner = part.num_experts, part.latent_size or width
    rows = {
        "router": ModuleRow(
            (experts, width),
            bias=isinstance(part.router, TopKRouter) and part.router.bias,
            is_trained=not isinstance(part.router, RandomProjectionRouter),
        ),
        "gate": ModuleRow((experts, size, inner), "column", part.bias),
        "up": ModuleRow((experts, size, inner), "column", part.bias),
        "down": ModuleRow((experts, inner, size), "row", part.bias, std=std),
    }
    if not part.gated:
        del rows["gate"]
    if part.latent_size is not None:
        rows |= {"to_latent": ModuleRow((inner, width)), "from_latent": ModuleRow((width, inner), std=std)}
    if has_correction(part):
        rows["correction"] = ModuleRow((experts,), initial=0.0, is_trained=False)
    shared = shared_expert(part)
    if shared is not None:
        rows |= _prefixed("shared", feed_forward_rows(shared, width, std))
        if part.shared_expert_gate:
            rows["shared_gate"] = ModuleRow((1, width))
    return rows


def shared_expert(part: Experts) -> PlainFeedForward | GatedFeedForward | None:
    """Return the feed-forward of the shared expert; None if there is none."""
    return None if part.shared_intermediate_size is None else _like_experts(part, part.shared_intermediate_size)


def _like_experts(part: Experts, size: int) -> PlainFeedForward | GatedFeedForward:
    """Return a feed-forward of the kind of the experts."""
    kind = GatedFeedForward if part.gated else PlainFeedForward
    return kind(intermediate_size=size, activation=part.activation)


def block_rows(spec: ModelSpec, layer: LayerSpec, *, has_source: bool) -> dict[str, ModuleRow]:
    """Return the rows of a block; with `has_source`, it also attends to an encoder."""
    branches = {"attention": attention_rows(spec, layer) if layer.has_attention else {}}
    if has_source:
        branches["cross_attention"] = branches["attention"]
    branches["feed_forward"] = feed_forward_rows(layer.feed_forward, spec.hidden_size, residual_std(spec))
    rows: dict[str, ModuleRow] = {}
    for branch, branch_rows in branches.items():
        before, behind = norm_places(layer, branch)
        rows |= norm_rows(f"{branch}_norm", layer.norm, spec.hidden_size) if before else {}
        rows |= _prefixed(branch, branch_rows)
        if layer.state_mixer is not None and branch == "attention":
            rows |= _prefixed("mixer", mixer_rows(layer.state_mixer, spec.hidden_size, residual_std(spec)))
        rows |= norm_rows(f"{branch}_output_norm", layer.norm, spec.hidden_size) if behind else {}
    return rows


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
        rows["positions"] = ModuleRow((spec.max_position_embeddings, spec.hidden_size), "tokens")
    if isinstance(spec.position, RelativeBias):
        rows["relative_bias"] = ModuleRow((spec.position.num_buckets, spec.attention.num_heads))
    if spec.embedding_norm:
        rows |= norm_rows("embedding_norm", spec.norm, spec.hidden_size)
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


def prediction_rows(spec: ModelSpec) -> dict[str, ModuleRow]:
    """Return the rows of a layer of multi-token prediction, without its block."""
    width = spec.hidden_size
    rows = norm_rows("embedding_norm", spec.norm, width) | norm_rows("hidden_norm", spec.norm, width)
    return {**rows, "projection": ModuleRow((width, 2 * width))}


def model_rows(spec: ModelSpec) -> Iterator[tuple[str, ModuleRow]]:
    """Yield the rows of a model by their full names, in module order."""
    ends = end_rows(spec)
    yield "embedding", ends.pop("embedding")
    yield from _stack(spec, spec.layers, has_source=spec.num_encoder_layers is not None)
    yield from ends.items()
    for number in range(spec.mtp_layers):
        rows = prediction_rows(spec) | _prefixed("block", block_rows(spec, spec.layers[-1], has_source=False))
        yield from _prefixed(f"mtp.{number}", rows | norm_rows("norm", spec.norm, spec.hidden_size)).items()
    if spec.num_encoder_layers:
        encoder = _stack(spec, (spec.default_layer,) * spec.num_encoder_layers, has_source=False)
        yield from ((f"encoder.{name}", row) for name, row in encoder)


def _stack(spec: ModelSpec, layers: tuple[LayerSpec, ...], *, has_source: bool) -> Iterator[tuple[str, ModuleRow]]:
    yield from stack_rows(spec).items()
    blocks = {layer: block_rows(spec, layer, has_source=has_source) for layer in dict.fromkeys(layers)}
    for number, layer in enumerate(layers):
        yield from _prefixed(f"blocks.{number}", blocks[layer]).items()
    yield from norm_rows("norm", spec.norm, spec.hidden_size).items()


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
    assert layer.mixer is None and not isinstance(feed_forward, NoFeedForward)
    stacks = 1 + (spec.num_encoder_layers is not None)
    # Tensors saved by norms, and the inputs of matmuls.
    branches = ["attention"] * stacks + ["feed_forward"]
    norms = sum(sum(norm_places(layer, branch)) for branch in branches)
    inputs = stacks + 1 - (layer.block_order == "parallel_one_norm")
    saved = norms * _saved_by_norm(layer.norm, spec.hidden_size, 1, size) + inputs * spec.hidden_size * size
    if layer.block_order == "parallel" and isinstance(layer.norm, LayerNorm):
        saved -= spec.hidden_size * size  # both norms save the same input
    saved += stacks * _saved_by_attention(part, size)
    if part.qk_norm:
        heads = part.num_heads + part.num_kv_heads
        groups = heads if part.qk_norm_width == "head" else 2
        saved += stacks * _saved_by_norm(qk_norm(layer), heads * part.head_dim, groups, size)
    return saved + _saved_by_feed_forward(dense_equivalent(feed_forward), size) + routed_bytes(spec, layer, size)


def _saved_by_attention(part: AttentionSpec, size: float) -> float:
    """Return the bytes per token that attention saves beside its input and its norms of queries and keys."""
    wide = max(size, 4.0)
    stores_scores = part.softcap is not None or part.sinks
    values = part.num_heads * part.value_size
    # Queries, keys and values repeated for all heads and padded to one size, in fp32 as without a fused kernel; and the
    # input of the output projection.
    largest = part.num_heads * max(part.head_dim, part.value_size)
    if stores_scores:
        saved = (2 * part.num_heads * part.head_dim + 2 * values) * size
    else:
        saved = 3 * largest * wide + values * size
    # A gate saves both factors.
    saved += 2 * values * size if part.output_gate else 0.0
    saved += part.num_heads * wide if part.sinks else 0.0
    latent = part.latent
    if latent is not None:
        ranks = [latent.rank, *([] if latent.query_rank is None else [latent.query_rank])]
        saved += sum(_saved_by_norm(RmsNorm(), rank, 1, size) + rank * size for rank in ranks)
        # Values are a part of the projection's result, which is saved as a whole, unless they are padded or cast.
        if part.value_size == part.head_dim and size >= 4:
            saved += part.num_heads * (part.head_dim - latent.rotary_dim) * size
    return saved


def dense_equivalent(part: FeedForward) -> PlainFeedForward | GatedFeedForward | NoFeedForward:
    """Return the feed-forward of the size that a token uses of a mixture of experts; a dense one as it is."""
    if not isinstance(part, Experts):
        return part
    size = part.num_experts_per_token * part.intermediate_size + (part.shared_intermediate_size or 0)
    return _like_experts(part, size)


def routed_bytes(spec: ModelSpec, layer: LayerSpec, size: float) -> float:
    """Return the bytes per token that a mixture of experts saves beside its matmuls: the permuted rows."""
    part = layer.feed_forward
    if not isinstance(part, Experts):
        return 0.0
    # The inputs and outputs of the projections to a latent space.
    latents = 0 if part.latent_size is None else 2 * part.latent_size
    width = part.latent_size or spec.hidden_size
    return (part.num_experts_per_token * 2.0 * width + latents) * size + 8.0 * part.num_experts


def _saved_by_feed_forward(part: PlainFeedForward | GatedFeedForward | NoFeedForward, size: float) -> float:
    if isinstance(part, NoFeedForward):
        return 0.0
    # The input (for ReLU, the output) of the activation, both factors of the gate, and the input of the last matmul.
    tensors = 2 * isinstance(part, GatedFeedForward) + 1 + (part.activation != "relu")
    # xIELU saves three more tensors and a mask.
    extra = 3 * size + 1 if part.activation == "xielu" else 0.0
    return part.intermediate_size * (tensors * size + extra)


def score_bytes(layer: LayerSpec, size: float) -> float:
    """Return the bytes that a layer saves for each attention score of a head: none with the kernels of PyTorch."""
    part = layer.attention
    if not layer.has_attention or (part.softcap is None and not part.sinks):
        return 0.0
    # The results of tanh and of softmax, and the probabilities in the compute dtype.
    return (1 + (part.softcap is not None)) * max(size, 4.0) + (size if size < 4 else 0.0)


def _saved_by_norm(norm: Norm, width: int, groups: int, size: float) -> float:
    """Return the bytes per token that a norm over `groups` groups of together `width` elements saves."""
    wide = max(size, 4.0)
    if isinstance(norm, LayerNorm):
        return width * size + 2 * groups * wide
    # Inputs, and results before the multiplication with the weight, in at least fp32.
    return (1 + norm.has_weight) * width * wide + groups * wide


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
    if isinstance(part, ShortConv):
        return 0, 0
    heads, rows, size = state_shapes(part, 0)[1]
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
    part = layer.attention
    if not layer.has_attention:
        return 0
    if part.latent is not None:
        return part.latent.rank + part.latent.rotary_dim
    return part.num_kv_heads * (part.head_dim + part.value_size)


def kv_heads(layer: LayerSpec, name: str) -> int:
    """Return the number of key-value heads that divide a parameter of a layer; of a mixer, its heads of keys or groups.

    Args:
        name: name of the parameter.
    """
    if ".mixer." not in name or layer.state_mixer is None:
        return layer.attention.num_kv_heads
    return mixer_heads(layer.state_mixer)[1]


def mixer_heads(part: StateMixer) -> tuple[int, int]:
    """Return the number of heads of a mixer, and of its heads of keys or groups; a convolution has none (0)."""
    if isinstance(part, GatedDelta):
        return part.num_heads, part.num_key_heads
    return (part.num_heads, part.num_groups) if isinstance(part, StateSpace) else (0, 0)


def state_bytes(spec: ModelSpec, layer: LayerSpec, size: float) -> float:
    """Return the bytes of the state that a layer keeps for each sequence in generation: none without a state.

    Args:
        size: bytes of the compute dtype; the state of a recurrence has at least fp32.
    """
    if layer.state_mixer is None:
        return 0.0
    conv, *recurrent = (prod(shape) for shape in state_shapes(layer.state_mixer, spec.hidden_size))
    return conv * size + sum(recurrent) * max(size, 4.0)
