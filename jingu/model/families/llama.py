"""Llama and the families that share its shape: RMS norm, rotary positions, grouped heads, gated feed-forward.

- Llama 1 to 3 (Touvron et al., 2023; Grattafiori et al., 2024)
- Mistral (Jiang et al., 2023): with a sliding window
- Qwen2 and Qwen2.5 (Yang et al., 2024): with biases on queries, keys and values
- Qwen3 (Yang et al., 2025): with normalized queries and keys, and a head size that does not follow from the width
- Mixtral (Jiang et al., 2024) and Qwen3-MoE: with a mixture of experts in every block. Their files have a tensor for
  each matrix of each expert, whatever release of transformers wrote them.
- Baichuan 2 (Yang et al., 2023): with q, k and v in one matrix, and a head whose rows have length 1. The 13B model has
  ALiBi instead of rotary positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jingu.errors import JinguError
from jingu.model.families.family import (
    DERIVED,
    ConfigKeys,
    Family,
    HFConfig,
    SpecValues,
    activation_key,
    config_key,
    constant_keys,
    supported_options,
    unsupported_option,
)
from jingu.model.families.name_map import name_rules
from jingu.model.families.rope import ROPE
from jingu.model.spec import (
    AlibiPositions,
    AttentionSpec,
    Experts,
    GatedFeedForward,
    ModelSpec,
    RmsNorm,
    RotaryPositions,
    replace_fields,
)


def _feed_forward_size(width: int) -> int:
    """Return a multiple of 64 near 8/3 of the hidden size: three such matrices are as large as two of 4 times it."""
    return -(-8 * width // (3 * 64)) * 64


def _check_heads(spec: ModelSpec) -> dict[str, Any]:
    """Raise JinguError for a spec that Hugging Face's Llama cannot build; write no keys."""
    if spec.hidden_size % spec.attention.num_heads:
        raise JinguError(
            f"Hugging Face's Llama needs a hidden size that is a multiple of its {spec.attention.num_heads} heads, not "
            f"{spec.hidden_size}.",
            where="model.hidden_size",
        )
    return {}


# Keys that all families here share, except for positions.
SHARED_KEYS = (
    config_key("vocab_size", "vocab_size"),
    config_key("hidden_size", "hidden_size"),
    config_key("num_layers", "num_hidden_layers"),
    config_key("attention.num_heads", "num_attention_heads"),
    config_key("attention.num_kv_heads", "num_key_value_heads", default=DERIVED),
    config_key("attention.head_dim", "head_dim", default=DERIVED),
    config_key("feed_forward.intermediate_size", "intermediate_size"),
    activation_key("hidden_act", "silu"),
    config_key("norm.eps", "rms_norm_eps", default=1e-6),
    config_key("tie_word_embeddings", "tie_word_embeddings", default=False),
    config_key("initializer_range", "initializer_range", default=0.02),
    constant_keys(attention_dropout=0.0, use_cache=True),
)
_ATTENTION_BIAS = ConfigKeys(
    lambda config: dict.fromkeys(("attention.qkv_bias", "attention.output_bias"), bool(config.get("attention_bias"))),
    lambda spec: {"attention_bias": spec.attention.qkv_bias},
)
_NAMES = {
    "model.embed_tokens": "embedding",
    "model.layers.*.input_layernorm": "blocks.*.attention_norm",
    "model.layers.*.self_attn.{q,k,v,o}_proj": "blocks.*.attention.{q,k,v,output}",
    "model.layers.*.self_attn.{q,k}_norm": "blocks.*.attention.{q,k}_norm",
    "model.layers.*.post_attention_layernorm": "blocks.*.feed_forward_norm",
    "model.layers.*.mlp.{gate,up,down}_proj": "blocks.*.feed_forward.{gate,up,down}",
    "model.norm": "norm",
    "lm_head": "head",
}
_TEMPLATE = ModelSpec(
    family="llama",
    vocab_size=32000,
    hidden_size=384,
    num_layers=6,
    max_position_embeddings=2048,
    norm=RmsNorm(eps=1e-5),
    position=RotaryPositions(theta=10000.0),
    attention=AttentionSpec(num_heads=6, num_kv_heads=6, head_dim=64),
    feed_forward=GatedFeedForward(intermediate_size=1024),
)


LLAMA = Family(
    architectures=("LlamaForCausalLM",),
    template=_TEMPLATE,
    feed_forward_size=_feed_forward_size,
    keys=(
        *SHARED_KEYS,
        ROPE,
        _ATTENTION_BIAS,
        config_key("feed_forward.bias", "mlp_bias", default=False),
        ConfigKeys(write=_check_heads),
    ),
    rules=name_rules(_NAMES),
    ignored=(".rotary_emb.inv_freq",),
)


# Mistral

MISTRAL = replace(
    LLAMA,
    architectures=("MistralForCausalLM",),
    template=replace_fields(_TEMPLATE, family="mistral", **{"attention.sliding_window": 4096}),
    keys=(
        *SHARED_KEYS,
        ROPE,
        ConfigKeys(
            # A config with `null` has no window.
            lambda config: {"attention.sliding_window": config.get("sliding_window", 4096)},
            lambda spec: {"sliding_window": spec.attention.sliding_window},
        ),
    ),
)


# Qwen2 and Qwen3


def _read_window(config: HFConfig) -> SpecValues:
    """Read the sliding window of Qwen2 and Qwen3, which must be that of all layers or of none."""
    if not config.get("use_sliding_window"):
        return {"attention.sliding_window": None}
    layers = config.get("num_hidden_layers") or 0
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or ["sliding_attention" if i >= first else "full" for i in range(layers)]
    sliding = {kind == "sliding_attention" for kind in kinds}
    if len(sliding) > 1:
        raise unsupported_option("max_window_layers", first, "either all layers have the window, or none")
    return {"attention.sliding_window": config.get("sliding_window") if True in sliding else None}


