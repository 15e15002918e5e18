"""ChatGLM2, ChatGLM3 and GLM-4 (Zeng et al., 2024).

They have interleaved rotary positions in half of each head, two key-value heads, and biases of q, k and v. In Hugging
Face's files one matrix holds q, k and v, and another one gate and up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jingu.model.families.family import (
    ConfigKeys,
    Family,
    HFConfig,
    SpecValues,
    config_keys,
    field_value,
    load_template,
    supported_options,
    unsupported_option,
)
from jingu.model.families.llama import SHARED_KEYS
from jingu.model.families.name_map import name_rules
from jingu.model.norm_specs import RmsNorm
from jingu.model.spec import ModelSpec, replace_fields


def _feed_forward_size(width: int) -> int:
    """Return 107/32 of the hidden size, as in the 6B model, rounded up to a multiple of 64."""
    return -(-107 * width // (32 * 64)) * 64


def _biases(config: HFConfig) -> SpecValues:
    """Read the biases: add_bias_linear means biases of all linear layers, add_qkv_bias only of q, k and v."""
    linear = bool(config.get("add_bias_linear"))
    qkv = linear or bool(config.get("add_qkv_bias"))
    return {"attention.qkv_bias": qkv, "attention.output_bias": linear, "feed_forward.bias": linear}


_THETA = 10000.0
_TEMPLATE = load_template("chatglm3")

CHATGLM3 = Family(
    architectures=("ChatGLMModel", "ChatGLMForConditionalGeneration"),
    model_type="chatglm",
    template=_TEMPLATE,
    feed_forward_size=_feed_forward_size,
    keys=(
        supported_options(
            multi_query_attention=(True,),
            rmsnorm=(True,),
            post_layer_norm=(True,),
            original_rope=(True,),
            apply_residual_connection_post_layernorm=(False,),
            pre_seq_len=(None, 0),
            quantization_bit=(0, None),
        ),
        *config_keys("chatglm3"),
        ConfigKeys(
            lambda config: {"position.theta": _THETA * (config.get("rope_ratio") or 1.0)},
            lambda spec: {"rope_ratio": field_value(spec, "position.theta") / _THETA},
        ),
        ConfigKeys(
            _biases,
            lambda spec: {
                "add_qkv_bias": spec.attention.qkv_bias,
                "add_bias_linear": field_value(spec, "feed_forward.bias"),
            },
        ),
        ConfigKeys(write=lambda spec: {"vocab_size": spec.vocab_size}),
    ),
    rules=name_rules("chatglm3"),
    base="transformer.",
    ignored=(".rotary_pos_emb.inv_freq",),
    equivalent="glm",
)


# GLM-4: the class of transformers for the same architecture


def _read_rope(config: HFConfig) -> SpecValues:
    rope = {"partial_rotary_factor": 0.5, **config, **(config.get("rope_parameters") or {})}
    nested = [name for name, value in (config.get("rope_parameters") or {}).items() if isinstance(value, Mapping)]
    if nested or rope.get("rope_scaling") or rope.get("rope_type", "default") != "default":
        raise unsupported_option("rope_parameters", config.get("rope_parameters"), "scaling is not supported")
    return {
        "position.theta": rope.get("rope_theta") or _THETA,
        "position.partial_rotary_factor": rope["partial_rotary_factor"],
    }


def _write_rope(spec: ModelSpec) -> dict[str, Any]:
    names = {"rope_theta": "position.theta", "partial_rotary_factor": "position.partial_rotary_factor"}
    rope = {name: field_value(spec, place) for name, place in names.items()}
    return {**rope, "rope_parameters": {"rope_type": "default", **rope}}


GLM = Family(
    architectures=("GlmForCausalLM",),
    template=replace_fields(_TEMPLATE, family="glm", norm=RmsNorm(eps=1.5625e-7), vocab_size=151552),
    feed_forward_size=_feed_forward_size,
    keys=(
        *SHARED_KEYS,
        *config_keys("glm"),
        ConfigKeys(_read_rope, _write_rope),
        # The default in transformers may be an id beyond the vocabulary.
        ConfigKeys(write=lambda spec: {"pad_token_id": None}),
    ),
    rules=name_rules("glm"),
    base="model.",
)
