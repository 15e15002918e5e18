"""Keys of a Hugging Face config that say how the layers of a stack differ: windows, positions and feed-forwards.

transformers 5 writes `layer_types` and `mlp_layer_types`, and `rope_parameters` with one object for each type. Older
files have `sliding_window_pattern`, `no_rope_layers`, `rope_local_base_freq` and others instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jingu.model.components import LayerSpec, LearnedPositions, NoPositions, RotaryPositions
from jingu.model.families.dense_layers import DenseLayers
from jingu.model.families.family import ConfigKeys, HFConfig, SpecValues, parse_activation, unsupported_option
from jingu.model.families.layer_shapes import SHARED, LayerShapes
from jingu.model.families.mixer_keys import MLP, MOE, MixerLayers
from jingu.model.families.rope import RopeDefaults, write_rope
from jingu.model.feed_forward_specs import Experts, NoFeedForward, PlainFeedForward
from jingu.model.mixer_specs import NoMixer
from jingu.model.spec import ModelSpec

_WINDOW, _CHUNK, _FULL = "sliding_attention", "chunked_attention", "full_attention"
_NO_ROPE, _DENSE = "_without_rope", "_dense"


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """How the layers of a family differ.

    Attributes:
        pattern: without `layer_types` and `sliding_window_pattern`, one of so many layers has no window.
        pattern_key: name of `sliding_window_pattern`.
        first_is_full: whether the first layer has no window either.
        last_is_full: whether the last layer has no window either; other models are refused.
        full_first: key of the number of first layers without a window, in configs without `layer_types`.
        window: whether windows depend on the type of a layer, are the same in all layers (`sliding_window` alone), or
            do not exist; or whether the type says which layers attend within chunks.
        default_window: window of a config without the key.
        all_local: whether all layers have the window, without `layer_types`.
        nested_rope: whether `rope_parameters` has one object for each type of layer.
        local_theta: base of layers with a window in files that do not nest; None: that of the others.
        without_rope: type of the layers without rotary positions, in models that have layers with windows.
        optional_rope: whether a base that is null means no rotary positions.
        no_rope_interval: without `no_rope_layers`, every so many layers one has no rotary positions; None: the family
            does not have the key.
        window_fields: fields of the layers with a window, by their paths, that differ from the others'.
        window_kv_heads: multiplies the number of key-value heads in layers with a window.
        single_branch: whether each layer is attention, a mixer, or a feed-forward alone.
        positions: whether layers have rotary positions, none, or vectors that are added to the embedding.
        first_position: number of the vector of the first position.
        rope_key: key that is `rope` in models with rotary positions, and null in others.
        mixers: which layers have a mixer with a state instead of attention; None: the family has no such layers.
        shapes: how the shapes of layers differ; None: they do not.
        predictions: what the layers of multi-token prediction are: like the last layer (`last`), or with a dense
            feed-forward and a window (`local`) or attention of the type in `mtp_layer_types` (`by_key`). With the
            latter there is one layer, unless `num_nextn_predict_layers` is 0.
        dense: which layers have a dense feed-forward instead of experts; None: the family has no such layers.
    """

    pattern: int = 1
    pattern_key: str = "sliding_window_pattern"
    first_is_full: bool = False
    last_is_full: bool = False
    full_first: str | None = None
    window: Literal["by_type", "uniform", "none", "chunks"] = "by_type"
    default_window: int | None = None
    all_local: bool = False
    nested_rope: bool = False
    local_theta: float | None = None
    without_rope: str | None = None
    optional_rope: bool = False
    no_rope_interval: int | None = None
    window_fields: Mapping[str, Any] = field(default_factory=dict)
    window_kv_heads: int = 1
    single_branch: bool = False
    positions: Literal["rope", "none", "learned"] = "rope"
    first_position: int = 0
    rope_key: str | None = None
    mixers: MixerLayers | None = None
    predictions: Literal["last", "local", "by_key"] = "last"
    dense: DenseLayers | None = None
    shapes: LayerShapes | None = None

    @property
    def local(self) -> str:
        """Type of the layers with a window, or that attend within chunks."""
        return _CHUNK if self.window == "chunks" else _WINDOW

    @property
    def window_key(self) -> str:
        """Key of the window or of the size of chunks."""
        return "attention_chunk_size" if self.window == "chunks" else "sliding_window"

    @property
    def window_field(self) -> str:
        """Field of the window or of the size of chunks."""
        return "attention.chunk_size" if self.window == "chunks" else "attention.sliding_window"

    def read_kinds(self, config: HFConfig) -> list[str]:
        """Return the name of the kind of each layer."""
        size = config.get(self.window_key, self.default_window)
        types = self.read_types(config)
        if size is not None and (self.window == "uniform" or (self.all_local and "layer_types" not in config)):
            types = [_WINDOW] * len(types)
        if self.no_rope_interval is not None:
            every = config.get("no_rope_layer_interval") or self.no_rope_interval
            if config.get("no_rope_layer_interval") == 0:
                raise unsupported_option("no_rope_layer_interval", 0, "expected a number of layers")
            flags = config.get("no_rope_layers") or [int((n + 1) % every != 0) for n in range(len(types))]
            if len(flags) != len(types):
                raise ValueError(f"no_rope_layers names {len(flags)} layers, and num_hidden_layers is {len(types)}")
            types = [name + ("" if flag else _NO_ROPE) for name, flag in zip(types, flags, strict=True)]
        if self.shapes is not None:
            flags = self.shapes.sharing_layers(config)
            types = [name + (SHARED if is_shared else "") for name, is_shared in zip(types, flags, strict=True)]
        if self.dense is not None:
            dense = self.dense.read(config)
            types = [name + (_DENSE if is_dense else "") for name, is_dense in zip(types, dense, strict=True)]
        return types

    def read_types(self, config: HFConfig) -> list[str]:
        """Return the type of each layer. Raises JinguError for types of layers that the family does not have."""
        number = config["num_hidden_layers"]
        types = config.get("layer_types") if self.mixers is None else self.mixers.read_types(config)
        if types is None and self.window == "chunks":
            # Layers without rotary positions are those that attend to everything.
            flags = config.get("no_rope_layers") or []
            every = config.get("no_rope_layer_interval") or self.no_rope_interval or 1
            flags = flags or [int((n + 1) % every != 0) for n in range(number)]
            types = [_CHUNK if flag else _FULL for flag in flags]
        if types is None:
            period = config.get(self.pattern_key)
            period = (self.pattern if self.window == "by_type" else 1) if period is None else period
            if not isinstance(period, int) or period < 1:
                raise unsupported_option(self.pattern_key, period, "expected a number of layers")
            types = [self.local if period > 1 and (layer + 1) % period else _FULL for layer in range(number)]
            types[:1] = [_FULL] if self.first_is_full else types[:1]
            types[-1:] = [_FULL] if self.last_is_full else types[-1:]
            if self.full_first is not None and config.get(self.window_key, self.default_window) is not None:
                first = config.get(self.full_first, number)
                types = [self.local if layer >= first else _FULL for layer in range(number)]
        known = [_FULL, *([self.local] if self.mixers is None or self.window == "by_type" else [])]
        known += [] if self.mixers is None else [self.mixers.layer_type]
        known += [MLP, MOE] if self.single_branch else []
        for name in types:
            if name not in known:
                raise unsupported_option("layer_types", name, f"known are {', '.join(known)}")
        if self.last_is_full and types[-1:] != [_FULL]:
            raise unsupported_option("layer_types", types[-1:], f"expected {_FULL} last")
        if len(types) != number:
            raise ValueError(f"layer_types names {len(types)} layers, and num_hidden_layers is {number}")
        return list(types)

    def read_predictions(self, config: HFConfig) -> SpecValues:
        """Return the fields of layers of multi-token prediction that are not like the last layer."""
        if self.predictions == "last":
            return {}
        if self.predictions == "local":
            return {"mtp_kind": self.local + _DENSE}
        types, windows = config.get("mtp_layer_types") or [], config.get("mtp_sliding_windows")
        if not types:
            # Sources do not agree on what these layers are, and their tensors are refused.
            return {"mtp_layers": 0, "mtp_kind": None}
        if len(types) != 1 or types[0] not in (self.local, _FULL):
            raise unsupported_option("mtp_layer_types", types, f"expected one of {self.local} and {_FULL}")
        window = config.get(self.window_key, self.default_window) if types[0] == self.local else 0
        if windows not in (None, [window]):
            raise unsupported_option("mtp_sliding_windows", windows, f"expected [{window}]")
        number = 0 if config.get("num_nextn_predict_layers") == 0 else 1
        return {"mtp_layers": number, "mtp_kind": types[0] + _DENSE}

    def write_predictions(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys of layers of multi-token prediction that are not like the last layer."""
        if self.predictions != "by_key":
            return {}
        has_kind = spec.mtp_kind is not None
        return {
            "num_nextn_predict_layers": spec.mtp_layers,
            "mtp_layer_types": [str(spec.mtp_kind).removesuffix(_DENSE)] if has_kind else [],
            "mtp_sliding_windows": [spec.prediction_layer.attention.reach or 0] if has_kind else [],
        }

    def write_type(self, layer: LayerSpec) -> str:
        """Return the type of a layer."""
        if layer.state_mixer is not None and self.mixers is not None:
            return self.mixers.layer_type
        if not layer.has_attention:
            return MOE if isinstance(layer.feed_forward, Experts) else MLP
        return _FULL if layer.attention.reach is None else self.local


