"""T5 (Raffel et al., 2020): an encoder-decoder with biases of relative positions, attention that is not scaled, RMS
norm and no biases. Version 1.0 has a plain feed-forward and ties the head, scaled, to the embedding; version 1.1 has a
gated one and a head of its own, and so have those after it, which share what is here."""

from __future__ import annotations

from typing import Any

from jingu.model.families.family import (
    HF_ACTIVATIONS,
    Config,
    Family,
    Keys,
    Values,
    activation,
    key,
    sized,
    written,
)
from jingu.model.families.names import rules
from jingu.model.spec import Attention, GatedFeedForward, ModelSpec, PlainFeedForward, RelativeBias, RmsNorm, replaced

CONTEXT = 512
"""Tokens of a source or a target in the published models' training; positions as such have no limit."""

SHARED_KEYS = (
    key("vocabulary", "vocab_size"),
    key("width", "d_model"),
    key("encoder_layers", "num_layers"),
    key("layers", "num_decoder_layers", "num_layers"),
    key("norm.epsilon", "layer_norm_epsilon", default=1e-6),
    key("position.buckets", "relative_attention_num_buckets", default=32),
    key("position.max_distance", "relative_attention_max_distance", default=128),
    key("attention.heads", "num_heads"),
    key("attention.head_size", "d_kv"),
    key("feed_forward.size", "d_ff"),
    key("initial_std", "initial_std", default=0.02),
    Keys(write=lambda spec: {"tie_word_embeddings": spec.tied_embeddings}),
    written(is_encoder_decoder=True, dropout_rate=0.0, use_cache=True),
)
"""Of T5 and those after it."""


def feed_forward_key(usual: str) -> Keys:
    """The key that names kind and activation; `usual` where a config has none."""

    # The gated kind has always called the approximation of gelu by gelu's name.
    def read(config: Config) -> Values:
        name: str = config.get("feed_forward_proj") or usual
        gated, function = name.startswith("gated-"), name.removeprefix("gated-")
        found = "gelu_tanh" if name == "gated-gelu" else activation("feed_forward_proj", function)
        return {"feed_forward.type": "gated" if gated else "plain", "feed_forward.activation": found}

    def write(spec: ModelSpec) -> dict[str, Any]:
        function = HF_ACTIVATIONS[spec.feed_forward.activation]
        gated = "gated-gelu" if function == "gelu_new" else f"gated-{function}"
        return {"feed_forward_proj": gated if _gated(spec) else function}

    return Keys(read, write)


def _tied(config: Config) -> Values:
    # Release 5 of transformers calls every head tied that it saves; whether it is scaled tells the versions apart.
    scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True) is not False)
    return dict.fromkeys(("tied_embeddings", "scaled_head"), bool(scaled))


def _gated(spec: ModelSpec) -> bool:
    return isinstance(spec.feed_forward, GatedFeedForward)


_NAMES = {
    "shared": "embedding",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias": "encoder.relative_bias",
    "encoder.block.*.layer.{0,1}.layer_norm": "encoder.blocks.*.{attention,feed_forward}_norm",
    "encoder.block.*.layer.0.SelfAttention.{q,k,v,o}": "encoder.blocks.*.attention.{q,k,v,output}",
    "encoder.block.*.layer.1.DenseReluDense.{wi_0,wo}": "encoder.blocks.*.feed_forward.{gate,down}",
    "encoder.final_layer_norm": "encoder.norm",
    "decoder.block.0.layer.0.SelfAttention.relative_attention_bias": "relative_bias",
    "decoder.block.*.layer.{0,1,2}.layer_norm": "blocks.*.{attention,cross_attention,feed_forward}_norm",
    "decoder.block.*.layer.0.SelfAttention.{q,k,v,o}": "blocks.*.attention.{q,k,v,output}",
    "decoder.block.*.layer.1.EncDecAttention.{q,k,v,o}": "blocks.*.cross_attention.{q,k,v,output}",
    "decoder.block.*.layer.2.DenseReluDense.{wi_0,wo}": "blocks.*.feed_forward.{gate,down}",
    "decoder.final_layer_norm": "norm",
    "lm_head": "head",
}
_PLAIN_NAMES = {
    "encoder.block.*.layer.1.DenseReluDense.wi": "encoder.blocks.*.feed_forward.up",
    "decoder.block.*.layer.2.DenseReluDense.wi": "blocks.*.feed_forward.up",
}
_GATED_NAMES = {f"{theirs}_1": ours for theirs, ours in _PLAIN_NAMES.items()}

V1_0 = ModelSpec(
    family="t5",
    vocabulary=32128,
    width=512,
    layers=6,
    encoder_layers=6,
    context=CONTEXT,
    norm=RmsNorm(epsilon=1e-6),
    position=RelativeBias(),
    attention=Attention(heads=8, kv_heads=8, head_size=64, scaled=False),
    feed_forward=PlainFeedForward(size=2048, activation="relu"),
    tied_embeddings=True,
    scaled_head=True,
)
V1_1 = replaced(
    V1_0,
    feed_forward=GatedFeedForward(size=1024, activation="gelu_tanh"),
    tied_embeddings=False,
    scaled_head=False,
)


def v1_1_presets(template: ModelSpec) -> dict[str, ModelSpec]:
    """The sizes of version 1.1: layers, width, heads, feed-forward."""
    return {
        "small": sized(template, 8, 512, 6, 1024, head_size=64),
        "base": sized(template, 12, 768, 12, 2048),
        "large": sized(template, 24, 1024, 16, 2816),
        "xl": sized(template, 24, 2048, 32, 5120),
        "xxl": sized(template, 24, 4096, 64, 10240),
    }


T5 = Family(
    architectures=("T5ForConditionalGeneration", "T5WithLMHeadModel"),
    template=V1_0,
    keys=(*SHARED_KEYS, feed_forward_key("relu"), key("context", "n_positions", default=CONTEXT), Keys(_tied)),
    rules=(
        *rules(_NAMES),
        *rules(_PLAIN_NAMES, when=lambda spec: not _gated(spec)),
        *rules(_GATED_NAMES, when=_gated),
    ),
    ignored=("coder.embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight"),
    # Flan-T5 has the dimensions of version 1.1.
    presets={
        "t5-small": sized(V1_0, 6, 512, 8, 2048),
        "t5-base": sized(V1_0, 12, 768, 12, 3072),
        "t5-large": sized(V1_0, 24, 1024, 16, 4096),
        "t5-3b": sized(V1_0, 24, 1024, 32, 16384, head_size=128),
        "t5-11b": sized(V1_0, 24, 1024, 128, 65536, head_size=128),
        **{f"t5-v1.1-{size}": spec for size, spec in v1_1_presets(V1_1).items()},
    },
)
