"""BLOOM (Scao et al., 2022): layer norm also after the embedding, ALiBi, plain feed-forward, biases, tied head.

Hugging Face keeps q, k and v in one matrix, head by head.
"""

from __future__ import annotations

from torch import Tensor

from jingu.model.families.family import Family, as_many_heads, four_widths, key, only, shared_width, sized, written
from jingu.model.families.names import SAME, Transform, rule
from jingu.model.spec import AlibiPositions, Attention, LayerNorm, ModelSpec, PlainFeedForward

_KEYS = (
    only(apply_residual_connection_post_layernorm=(False,), quantization_config=(None,)),
    key("vocabulary", "vocab_size"),
    key("width", "hidden_size", "n_embed"),
    key("layers", "n_layer", "num_hidden_layers"),
    # ALiBi sets no end; this is what they were trained with.
    key("context", "seq_length", default=2048),
    key("attention.heads", "n_head", "num_attention_heads"),
    key("attention.kv_heads", default=as_many_heads),
    key("attention.head_size", default=shared_width),
    key("feed_forward.size", default=lambda values: four_widths(values["width"])),
    key("norm.epsilon", "layer_norm_epsilon", default=1e-5),
    key("tied_embeddings", "tie_word_embeddings", default=True),
    key("initial_std", "initializer_range", default=0.02),
    written(
        model_type="bloom",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        apply_residual_connection_post_layernorm=False,
        use_cache=True,
    ),
)


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
    feed_forward_size=four_widths,
    keys=_KEYS,
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
