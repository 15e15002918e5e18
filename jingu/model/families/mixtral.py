"""Mixtral (Jiang et al., 2024) and Qwen3-MoE (Yang et al., 2025): Llama with a mixture of experts in every block.

On disk they keep each matrix of each expert by itself, with every release of transformers; its release 5 stacks them
when it loads. Qwen3-MoE also normalises queries and keys.
"""

from __future__ import annotations

from typing import Any

from jingu.model.families.family import Family, Keys, at, key, only, sized, written
from jingu.model.families.llama import ATTENTION_BIAS, LLAMA, SHARED_KEYS
from jingu.model.families.names import Rule, rule
from jingu.model.families.rope import ROPE
from jingu.model.spec import Experts, ModelSpec, RmsNorm, RotaryPositions, replaced

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


def _rules(block: str, **parts: str) -> tuple[Rule, ...]:
    """Llama's, with the experts (`gate`, `up`, `down`) in the place of its feed-forward."""
    ours, theirs = "blocks.{layer}.feed_forward", f"model.layers.{{layer}}.{block}"
    return (
        *(known for known in LLAMA.rules if "feed_forward." not in known.ours[0]),
        rule(f"{theirs}.gate.weight", f"{ours}.router.weight"),
        *(rule(f"{theirs}.experts.{{expert}}.{parts[p]}.weight", f"{ours}.{p}.weight") for p in parts),
    )


def _sized(template: ModelSpec, number: int, active: int, *sizes: int, balance: float, **changes: Any) -> ModelSpec:
    """A published model; `sizes` are layers, width, heads and the feed-forward of one expert."""
    experts = {"feed_forward.number": number, "feed_forward.active": active, "feed_forward.balance": balance}
    template = replaced(template, position=RotaryPositions(base=1e6), **experts)
    return sized(template, *sizes, **changes)


_EXPERTS = Experts(number=8, active=2, size=512, balance=0.001, balance_over="model")
_MIXTRAL = replaced(LLAMA.template, family="mixtral", feed_forward=_EXPERTS)
_QWEN3_MOE = replaced(_MIXTRAL, family="qwen3_moe", **{"attention.qk_norm": True})
_QWEN3: dict[str, Any] = {
    "kv_heads": 4,
    "head_size": 128,
    "vocabulary": 151936,
    "context": 40960,
    "norm": RmsNorm(epsilon=1e-6),
    "balance": 0.001,
}

MIXTRAL = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    template=_MIXTRAL,
    feed_forward_size=LLAMA.feed_forward_size,
    keys=(
        *_KEYS,
        only(router_jitter_noise=(0,)),
        key("attention.window", "sliding_window", default=None),
        written(model_type="mixtral", router_jitter_noise=0.0),
    ),
    rules=_rules("block_sparse_moe", gate="w1", up="w3", down="w2"),
    ignored=LLAMA.ignored,
    presets={
        "mixtral-8x7b": _sized(_MIXTRAL, 8, 2, 32, 4096, 32, 14336, balance=0.02, kv_heads=8, context=32768),
        "mixtral-8x22b": _sized(_MIXTRAL, 8, 2, 56, 6144, 48, 16384, balance=0.001, kv_heads=8, context=65536),
    },
)

QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    template=_QWEN3_MOE,
    feed_forward_size=LLAMA.feed_forward_size,
    keys=(
        *_KEYS,
        only(decoder_sparse_step=(1,), mlp_only_layers=(None, [])),
        ATTENTION_BIAS,
        Keys(
            lambda config, _: {
                "attention.window": config.get("sliding_window") if config.get("use_sliding_window") else None
            },
            lambda spec: {
                "use_sliding_window": spec.attention.window is not None,
                "sliding_window": spec.attention.window,
            },
        ),
        key("feed_forward.size", "moe_intermediate_size"),
        key("feed_forward.router.normalised", "norm_topk_prob", default=False),
        Keys(write=lambda spec: {"num_experts": at(spec, "feed_forward.number")}),
        written(model_type="qwen3_moe", decoder_sparse_step=1, mlp_only_layers=[]),
    ),
    rules=_rules("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    ignored=LLAMA.ignored,
    presets={
        "qwen3-30b-a3b": _sized(_QWEN3_MOE, 128, 8, 48, 2048, 32, 768, **_QWEN3),
        "qwen3-235b-a22b": _sized(_QWEN3_MOE, 128, 8, 94, 4096, 64, 1536, **_QWEN3),
    },
)
