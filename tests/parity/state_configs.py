"""Tiny configs of transformers' families with layers that keep a state, with awkward sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.parity.expert_configs import experts
from tests.parity.test_components import config

DELTA = {
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 3,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "head_dim": 24,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"], "conv_L_cache": 4}
LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"]
STATE_SPACE = {"mamba_n_heads": 6, "mamba_n_groups": 3, "mamba_d_state": 10, "mamba_d_conv": 3}
LIMITS = {"time_step_limit": (0.01, 0.9)}
GRANITE = {
    **STATE_SPACE,
    "layer_types": LAYERS,
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.7,
    "shared_intermediate_size": 28,
}
FALCON = {
    **STATE_SPACE,
    "mamba_d_ssm": 60,
    "attention_in_multiplier": 0.7,
    "key_multiplier": 1.9,
    "attention_out_multiplier": 0.6,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.8],
    "mlp_multipliers": [0.8, 1.4],
    "embedding_multiplier": 5.0,
    "lm_head_multiplier": 0.4,
}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 7,
    "n_groups": 3,
    "ssm_state_size": 10,
    "conv_kernel": 3,
    "head_dim": 12,
    "n_routed_experts": 10,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
    "routed_scaling_factor": 1.7,
}
LFM3 = {
    "layer_types": ["conv", "full_attention", "sliding_attention", "conv", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 700.0, "partial_rotary_factor": 0.25},
    },
    "sliding_window": 7,
    "head_dim": 22,
}
# transformers stores thirds of the convolutions of queries, keys and values, which have equal sizes here.
OLMO = {
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 3,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "layer_types": DELTA["layer_types"],
}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
GEMMA4 = {
    "layer_types": WINDOWS,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 700.0, "partial_rotary_factor": 0.25},
    },
    "sliding_window": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "global_head_dim": 22,
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
}
EQUAL = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
PARALLEL = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 20}
EACH = {"hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 317}
SHARING = {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "num_hidden_layers": 6}
SHARING |= {"layer_types": ["sliding_attention", "full_attention"] * 3}
UNIFIED = {key: value for key, value in GEMMA4.items() if key not in ("layer_types", "hidden_size_per_layer_input")}
SHARED = {"shared_expert_intermediate_size": 28}
STATE_CONFIGS: dict[str, Callable[[], Any]] = {
    "lfm2": lambda: config("Lfm2", **CONVOLUTIONS, conv_bias=True, block_auto_adjust_ff_dim=False),
    "lfm2-adjusted": lambda: config("Lfm2", **CONVOLUTIONS, block_multiple_of=8, block_ffn_dim_multiplier=1.5),
    "lfm2_moe": lambda: config("Lfm2Moe", **CONVOLUTIONS, **experts(), num_dense_layers=1, routed_scaling_factor=1.7),
    "lfm2_moe-plain": lambda: config("Lfm2Moe", **CONVOLUTIONS, **experts(), use_expert_bias=False),
    "qwen3_next": lambda: config("Qwen3Next", **DELTA, **experts(), **SHARED, mlp_only_layers=[1]),
    "qwen3_5_text": lambda: config("Qwen3_5Text", **DELTA),
    "qwen3_5_moe_text": lambda: config("Qwen3_5MoeText", **DELTA, **experts(), **SHARED),
    "granitemoehybrid": lambda: config("GraniteMoeHybrid", **GRANITE, num_local_experts=5, num_experts_per_tok=2),
    "granitemoehybrid-dense": lambda: config(
        "GraniteMoeHybrid", **GRANITE, **LIMITS, num_local_experts=0, position_embedding_type="rope"
    ),
    "falcon_h1": lambda: config("FalconH1", **FALCON, mamba_rms_norm=True, attention_bias=True, projectors_bias=True),
    "falcon_h1-plain": lambda: config("FalconH1", **{**FALCON, **LIMITS, "mamba_d_ssm": None}, mamba_proj_bias=True),
    "nemotron_h": lambda: config("NemotronH", **NEMOTRON, moe_latent_size=24, n_group=2, topk_group=1),
    "nemotron_h-dense": lambda: config(
        "NemotronH",
        **{**NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
        time_step_min=0.05,
    ),
    "mamba2": lambda: config(
        "Mamba2", num_heads=6, head_dim=16, n_groups=3, state_size=10, conv_kernel=3, use_bias=True
    ),
    "bamba": lambda: config("Bamba", **STATE_SPACE, **LIMITS, attn_layer_indices=[1, 4], mamba_proj_bias=True),
    "lfm3": lambda: config("Lfm3", **LFM3, conv_L_cache=5, conv_bias=True),
    "lfm3-plain": lambda: config("Lfm3", **LFM3, use_sandwich_norm=False, use_attention_gate=False),
    "olmo_hybrid": lambda: config("OlmoHybrid", **OLMO, rope_parameters={"rope_theta": None}),
    "olmo_hybrid-rope": lambda: config(
        "OlmoHybrid", **OLMO, rope_parameters={"rope_theta": 50.0}, linear_allow_neg_eigval=False
    ),
    "gemma4_text": lambda: config("Gemma4Text", **GEMMA4),
    "gemma4_text-equal": lambda: config("Gemma4Text", **GEMMA4, **EQUAL),
    "gemma4_text-experts": lambda: config("Gemma4Text", **GEMMA4, **PARALLEL),
    "gemma4_text-shared": lambda: config("Gemma4Text", **{**GEMMA4, **EACH, **SHARING}),
    "gemma4_unified_text": lambda: config("Gemma4UnifiedText", **UNIFIED, **EQUAL, **SHARING),
}