def layer_keys(options: LayerOptions, position: RopeDefaults) -> ConfigKeys:
    """Return the conversion of the keys of a family whose layers may differ.

    Args:
        position: what the family's positions are where configs do not say it.
    """

    def read(config: HFConfig) -> SpecValues:
        names = options.read_kinds(config)
        positions, context = _read_positions(config, options, position)
        types = [name.removesuffix(SHARED) for name in names]
        predictions = options.read_predictions(config)
        kind = predictions.get("mtp_kind")
        kind_names = sorted({*names, kind or names[0]})
        kinds = {name: _kind_fields(name, config, options, positions, types) for name in kind_names}
        values: SpecValues = {"position": positions[_FULL], "max_position_embeddings": context, **predictions}
        values |= {options.window_field: None, **position.read_query_scaling(config)}
        rope = {"rope_theta": config.get("rope_theta", True), **(config.get("rope_parameters") or {})}
        if options.optional_rope and rope["rope_theta"] is None:
            values["position"] = NoPositions()
        if options.positions == "learned":
            values["position"] = LearnedPositions(offset=options.first_position)
        elif options.positions == "none" or (options.rope_key is not None and config.get(options.rope_key) != "rope"):
            values["position"] = NoPositions()
        if options.dense is not None:
            values |= options.dense.read_model(config)
        if len(kinds) == 1 and kind is None:
            return {**values, **kinds.popitem()[1], "layer_kinds": {}, "layer_pattern": ()}
        return {**values, "layer_kinds": kinds, "layer_pattern": tuple(names)}

    def write(spec: ModelSpec) -> dict[str, Any]:
        layers = spec.layers
        types = [options.write_type(layer) for layer in layers]
        windows = [layer.attention.reach for layer in layers if layer.attention.reach]
        keys: dict[str, Any] = {"max_position_embeddings": spec.max_position_embeddings}
        if options.window != "none":
            keys[options.window_key] = windows[0] if windows else None
        if options.mixers is not None:
            keys |= options.mixers.write_types(types) | options.mixers.write(spec)
        elif options.window in ("by_type", "chunks"):
            keys["layer_types"] = types
        if options.rope_key is not None:
            keys[options.rope_key] = "rope" if isinstance(spec.position, RotaryPositions) else None
        if options.no_rope_interval is not None:
            keys["no_rope_layers"] = [int(isinstance(layer.position, RotaryPositions)) for layer in layers]
        keys |= options.write_predictions(spec)
        if options.dense is not None:
            keys |= options.dense.write(spec)
        if options.shapes is not None:
            keys |= options.shapes.write(spec)
        if options.single_branch:
            plain = [layer.intermediate_size for layer in layers if options.write_type(layer) == MLP]
            keys |= {"intermediate_size": plain[0]} if plain else {}
        if options.window_kv_heads != 1:
            full = [layer.attention.num_kv_heads for layer in layers if layer.attention.reach is None]
            keys["num_key_value_heads"] = (full or [spec.attention.num_kv_heads])[0]
        if isinstance(spec.position, RotaryPositions):
            keys |= position.write(spec)
        elif options.optional_rope:
            keys["rope_parameters"] = {"rope_type": "default", "rope_theta": None}
        if options.nested_rope:
            # A type that no layer has gets the positions of the model.
            places = dict.fromkeys((_FULL, options.local), spec.position) | {
                name: layer.position for name, layer in zip(types, layers, strict=True) if layer.has_attention
            }
            ropes = {name: place for name, place in places.items() if isinstance(place, RotaryPositions)}
            keys["rope_parameters"] = {name: write_rope(place) for name, place in ropes.items()}
        return keys

    return ConfigKeys(read, write)


