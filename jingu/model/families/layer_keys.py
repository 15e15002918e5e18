"""Keys of a Hugging Face config that say how the layers of a stack differ: windows and positions by kind of layer.

transformers 5 writes `layer_types`, and `rope_parameters` with one object for each type. Older files have
`sliding_window_pattern`, `no_rope_layers` and `rope_local_base_freq` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jingu.model.families.family import ConfigKeys, HFConfig, SpecValues, unsupported_option
from jingu.model.families.rope import read_rope, write_rope
from jingu.model.spec import LayerSpec, ModelSpec, NoPositions, RotaryPositions

_WINDOW, _FULL = "sliding_attention", "full_attention"
_NO_ROPE = "_without_rope"


def layer_keys(
    *,
    pattern: int = 1,
    has_window: bool = True,
    nested_rope: bool = False,
    local_theta: float | None = None,
    interleaved: bool = False,
    without_rope: str | None = None,
    no_rope_interval: int | None = None,
) -> ConfigKeys:
    """Return the conversion of the keys of a family whose layers may differ.

    Args:
        pattern: without `layer_types` and `sliding_window_pattern`, one of so many layers has no window.
        has_window: whether the family has windows at all.
        nested_rope: whether `rope_parameters` has one object for each type of layer.
        local_theta: base of layers with a window in files that do not nest; None: that of the others.
        interleaved: whether rotated pairs are neighbors, which configs do not say.
        without_rope: type of the layers without rotary positions.
        no_rope_interval: without `no_rope_layers`, every so many layers one has no rotary positions; None: the family
            does not have the key.
    """

    def read(config: HFConfig) -> SpecValues:
        types = _read_types(config, pattern if has_window else 1)
        rotates = [True] * len(types)
        if no_rope_interval is not None:
            every = config.get("no_rope_layer_interval") or no_rope_interval
            flags = config.get("no_rope_layers") or [int((n + 1) % every != 0) for n in range(len(types))]
            rotates = [bool(flag) for flag in flags]
        names = [name + ("" if flag else _NO_ROPE) for name, flag in zip(types, rotates, strict=True)]
        if len(names) != config["num_hidden_layers"]:
            layers = config["num_hidden_layers"]
            raise ValueError(f"layer_types names {len(names)} layers, and num_hidden_layers is {layers}")
        positions, context = _read_positions(config, nested_rope, local_theta)
        positions = {name: place.model_copy(update={"interleaved": interleaved}) for name, place in positions.items()}
        base = positions[_FULL]
        kinds: dict[str, SpecValues] = {}
        for name in sorted(set(names)):
            kind = name.removesuffix(_NO_ROPE)
            changes: SpecValues = {"attention.sliding_window": config["sliding_window"]} if kind == _WINDOW else {}
            if name.endswith(_NO_ROPE) or kind == without_rope:
                changes["position"] = NoPositions().model_dump()
            elif positions[kind] != base:
                changes["position"] = positions[kind].model_dump()
            kinds[name] = changes
        values: SpecValues = {"position": base, "max_position_embeddings": context, "attention.sliding_window": None}
        if len(kinds) == 1:
            return {**values, **kinds.popitem()[1], "layer_kinds": {}, "layer_pattern": ()}
        return {**values, "layer_kinds": kinds, "layer_pattern": tuple(names)}

    def write(spec: ModelSpec) -> dict[str, Any]:
        layers = spec.layers
        types = [_type(layer) for layer in layers]
        windows = [layer.attention.sliding_window for layer in layers if layer.attention.sliding_window]
        keys: dict[str, Any] = {"max_position_embeddings": spec.max_position_embeddings}
        if has_window:
            keys |= {"layer_types": types, "sliding_window": windows[0] if windows else None}
        if no_rope_interval is not None:
            keys["no_rope_layers"] = [int(isinstance(layer.position, RotaryPositions)) for layer in layers]
        if isinstance(spec.position, RotaryPositions):
            keys["rope_parameters"] = write_rope(spec.position)
        if nested_rope:
            # A type that no layer has gets the positions of the model.
            places = dict.fromkeys((_FULL, _WINDOW), spec.position) | {
                name: layer.position for name, layer in zip(types, layers, strict=True)
            }
            ropes = {name: place for name, place in places.items() if isinstance(place, RotaryPositions)}
            keys["rope_parameters"] = {name: write_rope(place) for name, place in ropes.items()}
        return keys

    return ConfigKeys(read, write)


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
    config: HFConfig, nested: bool, local_theta: float | None
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
        positions[name], context = read_rope(by_type.get(name) or by_type[_FULL], config)
    return positions, context
