"""T5 (Raffel et al., 2020): an encoder-decoder with relative position biases, unscaled attention scores and RMS norm.

Linear layers have no biases. Version 1.0 has a plain feed-forward, and a scaled head that is tied to the embedding.
Version 1.1 has a gated feed-forward and an untied head. mT5 (Xue et al., 2021) is version 1.1 with a multilingual
vocabulary.
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
    config_keys,
    field_value,
    load_template,
    parse_activation,
)
from jingu.model.families.name_map import name_rules
from jingu.model.feed_forward_specs import GatedFeedForward
from jingu.model.spec import ModelSpec, replace_fields

# Keys of T5 and of the models derived from it.
SHARED_KEYS = (
    *config_keys("t5"),
    ConfigKeys(write=lambda spec: {"tie_word_embeddings": spec.tie_word_embeddings}),
)


def _feed_forward_key(default: str) -> ConfigKeys:
    """Return the conversion of the key `feed_forward_proj`, which names type and activation of the feed-forward."""

    # In T5, `gated-gelu` means the tanh approximation of gelu.
    def read(config: HFConfig) -> SpecValues:
        name: str = config.get("feed_forward_proj") or default
        gated, function = name.startswith("gated-"), name.removeprefix("gated-")
        activation = "gelu_tanh" if name == "gated-gelu" else parse_activation("feed_forward_proj", function)
        return {"feed_forward.type": "gated" if gated else "plain", "feed_forward.activation": activation}

    def write(spec: ModelSpec) -> dict[str, Any]:
        function = HF_ACTIVATIONS[field_value(spec, "feed_forward.activation")]
        gated = "gated-gelu" if function == "gelu_new" else f"gated-{function}"
        return {"feed_forward_proj": gated if _is_gated(spec) else function}

    return ConfigKeys(read, write)


def _read_tie(config: HFConfig) -> SpecValues:
    """Read whether the head is tied and scaled: both or neither."""
    # Release 5 of transformers writes tie_word_embeddings=true for every model. There, scale_decoder_outputs tells
    # version 1.0, with a tied and scaled head, from version 1.1.
    scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True) is not False)
    return dict.fromkeys(("tie_word_embeddings", "scale_lm_head"), bool(scaled))


def _is_gated(spec: ModelSpec) -> bool:
    return isinstance(spec.feed_forward, GatedFeedForward)


V1_0 = load_template("t5")
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
        config_key("max_position_embeddings", "n_positions", default=V1_0.max_position_embeddings),
        ConfigKeys(_read_tie),
    ),
    rules=(
        *name_rules("t5"),
        *name_rules("t5", table="plain_names", when=lambda spec: not _is_gated(spec)),
        *name_rules("t5", table="gated_names", when=_is_gated),
    ),
    base="transformer.",
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
