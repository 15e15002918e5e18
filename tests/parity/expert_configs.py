"""Tiny configs of transformers' families with experts or latent attention, with options that bite within 41 tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.parity.test_components import KINDS, LAYERS, config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 50.0}
MSCALES = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}
# transformers has the short factors beyond the original context, too.
LONG = {"rope_type": "longrope", "rope_theta": 50.0, "original_max_position_embeddings": 96}
LONG |= {"short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 3.8], "long_factor": [4.0] * 8}
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
}
GROUPS = {"n_group": 4, "topk_group": 2}
LATENT = {
    "num_key_value_heads": 3,
    "kv_lora_rank": 22,
    "q_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
}
SPARSE = ["dense", "sparse", "sparse", "dense", "sparse"]


def experts(number: int = 10, per_token: int = 3, size: str = "moe_intermediate_size") -> dict[str, Any]:
    return {"num_experts": number, "num_experts_per_tok": per_token, size: 20}


EXPERT_CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen2_moe": lambda: config(
        "Qwen2Moe", **experts(), shared_expert_intermediate_size=28, mlp_only_layers=[1, 3], norm_topk_prob=True
    ),
    "qwen2_moe-steps": lambda: config(
        "Qwen2Moe", **experts(), shared_expert_intermediate_size=28, decoder_sparse_step=2, qkv_bias=False
    ),
    "phimoe": lambda: config(
        "Phimoe",
        num_local_experts=6,
        num_experts_per_tok=2,
        # Half of the second choices have other experts close by.
        router_jitter_noise=0.3,
        intermediate_size=20,
        attention_bias=True,
        lm_head_bias=True,
        sliding_window=9,
        rope_parameters={**LONG, "short_mscale": 1.2, "long_mscale": 1.2},
    ),
    "phimoe-short": lambda: config(
        "Phimoe", num_local_experts=6, num_experts_per_tok=2, router_jitter_noise=0.1, intermediate_size=20, head_dim=20
    ),
    "olmoe": lambda: config("Olmoe", **experts(size="intermediate_size"), num_key_value_heads=3),
    "granitemoe": lambda: config(
        "GraniteMoe",
        num_local_experts=6,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        attention_multiplier=0.4,
        logits_scaling=2.5,
    ),
    "granitemoeshared": lambda: config("GraniteMoeShared", num_local_experts=6, shared_intermediate_size=28),
    "hunyuan_v1_moe": lambda: config("HunYuanMoEV1", num_experts=6, moe_topk=2, head_dim=16),
    "ernie4_5_moe": lambda: config(
        "Ernie4_5_Moe",
        moe_num_experts=10,
        moe_k=3,
        moe_intermediate_size=20,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_end_index=3,
    ),
    "glm4_moe": lambda: config("Glm4Moe", **DEEPSEEK, use_qk_norm=True, head_dim=16, first_k_dense_replace=2),
    "glm4_moe-bias": lambda: config("Glm4Moe", **DEEPSEEK, **GROUPS, attention_bias=True, head_dim=20),
    "dots1": lambda: config(
        "Dots1", **DEEPSEEK, first_k_dense_replace=1, routed_scaling_factor=1.7, sliding_window=7, layer_types=KINDS
    ),
    "solar_open": lambda: config("SolarOpen", **DEEPSEEK, head_dim=20, routed_scaling_factor=1.7),
    "exaone_moe": lambda: config(
        "ExaoneMoe",
        **experts(12),
        **GROUPS,
        num_shared_experts=1,
        sliding_window=7,
        layer_types=KINDS,
        mlp_layer_types=SPARSE,
    ),
    "hy_v3": lambda: config("HYV3", **experts(), num_shared_experts=1, head_dim=20, mlp_layer_types=SPARSE),
    "minimax_m2": lambda: config(
        "MiniMaxM2", num_local_experts=10, num_experts_per_tok=3, intermediate_size=20, head_dim=16, rotary_dim=8
    ),
    "afmoe": lambda: config(
        "Afmoe",
        **experts(),
        num_shared_experts=2,
        num_dense_layers=2,
        head_dim=20,
        sliding_window=7,
        layer_types=KINDS,
        route_scale=1.6,
        mup_enabled=True,
    ),
    "gpt_oss": lambda: config(
        "GptOss",
        num_local_experts=6,
        num_experts_per_tok=3,
        intermediate_size=20,
        head_dim=16,
        sliding_window=7,
        layer_types=KINDS,
        swiglu_limit=0.4,
        rope_parameters={**YARN, "truncate": False},
    ),
    "llama4_text": lambda: config(
        "Llama4Text",
        num_local_experts=6,
        num_experts_per_tok=2,
        intermediate_size=20,
        intermediate_size_mlp=28,
        head_dim=16,
        attention_chunk_size=9,
        moe_layers=[1, 2, 4],
        no_rope_layers=[1, 1, 0, 1, 0],
        floor_scale=8,
        attn_scale=0.3,
    ),
    "mimo_v2_flash": lambda: config(
        "MiMoV2Flash",
        **{key: value for key, value in DEEPSEEK.items() if key != "n_shared_experts"},
        num_attention_heads=4,
        head_dim=24,
        v_head_dim=14,
        sliding_window=7,
        layer_types=KINDS,
        mlp_layer_types=SPARSE,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.334},
        },
    ),
    "deepseek_v2": lambda: config(
        "DeepseekV2",
        **DEEPSEEK,
        **GROUPS,
        **LATENT,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.7,
        first_k_dense_replace=1,
        rope_parameters=MSCALES,
    ),
    "deepseek_v2-lite": lambda: config("DeepseekV2", **DEEPSEEK, **{**LATENT, "q_lora_rank": None}),
    "deepseek_v3": lambda: config(
        "DeepseekV3", **DEEPSEEK, **GROUPS, **LATENT, first_k_dense_replace=2, rope_parameters=MSCALES
    ),
    "deepseek_v3-bias": lambda: config(
        "DeepseekV3", **DEEPSEEK, **LATENT, n_group=1, topk_group=1, attention_bias=True, rope_interleave=False
    ),
    "glm4_moe_lite": lambda: config(
        "Glm4MoeLite", **DEEPSEEK, **{**LATENT, "v_head_dim": 20}, mlp_layer_types=SPARSE, routed_scaling_factor=1.8
    ),
    "mistral4": lambda: config(
        "Mistral4",
        **DEEPSEEK,
        **GROUPS,
        **LATENT,
        first_k_dense_replace=1,
        rope_parameters={**MSCALES, "type": "yarn", "llama_4_scaling_beta": 0.3},
    ),
}
assert len(SPARSE) == LAYERS
