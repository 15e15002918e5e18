"""Mixtral (Jiang et al., 2024) and Qwen3-MoE (Yang et al., 2025): Llama with a mixture of experts in every block.

On disk they keep each matrix of each expert by itself, with every release of transformers; its release 5 stacks them
when it loads. Qwen3-MoE also normalises queries and keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jingu.model.families.family import ConfigKeys, config_key, constant_keys, preset, supported_options
from jingu.model.families.llama import ATTENTION_BIAS, LLAMA, NAMES, SHARED_KEYS
from jingu.model.families.name_map import name_rules
from jingu.model.families.qwen2 import WINDOW
from jingu.model.families.rope import ROPE
from jingu.model.spec import Experts, RmsNorm, RotaryPositions, replace_fields

_KEYS = (
    *SHARED_KEYS,
    ROPE,
    # Release 5 of transformers calls it so in both families, earlier ones only in Mixtral.
    config_key("feed_forward.num_experts", "num_local_experts", "num_experts"),
    config_key("feed_forward.num_experts_per_token", "num_experts_per_tok"),
    config_key("feed_forward.aux_loss_coef", "router_aux_loss_coef", default=0.001),
    # For what only training asks, transformers has no keys, and passes over ours.
    config_key("feed_forward.aux_loss_scope", "router_aux_loss_over", default="model"),
    config_key("feed_forward.z_loss_coef", "router_z_loss_coef", default=0.0),
    config_key("feed_forward.capacity_factor", "expert_capacity_factor", default=None),
    constant_keys(output_router_logits=False),
)
_MIXTRAL_NAMES = {
    **NAMES,
    "model.layers.*.block_sparse_moe.gate": "blocks.*.feed_forward.router",
    "model.layers.*.block_sparse_moe.experts.*.{w1,w3,w2}": "blocks.*.feed_forward.{gate,up,down}",
}
_QWEN3_NAMES = {
    **NAMES,
    "model.layers.*.mlp.gate": "blocks.*.feed_forward.router",
    "model.layers.*.mlp.experts.*.{gate,up,down}_proj": "blocks.*.feed_forward.{gate,up,down}",
}
_MIXTRAL = replace_fields(
    LLAMA.template,
    family="mixtral",
    feed_forward=Experts(
        num_experts=8, num_experts_per_token=2, intermediate_size=512, aux_loss_coef=0.001, aux_loss_scope="model"
    ),
)
_QWEN3_MOE = replace_fields(_MIXTRAL, family="qwen3_moe", **{"attention.qk_norm": True})
_8X: dict[str, Any] = {"num_kv_heads": 8, "position": RotaryPositions(theta=1e6)}
_A8: dict[str, Any] = {
    "num_kv_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "norm": RmsNorm(eps=1e-6),
    "position": RotaryPositions(theta=1e6),
    "feed_forward.num_experts": 128,
    "feed_forward.num_experts_per_token": 8,
}

MIXTRAL = replace(
    LLAMA,
    architectures=("MixtralForCausalLM",),
    template=_MIXTRAL,
    keys=(
        *_KEYS,
        supported_options(router_jitter_noise=(0.0,)),
        config_key("attention.sliding_window", "sliding_window", default=None),
    ),
    rules=name_rules(_MIXTRAL_NAMES),
    # Layers, width, heads, feed-forward of one expert.
    presets={
        "mixtral-8x7b": preset(
            _MIXTRAL, 32, 4096, 32, 14336, max_position_embeddings=32768, **{**_8X, "feed_forward.aux_loss_coef": 0.02}
        ),
        "mixtral-8x22b": preset(_MIXTRAL, 56, 6144, 48, 16384, max_position_embeddings=65536, **_8X),
    },
)

QWEN3_MOE = replace(
    LLAMA,
    architectures=("Qwen3MoeForCausalLM",),
    template=_QWEN3_MOE,
    keys=(
        *_KEYS,
        supported_options(decoder_sparse_step=(1,), mlp_only_layers=([], None)),
        ATTENTION_BIAS,
        ConfigKeys(
            lambda config: {
                "attention.sliding_window": config.get("sliding_window") if config.get("use_sliding_window") else None
            },
            WINDOW.write,
        ),
        config_key("feed_forward.intermediate_size", "moe_intermediate_size"),
        config_key("feed_forward.router.norm_topk_prob", "norm_topk_prob", default=False),
        config_key("feed_forward.num_experts", "num_experts", "num_local_experts"),
    ),
    rules=name_rules(_QWEN3_NAMES),
    presets={
        "qwen3-30b-a3b": preset(_QWEN3_MOE, 48, 2048, 32, 768, **_A8),
        "qwen3-235b-a22b": preset(_QWEN3_MOE, 94, 4096, 64, 1536, **_A8),
    },
)
