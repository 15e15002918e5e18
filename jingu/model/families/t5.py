"""T5 (Raffel et al., 2020): an encoder-decoder with relative position biases, unscaled attention scores, RMS norm and
no biases in linear layers.

Version 1.0 has a plain feed-forward, and a scaled head that is tied to the embedding. Version 1.1 has a gated
feed-forward and an untied head. mT5 (Xue et al., 2021) is version 1.1 with a vocabulary for many languages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jingu.model.families.family import (
    HF_ACTIVATIONS,
    ConfigKeys,
    Family,
    HFConfig,
    SpecValues,
    config_key,
    constant_keys,
    parse_activation,
)
from jingu.model.families.name_map import name_rules
from jingu.model.spec import (
    AttentionSpec,
    GatedFeedForward,
    ModelSpec,
    PlainFeedForward,
    RelativeBias,
    RmsNorm,
    replace_fields,
)

# Tokens of a source or a target when the published models were trained; relative positions have no limit.
CONTEXT = 512

# Keys of T5 and of the models derived from it.
SHARED_KEYS = (
    config_key("vocab_size", "vocab_size"),
    config_key("hidden_size", "d_model"),
    config_key("num_encoder_layers", "num_layers"),
    config_key("num_layers", "num_decoder_layers", "num_layers"),
    config_key("norm.eps", "layer_norm_epsilon", default=1e-6),
    config_key("position.num_buckets", "relative_attention_num_buckets", default=32),
    config_key("position.max_distance", "relative_attention_max_distance", default=128),
    config_key("attention.num_heads", "num_heads"),
    config_key("attention.head_dim", "d_kv"),
    config_key("feed_forward.intermediate_size", "d_ff"),
    config_key("initializer_range", "initial_std", default=0.02),
    ConfigKeys(write=lambda spec: {"tie_word_embeddings": spec.tie_word_embeddings}),
    constant_keys(is_encoder_decoder=True, dropout_rate=0.0, use_cache=True),
)


def _feed_forward_key(default: str) -> ConfigKeys:
    """Return the key that names type and activation of the feed-forward."""

    # `gated-gelu` has always meant the tanh approximation of gelu.
    def read(config: HFConfig) -> SpecValues:
        name: str = config.get("feed_forward_proj") or default
        gated, function = name.startswith("gated-"), name.removeprefix("gated-")
        activation = "gelu_tanh" if name == "gated-gelu" else parse_activation("feed_forward_proj", function)
        return {"feed_forward.type": "gated" if gated else "plain", "feed_forward.activation": activation}

    def write(spec: ModelSpec) -> dict[str, Any]:
        function = HF_ACTIVATIONS[spec.feed_forward.activation]
        gated = "gated-gelu" if function == "gelu_new" else f"gated-{function}"
        return {"feed_forward_proj": gated if _gated(spec) else function}

    return ConfigKeys(read, write)


def _tied(config: HFConfig) -> SpecValues:
    # Release 5 of transformers writes tie_word_embeddings=true for every model; whether the head is scaled tells the
    # versions apart.
    scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True) is not False)
    return dict.fromkeys(("tie_word_embeddings", "scale_lm_head"), bool(scaled))


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
_GATED_NAMES = {f"{hf_name}_1": jingu_name for hf_name, jingu_name in _PLAIN_NAMES.items()}

V1_0 = ModelSpec(
    family="t5",
    vocab_size=32128,
    hidden_size=512,
    num_layers=6,
    num_encoder_layers=6,
    max_position_embeddings=CONTEXT,
    norm=RmsNorm(eps=1e-6),
    position=RelativeBias(),
    attention=AttentionSpec(num_heads=8, num_kv_heads=8, head_dim=64, scale_scores=False),
    feed_forward=PlainFeedForward(intermediate_size=2048, activation="relu"),
    tie_word_embeddings=True,
    scale_lm_head=True,
)
V1_1 = replace_fields(
    V1_0,
    feed_forward=GatedFeedForward(intermediate_size=1024, activation="gelu_tanh"),
    tie_word_embeddings=False,
    scale_lm_head=False,
)


T5 = Family(
    architectures=("T5ForConditionalGeneration", "T5WithLMHeadModel"),
    template=V1_0,
    keys=(
        *SHARED_KEYS,
        _feed_forward_key("relu"),
        config_key("max_position_embeddings", "n_positions", default=CONTEXT),
        ConfigKeys(_tied),
    ),
    rules=(
        *name_rules(_NAMES),
        *name_rules(_PLAIN_NAMES, when=lambda spec: not _gated(spec)),
        *name_rules(_GATED_NAMES, when=_gated),
    ),
    ignored=("coder.embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight"),
)

_MT5 = replace_fields(V1_1, family="mt5", vocab_size=250112, max_position_embeddings=1024)

MT5 = replace(
    T5,
    architectures=("MT5ForConditionalGeneration",),
    template=_MT5,
    keys=(
        *SHARED_KEYS,
        _feed_forward_key("gated-gelu"),
        config_key("max_position_embeddings", "n_positions", default=1024),
    ),
)