def _kind_fields(
    name: str, config: HFConfig, options: LayerOptions, positions: Mapping[str, RotaryPositions], types: list[str]
) -> SpecValues:
    """Return the fields in which a kind of layer differs from the model's own.

    Args:
        types: type of each layer.
    """
    type_name = name.removesuffix(_DENSE).removesuffix(SHARED).removesuffix(_NO_ROPE)
    size = config.get(options.window_key, options.default_window)
    changes: SpecValues = {}
    has_mixer = options.mixers is not None and type_name == options.mixers.layer_type
    if has_mixer and options.mixers is not None:
        changes = {"mixer": options.mixers.read(config), "parallel_mixer": options.mixers.parallel}
        changes |= options.mixers.layer_fields
    elif type_name in (MLP, MOE):
        changes = {"mixer": NoMixer().model_dump()}
    elif type_name == options.local:
        changes = {options.window_field: size, **options.window_fields}
        if options.window_kv_heads != 1:
            changes["attention.num_kv_heads"] = config["num_key_value_heads"] * options.window_kv_heads
    if options.shapes is not None:
        changes |= options.shapes.read(name, type_name == _FULL, config, types)
    if options.window == "chunks" and (type_name == _CHUNK) == (_NO_ROPE in name):
        # Norms and scales depend on both, which kinds of layers do not express.
        raise unsupported_option("no_rope_layers", config.get("no_rope_layers"), f"expected 1 for {_CHUNK} only")
    has_rope = _NO_ROPE not in name and not (type_name == options.without_rope and size is not None)
    if not has_rope:
        changes["position"] = NoPositions().model_dump()
    elif type_name in positions and positions[type_name] != positions[_FULL]:
        changes["position"] = positions[type_name].model_dump()
    if type_name == MLP:
        activation = parse_activation("mlp_hidden_act", config.get("mlp_hidden_act") or "relu2")
        size = config["intermediate_size"]
        changes["feed_forward"] = PlainFeedForward(intermediate_size=size, activation=activation).model_dump()
    elif options.single_branch and type_name != MOE:
        changes["feed_forward"] = NoFeedForward().model_dump()
    if name.endswith(_DENSE) and options.dense is not None:
        changes["feed_forward"] = options.dense.feed_forward(config).model_dump()
    return changes


