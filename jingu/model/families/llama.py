"""Llama 1 to 3 (Touvron et al., 2023; Grattafiori et al., 2024): RMS norm, rotary positions, grouped heads, gated
feed-forward. Several families are this one with other habits, and share what is here."""

from __future__ import annotations

from typing import Any

from jingu.errors import JinguError
from jingu.model.families.family import (
    Config,
    Family,
    Keys,
    Values,
    activation_key,
    as_many_heads,
    key,
    only,
    shared_width,
    sized,
    written,
)
from jingu.model.families.names import rule
from jingu.model.families.rope import ROPE
from jingu.model.spec import Attention, GatedFeedForward, Llama3Scaling, ModelSpec, RmsNorm, RotaryPositions


def _feed_forward_size(width: int) -> int:
    """8/3 of the width, so that three matrices weigh as much as two of 4 times the width; a multiple of 64."""
    return -(-8 * width // (3 * 64)) * 64


def _divided_heads(spec: ModelSpec) -> Values:
    if spec.width % spec.attention.heads:
        raise JinguError(
            f"Hugging Face's Llama wants a width that {spec.attention.heads} heads divide; it is {spec.width}.",
            where="model.width",
        )
    return {}


SHARED_KEYS = (
    only(pretraining_tp=(1, None), quantization_config=(None,)),
    key("vocabulary", "vocab_size"),
    key("width", "hidden_size"),
    key("layers", "num_hidden_layers"),
    key("attention.heads", "num_attention_heads"),
    key("attention.kv_heads", "num_key_value_heads", default=as_many_heads),
    key("attention.head_size", "head_dim", default=shared_width),
    key("feed_forward.size", "intermediate_size"),
    activation_key("hidden_act", "silu"),
    key("norm.epsilon", "rms_norm_eps", default=1e-6),
    key("tied_embeddings", "tie_word_embeddings", default=False),
    key("initial_std", "initializer_range", default=0.02),
    written(attention_dropout=0.0, use_cache=True),
)
"""Of Llama and those after it, but for positions."""


def _biases(config: Config, _: Values) -> Values:
    return dict.fromkeys(("attention.qkv_bias", "attention.output_bias"), bool(config.get("attention_bias")))


ATTENTION_BIAS = Keys(_biases, lambda spec: {"attention_bias": spec.attention.qkv_bias})

_LAYER, _BLOCK = "model.layers.{layer}.", "blocks.{layer}."
_PARTS = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.output",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "post_attention_layernorm": "feed_forward_norm",
    "mlp.gate_proj": "feed_forward.gate",
    "mlp.up_proj": "feed_forward.up",
    "mlp.down_proj": "feed_forward.down",
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
    name="llama",
    architectures=("LlamaForCausalLM",),
    template=_TEMPLATE,
    feed_forward_size=_feed_forward_size,
    keys=(
        *SHARED_KEYS,
        ROPE,
        ATTENTION_BIAS,
        key("feed_forward.bias", "mlp_bias", default=False),
        Keys(write=_divided_heads),
        written(model_type="llama"),
    ),
    rules=(
        rule("model.embed_tokens.weight", "embedding.weight"),
        *(
            rule(f"{_LAYER}{theirs}.{kind}", f"{_BLOCK}{ours}.{kind}")
            for theirs, ours in _PARTS.items()
            for kind in ("weight", "bias")
        ),
        rule("model.norm.weight", "norm.weight"),
        rule("lm_head.weight", "head.weight"),
    ),
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
