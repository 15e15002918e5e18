"""Mixtral (Jiang et al., 2024) and Qwen3-MoE (Yang et al., 2025): Llama with a mixture of experts in every block.

On disk they keep each matrix of each expert by itself, with every release of transformers; its release 5 stacks them
when it loads. Qwen3-MoE also normalises queries and keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jingu.model.families.family import Keys, key, only, sized, written
from jingu.model.families.llama import ATTENTION_BIAS, LLAMA, NAMES, SHARED_KEYS
from jingu.model.families.names import rules
from jingu.model.families.qwen2 import WINDOW
from jingu.model.families.rope import ROPE
from jingu.model.spec import Experts, RmsNorm, RotaryPositions, replaced

_KEYS = (
    *SHARED_KEYS,
    ROPE,
    # Release 5 of transformers calls it so in both families, earlier ones only in Mixtral.
    key("feed_forward.number", "num_local_experts", "num_experts"),
    key("feed_forward.active", "num_experts_per_tok"),
    key("feed_forward.balance", "router_aux_loss_coef", default=0.001),
    # For what only training asks, transformers has no keys, and passes over ours.
    key("feed_forward.balance_over", "router_aux_loss_over", default="model"),
    key("feed_forward.z", "router_z_loss_coef", default=0.0),
    key("feed_forward.capacity", "expert_capacity_factor", default=None),
    written(output_router_logits=False),
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
_MIXTRAL = replaced(
    LLAMA.template,
    family="mixtral",
    feed_forward=Experts(number=8, active=2, size=512, balance=0.001, balance_over="model"),
)
_QWEN3_MOE = replaced(_MIXTRAL, family="qwen3_moe", **{"attention.qk_norm": True})
_8X: dict[str, Any] = {"kv_heads": 8, "position": RotaryPositions(base=1e6)}
_A8: dict[str, Any] = {
    "kv_heads": 4,
    "head_size": 128,
    "vocabulary": 151936,
    "context": 40960,
    "norm": RmsNorm(epsilon=1e-6),
    "position": RotaryPositions(base=1e6),
    "feed_forward.number": 128,
    "feed_forward.active": 8,
}

MIXTRAL = replace(
    LLAMA,
    architectures=("MixtralForCausalLM",),
    template=_MIXTRAL,
    keys=(*_KEYS, only(router_jitter_noise=(0.0,)), key("attention.window", "sliding_window", default=None)),
    rules=rules(_MIXTRAL_NAMES),
    # Layers, width, heads, feed-forward of one expert.
    presets={
        "mixtral-8x7b": sized(_MIXTRAL, 32, 4096, 32, 14336, context=32768, **{**_8X, "feed_forward.balance": 0.02}),
        "mixtral-8x22b": sized(_MIXTRAL, 56, 6144, 48, 16384, context=65536, **_8X),
    },
)

QWEN3_MOE = replace(
    LLAMA,
    architectures=("Qwen3MoeForCausalLM",),
    template=_QWEN3_MOE,
    keys=(
        *_KEYS,
        only(decoder_sparse_step=(1,), mlp_only_layers=([], None)),
        ATTENTION_BIAS,
        Keys(
            lambda config: {
                "attention.window": config.get("sliding_window") if config.get("use_sliding_window") else None
            },
            WINDOW.write,
        ),
        key("feed_forward.size", "moe_intermediate_size"),
        key("feed_forward.router.normalised", "norm_topk_prob", default=False),
        key("feed_forward.number", "num_experts", "num_local_experts"),
    ),
    rules=rules(_QWEN3_NAMES),
    presets={
        "qwen3-30b-a3b": sized(_QWEN3_MOE, 48, 2048, 32, 768, **_A8),
        "qwen3-235b-a22b": sized(_QWEN3_MOE, 94, 4096, 64, 1536, **_A8),
    },
)