def _write_window(spec: ModelSpec) -> dict[str, Any]:
    window = spec.attention.sliding_window
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": 0 if window else spec.num_layers,
    }


_WINDOW = ConfigKeys(_read_window, _write_window)
_QWEN = replace_fields(_TEMPLATE, norm=RmsNorm(eps=1e-6), position=RotaryPositions(theta=1e6))

QWEN2 = replace(
    LLAMA,
    architectures=("Qwen2ForCausalLM",),
    template=replace_fields(_QWEN, family="qwen2", **{"attention.qkv_bias": True}),
    keys=(*SHARED_KEYS, ROPE, _WINDOW),
)

QWEN3 = replace(
    LLAMA,
    architectures=("Qwen3ForCausalLM",),
    template=replace_fields(_QWEN, family="qwen3", **{"attention.qk_norm": True}),
    keys=(*SHARED_KEYS, ROPE, _ATTENTION_BIAS, _WINDOW, config_key("attention.head_dim", "head_dim", default=128)),
)


# Mixtures of experts

_MOE_KEYS = (
    *SHARED_KEYS,
    ROPE,
    # Release 5 of transformers uses this name in both families, earlier ones only in Mixtral.
    config_key("feed_forward.num_experts", "num_local_experts", "num_experts"),
    config_key("feed_forward.num_experts_per_token", "num_experts_per_tok"),
    config_key("feed_forward.aux_loss_coef", "router_aux_loss_coef", default=0.001),
    # transformers has no keys for these settings of training, and ignores ours.
    config_key("feed_forward.aux_loss_scope", "router_aux_loss_over", default="model"),
    config_key("feed_forward.z_loss_coef", "router_z_loss_coef", default=0.0),
    config_key("feed_forward.capacity_factor", "expert_capacity_factor", default=None),
    constant_keys(output_router_logits=False),
)
_MIXTRAL_NAMES = {
    "model.layers.*.block_sparse_moe.gate": "blocks.*.feed_forward.router",
    "model.layers.*.block_sparse_moe.experts.*.{w1,w3,w2}": "blocks.*.feed_forward.{gate,up,down}",
}
_QWEN3_MOE_NAMES = {
    "model.layers.*.mlp.gate": "blocks.*.feed_forward.router",
    "model.layers.*.mlp.experts.*.{gate,up,down}_proj": "blocks.*.feed_forward.{gate,up,down}",
}
_MIXTRAL = replace_fields(
    _TEMPLATE,
    family="mixtral",
    feed_forward=Experts(
        num_experts=8, num_experts_per_token=2, intermediate_size=512, aux_loss_coef=0.001, aux_loss_scope="model"
    ),
)

MIXTRAL = replace(
    LLAMA,
    architectures=("MixtralForCausalLM",),
    template=_MIXTRAL,
    keys=(
        *_MOE_KEYS,
        supported_options(router_jitter_noise=(0.0,)),
        config_key("attention.sliding_window", "sliding_window", default=None),
    ),
    rules=name_rules({**_NAMES, **_MIXTRAL_NAMES}),
)

QWEN3_MOE = replace(
    LLAMA,
    architectures=("Qwen3MoeForCausalLM",),
    template=replace_fields(_MIXTRAL, family="qwen3_moe", **{"attention.qk_norm": True}),
    keys=(
        *_MOE_KEYS,
        supported_options(decoder_sparse_step=(1,), mlp_only_layers=([], None)),
        _ATTENTION_BIAS,
        ConfigKeys(
            lambda config: {
                "attention.sliding_window": config.get("sliding_window") if config.get("use_sliding_window") else None
            },
            _write_window,
        ),
        config_key("feed_forward.intermediate_size", "moe_intermediate_size"),
        config_key("feed_forward.router.norm_topk_prob", "norm_topk_prob", default=False),
        config_key("feed_forward.num_experts", "num_experts", "num_local_experts"),
    ),
    rules=name_rules({**_NAMES, **_QWEN3_MOE_NAMES}),
)


# Baichuan 2


def _read_positions(config: HFConfig) -> SpecValues:
    """Read the positions: Baichuan's code has one base and no scaling, whatever the config says."""
    if config.get("vocab_size") == 64000:
        raise unsupported_option("vocab_size", 64000, "that of the first Baichuan, whose head differs")
    if "max_position_embeddings" in config:
        return {"position": RotaryPositions(), "max_position_embeddings": config["max_position_embeddings"] or 2048}
    return {"position": AlibiPositions(), "max_position_embeddings": config.get("model_max_length") or 4096}


def _write_positions(spec: ModelSpec) -> dict[str, Any]:
    names = ["model_max_length", *["max_position_embeddings"] * isinstance(spec.position, RotaryPositions)]
    return dict.fromkeys(names, spec.max_position_embeddings)


_BAICHUAN2_NAMES = {
    **{hf_name: jingu_name for hf_name, jingu_name in _NAMES.items() if "{q,k,v" not in jingu_name},
    "model.layers.*.self_attn.W_pack": "blocks.*.attention.{q,k,v}",
    "model.layers.*.self_attn.o_proj": "blocks.*.attention.output",
}

BAICHUAN2 = replace(
    LLAMA,
    architectures=("BaichuanForCausalLM",),
    model_type="baichuan",
    template=replace_fields(_TEMPLATE, family="baichuan2", norm=RmsNorm(eps=1e-6), normalize_lm_head=True),
    keys=(*SHARED_KEYS, ConfigKeys(_read_positions, _write_positions)),
    rules=name_rules(_BAICHUAN2_NAMES),
    equivalent="llama",
)
