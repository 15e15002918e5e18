"""GPT-2 (Radford et al., 2019): layer norm, learned positions, plain feed-forward, biases, tied head.

In Hugging Face's files matrices are transposed ([inputs, outputs], Conv1D), and one matrix holds q, k and v.
"""

from __future__ import annotations

from jingu.model.families.family import (
    DERIVED,
    ConfigKeys,
    Family,
    activation_key,
    config_key,
    constant_keys,
    supported_options,
)
from jingu.model.families.name_map import TRANSPOSE, name_rules
from jingu.model.spec import AttentionSpec, LayerNorm, LearnedPositions, ModelSpec, PlainFeedForward

_KEYS = (
    supported_options(
        scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,)
    ),
    config_key("vocab_size", "vocab_size"),
    config_key("max_position_embeddings", "n_positions"),
    config_key("hidden_size", "n_embd"),
    config_key("num_layers", "n_layer"),
    config_key("attention.num_heads", "n_head"),
    config_key("feed_forward.intermediate_size", "n_inner", default=DERIVED),
    activation_key("activation_function", "gelu_new"),
    config_key("norm.eps", "layer_norm_epsilon", default=1e-5),
    config_key("tie_word_embeddings", "tie_word_embeddings", default=True),
    config_key("initializer_range", "initializer_range", default=0.02),
    ConfigKeys(write=lambda spec: {"n_ctx": spec.max_position_embeddings}),
    constant_keys(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=True),
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
    vocab_size=50257,
    hidden_size=384,
    num_layers=6,
    max_position_embeddings=1024,
    norm=LayerNorm(eps=1e-5),
    position=LearnedPositions(),
    attention=AttentionSpec(num_heads=6, num_kv_heads=6, head_dim=64, qkv_bias=True, output_bias=True),
    feed_forward=PlainFeedForward(intermediate_size=1536, activation="gelu_tanh", bias=True),
    tie_word_embeddings=True,
)

GPT2 = Family(
    architectures=("GPT2LMHeadModel",),
    template=_TEMPLATE,
    keys=_KEYS,
    rules=(*name_rules(_NAMES), *name_rules(_CONV_NAMES, TRANSPOSE)),
    base="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)