def _read_positions(
    config: HFConfig, options: LayerOptions, defaults: RopeDefaults
) -> tuple[dict[str, RotaryPositions], int]:
    """Return the positions of both types of layers, and the context length."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    by_type = {name: value for name, value in rope.items() if isinstance(value, Mapping)}
    if by_type and not options.nested_rope:
        raise unsupported_option("rope_parameters", by_type, "expected the same for all layers")
    if by_type:
        needed_types = {name for name in options.read_types(config) if name in (options.local, _FULL)}
        is_nested = any(isinstance(value, Mapping) for each in by_type.values() for value in each.values())
        if is_nested or not needed_types <= by_type.keys() <= {options.local, _FULL} or by_type.keys() != rope.keys():
            expected = " and ".join(sorted(needed_types))
            raise unsupported_option("rope_parameters", rope, f"expected an object for each of {expected}, and no more")
    if not by_type:
        # Files before release 5: scaling is for layers without a window.
        theta = config.get("rope_local_base_freq") or options.local_theta or config.get("rope_theta")
        local = {"rope_theta": theta, "rope_type": "default"} if options.nested_rope else rope
        by_type = {_FULL: rope, options.local: local}
    positions, context = {}, 0
    for name in (options.local, _FULL):
        positions[name], context = defaults.read(by_type.get(name) or by_type[_FULL], config)
    return positions, context
