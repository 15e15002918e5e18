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
SHARED = {"shared_expert_intermediate_size": 28}
STATE_CONFIGS: dict[str, Callable[[], Any]] = {
    "lfm2": lambda: config("Lfm2", **CONVOLUTIONS, conv_bias=True, block_auto_adjust_ff_dim=False),
    "lfm2-adjusted": lambda: config("Lfm2", **CONVOLUTIONS, block_multiple_of=8, block_ffn_dim_multiplier=1.5),
    "lfm2_moe": lambda: config("Lfm2Moe", **CONVOLUTIONS, **experts(), num_dense_layers=1, routed_scaling_factor=1.7),
    "lfm2_moe-plain": lambda: config("Lfm2Moe", **CONVOLUTIONS, **experts(), use_expert_bias=False),
    "qwen3_next": lambda: config("Qwen3Next", **DELTA, **experts(), **SHARED, mlp_only_layers=[1]),
    "qwen3_5_text": lambda: config("Qwen3_5Text", **DELTA),
    "qwen3_5_moe_text": lambda: config("Qwen3_5MoeText", **DELTA, **experts(), **SHARED),
}
