"""Keys of a Hugging Face config that say how the shapes of layers differ: Gemma 4's heads, shared keys and values, and
feed-forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jingu.model.components import LayerSpec
from jingu.model.families.family import ConfigKeys, HFConfig, SpecValues, parse_activation, unsupported_option
from jingu.model.feed_forward_specs import Experts
from jingu.model.spec import ModelSpec

_FULL = "full_attention"
SHARED = "_shared"
_HEADS = {"head_dim": "attention.head_dim", "num_key_value_heads": "attention.num_kv_heads"}


@dataclass(frozen=True)
class LayerShapes:
    """How the layers of a family differ in their shapes.

    The heads of layers without a window have sizes of their own (`global_head_dim`, `num_global_key_value_heads`);
    their values may be their keys (`attention_k_eq_v`). The last layers share the keys and values of earlier ones
    (`num_kv_shared_layers`), and may have wider feed-forwards (`use_double_wide_mlp`).

    Attributes:
        head_dim: `global_head_dim` of a config without the key.
    """

    head_dim: int = 512

    def sharing_layers(self, config: HFConfig) -> list[bool]:
        """Return which layers share keys and values."""
        number = config["num_hidden_layers"]
        first = number - (config.get("num_kv_shared_layers") or 0)
        return [layer >= first for layer in range(number)]

    def read(self, name: str, is_full: bool, config: HFConfig, types: Sequence[str]) -> SpecValues:
        """Return the fields in which a kind of layer differs from the model's own.

        Args:
            name: name of the kind.
            is_full: whether its layers have no window.
            types: type of each layer.
        """
        changes = self._read_heads(config, types) if is_full else {}
        if name.endswith(SHARED):
            changes["attention.shares_kv"] = True
            if config.get("use_double_wide_mlp"):
                place = "parallel_intermediate_size" if config.get("enable_moe_block") else "intermediate_size"
                changes[f"feed_forward.{place}"] = 2 * config["intermediate_size"]
        return changes

    def _read_heads(self, config: HFConfig, types: Sequence[str]) -> SpecValues:
        """Return the sizes of heads in layers without a window."""
        changes: SpecValues = {"attention.values_are_keys": bool(config.get("attention_k_eq_v"))}
        by_layer = config.get("per_layer_config")
        if by_layer is None:
            heads = {"head_dim": config.get("global_head_dim", self.head_dim)}
            if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
                heads["num_key_value_heads"] = config["num_global_key_value_heads"]
        else:
            # transformers 5 writes the keys of each layer that differs from the others.
            full = {number for number, kind in enumerate(types) if kind == _FULL}
            first = {int(number): dict(keys) for number, keys in by_layer.items()}
            heads = first.get(min(full, default=-1), {})
            is_equal = first == dict.fromkeys(full if heads else (), heads)
            if not is_equal or not heads.keys() <= _HEADS.keys():
                detail = "expected sizes of heads, the same for all layers without a window"
                raise unsupported_option("per_layer_config", dict(by_layer), detail)
        return {**changes, **{_HEADS[key]: value for key, value in heads.items()}}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys of a model."""
        layers = spec.layers
        full = [layer.attention for layer in layers if layer.attention.reach is None] or [spec.attention]
        local = [layer.attention for layer in layers if layer.attention.reach is not None] or full
        sharing = [layer for layer in layers if layer.attention.shares_kv]
        return {
            "head_dim": local[0].head_dim,
            "num_key_value_heads": local[0].num_kv_heads,
            "global_head_dim": full[0].head_dim,
            "num_global_key_value_heads": full[0].num_kv_heads if full[0].values_are_keys else None,
            "attention_k_eq_v": full[0].values_are_keys,
            "num_kv_shared_layers": len(sharing),
            "use_double_wide_mlp": bool(sharing) and _width(sharing[0]) == 2 * _width(layers[0]),
        }


def _width(layer: LayerSpec) -> int:
    part = layer.feed_forward
    size = part.parallel_intermediate_size if isinstance(part, Experts) else None
    return size or layer.intermediate_size


def _read_parallel_experts(config: HFConfig) -> SpecValues:
    if not config.get("enable_moe_block"):
        return {}
    return {
        "feed_forward": {
            "type": "experts",
            "num_experts": config["num_experts"],
            "num_experts_per_token": config["top_k_experts"],
            "intermediate_size": config["moe_intermediate_size"],
            "parallel_intermediate_size": config["intermediate_size"],
            "norm_eps": config.get("rms_norm_eps", 1e-6),
            "activation": parse_activation("hidden_activation", config.get("hidden_activation") or "gelu_pytorch_tanh"),
            "router": {"type": "top_k", "own_norm": True, "expert_scales": True},
            "aux_loss_scope": "model",
        }
    }


def _write_parallel_experts(spec: ModelSpec) -> dict[str, Any]:
    part = spec.feed_forward
    if not isinstance(part, Experts):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": part.num_experts,
        "top_k_experts": part.num_experts_per_token,
        "moe_intermediate_size": part.intermediate_size,
        "intermediate_size": part.parallel_intermediate_size,
    }


# Experts beside a dense feed-forward, if the config has some.
PARALLEL_EXPERTS = ConfigKeys(_read_parallel_experts, _write_parallel_experts)


def _read_per_layer_inputs(config: HFConfig) -> SpecValues:
    size, rows = config["hidden_size_per_layer_input"], config["vocab_size_per_layer_input"]
    if size and rows != config["vocab_size"]:
        raise unsupported_option("vocab_size_per_layer_input", rows, f"expected vocab_size, {config['vocab_size']}")
    return {"per_layer_inputs": size or None}


def _write_per_layer_inputs(spec: ModelSpec) -> dict[str, Any]:
    return {
        "hidden_size_per_layer_input": spec.per_layer_inputs or 0,
        "vocab_size_per_layer_input": spec.vocab_size,
    }


# Inputs of each layer.
PER_LAYER_INPUTS = ConfigKeys(_read_per_layer_inputs, _write_per_layer_inputs)
