"""GPT-2 (Radford et al., 2019): layer norm, learned positions, plain feed-forward, biases, tied head.

Hugging Face keeps its matrices input-first (Conv1D), and q, k, v in one.
"""

from __future__ import annotations

from jingu.model.families.family import (
    Family,
    Keys,
    activation_key,
    as_many_heads,
    four_widths,
    key,
    only,
    shared_width,
    sized,
    written,
)
from jingu.model.families.names import TRANSPOSED, Rule, rule
from jingu.model.spec import Attention, LayerNorm, LearnedPositions, ModelSpec, PlainFeedForward

_KEYS = (
    only(
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
        add_cross_attention=(False,),
        quantization_config=(None,),
    ),
    key("vocabulary", "vocab_size"),
    key("context", "n_positions"),
    key("width", "n_embd"),
    key("layers", "n_layer"),
    key("attention.heads", "n_head"),
    key("attention.kv_heads", default=as_many_heads),
    key("attention.head_size", default=shared_width),
    key("feed_forward.size", "n_inner", default=lambda values: four_widths(values["width"])),
    activation_key("activation_function", "gelu_new"),
    key("norm.epsilon", "layer_norm_epsilon", default=1e-5),
    key("tied_embeddings", "tie_word_embeddings", default=True),
    key("initial_std", "initializer_range", default=0.02),
    Keys(write=lambda spec: {"n_ctx": spec.context}),
    written(
        model_type="gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, scale_attn_weights=True, use_cache=True
    ),
)


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
    feed_forward_size=four_widths,
    keys=_KEYS,
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
