"""ChatGLM2 and ChatGLM3 (Zeng et al., 2024).

Interleaved rotary positions in half of each head, two key-value heads, biases on q, k and v. One matrix holds q, k and
v, another one gate and up.
"""

from __future__ import annotations

from typing import Any

from jingu.model.families.family import (
    DERIVED,
    ConfigKeys,
    Family,
    HFConfig,
    SpecValues,
    config_key,
    constant_keys,
    field_value,
    supported_options,
    unsupported_option,
)
from jingu.model.families.llama import SHARED_KEYS
from jingu.model.families.name_map import name_rules
from jingu.model.spec import AttentionSpec, GatedFeedForward, ModelSpec, RmsNorm, RotaryPositions, replace_fields


def _feed_forward_size(width: int) -> int:
    """Return 107/32 of the hidden size, as in the 6B model, rounded up to a multiple of 64."""
    return -(-107 * width // (32 * 64)) * 64


def _biases(config: HFConfig) -> SpecValues:
    linear = bool(config.get("add_bias_linear"))
    qkv = linear or bool(config.get("add_qkv_bias"))
    return {"attention.qkv_bias": qkv, "attention.output_bias": linear, "feed_forward.bias": linear}


_KEYS = (
    supported_options(
        multi_query_attention=(True,),
        rmsnorm=(True,),
        post_layer_norm=(True,),
        original_rope=(True,),
        apply_residual_connection_post_layernorm=(False,),
        pre_seq_len=(None, 0),
        quantization_bit=(0, None),
    ),
    config_key("vocab_size", "padded_vocab_size"),
    config_key("hidden_size", "hidden_size"),
    config_key("num_layers", "num_layers"),
    config_key("max_position_embeddings", "seq_length"),
    config_key("norm.eps", "layernorm_epsilon", default=1e-5),
    ConfigKeys(
        lambda config: {"position.theta": 10000.0 * (config.get("rope_ratio") or 1.0)},
        lambda spec: {"rope_ratio": field_value(spec, "position.theta") / 10000.0},
    ),
    config_key("attention.num_heads", "num_attention_heads"),
    config_key("attention.num_kv_heads", "multi_query_group_num"),
    config_key("attention.head_dim", "kv_channels", default=DERIVED),
    config_key("feed_forward.intermediate_size", "ffn_hidden_size"),
    ConfigKeys(
        _biases, lambda spec: {"add_qkv_bias": spec.attention.qkv_bias, "add_bias_linear": spec.feed_forward.bias}
    ),
    config_key("tie_word_embeddings", "tie_word_embeddings", default=False),
    config_key("initializer_range", "initializer_range", default=0.02),
    ConfigKeys(write=lambda spec: {"vocab_size": spec.vocab_size}),
    constant_keys(attention_dropout=0.0, hidden_dropout=0.0, use_cache=True),
)
_NAMES = {
    "transformer.embedding.word_embeddings": "embedding",
    "transformer.encoder.layers.*.{input,post_attention}_layernorm": "blocks.*.{attention,feed_forward}_norm",
    "transformer.encoder.layers.*.self_attention.query_key_value": "blocks.*.attention.{q,k,v}",
    "transformer.encoder.layers.*.self_attention.dense": "blocks.*.attention.output",
    "transformer.encoder.layers.*.mlp.dense_h_to_4h": "blocks.*.feed_forward.{gate,up}",
    "transformer.encoder.layers.*.mlp.dense_4h_to_h": "blocks.*.feed_forward.down",
    "transformer.encoder.final_layernorm": "norm",
    "transformer.output_layer": "head",
}
_TEMPLATE = ModelSpec(
    family="chatglm3",
    vocab_size=65024,
    hidden_size=384,
    num_layers=6,
    max_position_embeddings=8192,
    norm=RmsNorm(eps=1e-5),
    position=RotaryPositions(theta=10000.0, partial_rotary_factor=0.5, interleaved=True),
    attention=AttentionSpec(num_heads=6, num_kv_heads=6, head_dim=64, qkv_bias=True),
    feed_forward=GatedFeedForward(intermediate_size=1344),
)

CHATGLM3 = Family(
    architectures=("ChatGLMModel", "ChatGLMForConditionalGeneration"),
    model_type="chatglm",
    template=_TEMPLATE,
    feed_forward_size=_feed_forward_size,
    keys=_KEYS,
    rules=name_rules(_NAMES),
    base="transformer.",
    ignored=(".rotary_pos_emb.inv_freq",),
    equivalent="glm",
)


# GLM-4: transformers' own class for the same architecture


def _read_rope(config: HFConfig) -> SpecValues:
    rope = {"partial_rotary_factor": 0.5, **config, **(config.get("rope_parameters") or {})}
    if rope.get("rope_scaling") or rope.get("rope_type", "default") != "default":
        raise unsupported_option("rope_parameters", config.get("rope_parameters"), "scaling is not supported")
    return {
        "position.theta": rope.get("rope_theta") or 10000.0,
        "position.partial_rotary_factor": rope["partial_rotary_factor"],
    }


def _write_rope(spec: ModelSpec) -> dict[str, Any]:
    values = {name: field_value(spec, f"position.{name}") for name in ("theta", "partial_rotary_factor")}
    rope = {"rope_theta": values["theta"], "partial_rotary_factor": values["partial_rotary_factor"]}
    return {**rope, "rope_parameters": {"rope_type": "default", **rope}}


_GLM_NAMES = {
    "model.embed_tokens": "embedding",
    "model.layers.*.{input,post_attention}_layernorm": "blocks.*.{attention,feed_forward}_norm",
    "model.layers.*.self_attn.{q,k,v,o}_proj": "blocks.*.attention.{q,k,v,output}",
    "model.layers.*.mlp.gate_up_proj": "blocks.*.feed_forward.{gate,up}",
    "model.layers.*.mlp.down_proj": "blocks.*.feed_forward.down",
    "model.norm": "norm",
    "lm_head": "head",
}

GLM = Family(
    architectures=("GlmForCausalLM",),
    template=replace_fields(_TEMPLATE, family="glm", norm=RmsNorm(eps=1.5625e-7), vocab_size=151552),
    feed_forward_size=_feed_forward_size,
    keys=(
        *SHARED_KEYS,
        config_key("max_position_embeddings", "max_position_embeddings"),
        config_key("attention.qkv_bias", "attention_bias", default=True),
        ConfigKeys(_read_rope, _write_rope),
        # Its default in transformers may be beyond the vocabulary.
        constant_keys(pad_token_id=None),
    ),
    rules=name_rules(_GLM_NAMES),
)
