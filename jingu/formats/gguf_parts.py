"""Parts of models that the metadata of GGUF files and config.json describe differently.

Architectures name their parts in gguf.toml (`parts`). A part reads keys of config.json from the metadata, and writes
the metadata from a spec.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import log
from typing import Any

from torch import Tensor

from jingu.errors import JinguError
from jingu.model.components import LayerSpec, RotaryPositions, YarnScaling
from jingu.model.families.latent_keys import mscale_weight
from jingu.model.feed_forward_specs import Experts, NoFeedForward
from jingu.model.spec import ModelSpec

Values = dict[str, Any]
USE_FOLDER = "Use the model's Hugging Face folder, if jingu supports it."


@dataclass(frozen=True)
class FileContents:
    """What a file says of a model.

    Attributes:
        get: returns a value of the metadata, without the name of the architecture in its key; None: there is none.
        names: names of the tensors.
        divisors: what rotary frequencies are divided by; None: the file does not say.
        vocab_size: rows of the embedding.
    """

    get: Callable[[str], Any]
    names: Collection[str]
    divisors: Tensor | None
    vocab_size: int


@dataclass(frozen=True)
class Part:
    """A part of models.

    Attributes:
        keys: the metadata that it reads.
        read: returns keys of config.json.
        write: returns the metadata of a model.
    """

    keys: tuple[str, ...]
    read: Callable[[FileContents], Values]
    write: Callable[[ModelSpec], Values]


def merge(config: Values, more: Values) -> Values:
    """Return a config with more keys; objects are joined."""
    return config | {
        key: {**config[key], **value} if isinstance(value, dict) and isinstance(config.get(key), dict) else value
        for key, value in more.items()
    }


def _refuse(what: str) -> JinguError:
    return JinguError(what, fix=USE_FOLDER)


# Latent attention


def _read_latent(contents: FileContents) -> Values:
    """Read the sizes of latent attention. Older files have the sizes of its heads under the keys of plain attention."""
    get = contents.get
    rotary = get("rope.dimension_count") or 0
    key_size = get("attention.key_length_mla") or get("attention.key_length") or 0
    return {
        "kv_lora_rank": get("attention.kv_lora_rank"),
        "q_lora_rank": get("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key_size - rotary,
        "v_head_dim": get("attention.value_length_mla") or get("attention.value_length"),
        "num_key_value_heads": get("attention.head_count"),
        "head_dim": None,
    }


def _write_latent(spec: ModelSpec) -> Values:
    """Write the sizes of latent attention, which llama.cpp computes as attention with one head of keys, the latents."""
    part = spec.attention
    assert part.latent is not None
    return {
        "attention.kv_lora_rank": part.latent.rank,
        "attention.q_lora_rank": part.latent.query_rank or 0,
        "attention.key_length": part.latent.rank + part.latent.rotary_dim,
        "attention.value_length": part.latent.rank,
        "attention.key_length_mla": part.head_dim,
        "attention.value_length_mla": part.value_size,
        "attention.head_count_kv": 1,
        "rope.dimension_count": part.latent.rotary_dim,
    }


# YaRN


_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
_YARN_KEYS = (_LOG_MULTIPLIER, "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")
_TEMPERATURE = "attention.temperature_scale"


def _yarn(spec: ModelSpec) -> YarnScaling | None:
    scaling = spec.position.scaling if isinstance(spec.position, RotaryPositions) else None
    return scaling if isinstance(scaling, YarnScaling) and scaling.factor > 1 else None


def _read_yarn(contents: FileContents) -> Values:
    """Read YaRN whose factor of attention depends on `mscale_all_dim`. llama.cpp takes `mscale` for 1."""
    get = contents.get
    if get("rope.scaling.type") != "yarn":
        return {}
    rope = {
        "beta_fast": get("rope.scaling.yarn_beta_fast"),
        "beta_slow": get("rope.scaling.yarn_beta_slow"),
        "mscale": 1.0,
        "mscale_all_dim": get(_LOG_MULTIPLIER),
        "llama_4_scaling_beta": get(_TEMPERATURE),
    }
    return {"rope_scaling": {key: value for key, value in rope.items() if value is not None}}


def _write_yarn(spec: ModelSpec) -> Values:
    scaling, queries = _yarn(spec), spec.attention.query_scaling
    if scaling is None:
        return {}
    unit = 0.1 * log(scaling.factor)
    weight = round(((1.0 + unit) / scaling.attention_factor - 1.0) / unit, 6)
    return {
        "rope.scaling.yarn_beta_fast": scaling.beta_fast,
        "rope.scaling.yarn_beta_slow": scaling.beta_slow,
        **({_LOG_MULTIPLIER: weight} if weight else {}),
        **({} if queries is None else {_TEMPERATURE: float(queries.beta)}),
    }


def _read_latent_yarn(contents: FileContents) -> Values:
    """Read the YaRN of latent attention, which multiplies all scores by the square of a scale.

    llama.cpp's converter writes a tenth of `mscale_all_dim`, and its graphs are right if `mscale` is the same.
    """
    weight = contents.get(_LOG_MULTIPLIER)
    if contents.get("rope.scaling.type") != "yarn":
        return {}
    if not weight:
        raise _refuse(f"the file scales latent attention by YaRN without {_LOG_MULTIPLIER}, which jingu does not read.")
    rope = _read_yarn(contents)["rope_scaling"]
    weight = round(10 * weight, 6)
    return {"rope_scaling": {**rope, "mscale": weight, "mscale_all_dim": weight}}


def _write_latent_yarn(spec: ModelSpec) -> Values:
    queries, weight = spec.attention.query_scaling, mscale_weight(spec)
    if _yarn(spec) is None:
        return {}
    values: Values = {_LOG_MULTIPLIER: round(0.1 * weight, 7)}
    if queries is not None:
        values |= {_TEMPERATURE: float(queries.beta), "attention.temperature_length": queries.length}
    return values


# Layers


def _read_dense_first(contents: FileContents) -> Values:
    number, layers = contents.get("leading_dense_block_count") or 0, contents.get("block_count") or 0
    types = ["dense" if layer < number else "sparse" for layer in range(layers)]
    return {"first_k_dense_replace": number, "mlp_layer_types": types}


def _write_dense_first(spec: ModelSpec) -> Values:
    has_experts = [isinstance(layer.feed_forward, Experts) for layer in spec.layers]
    return {"leading_dense_block_count": [*has_experts, True].index(True)}


def _windows(spec: ModelSpec) -> list[bool]:
    return [layer.attention.sliding_window is not None for layer in spec.layers]


def _rotary(layer: LayerSpec) -> RotaryPositions:
    assert isinstance(layer.position, RotaryPositions)
    return layer.position


def _by_window(contents: FileContents, values: Any) -> tuple[Any, Any]:
    """Return what a list has for layers without windows and for those with them, or one value twice."""
    pattern = contents.get("attention.sliding_window_pattern") or []
    if not isinstance(values, list):
        return values, values
    sets = [
        {value for value, flag in zip(values, pattern, strict=True) if bool(flag) == kind} for kind in (False, True)
    ]
    if any(len(each) > 1 for each in sets):
        raise _refuse(
            "the number of key-value heads differs between layers of one kind of attention, which jingu does not read."
        )
    full, local = (next(iter(each), None) for each in sets)
    return full, local


def _read_window_heads(contents: FileContents) -> Values:
    """Read MiMo's attention: bases and key-value heads of layers with windows, and another size of values."""
    get = contents.get
    size, rotary = get("attention.key_length") or 0, get("rope.dimension_count") or 0
    full, local = _by_window(contents, get("attention.head_count_kv"))
    if full is not None and local is not None and local != 2 * full:
        raise _refuse(
            f"layers with windows have {local} key-value heads, and jingu reads twice as many as in others: {2 * full}."
        )
    rope = {"rope_type": "default", "partial_rotary_factor": rotary / size}
    bases = {"full_attention": "rope.freq_base", "sliding_attention": "rope.freq_base_swa"}
    layers = range(get("block_count") or 0)
    sparse = [f"blk.{layer}.ffn_gate_inp.weight" in contents.names for layer in layers]
    return {
        "num_key_value_heads": local // 2 if full is None else full,
        "v_head_dim": get("attention.value_length"),
        "attention_value_scale": get("attention.value_scale") or 1.0,
        "rope_parameters": {kind: {**rope, "rope_theta": get(key) or 10000.0} for kind, key in bases.items()},
        "rope_theta": None,
        "rope_scaling": None,
        "partial_rotary_factor": None,
        "mlp_layer_types": ["sparse" if flag else "dense" for flag in sparse],
    }


