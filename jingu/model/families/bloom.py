"""BLOOM (Scao et al., 2022): layer norm also after the embedding, ALiBi, plain feed-forward, biases, tied head.

Hugging Face keeps q, k and v in one matrix, head by head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from jingu.model.families.family import Config, Family, expect, required, sized
from jingu.model.families.names import SAME, Transform, rule
from jingu.model.spec import AlibiPositions, Attention, LayerNorm, ModelSpec, PlainFeedForward, replaced


def _feed_forward_size(width: int) -> int:
    return 4 * width


def _spec_from_hf(config: Config) -> ModelSpec:
    expect(config, {"apply_residual_connection_post_layernorm": (False,), "quantization_config": (None,)})
    heads, width = required(config, "n_head", "num_attention_heads"), required(config, "hidden_size", "n_embed")
    return replaced(
        _TEMPLATE,
        vocabulary=required(config, "vocab_size"),
        width=width,
        layers=required(config, "n_layer", "num_hidden_layers"),
        # ALiBi sets no end; this is what they were trained with.
        context=config.get("seq_length") or 2048,
        norm=LayerNorm(epsilon=config.get("layer_norm_epsilon", 1e-5)),
        attention=Attention(heads=heads, kv_heads=heads, head_size=width // heads, qkv_bias=True, output_bias=True),
        feed_forward=PlainFeedForward(size=_feed_forward_size(width), bias=True),
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        initial_std=config.get("initializer_range") or 0.02,
    )


def _hf_config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "model_type": "bloom",
        "vocab_size": spec.vocabulary,
        "hidden_size": spec.width,
        "n_layer": spec.layers,
        "n_head": spec.attention.heads,
        "seq_length": spec.context,
        "layer_norm_epsilon": spec.norm.epsilon,
        "initializer_range": spec.initial_std,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": spec.tied_embeddings,
        "use_cache": True,
    }


def _to_ours(theirs: Tensor, spec: ModelSpec) -> Tensor:
    heads = spec.attention
    return theirs.unflatten(0, (heads.heads, 3, heads.head_size)).transpose(0, 1).flatten(0, 2)


def _to_theirs(ours: Tensor, spec: ModelSpec) -> Tensor:
    heads = spec.attention
    return ours.unflatten(0, (3, heads.heads, heads.head_size)).transpose(0, 1).flatten(0, 2)


_LAYER, _BLOCK = "transformer.h.{layer}.", "blocks.{layer}."
_INTERLEAVED = Transform(_to_ours, _to_theirs)
_PARTS: dict[str, tuple[str, ...]] = {
    "transformer.word_embeddings": ("embedding",),
    "transformer.word_embeddings_layernorm": ("embedding_norm",),
    f"{_LAYER}input_layernorm": (f"{_BLOCK}attention_norm",),
    f"{_LAYER}self_attention.query_key_value": tuple(f"{_BLOCK}attention.{part}" for part in "qkv"),
    f"{_LAYER}self_attention.dense": (f"{_BLOCK}attention.output",),
    f"{_LAYER}post_attention_layernorm": (f"{_BLOCK}feed_forward_norm",),
    f"{_LAYER}mlp.dense_h_to_4h": (f"{_BLOCK}feed_forward.up",),
    f"{_LAYER}mlp.dense_4h_to_h": (f"{_BLOCK}feed_forward.down",),
    "transformer.ln_f": ("norm",),
    "lm_head": ("head",),
}
_TEMPLATE = ModelSpec(
    family="bloom",
    vocabulary=250880,
    width=384,
    layers=6,
    context=2048,
    norm=LayerNorm(epsilon=1e-5),
    position=AlibiPositions(),
    attention=Attention(heads=6, kv_heads=6, head_size=64, qkv_bias=True, output_bias=True),
    feed_forward=PlainFeedForward(size=1536, bias=True),
    tied_embeddings=True,
    embedding_norm=True,
)

BLOOM = Family(
    name="bloom",
    architectures=("BloomForCausalLM",),
    template=_TEMPLATE,
    feed_forward_size=_feed_forward_size,
    spec_from_hf=_spec_from_hf,
    hf_config=_hf_config,
    rules=tuple(
        rule(
            f"{theirs}.{kind}",
            *(f"{name}.{kind}" for name in ours),
            transform=_INTERLEAVED if len(ours) == 3 else SAME,
        )
        for theirs, ours in _PARTS.items()
        for kind in ("weight", "bias")
    ),
    base="transformer.",
    presets={
        name: sized(_TEMPLATE, layers, width, heads, 4 * width)
        for name, layers, width, heads in (
            ("bloom-560m", 24, 1024, 16),
            ("bloom-1b1", 24, 1536, 16),
            ("bloom-1b7", 24, 2048, 16),
            ("bloom-3b", 30, 2560, 32),
            ("bloom-7b1", 30, 4096, 32),
            ("bloom", 70, 14336, 112),
        )
    },
)
