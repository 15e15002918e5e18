"""BLOOM (Scao et al., 2022): layer norm also after the embedding, ALiBi, plain feed-forward, biases, tied head.

Hugging Face keeps q, k and v in one matrix, head by head.
"""

from __future__ import annotations

from torch import Tensor

from jingu.model.families.family import Family, key, only, sized, written
from jingu.model.families.names import Transform, rules
from jingu.model.spec import AlibiPositions, Attention, LayerNorm, ModelSpec, PlainFeedForward

_KEYS = (
    only(apply_residual_connection_post_layernorm=(False,)),
    key("vocabulary", "vocab_size"),
    key("width", "hidden_size", "n_embed"),
    key("layers", "n_layer", "num_hidden_layers"),
    # ALiBi sets no end; this is what they were trained with.
    key("context", "seq_length", default=2048),
    key("attention.heads", "n_head", "num_attention_heads"),
    key("norm.epsilon", "layer_norm_epsilon", default=1e-5),
    key("tied_embeddings", "tie_word_embeddings", default=True),
    key("initial_std", "initializer_range", default=0.02),
    written(hidden_dropout=0.0, attention_dropout=0.0, use_cache=True),
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


def _to_ours(theirs: Tensor, spec: ModelSpec) -> Tensor:
    heads = spec.attention
    return theirs.unflatten(0, (heads.heads, 3, heads.head_size)).transpose(0, 1).flatten(0, 2)


def _to_theirs(ours: Tensor, spec: ModelSpec) -> Tensor:
    heads = spec.attention
    return ours.unflatten(0, (3, heads.heads, heads.head_size)).transpose(0, 1).flatten(0, 2)


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
    architectures=("BloomForCausalLM",),
    template=_TEMPLATE,
    keys=_KEYS,
    rules=(*rules(_NAMES), *rules(_INTERLEAVED_NAMES, Transform(_to_ours, _to_theirs))),
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
