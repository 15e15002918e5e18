"""Mixtral (Jiang et al., 2024) and Qwen3-MoE (Yang et al., 2025): Llama with a mixture of experts in every block.

On disk they keep each matrix of each expert by itself, with every release of transformers; its release 5 stacks them
when it loads. Qwen3-MoE also normalises queries and keys.
"""

from __future__ import annotations

from typing import Any

from jingu.errors import JinguError
from jingu.model.families.family import Config, Family, expect, required, sized
from jingu.model.families.llama import LLAMA, llama_config, llama_spec
from jingu.model.families.names import Rule, rule
from jingu.model.spec import Experts, ModelSpec, RmsNorm, RotaryPositions, TopK, replaced


def _rules(block: str, **parts: str) -> tuple[Rule, ...]:
    """Llama's, with the experts (`gate`, `up`, `down`) in the place of its feed-forward."""
    ours, theirs = "blocks.{layer}.feed_forward", f"model.layers.{{layer}}.{block}"
    return (
        *(known for known in LLAMA.rules if "feed_forward." not in known.ours[0]),
        rule(f"{theirs}.gate.weight", f"{ours}.router.weight"),
        *(rule(f"{theirs}.experts.{{expert}}.{parts[p]}.weight", f"{ours}.{p}.weight") for p in parts),
    )


def _experts(spec: ModelSpec, config: Config, size: str, *, normalised: bool) -> Experts:
    return Experts(
        # Release 5 of transformers calls it so in both families, earlier ones only in Mixtral.
        number=config.get("num_experts") or required(config, "num_local_experts"),
        active=required(config, "num_experts_per_tok"),
        size=required(config, size),
        activation=spec.feed_forward.activation,
        router=TopK(normalised=normalised),
        balance=config.get("router_aux_loss_coef", 0.001) or 0.0,
        balance_over=config.get("router_aux_loss_over", "model"),
        z=config.get("router_z_loss_coef", 0.0),
        capacity=config.get("expert_capacity_factor"),
    )


def _config(spec: ModelSpec, model_type: str, **more: Any) -> dict[str, Any]:
    """The keys of both. For what only training asks, transformers has none and passes over ours."""
    experts = spec.feed_forward
    assert isinstance(experts, Experts)
    lacking = {
        f"the router {experts.router.type}": not isinstance(experts.router, TopK),
        "shared experts": experts.shared is not None,
        "experts without a gate": not experts.gated,
    }
    if any(lacking.values()):
        raise JinguError(
            f"Hugging Face's {model_type} has not {' or '.join(name for name, true in lacking.items() if true)}.",
            where="model.experts",
            fix="Such a model is used as a run; it cannot be exported.",
        )
    return llama_config(
        spec,
        model_type,
        num_local_experts=experts.number,
        num_experts_per_tok=experts.active,
        router_aux_loss_coef=experts.balance,
        router_aux_loss_over=experts.balance_over,
        router_z_loss_coef=experts.z,
        expert_capacity_factor=experts.capacity,
        output_router_logits=False,
        sliding_window=spec.attention.window,
        **more,
    )


def _probabilities_sum_to_one(spec: ModelSpec) -> bool:
    router = spec.feed_forward.router if isinstance(spec.feed_forward, Experts) else None
    return isinstance(router, TopK) and (router.normalised or router.softmax == "after")


def _mixtral_spec(config: Config) -> ModelSpec:
    expect(config, {"router_jitter_noise": (0, 0.0)})
    spec = llama_spec(config, "mixtral", window=config.get("sliding_window"))
    experts = _experts(spec, config, "intermediate_size", normalised=True)
    return replaced(spec, feed_forward=experts)


def _mixtral_config(spec: ModelSpec) -> dict[str, Any]:
    config = _config(spec, "mixtral", router_jitter_noise=0.0)
    if not _probabilities_sum_to_one(spec):
        raise JinguError("Mixtral's weights of the chosen experts sum to one.", where="model.experts")
    return config


def _qwen3_moe_spec(config: Config) -> ModelSpec:
    only_experts: dict[str, tuple[Any, ...]] = {"decoder_sparse_step": (1,), "mlp_only_layers": (None, [])}
    expect(config, only_experts)
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    bias = bool(config.get("attention_bias", False))
    spec = llama_spec(config, "qwen3_moe", qkv_bias=bias, output_bias=bias, qk_norm=True, window=window)
    normalised = bool(config.get("norm_topk_prob", False))
    return replaced(spec, feed_forward=_experts(spec, config, "moe_intermediate_size", normalised=normalised))


def _qwen3_moe_config(spec: ModelSpec) -> dict[str, Any]:
    return _config(
        spec,
        "qwen3_moe",
        num_experts=spec.feed_forward.number if isinstance(spec.feed_forward, Experts) else None,
        moe_intermediate_size=spec.feed_forward.size,
        norm_topk_prob=_probabilities_sum_to_one(spec),
        attention_bias=spec.attention.qkv_bias,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        use_sliding_window=spec.attention.window is not None,
    )


def _template(family: str, **attention: Any) -> ModelSpec:
    llama = LLAMA.template
    experts = Experts(number=8, active=2, size=512, balance=0.001, balance_over="model")
    return replaced(llama, family=family, attention=llama.attention.model_copy(update=attention), feed_forward=experts)


def _sized(template: ModelSpec, number: int, active: int, *sizes: int, balance: float, **changes: Any) -> ModelSpec:
    """A published model; `sizes` are layers, width, heads and the feed-forward of one expert."""
    experts = {"number": number, "active": active, "balance": balance}
    template = replaced(template, feed_forward=template.feed_forward.model_copy(update=experts))
    return sized(template, *sizes, position=RotaryPositions(base=1e6), **changes)


_MIXTRAL, _QWEN3_MOE = _template("mixtral"), _template("qwen3_moe", qk_norm=True)
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
    spec_from_hf=_mixtral_spec,
    hf_config=_mixtral_config,
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
    spec_from_hf=_qwen3_moe_spec,
    hf_config=_qwen3_moe_config,
    rules=_rules("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    ignored=LLAMA.ignored,
    presets={
        "qwen3-30b-a3b": _sized(_QWEN3_MOE, 128, 8, 48, 2048, 32, 768, **_QWEN3),
        "qwen3-235b-a22b": _sized(_QWEN3_MOE, 128, 8, 94, 4096, 64, 1536, **_QWEN3),
    },
)
