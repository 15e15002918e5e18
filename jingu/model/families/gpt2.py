"""GPT-2 (Radford et al., 2019): layer norm, learned positions, plain feed-forward, biases, tied head.

Hugging Face keeps its matrices input-first (Conv1D), and q, k, v in one.
"""

from __future__ import annotations

from jingu.model.families.family import FOLLOWS, Family, Keys, activation_key, key, only, sized, written
from jingu.model.families.names import TRANSPOSED, rules
from jingu.model.spec import Attention, LayerNorm, LearnedPositions, ModelSpec, PlainFeedForward

_KEYS = (
    only(scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,)),
    key("vocabulary", "vocab_size"),
    key("context", "n_positions"),
    key("width", "n_embd"),
    key("layers", "n_layer"),
    key("attention.heads", "n_head"),
    key("feed_forward.size", "n_inner", default=FOLLOWS),
    activation_key("activation_function", "gelu_new"),
    key("norm.epsilon", "layer_norm_epsilon", default=1e-5),
    key("tied_embeddings", "tie_word_embeddings", default=True),
    key("initial_std", "initializer_range", default=0.02),
    Keys(write=lambda spec: {"n_ctx": spec.context}),
    written(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=True),
)
_NAMES = {
    "transformer.wte": "embedding",
    "transformer.wpe": "positions",
    "transformer.h.*.ln_{1,2}": "blocks.*.{attention,feed_forward}_norm",
    "transformer.ln_f": "norm",
    "lm_head": "head",
}
_CONV_NAMES = {
    "transformer.h.*.attn.c_attn": "blocks.*.attention.{q,k,v}",
    "transformer.h.*.attn.c_proj": "blocks.*.attention.output",
    "transformer.h.*.mlp.c_{fc,proj}": "blocks.*.feed_forward.{up,down}",
}
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
    architectures=("GPT2LMHeadModel",),
    template=_TEMPLATE,
    keys=_KEYS,
    rules=(*rules(_NAMES), *rules(_CONV_NAMES, TRANSPOSED)),
    base="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
    presets={
        "gpt2": sized(_TEMPLATE, 12, 768, 12, 3072),
        "gpt2-medium": sized(_TEMPLATE, 24, 1024, 16, 4096),
        "gpt2-large": sized(_TEMPLATE, 36, 1280, 20, 5120),
        "gpt2-xl": sized(_TEMPLATE, 48, 1600, 25, 6400),
    },
)
