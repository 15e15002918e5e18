"""Llama and similar families: RMS norm, rotary positions, grouped-query attention, gated feed-forward.

- Llama 1 to 3 (Touvron et al., 2023; Grattafiori et al., 2024)
- Mistral (Jiang et al., 2023): with a sliding window
- Qwen2 and Qwen2.5 (Yang et al., 2024): with biases of queries, keys and values
- Qwen3 (Yang et al., 2025): with normalized queries and keys, and a head size that is independent of the hidden size
- Mixtral (Jiang et al., 2024) and Qwen3-MoE: with a mixture of experts in every block. Their files have one tensor per
  matrix of each expert, in all releases of transformers.
- Baichuan 2 (Yang et al., 2023): with q, k and v in one matrix, and a head whose rows are normalized. The 13B model has
  ALiBi instead of rotary positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jingu.errors import JinguError
from jingu.model.components import AlibiPositions, RotaryPositions
from jingu.model.families.family import (
    ConfigKeys,
    Family,
    HFConfig,
    SpecValues,
    activation_key,
    config_key,
    config_keys,
    load_template,
    supported_options,
    unsupported_option,
)
from jingu.model.families.name_map import name_rules
from jingu.model.families.rope import ROPE
from jingu.model.feed_forward_specs import Experts
from jingu.model.norm_specs import RmsNorm
from jingu.model.spec import ModelSpec, replace_fields


def _feed_forward_size(width: int) -> int:
    """Return 8/3 of the hidden size, rounded up to a multiple of 64.

    Three matrices of this size have as many parameters as the two of a plain feed-forward with 4 times the hidden size.
    """
    return -(-8 * width // (3 * 64)) * 64


def _check_heads(spec: ModelSpec) -> dict[str, Any]:
    """Raise JinguError for a spec that Hugging Face's Llama class does not support. Return no keys."""
    if spec.hidden_size % spec.attention.num_heads:
        raise JinguError(
            f"Hugging Face's Llama needs a hidden size that is a multiple of its {spec.attention.num_heads} heads, not "
            f"{spec.hidden_size}.",
            where="model.hidden_size",
        )
    return {}


# Keys that all families in this file share, except for positions.
SHARED_KEYS = (*config_keys("llama"), activation_key("hidden_act", "silu"))
_ATTENTION_BIAS = ConfigKeys(
    lambda config: dict.fromkeys(("attention.qkv_bias", "attention.output_bias"), bool(config.get("attention_bias"))),
    lambda spec: {"attention_bias": spec.attention.qkv_bias},
)
_TEMPLATE = load_template("llama")

LLAMA = Family(
    architectures=("LlamaForCausalLM",),
    template=_TEMPLATE,
    feed_forward_size=_feed_forward_size,
    keys=(
        *SHARED_KEYS,
        ROPE,
        _ATTENTION_BIAS,
        config_key("feed_forward.bias", "mlp_bias", default=False),
        ConfigKeys(write=_check_heads),
    ),
    rules=name_rules("llama"),
    base="model.",
    ignored=(".rotary_emb.inv_freq",),
)


# Mistral

MISTRAL = replace(
    LLAMA,
    architectures=("MistralForCausalLM",),
    template=replace_fields(_TEMPLATE, family="mistral", **{"attention.sliding_window": 4096}),
    keys=(
        *SHARED_KEYS,
        ROPE,
        ConfigKeys(
            # A config without the key has the default window; a config with `null` has none.
            lambda config: {"attention.sliding_window": config.get("sliding_window", 4096)},
            lambda spec: {"sliding_window": spec.attention.sliding_window},
        ),
    ),
)


# Qwen2 and Qwen3

_FULL, _SLIDING = "full_attention", "sliding_attention"


def _read_window(config: HFConfig) -> SpecValues:
    """Read the sliding window of Qwen2 and Qwen3, which all layers have, or some, or none."""
    layers = config["num_hidden_layers"]
    # As in transformers: `layer_types`, or by default all layers from `max_window_layers` on.
    first = config.get("max_window_layers", 28)
    types = config.get("layer_types") or [_SLIDING if layer >= first else _FULL for layer in range(layers)]
    if len(types) != layers:
        raise ValueError(f"layer_types names {len(types)} layers, and num_hidden_layers is {layers}")
    unknown = next((name for name in types if name not in (_FULL, _SLIDING)), None)
    if unknown is not None:
        raise unsupported_option("layer_types", unknown, f"known are {_FULL} and {_SLIDING}")
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if window is None or len(set(types)) == 1:
        return {
            "attention.sliding_window": window if _SLIDING in types else None,
            "layer_kinds": {},
            "layer_pattern": (),
        }
    kinds = {_FULL: {}, _SLIDING: {"attention.sliding_window": window}}
    return {"attention.sliding_window": None, "layer_kinds": kinds, "layer_pattern": tuple(types)}


