"""GPT-2 (Radford et al., 2019): layer norm, learned positions, plain feed-forward, biases, tied head.

Hugging Face keeps its matrices input-first (Conv1D), and q, k, v in one.
"""

from __future__ import annotations

from typing import Any

from jingu.model.families.family import HF_ACTIVATIONS, Config, Family, activation, expect, required, sized
from jingu.model.families.names import TRANSPOSED, Rule, rule
from jingu.model.spec import Attention, LayerNorm, LearnedPositions, ModelSpec, PlainFeedForward


def _feed_forward_size(width: int) -> int:
    return 4 * width


def _spec_from_hf(config: Config) -> ModelSpec:
    expect(
        config,
        {
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "quantization_config": (None,),
        },
    )
    heads, width = required(config, "n_head"), required(config, "n_embd")
    return ModelSpec(
        family="gpt2",
        vocabulary=required(config, "vocab_size"),
        width=width,
        layers=required(config, "n_layer"),
        context=required(config, "n_positions"),
        norm=LayerNorm(epsilon=config.get("layer_norm_epsilon", 1e-5)),
        position=LearnedPositions(),
        attention=Attention(heads=heads, kv_heads=heads, head_size=width // heads, qkv_bias=True, output_bias=True),
        feed_forward=PlainFeedForward(
            size=config.get("n_inner") or _feed_forward_size(width),
            activation=activation(config, "activation_function", "gelu_new"),
            bias=True,
        ),
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        initial_std=config.get("initializer_range") or 0.02,
    )


def _hf_config(spec: ModelSpec) -> dict[str, Any]:
    heads = spec.attention
    return {
        "model_type": "gpt2",
        "vocab_size": spec.vocabulary,
        "n_positions": spec.context,
        "n_ctx": spec.context,
        "n_embd": spec.width,
        "n_layer": spec.layers,
        "n_head": heads.heads,
        "n_inner": spec.feed_forward.size,
        "activation_function": HF_ACTIVATIONS[spec.feed_forward.activation],
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "layer_norm_epsilon": spec.norm.epsilon,
        "initializer_range": spec.initial_std,
        "scale_attn_weights": True,
        "tie_word_embeddings": spec.tied_embeddings,
        "use_cache": True,
    }


def _pair(theirs: str, *ours: str) -> list[Rule]:
    """Weight and bias of a Conv1D."""
    return [
        rule(f"{theirs}.weight", *(f"{name}.weight" for name in ours), transform=TRANSPOSED),
        rule(f"{theirs}.bias", *(f"{name}.bias" for name in ours)),
    ]


_LAYER, _BLOCK = "transformer.h.{layer}.", "blocks.{layer}."

_TEMPLATE = ModelSpec(
    family="gpt2",
    vocabulary=50257,
    width=384,
    layers=6,
    context=1024,
    norm=LayerNorm(epsilon=1e-5),
    position=LearnedPositions(),
    attention=Attention(heads=6, kv_heads=6, head_size=64, qkv_bias=True, output_bias=True),
    feed_forward=PlainFeedForward(size=1536, activation="gelu_tanh", bias=True),
    tied_embeddings=True,
)

GPT2 = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    template=_TEMPLATE,
    feed_forward_size=_feed_forward_size,
    spec_from_hf=_spec_from_hf,
    hf_config=_hf_config,
    rules=(
        rule("transformer.wte.weight", "embedding.weight"),
        rule("transformer.wpe.weight", "positions.weight"),
        *(
            rule(f"{theirs}.{kind}", f"{ours}.{kind}")
            for theirs, ours in (
                (f"{_LAYER}ln_1", f"{_BLOCK}attention_norm"),
                (f"{_LAYER}ln_2", f"{_BLOCK}feed_forward_norm"),
                ("transformer.ln_f", "norm"),
            )
            for kind in ("weight", "bias")
        ),
        *_pair(f"{_LAYER}attn.c_attn", *(f"{_BLOCK}attention.{part}" for part in "qkv")),
        *_pair(f"{_LAYER}attn.c_proj", f"{_BLOCK}attention.output"),
        *_pair(f"{_LAYER}mlp.c_fc", f"{_BLOCK}feed_forward.up"),
        *_pair(f"{_LAYER}mlp.c_proj", f"{_BLOCK}feed_forward.down"),
        rule("lm_head.weight", "head.weight"),
    ),
    base="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
    presets={
        "gpt2": sized(_TEMPLATE, 12, 768, 12, 3072),
        "gpt2-medium": sized(_TEMPLATE, 24, 1024, 16, 4096),
        "gpt2-large": sized(_TEMPLATE, 36, 1280, 20, 5120),
        "gpt2-xl": sized(_TEMPLATE, 48, 1600, 25, 6400),
    },
)
