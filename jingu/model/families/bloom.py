"""BLOOM (Scao et al., 2022): layer norm also after the embedding, ALiBi, plain feed-forward, biases, tied head.

In Hugging Face's files one matrix holds q, k and v, head by head.
"""

from __future__ import annotations

from torch import Tensor

from jingu.model.families.family import Family, config_key, constant_keys, supported_options
from jingu.model.families.name_map import Transform, name_rules
from jingu.model.spec import AlibiPositions, AttentionSpec, LayerNorm, ModelSpec, PlainFeedForward

_KEYS = (
    supported_options(apply_residual_connection_post_layernorm=(False,)),
    config_key("vocab_size", "vocab_size"),
    config_key("hidden_size", "hidden_size", "n_embed"),
    config_key("num_layers", "n_layer", "num_hidden_layers"),
    # ALiBi has no limit; the models were trained with this length.
    config_key("max_position_embeddings", "seq_length", default=2048),
    config_key("attention.num_heads", "n_head", "num_attention_heads"),
    config_key("norm.eps", "layer_norm_epsilon", default=1e-5),
    config_key("tie_word_embeddings", "tie_word_embeddings", default=True),
    config_key("initializer_range", "initializer_range", default=0.02),
    constant_keys(hidden_dropout=0.0, attention_dropout=0.0, use_cache=True),
)
_NAMES = {
    "transformer.word_embeddings": "embedding",
    "transformer.word_embeddings_layernorm": "embedding_norm",
    "transformer.h.*.{input,post_attention}_layernorm": "blocks.*.{attention,feed_forward}_norm",
    "transformer.h.*.self_attention.dense": "blocks.*.attention.output",
    "transformer.h.*.mlp.dense_{h_to_4h,4h_to_h}": "blocks.*.feed_forward.{up,down}",
    "transformer.ln_f": "norm",
    "lm_head": "head",
}
_INTERLEAVED_NAMES = {"transformer.h.*.self_attention.query_key_value": "blocks.*.attention.{q,k,v}"}


def _to_jingu(tensor: Tensor, spec: ModelSpec) -> Tensor:
    heads = spec.attention
    return tensor.unflatten(0, (heads.num_heads, 3, heads.head_dim)).transpose(0, 1).flatten(0, 2)


def _to_hf(tensor: Tensor, spec: ModelSpec) -> Tensor:
    heads = spec.attention
    return tensor.unflatten(0, (3, heads.num_heads, heads.head_dim)).transpose(0, 1).flatten(0, 2)


_TEMPLATE = ModelSpec(
    family="bloom",
    vocab_size=250880,
    hidden_size=384,
    num_layers=6,
    max_position_embeddings=2048,
    norm=LayerNorm(eps=1e-5),
    position=AlibiPositions(),
    attention=AttentionSpec(num_heads=6, num_kv_heads=6, head_dim=64, qkv_bias=True, output_bias=True),
    feed_forward=PlainFeedForward(intermediate_size=1536, bias=True),
    tie_word_embeddings=True,
    embedding_norm=True,
)

BLOOM = Family(
    architectures=("BloomForCausalLM",),
    template=_TEMPLATE,
    keys=_KEYS,
    rules=(*name_rules(_NAMES), *name_rules(_INTERLEAVED_NAMES, Transform(_to_jingu, _to_hf))),
    base="transformer.",
)