def _write_window(spec: ModelSpec) -> dict[str, Any]:
    windows = [layer.attention.sliding_window for layer in spec.layers]
    window = next(filter(None, windows), None)
    keys: dict[str, Any] = {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": 0 if window else spec.num_layers,
    }
    if spec.layer_pattern:
        keys["layer_types"] = [_FULL if size is None else _SLIDING for size in windows]
    return keys


_WINDOW = ConfigKeys(_read_window, _write_window)
_QWEN = replace_fields(_TEMPLATE, norm=RmsNorm(eps=1e-6), position=RotaryPositions(theta=1e6))

QWEN2 = replace(
    LLAMA,
    architectures=("Qwen2ForCausalLM",),
    template=replace_fields(_QWEN, family="qwen2", **{"attention.qkv_bias": True}),
    keys=(*SHARED_KEYS, ROPE, _WINDOW),
)

QWEN3 = replace(
    LLAMA,
    architectures=("Qwen3ForCausalLM",),
    template=replace_fields(_QWEN, family="qwen3", **{"attention.qk_norm": True}),
    keys=(*SHARED_KEYS, ROPE, _ATTENTION_BIAS, _WINDOW, config_key("attention.head_dim", "head_dim", default=128)),
)


# Mixtures of experts

_MOE_KEYS = (
    *SHARED_KEYS,
    ROPE,
    *config_keys("mixtral"),
    config_key("feed_forward.capacity_factor", "expert_capacity_factor", default=None),
)
_MIXTRAL = replace_fields(
    _TEMPLATE,
    family="mixtral",
    feed_forward=Experts(
        num_experts=8, num_experts_per_token=2, intermediate_size=512, aux_loss_coef=0.001, aux_loss_scope="model"
    ),
)

MIXTRAL = replace(
    LLAMA,
    architectures=("MixtralForCausalLM",),
    template=_MIXTRAL,
    keys=(
        *_MOE_KEYS,
        supported_options(router_jitter_noise=(0.0,)),
        config_key("attention.sliding_window", "sliding_window", default=None),
    ),
    rules=name_rules("llama", "mixtral"),
)

QWEN3_MOE = replace(
    LLAMA,
    architectures=("Qwen3MoeForCausalLM",),
    template=replace_fields(_MIXTRAL, family="qwen3_moe", **{"attention.qk_norm": True}),
    keys=(
        *_MOE_KEYS,
        supported_options(decoder_sparse_step=(1,), mlp_only_layers=([], None)),
        _ATTENTION_BIAS,
        ConfigKeys(
            lambda config: {
                "attention.sliding_window": config.get("sliding_window") if config.get("use_sliding_window") else None
            },
            _write_window,
        ),
        *config_keys("qwen3_moe"),
    ),
    rules=name_rules("llama", "qwen3_moe"),
)


# Baichuan 2


def _read_positions(config: HFConfig) -> SpecValues:
    """Read the positions. Baichuan's code ignores settings of their base and scaling."""
    # The first Baichuan has the same class name.
    if config.get("vocab_size") == 64000:
        raise unsupported_option("vocab_size", 64000, "that of the first Baichuan, whose head differs")
    if "max_position_embeddings" in config:
        return {"position": RotaryPositions(), "max_position_embeddings": config["max_position_embeddings"] or 2048}
    return {"position": AlibiPositions(), "max_position_embeddings": config.get("model_max_length") or 4096}


def _write_positions(spec: ModelSpec) -> dict[str, Any]:
    names = ["model_max_length", *["max_position_embeddings"] * isinstance(spec.position, RotaryPositions)]
    return dict.fromkeys(names, spec.max_position_embeddings)


BAICHUAN2 = replace(
    LLAMA,
    architectures=("BaichuanForCausalLM",),
    model_type="baichuan",
    template=replace_fields(_TEMPLATE, family="baichuan2", norm=RmsNorm(eps=1e-6), normalize_lm_head=True),
    keys=(*SHARED_KEYS, ConfigKeys(_read_positions, _write_positions)),
    rules=name_rules("baichuan2"),
    equivalent="llama",
)
