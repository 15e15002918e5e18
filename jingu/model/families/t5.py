"""T5 (Raffel et al., 2020): an encoder-decoder with biases of relative positions, attention that is not scaled, RMS
norm and no biases. Version 1.0 has a plain feed-forward and ties the head, scaled, to the embedding; version 1.1 has a
gated one and a head of its own, and so have those after it, which share what is here."""

from __future__ import annotations

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
    preset,
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

# Tokens of a source or a target in the published models' training; positions as such have no limit.
CONTEXT = 512

# Of T5 and those after it.
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


def feed_forward_key(usual: str) -> ConfigKeys:
    """The key that names kind and activation; `usual` where a config has none."""

    # The gated kind has always called the approximation of gelu by gelu's name.
    def read(config: HFConfig) -> SpecValues:
        name: str = config.get("feed_forward_proj") or usual
        gated, function = name.startswith("gated-"), name.removeprefix("gated-")
        activation = "gelu_tanh" if name == "gated-gelu" else parse_activation("feed_forward_proj", function)
        return {"feed_forward.type": "gated" if gated else "plain", "feed_forward.activation": activation}

    def write(spec: ModelSpec) -> dict[str, Any]:
        function = HF_ACTIVATIONS[spec.feed_forward.activation]
        gated = "gated-gelu" if function == "gelu_new" else f"gated-{function}"
        return {"feed_forward_proj": gated if _gated(spec) else function}

    return ConfigKeys(read, write)


def _tied(config: HFConfig) -> SpecValues:
    # Release 5 of transformers calls every head tied that it saves; whether it is scaled tells the versions apart.
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


def v1_1_presets(template: ModelSpec) -> dict[str, ModelSpec]:
    """The sizes of version 1.1: layers, width, heads, feed-forward."""
    return {
        "small": preset(template, 8, 512, 6, 1024, head_dim=64),
        "base": preset(template, 12, 768, 12, 2048),
        "large": preset(template, 24, 1024, 16, 2816),
        "xl": preset(template, 24, 2048, 32, 5120),
        "xxl": preset(template, 24, 4096, 64, 10240),
    }


T5 = Family(
    architectures=("T5ForConditionalGeneration", "T5WithLMHeadModel"),
    template=V1_0,
    keys=(
        *SHARED_KEYS,
        feed_forward_key("relu"),
        config_key("max_position_embeddings", "n_positions", default=CONTEXT),
        ConfigKeys(_tied),
    ),
    rules=(
        *name_rules(_NAMES),
        *name_rules(_PLAIN_NAMES, when=lambda spec: not _gated(spec)),
        *name_rules(_GATED_NAMES, when=_gated),
    ),
    ignored=("coder.embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight"),
    # Flan-T5 has the dimensions of version 1.1.
    presets={
        "t5-small": preset(V1_0, 6, 512, 8, 2048),
        "t5-base": preset(V1_0, 12, 768, 12, 3072),
        "t5-large": preset(V1_0, 24, 1024, 16, 4096),
        "t5-3b": preset(V1_0, 24, 1024, 32, 16384, head_dim=128),
        "t5-11b": preset(V1_0, 24, 1024, 128, 65536, head_dim=128),
        **{f"t5-v1.1-{size}": spec for size, spec in v1_1_presets(V1_1).items()},
    },
)
