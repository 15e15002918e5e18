"""Names, shapes and sharding styles of a model's parameters, computed without building its modules.

`jingu plan` needs no more of a model, and importing PyTorch to build one would take seconds. A test compares this table
with the modules of every family. Change it together with the modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from jingu.model.sharding_table import ShardingStyle
from jingu.model.spec import (
    AttentionSpec,
    Experts,
    GatedFeedForward,
    LayerNorm,
    LearnedPositions,
    Lora,
    ModelSpec,
    Norm,
    PlainFeedForward,
    RelativeBias,
)

# Names of an adapter's parameters, beside the `weight` of its module: the matrices A and B of LoRA, the bias of B, the
# row norms of DoRA, the factors of inputs and of outputs of IA³, and trained rows of the embedding.
ADAPTER_PARAMETERS = ("lora_a", "lora_b", "lora_bias", "lora_m", "ia3_in", "ia3_out", "token_rows")
# A parameter belongs to an adapter if one of these is a part of its name.
_OWN = frozenset({*ADAPTER_PARAMETERS, "prompt"})


class Entry(NamedTuple):
    """A parameter: its shape, and how it can be sharded (None: not at all)."""

    shape: tuple[int, ...]
    style: ShardingStyle | None = None


Table = dict[str, Entry]


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of the patterns (fnmatch)."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return not _OWN.isdisjoint(name.split("."))


def is_trained(name: str, spec: ModelSpec) -> bool:
    """Return whether a parameter of a model is trained. With adapters, other parameters are frozen by default."""
    adapter = spec.adapter
    if adapter is None:
        return not matches_any(name, spec.frozen_parameters)
    saved = adapter.modules_to_save if isinstance(adapter, Lora) else ()
    # A score head has no pretrained weights, so it is trained together with adapters of any kind.
    return is_adapter(name) or name == "score.weight" or matches_any(name.rpartition(".")[0], saved)


def has_table(spec: ModelSpec) -> bool:
    """Return whether `parameter_table` supports the spec: it does not with adapters or quantization."""
    return spec.adapter is None and spec.quantization is None


def parameter_table(spec: ModelSpec) -> Table:
    """Return the parameters by name, in module order, of a model without adapters and quantization."""
    width, encoders = spec.hidden_size, spec.num_encoder_layers or 0
    table = {"embedding.weight": Entry((spec.vocab_size, width), "vocabulary")}
    table |= _stack(spec, spec.num_layers, has_source=encoders > 0)
    if not spec.tie_word_embeddings and not spec.score_head:
        table["head.weight"] = Entry((spec.vocab_size, width), "vocabulary")
    if spec.score_head or spec.value_head:
        table["score.weight"] = Entry((1, width))
    if encoders:
        table |= _prefixed("encoder.", _stack(spec, encoders))
    return table


@lru_cache(maxsize=16)
def parameter_sizes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Return names and shapes of a model's parameters in module order, as if none were quantized."""
    if has_table(spec.model_copy(update={"quantization": None})):
        return {name: entry.shape for name, entry in parameter_table(spec).items()}
    # The table does not contain adapters, so build the modules on the meta device.
    from jingu.model.decoder import parameter_shapes

    return parameter_shapes(spec)


def _prefixed(prefix: str, table: Table) -> Table:
    return {prefix + name: entry for name, entry in table.items()}


def _stack(spec: ModelSpec, layers: int, *, has_source: bool = False) -> Table:
    """Return the parameters of a stack (decoder or encoder) except for the embedding, which both share."""
    table: Table = {}
    if isinstance(spec.position, LearnedPositions):
        table["positions.weight"] = Entry((spec.max_position_embeddings, spec.hidden_size), "tokens")
    if isinstance(spec.position, RelativeBias):
        table["relative_bias.weight"] = Entry((spec.position.num_buckets, spec.attention.num_heads))
    if spec.embedding_norm:
        table |= _norm("embedding_norm", spec.norm, spec.hidden_size)
    block = _block(spec, has_source=has_source)
    for number in range(layers):
        table |= _prefixed(f"blocks.{number}.", block)
    return table | _norm("norm", spec.norm, spec.hidden_size)


def _block(spec: ModelSpec, *, has_source: bool) -> Table:
    width = spec.hidden_size
    table = _norm("attention_norm", spec.norm, width) | _attention("attention", spec.attention, spec)
    if has_source:
        table |= _norm("cross_attention_norm", spec.norm, width) | _attention("cross_attention", spec.attention, spec)
    table |= _norm("feed_forward_norm", spec.norm, width)
    part = spec.feed_forward
    return table | (_mixture(part, width) if isinstance(part, Experts) else _feed_forward("feed_forward", part, width))


def _norm(name: str, norm: Norm, width: int) -> Table:
    table = {f"{name}.weight": Entry((width,))}
    if isinstance(norm, LayerNorm):
        table[f"{name}.bias"] = Entry((width,))
    return table


def _linear(name: str, outputs: int, inputs: int, style: ShardingStyle | None, bias: bool = False) -> Table:
    table = {f"{name}.weight": Entry((outputs, inputs), style)}
    if bias:
        table[f"{name}.bias"] = Entry((outputs,), style)
    return table


def _attention(name: str, part: AttentionSpec, spec: ModelSpec) -> Table:
    width, inner, kv_inner = spec.hidden_size, part.num_heads * part.head_dim, part.num_kv_heads * part.head_dim
    table = _linear(f"{name}.q", inner, width, "heads", part.qkv_bias)
    table |= _linear(f"{name}.k", kv_inner, width, "kv_heads", part.qkv_bias)
    table |= _linear(f"{name}.v", kv_inner, width, "kv_heads", part.qkv_bias)
    table |= _linear(f"{name}.output", width, inner, "from_heads", part.output_bias)
    if part.qk_norm:
        table |= _norm(f"{name}.q_norm", spec.norm, part.head_dim) | _norm(f"{name}.k_norm", spec.norm, part.head_dim)
    return table


def _feed_forward(name: str, part: PlainFeedForward | GatedFeedForward, width: int) -> Table:
    size, table = part.intermediate_size, {}
    if isinstance(part, GatedFeedForward):
        table = _linear(f"{name}.gate", size, width, "column", part.bias)
    table |= _linear(f"{name}.up", size, width, "column", part.bias)
    return table | _linear(f"{name}.down", width, size, "row", part.bias)


def _mixture(part: Experts, width: int) -> Table:
    name, experts, size = "feed_forward", part.num_experts, part.intermediate_size
    table: Table = {
        f"{name}.router.weight": Entry((experts, width)),
        f"{name}.gate.weight": Entry((experts, size, width), "column"),
        f"{name}.up.weight": Entry((experts, size, width), "column"),
        f"{name}.down.weight": Entry((experts, width, size), "row"),
    }
    if part.shared_intermediate_size:
        shared = GatedFeedForward(intermediate_size=part.shared_intermediate_size)
        table |= _feed_forward(f"{name}.shared", shared, width)
        if part.shared_expert_gate:
            table |= _linear(f"{name}.shared_gate", 1, width, None)
    return table