def _write_window_heads(spec: ModelSpec) -> Values:
    windows = _windows(spec)
    local = [_rotary(layer).theta for layer, flag in zip(spec.layers, windows, strict=True) if flag]
    return {
        "attention.head_count_kv": [layer.attention.num_kv_heads for layer in spec.layers],
        "attention.sliding_window_pattern": windows,
        "attention.value_length": spec.attention.value_size,
        "attention.value_scale": float(spec.attention.value_scale),
        "rope.freq_base_swa": float(local[0] if local else _rotary(spec.layers[0]).theta),
    }


def _read_chunks(contents: FileContents) -> Values:
    """Read Llama 4's attention. llama.cpp knows one size of chunks, and takes 128 experts for a model without norms."""
    if contents.get("attention.sliding_window") == 0:
        raise _refuse("the file has Llama 4's layers without chunks, which jingu does not read.")
    return {
        "use_qk_norm": contents.get("expert_count") != 128,
        "intermediate_size": contents.get("expert_feed_forward_length"),
        "intermediate_size_mlp": contents.get("feed_forward_length"),
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }


def _write_chunks(spec: ModelSpec) -> Values:
    layers = spec.layers
    sparse = [number for number, layer in enumerate(layers, 1) if isinstance(layer.feed_forward, Experts)]
    dense = [layer.intermediate_size for layer in layers if not isinstance(layer.feed_forward, Experts)]
    return {
        "interleave_moe_layer_step": (sparse or [0])[0],
        "feed_forward_length": (dense or [spec.default_layer.intermediate_size])[0],
    }


