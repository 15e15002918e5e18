"""Keys of a Hugging Face config that say which layers have a dense feed-forward, and which have experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jingu.model.families.family import HFConfig, SpecValues, parse_activation, unsupported_option
from jingu.model.feed_forward_specs import Experts, GatedFeedForward
from jingu.model.spec import ModelSpec


def check_layers(key: str, config: HFConfig) -> list[int]:
    """Return the layers that a list of a config names. Raises ValueError if the model has no such layers."""
    numbers = config.get(key) or []
    count = config["num_hidden_layers"]
    beyond = [number for number in numbers if number not in range(count)]
    if beyond:
        raise ValueError(f"{key} names layer {beyond[0]}, and num_hidden_layers is {count}")
    return list(numbers)


@dataclass(frozen=True, kw_only=True)
class DenseLayers:
    """Which layers of a family are dense.

    Attributes:
        by: how the config says it. `first`: a key has the number of first layers that are dense. `types`: the list
            `mlp_layer_types`, or without it such a number. `steps`: `mlp_only_layers` are dense, and all layers but
            every `decoder_sparse_step`-th. `range`: layers from `moe_layer_start_index` to `moe_layer_end_index` have
            experts, every `moe_layer_interval`-th of them. `list`: `moe_layers` have experts, or every
            `interleave_moe_layer_step`-th. `no_experts`: all layers, if `num_local_experts` is 0 (Granite 4).
        first: key of the number of first layers.
        default: that number in a config without the key.
        size: key of the intermediate size of a dense feed-forward.
    """

    by: Literal["first", "types", "steps", "range", "list", "no_experts"] = "first"
    first: str = "first_k_dense_replace"
    default: int = 0
    size: str = "intermediate_size"

    def feed_forward(self, config: HFConfig) -> GatedFeedForward:
        """Return the dense feed-forward."""
        activation = parse_activation("hidden_act", config.get("hidden_act") or "silu")
        return GatedFeedForward(intermediate_size=config[self.size], activation=activation)

    def read_model(self, config: HFConfig) -> SpecValues:
        """Return the feed-forward of a model that has no experts in any layer; nothing for other models."""
        has_experts = self.by != "no_experts" or config.get("num_local_experts") != 0
        return {} if has_experts else {"feed_forward": self.feed_forward(config)}

    def read(self, config: HFConfig) -> list[bool]:
        """Return for each layer whether it is dense, unless all are."""
        layers = range(config["num_hidden_layers"])
        if self.by == "no_experts":
            return [False for _ in layers]
        types = config.get("mlp_layer_types")
        if self.by == "types" and types is not None:
            if len(types) != len(layers) or not set(types) <= {"dense", "sparse"}:
                raise ValueError(f"mlp_layer_types is {types!r}; expected dense or sparse for {len(layers)} layers")
            return [name == "dense" for name in types]
        if self.by == "steps":
            step = config.get("decoder_sparse_step") or 1
            only = check_layers("mlp_only_layers", config)
            return [layer in only or (layer + 1) % step != 0 for layer in layers]
        if self.by == "range":
            start = config.get("moe_layer_start_index", 1)
            end = config.get("moe_layer_end_index", -1)
            interval = config.get("moe_layer_interval") or 1
            last = layers[-1] if end == -1 else end
            return [(layer + 1) % interval != 0 or not start <= layer <= last for layer in layers]
        if self.by == "list":
            step = config.get("interleave_moe_layer_step") or 1
            sparse = check_layers("moe_layers", config) or list(range(step - 1, len(layers), step))
            return [layer not in sparse for layer in layers]
        number = config.get(self.first)
        if number is not None and (not isinstance(number, int) or number < 0):
            raise unsupported_option(self.first, number, "expected a number of layers")
        return [layer < (self.default if number is None else number) for layer in layers]

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys of a model."""
        dense = [not isinstance(layer.feed_forward, Experts) for layer in spec.layers]
        sparse = [layer for layer, is_dense in enumerate(dense) if not is_dense]
        sizes = [layer.feed_forward.intermediate_size for layer in spec.layers if layer.feed_forward.type == "gated"]
        if self.by == "no_experts":
            none = {"num_local_experts": 0, "num_experts_per_tok": 0}
            return {} if sparse else {**none, self.size: sizes[0]}
        # A model without dense layers needs the key nevertheless.
        keys: dict[str, Any] = {self.size: sizes[0] if sizes else spec.default_layer.intermediate_size}
        if self.by == "types":
            return {**keys, "mlp_layer_types": ["dense" if is_dense else "sparse" for is_dense in dense]}
        if self.by == "steps":
            only = [layer for layer, is_dense in enumerate(dense) if is_dense]
            return {**keys, "decoder_sparse_step": 1, "mlp_only_layers": only}
        if self.by == "range":
            first, last = (sparse[0], sparse[-1]) if sparse else (len(dense), -1)
            return {**keys, "moe_layer_start_index": first, "moe_layer_end_index": last, "moe_layer_interval": 1}
        if self.by == "list":
            return {**keys, "moe_layers": sparse}
        return {**keys, self.first: sparse[0] if sparse else len(dense)}
