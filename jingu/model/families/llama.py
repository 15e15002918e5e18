"""Llama 1 to 3 (Touvron et al., 2023; Grattafiori et al., 2024): RMS norm, rotary positions, grouped heads, gated
feed-forward. Several families are this one with other habits, and share what is here."""

from __future__ import annotations

from typing import Any

from jingu.errors import JinguError
from jingu.model.families.family import DERIVED, ConfigKeys, Family, activation_key, config_key, constant_keys, preset
from jingu.model.families.name_map import name_rules
from jingu.model.families.rope import ROPE
from jingu.model.spec import AttentionSpec, GatedFeedForward, Llama3Scaling, ModelSpec, RmsNorm, RotaryPositions


def _feed_forward_size(width: int) -> int:
    """8/3 of the width, so that three matrices weigh as much as two of 4 times the width; a multiple of 64."""
    return -(-8 * width // (3 * 64)) * 64


def _divided_heads(spec: ModelSpec) -> dict[str, Any]:
    if spec.hidden_size % spec.attention.num_heads:
        raise JinguError(
            f"Hugging Face's Llama wants a width that {spec.attention.num_heads} heads divide; it is "
            f"{spec.hidden_size}.",
            where="model.hidden_size",
        )
    return {}


# Of Llama and those after it, but for positions.
SHARED_KEYS = (
    config_key("vocab_size", "vocab_size"),
    config_key("hidden_size", "hidden_size"),
    config_key("num_layers", "num_hidden_layers"),
    config_key("attention.num_heads", "num_attention_heads"),
    config_key("attention.num_kv_heads", "num_key_value_heads", default=DERIVED),
    config_key("attention.head_dim", "head_dim", default=DERIVED),
    config_key("feed_forward.intermediate_size", "intermediate_size"),
    activation_key("hidden_act", "silu"),
    config_key("norm.eps", "rms_norm_eps", default=1e-6),
    config_key("tie_word_embeddings", "tie_word_embeddings", default=False),
    config_key("initializer_range", "initializer_range", default=0.02),
    constant_keys(attention_dropout=0.0, use_cache=True),
)


ATTENTION_BIAS = ConfigKeys(
    lambda config: dict.fromkeys(("attention.qkv_bias", "attention.output_bias"), bool(config.get("attention_bias"))),
    lambda spec: {"attention_bias": spec.attention.qkv_bias},
)
NAMES = {
    "model.embed_tokens": "embedding",
    "model.layers.*.input_layernorm": "blocks.*.attention_norm",
    "model.layers.*.self_attn.{q,k,v,o}_proj": "blocks.*.attention.{q,k,v,output}",
    "model.layers.*.self_attn.{q,k}_norm": "blocks.*.attention.{q,k}_norm",
    "model.layers.*.post_attention_layernorm": "blocks.*.feed_forward_norm",
    "model.layers.*.mlp.{gate,up,down}_proj": "blocks.*.feed_forward.{gate,up,down}",
    "model.norm": "norm",
    "lm_head": "head",
}

_TEMPLATE = ModelSpec(
    family="llama",
    vocab_size=32000,
    hidden_size=384,
    num_layers=6,
    max_position_embeddings=2048,
    norm=RmsNorm(eps=1e-5),
    position=RotaryPositions(theta=10000.0),
    attention=AttentionSpec(num_heads=6, num_kv_heads=6, head_dim=64),
    feed_forward=GatedFeedForward(intermediate_size=1024, activation="silu"),
    tie_word_embeddings=False,
)


def _llama3(factor: float) -> RotaryPositions:
    scaling = Llama3Scaling(
        factor=factor, original_max_position_embeddings=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    return RotaryPositions(theta=500000.0, scaling=scaling)


_V1: dict[str, Any] = {"max_position_embeddings": 2048, "norm": RmsNorm(eps=1e-6)}
_V2: dict[str, Any] = {"max_position_embeddings": 4096}
_V3: dict[str, Any] = {
    "num_kv_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "position": RotaryPositions(theta=500000.0),
}
_V31: dict[str, Any] = {**_V3, "max_position_embeddings": 131072, "position": _llama3(8.0)}
_V32: dict[str, Any] = {**_V31, "position": _llama3(32.0), "tie_word_embeddings": True}

LLAMA = Family(
    architectures=("LlamaForCausalLM",),
    template=_TEMPLATE,
    feed_forward_size=_feed_forward_size,
    keys=(
        *SHARED_KEYS,
        ROPE,
        ATTENTION_BIAS,
        config_key("feed_forward.bias", "mlp_bias", default=False),
        ConfigKeys(write=_divided_heads),
    ),
    rules=name_rules(NAMES),
    ignored=(".rotary_emb.inv_freq",),
    # Layers, width, heads, feed-forward.
    presets={
        "llama-7b": preset(_TEMPLATE, 32, 4096, 32, 11008, **_V1),
        "llama-13b": preset(_TEMPLATE, 40, 5120, 40, 13824, **_V1),
        "llama-33b": preset(_TEMPLATE, 60, 6656, 52, 17920, **_V1),
        "llama-65b": preset(_TEMPLATE, 80, 8192, 64, 22016, **_V1),
        "llama-2-7b": preset(_TEMPLATE, 32, 4096, 32, 11008, **_V2),
        "llama-2-13b": preset(_TEMPLATE, 40, 5120, 40, 13824, **_V2),
        "llama-2-70b": preset(_TEMPLATE, 80, 8192, 64, 28672, num_kv_heads=8, **_V2),
        "llama-3-8b": preset(_TEMPLATE, 32, 4096, 32, 14336, **_V3),
        "llama-3-70b": preset(_TEMPLATE, 80, 8192, 64, 28672, **_V3),
        "llama-3.1-8b": preset(_TEMPLATE, 32, 4096, 32, 14336, **_V31),
        "llama-3.1-70b": preset(_TEMPLATE, 80, 8192, 64, 28672, **_V31),
        "llama-3.1-405b": preset(_TEMPLATE, 126, 16384, 128, 53248, **_V31),
        "llama-3.2-1b": preset(_TEMPLATE, 16, 2048, 32, 8192, **_V32),
        "llama-3.2-3b": preset(_TEMPLATE, 28, 3072, 24, 8192, **_V32),
    },
)