def _read_branches(contents: FileContents) -> Values:
    """Read the layers of Nemotron-H: attention has key-value heads, a feed-forward a size, and a mixer neither."""
    kv_heads, sizes = contents.get("attention.head_count_kv"), contents.get("feed_forward_length")
    if not isinstance(kv_heads, list) or not isinstance(sizes, list):
        raise ValueError("attention.head_count_kv and feed_forward_length are not lists of numbers for each layer")
    feed_forward = "moe" if contents.get("expert_count") else "mlp"
    mixers = ["full_attention" if heads else "linear_attention" for heads in kv_heads]
    types = [feed_forward if size else mixer for size, mixer in zip(sizes, mixers, strict=True)]
    return {
        "layers_block_type": types,
        "layer_types": None,
        "num_key_value_heads": max(kv_heads),
        "intermediate_size": max(sizes),
    }


def _write_branches(spec: ModelSpec) -> Values:
    is_feed_forward = [not isinstance(layer.feed_forward, NoFeedForward) for layer in spec.layers]
    kinds = {layer.feed_forward.type for layer in spec.layers if not isinstance(layer.feed_forward, NoFeedForward)}
    if len(kinds) > 1:
        raise _refuse("llama.cpp has no models of this architecture with both experts and dense layers.")
    return {
        "attention.head_count_kv": [
            layer.attention.num_kv_heads if layer.has_attention else 0 for layer in spec.layers
        ],
        "feed_forward_length": [
            layer.intermediate_size if flag else 0 for layer, flag in zip(spec.layers, is_feed_forward, strict=True)
        ],
        "attention.layer_norm_epsilon": spec.norm.eps,
    }


def _read_xielu(contents: FileContents) -> Values:
    for key, constant in (("xielu.beta", 0.5), ("xielu.eps", -1e-6)):
        values = contents.get(key)
        if any(abs(value - constant) > 1e-9 for value in (values if isinstance(values, list) else [values])):
            raise _refuse(f"the metadata {key} is not {constant}, the only value that jingu computes with.")
    return {}


def _write_xielu(spec: ModelSpec) -> Values:
    return {"xielu.beta": [0.5] * spec.num_layers, "xielu.eps": [-1e-6] * spec.num_layers}


