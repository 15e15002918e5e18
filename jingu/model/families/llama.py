"""Llama 1 to 3 (Touvron et al., 2023; Grattafiori et al., 2024): RMS norm, rotary positions, grouped heads, gated
feed-forward. Several families are this one with other habits, and share what is here."""

from __future__ import annotations

from typing import Any

from jingu.errors import JinguError
from jingu.model.families.family import FOLLOWS, Family, Keys, activation_key, key, sized, written
from jingu.model.families.names import rules
from jingu.model.families.rope import ROPE
from jingu.model.spec import Attention, GatedFeedForward, Llama3Scaling, ModelSpec, RmsNorm, RotaryPositions


def _feed_forward_size(width: int) -> int:
    """8/3 of the width, so that three matrices weigh as much as two of 4 times the width; a multiple of 64."""
    return -(-8 * width // (3 * 64)) * 64


def _divided_heads(spec: ModelSpec) -> dict[str, Any]:
    if spec.width % spec.attention.heads:
        raise JinguError(
            f"Hugging Face's Llama wants a width that {spec.attention.heads} heads divide; it is {spec.width}.",
            where="model.width",
        )
    return {}


SHARED_KEYS = (
    key("vocabulary", "vocab_size"),
    key("width", "hidden_size"),
    key("layers", "num_hidden_layers"),
    key("attention.heads", "num_attention_heads"),
    key("attention.kv_heads", "num_key_value_heads", default=FOLLOWS),
    key("attention.head_size", "head_dim", default=FOLLOWS),
    key("feed_forward.size", "intermediate_size"),
    activation_key("hidden_act", "silu"),
    key("norm.epsilon", "rms_norm_eps", default=1e-6),
    key("tied_embeddings", "tie_word_embeddings", default=False),
    key("initial_std", "initializer_range", default=0.02),
    written(attention_dropout=0.0, use_cache=True),
)
"""Of Llama and those after it, but for positions."""


ATTENTION_BIAS = Keys(
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
    vocabulary=32000,
    width=384,
    layers=6,
    context=2048,
    norm=RmsNorm(epsilon=1e-5),
    position=RotaryPositions(base=10000.0),
    attention=Attention(heads=6, kv_heads=6, head_size=64),
    feed_forward=GatedFeedForward(size=1024, activation="silu"),
    tied_embeddings=False,
)


def _llama3(factor: float) -> RotaryPositions:
    scaling = Llama3Scaling(factor=factor, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    return RotaryPositions(base=500000.0, scaling=scaling)


_V1: dict[str, Any] = {"context": 2048, "norm": RmsNorm(epsilon=1e-6)}
_V2: dict[str, Any] = {"context": 4096}
_V3: dict[str, Any] = {"kv_heads": 8, "vocabulary": 128256, "context": 8192, "position": RotaryPositions(base=500000.0)}
_V31: dict[str, Any] = {**_V3, "context": 131072, "position": _llama3(8.0)}
_V32: dict[str, Any] = {**_V31, "position": _llama3(32.0), "tied_embeddings": True}

LLAMA = Family(
    architectures=("LlamaForCausalLM",),
    template=_TEMPLATE,
    feed_forward_size=_feed_forward_size,
    keys=(
        *SHARED_KEYS,
        ROPE,
        ATTENTION_BIAS,
        key("feed_forward.bias", "mlp_bias", default=False),
        Keys(write=_divided_heads),
    ),
    rules=rules(NAMES),
    ignored=(".rotary_emb.inv_freq",),
    # Layers, width, heads, feed-forward.
    presets={
        "llama-7b": sized(_TEMPLATE, 32, 4096, 32, 11008, **_V1),
        "llama-13b": sized(_TEMPLATE, 40, 5120, 40, 13824, **_V1),
        "llama-33b": sized(_TEMPLATE, 60, 6656, 52, 17920, **_V1),
        "llama-65b": sized(_TEMPLATE, 80, 8192, 64, 22016, **_V1),
        "llama-2-7b": sized(_TEMPLATE, 32, 4096, 32, 11008, **_V2),
        "llama-2-13b": sized(_TEMPLATE, 40, 5120, 40, 13824, **_V2),
        "llama-2-70b": sized(_TEMPLATE, 80, 8192, 64, 28672, kv_heads=8, **_V2),
        "llama-3-8b": sized(_TEMPLATE, 32, 4096, 32, 14336, **_V3),
        "llama-3-70b": sized(_TEMPLATE, 80, 8192, 64, 28672, **_V3),
        "llama-3.1-8b": sized(_TEMPLATE, 32, 4096, 32, 14336, **_V31),
        "llama-3.1-70b": sized(_TEMPLATE, 80, 8192, 64, 28672, **_V31),
        "llama-3.1-405b": sized(_TEMPLATE, 126, 16384, 128, 53248, **_V31),
        "llama-3.2-1b": sized(_TEMPLATE, 16, 2048, 32, 8192, **_V32),
        "llama-3.2-3b": sized(_TEMPLATE, 28, 3072, 24, 8192, **_V32),
    },
)
