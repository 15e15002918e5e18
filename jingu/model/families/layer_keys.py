"""Keys of a Hugging Face config that say how the layers of a stack differ: windows and positions by kind of layer.

transformers 5 writes `layer_types`, and `rope_parameters` with one object for each type. Older files have
`sliding_window_pattern`, `no_rope_layers` and `rope_local_base_freq` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jingu.model.components import LayerSpec, NoPositions, RotaryPositions
from jingu.model.families.family import ConfigKeys, HFConfig, SpecValues, unsupported_option
from jingu.model.families.rope import RopeDefaults, write_rope
from jingu.model.spec import ModelSpec

_WINDOW, _FULL = "sliding_attention", "full_attention"
_NO_ROPE = "_without_rope"


def layer_keys(
    *,
    pattern: int = 1,
    window: Literal["by_type", "uniform", "none"] = "by_type",
    default_window: int | None = None,
    nested_rope: bool = False,
    local_theta: float | None = None,
    without_rope: str | None = None,
    no_rope_interval: int | None = None,
    position: RopeDefaults | None = None,
) -> ConfigKeys:
    """Return the conversion of the keys of a family whose layers may differ.

    Args:
        pattern: without `layer_types` and `sliding_window_pattern`, one of so many layers has no window.
        window: whether windows depend on the type of a layer, are the same in all layers (`sliding_window` alone), or
            do not exist.
        default_window: window of a config without the key.
        nested_rope: whether `rope_parameters` has one object for each type of layer.
        local_theta: base of layers with a window in files that do not nest; None: that of the others.
        without_rope: type of the layers without rotary positions, in models that have layers with windows.
        no_rope_interval: without `no_rope_layers`, every so many layers one has no rotary positions; None: the family
            does not have the key.
        position: what the family's positions are where configs do not say it.
    """
    defaults = position or RopeDefaults()
    arguments = _Layers(pattern, window, default_window, without_rope, no_rope_interval)

    def read(config: HFConfig) -> SpecValues:
        names = arguments.read(config)
        if len(names) != config["num_hidden_layers"]:
            layers = config["num_hidden_layers"]
            raise ValueError(f"layer_types names {len(names)} layers, and num_hidden_layers is {layers}")
        size = config.get("sliding_window", default_window)
        positions, context = _read_positions(config, nested_rope, local_theta, defaults)
        base = positions[_FULL]
        kinds: dict[str, SpecValues] = {}
        for name in sorted(set(names)):
            kind = name.removesuffix(_NO_ROPE)
            changes: SpecValues = {"attention.sliding_window": size} if kind == _WINDOW else {}
            if name.endswith(_NO_ROPE) or (kind == without_rope and size is not None):
                changes["position"] = NoPositions().model_dump()
            elif positions[kind] != base:
                changes["position"] = positions[kind].model_dump()
            kinds[name] = changes
        values: SpecValues = {"position": base, "max_position_embeddings": context, "attention.sliding_window": None}
        values |= defaults.read_query_scaling(config)
        if len(kinds) == 1:
            return {**values, **kinds.popitem()[1], "layer_kinds": {}, "layer_pattern": ()}
        return {**values, "layer_kinds": kinds, "layer_pattern": tuple(names)}

    def write(spec: ModelSpec) -> dict[str, Any]:
        layers = spec.layers
        types = [_type(layer) for layer in layers]
        windows = [layer.attention.sliding_window for layer in layers if layer.attention.sliding_window]
        keys: dict[str, Any] = {"max_position_embeddings": spec.max_position_embeddings}
        if window != "none":
            keys["sliding_window"] = windows[0] if windows else None
        if window == "by_type":
            keys["layer_types"] = types
        if no_rope_interval is not None:
            keys["no_rope_layers"] = [int(isinstance(layer.position, RotaryPositions)) for layer in layers]
        if isinstance(spec.position, RotaryPositions):
            keys |= defaults.write(spec)
        if nested_rope:
            # A type that no layer has gets the positions of the model.
            places = dict.fromkeys((_FULL, _WINDOW), spec.position) | {
                name: layer.position for name, layer in zip(types, layers, strict=True)
            }
            ropes = {name: place for name, place in places.items() if isinstance(place, RotaryPositions)}
            keys["rope_parameters"] = {name: write_rope(place) for name, place in ropes.items()}
        return keys

    return ConfigKeys(read, write)


@dataclass(frozen=True)
class _Layers:
    """The arguments of `layer_keys` that decide the kind of each layer."""

    pattern: int
    window: str
    default_window: int | None
    without_rope: str | None
    no_rope_interval: int | None

    def read(self, config: HFConfig) -> list[str]:
        """Return the name of the kind of each layer."""
        size = config.get("sliding_window", self.default_window)
        types = _read_types(config, self.pattern if self.window == "by_type" else 1)
        if size is not None and (self.window == "uniform" or (self.default_window and "layer_types" not in config)):
            types = [_WINDOW] * len(types)
        if self.no_rope_interval is None:
            return types
        every = config.get("no_rope_layer_interval") or self.no_rope_interval
        flags = config.get("no_rope_layers") or [int((n + 1) % every != 0) for n in range(len(types))]
        return [name + ("" if flag else _NO_ROPE) for name, flag in zip(types, flags, strict=True)]


def _type(layer: LayerSpec) -> str:
    return _FULL if layer.attention.sliding_window is None else _WINDOW


def _read_types(config: HFConfig, pattern: int) -> list[str]:
    """Return the type of each layer. Raises JinguError for types that are not attention with or without a window."""
    types = config.get("layer_types")
    if types is None:
        period = config.get("sliding_window_pattern") or pattern
        number = config["num_hidden_layers"]
        types = [_WINDOW if period > 1 and (layer + 1) % period else _FULL for layer in range(number)]
    for name in types:
        if name not in (_FULL, _WINDOW):
            raise unsupported_option("layer_types", name, f"known are {_FULL} and {_WINDOW}")
    return list(types)


def _read_positions(
    config: HFConfig, nested: bool, local_theta: float | None, defaults: RopeDefaults
) -> tuple[dict[str, RotaryPositions], int]:
    """Return the positions of both types of layers, and the context length."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    by_type = {name: value for name, value in rope.items() if isinstance(value, Mapping)}
    if by_type and not nested:
        raise unsupported_option("rope_parameters", by_type, "expected the same for all layers")
    if not by_type:
        # Files before release 5: scaling is for layers without a window.
        theta = config.get("rope_local_base_freq") or local_theta or config.get("rope_theta")
        local = {"rope_theta": theta, "rope_type": "default"} if nested else rope
        by_type = {_FULL: rope, _WINDOW: local}
    positions, context = {}, 0
    for name in (_WINDOW, _FULL):
        positions[name], context = defaults.read(by_type.get(name) or by_type[_FULL], config)
    return positions, context