def _read_gemma4(contents: FileContents) -> Values:
    get, names = contents.get, contents.names
    pattern, sizes = get("attention.sliding_window_pattern") or [], get("feed_forward_length")
    full, local = _by_window(contents, get("attention.head_count_kv"))
    wide = isinstance(sizes, list) and sizes[-1] == 2 * sizes[0]
    first_full = next((layer for layer, flag in enumerate(pattern) if not flag), 0)
    # Pairs whose frequency is divided by a huge number do not rotate.
    divisors = contents.divisors
    share = 1.0 if divisors is None else float((divisors < 1e6).double().mean())
    size = get("embedding_length_per_layer_input") or 0
    has_experts = bool(get("expert_count"))
    return {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional", "rope_theta": get("rope.freq_base"), "partial_rotary_factor": share,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": get("rope.freq_base_swa")},
        },
        "rope_theta": None,
        "rope_scaling": None,
        "head_dim": get("attention.key_length_swa"),
        "global_head_dim": get("attention.key_length"),
        "num_key_value_heads": local or full,
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in names,
        "num_global_key_value_heads": full,
        "num_kv_shared_layers": get("attention.shared_kv_layers") or 0,
        "use_double_wide_mlp": wide,
        "intermediate_size": sizes[0] if isinstance(sizes, list) else sizes,
        "hidden_size_per_layer_input": size,
        "vocab_size_per_layer_input": contents.vocab_size,
        "enable_moe_block": has_experts,
        "num_experts": get("expert_count"),
        "top_k_experts": get("expert_used_count"),
    }  # fmt: skip


def _write_gemma4(spec: ModelSpec) -> Values:
    windows, layers = _windows(spec), spec.layers
    full = next((layer for layer, flag in zip(layers, windows, strict=True) if not flag), layers[0])
    local = next((layer for layer, flag in zip(layers, windows, strict=True) if flag), full)
    sizes = [
        layer.feed_forward.parallel_intermediate_size or 0
        if isinstance(layer.feed_forward, Experts)
        else layer.intermediate_size
        for layer in layers
    ]
    return {
        "attention.sliding_window_pattern": windows,
        "attention.shared_kv_layers": sum(layer.shares_kv for layer in layers),
        "attention.head_count_kv": [layer.attention.num_kv_heads for layer in layers],
        "attention.key_length": full.attention.head_dim,
        "attention.value_length": full.attention.head_dim,
        "attention.key_length_swa": local.attention.head_dim,
        "attention.value_length_swa": local.attention.head_dim,
        "rope.dimension_count": full.attention.head_dim,
        "rope.dimension_count_swa": local.attention.head_dim,
        "rope.freq_base": float(_rotary(full).theta),
        "rope.freq_base_swa": float(_rotary(local).theta),
        "embedding_length_per_layer_input": spec.per_layer_inputs or 0,
        "feed_forward_length": sizes,
    }


def _read_falcon(contents: FileContents) -> Values:
    return {"num_ln_in_parallel_attn": 1 + ("blk.0.attn_norm_2.weight" in contents.names)}


PARTS = {
    "latent": Part(
        (
            "attention.kv_lora_rank", "attention.q_lora_rank", "attention.key_length_mla", "attention.value_length_mla",
        ),
        _read_latent,
        _write_latent,
    ),
    "yarn": Part((*_YARN_KEYS, _TEMPERATURE), _read_yarn, _write_yarn),
    "latent_yarn": Part(
        (_LOG_MULTIPLIER, _TEMPERATURE, "attention.temperature_length"), _read_latent_yarn, _write_latent_yarn
    ),
    "dense_first": Part(("leading_dense_block_count",), _read_dense_first, _write_dense_first),
    "window_heads": Part(
        ("attention.sliding_window_pattern", "attention.value_scale", "rope.freq_base_swa"),
        _read_window_heads,
        _write_window_heads,
    ),
    "chunks": Part(("attention.sliding_window",), _read_chunks, _write_chunks),
    "branches": Part(("attention.layer_norm_epsilon",), _read_branches, _write_branches),
    "xielu": Part(("xielu.beta", "xielu.eps"), _read_xielu, _write_xielu),
    "gemma4": Part(
        (
            "attention.sliding_window_pattern", "attention.shared_kv_layers", "attention.key_length_swa",
            "attention.value_length_swa", "rope.dimension_count_swa", "rope.freq_base_swa",
            "embedding_length_per_layer_input",
        ),
        _read_gemma4,
        _write_gemma4,
    ),
    "falcon": Part((), _read_falcon, lambda spec: {}),
}  # fmt: skip
