"""Keys of a Hugging Face config that say which layers have a mixer with a state instead of attention, and its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jingu.model.families.dense_layers import check_layers
from jingu.model.families.family import ConfigKeys, HFConfig, SpecValues, field_value, unsupported_option
from jingu.model.mixer_specs import StateSpace
from jingu.model.spec import ModelSpec

_FULL = "full_attention"


# Former names of types of layers.
_ALIASES = {"mamba": "linear_attention", "attention": _FULL}
# Types of layers that are a feed-forward alone, dense or with experts.
MLP, MOE = "mlp", "moe"
_LETTERS = {"M": "linear_attention", "*": _FULL, "-": MLP, "E": MOE}


@dataclass(frozen=True, kw_only=True)
class MixerLayers:
    """Which layers of a family have a mixer.

    Attributes:
        layer_type: their name in `layer_types`.
        type: tag of the mixer.
        keys: for each field of the mixer the key that has it, or an object with `key` and `default`.
        fields: fields that are the same in all models of the family.
        layer_fields: other fields of layers with a mixer, by their paths, that differ from those with attention.
        interval: key of the period of layers with attention, in configs without `layer_types`.
        default_interval: that period in a config without the key; 0: all layers have mixers.
        full: key of the list of layers with attention.
        type_without_list: type of all layers in configs without that list.
        types_key: key of the types of layers; None: configs have no such key.
        letters: key of a text with a letter for the type of each layer, in configs without types (Nemotron-H).
        parallel: whether all layers have the mixer beside attention.
        expand: key of the size of all heads together, relative to the hidden size, which must agree with their number.
        size: key of the size of all heads together; null means that `expand` says it.
        norm: keys that say whether the mixer has a norm, and whether it is applied before the gate.
    """

    layer_type: str
    type: str
    keys: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)
    layer_fields: Mapping[str, Any] = field(default_factory=dict)
    interval: str | None = None
    default_interval: int = 0
    full: str | None = None
    type_without_list: str = _FULL
    types_key: str | None = "layer_types"
    letters: str | None = None
    parallel: bool = False
    expand: str | None = None
    size: str | None = None
    norm: tuple[str, str] | None = None

    def read_types(self, config: HFConfig) -> list[str]:
        """Return the type of each layer of a config."""
        layers = range(config["num_hidden_layers"])
        if self.parallel:
            return [self.layer_type for _ in layers]
        if self.types_key is not None and config.get(self.types_key) is not None:
            return [_ALIASES.get(name, name) for name in config[self.types_key]]
        if self.letters is not None and config.get(self.letters) is not None:
            return [_LETTERS[letter] for letter in config[self.letters]]
        if self.full is not None:
            full = check_layers(self.full, config)
            if config.get(self.full) is None:
                return [self.type_without_list for _ in layers]
            return [_FULL if layer in full else self.layer_type for layer in layers]
        period = config.get(self.interval or "", self.default_interval)
        if not isinstance(period, int) or (period < 1 and self.interval in config):
            raise unsupported_option(str(self.interval), period, "expected a number of layers")
        return [_FULL if period and (layer + 1) % period == 0 else self.layer_type for layer in layers]

    def write_types(self, types: list[str]) -> dict[str, Any]:
        """Return the keys of the types of layers."""
        if self.types_key is not None:
            return {self.types_key: types}
        if self.full is None:
            return {}
        return {str(self.full): [layer for layer, name in enumerate(types) if name == _FULL]}

    def read(self, config: HFConfig) -> dict[str, Any]:
        """Return the fields of the mixer. Raises ValueError if its sizes contradict each other."""
        fields: dict[str, Any] = {"type": self.type, **self.fields}
        for name, entry in self.keys.items():
            if isinstance(entry, str):
                fields[name] = config[entry]
            else:
                value = config.get(entry["key"])
                fields[name] = entry["default"] if value is None else value
        if self.norm is not None:
            has_norm, is_first = config.get(self.norm[0], False), config.get(self.norm[1], True)
            fields["norm"] = ("before_gate" if is_first else "behind_gate") if has_norm else "none"
        if "step_limits" in fields:
            fields["step_limits"] = _read_limits(fields["step_limits"])
        if self.expand is not None:
            size, heads = self._inner_size(config), fields["num_heads"]
            if fields["head_dim"] == "auto":
                fields["head_dim"] = size // heads
            if fields["head_dim"] * heads != size:
                sizes = f"{heads} heads of {fields['head_dim']} have {heads * fields['head_dim']}"
                raise ValueError(f"all heads of a mixer have {size} elements together, and {sizes}")
        return fields

    def _inner_size(self, config: HFConfig) -> int:
        """Return the size of all heads together."""
        return int(config.get(str(self.size)) or (config.get(str(self.expand)) or 2) * config["hidden_size"])

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys of a model; a model whose layers all have attention gets those of the template."""
        mixer = next((layer.mixer for layer in spec.layers if layer.mixer is not None), None)
        entries: dict[str, dict[str, Any]] = {
            name: {"key": entry, "default": None} if isinstance(entry, str) else entry
            for name, entry in self.keys.items()
        }
        if mixer is None:
            return {entry["key"]: entry["default"] for name, entry in entries.items() if name not in _SHARED_FIELDS}
        values = {name: getattr(mixer, name) for name in entries}
        if "step_limits" in values:
            has_one = not isinstance(entries["step_limits"]["default"], list)
            low, high = values["step_limits"]
            values["step_limits"] = low if has_one else [low, {"__float__": "Infinity"} if high is None else high]
        keys = {entries[name]["key"]: value for name, value in values.items()}
        if self.size is not None:
            keys[self.size] = values["num_heads"] * values["head_dim"]
        elif self.expand is not None:
            keys[self.expand] = values["num_heads"] * values["head_dim"] // spec.hidden_size
        if self.norm is not None and isinstance(mixer, StateSpace):
            keys |= {self.norm[0]: mixer.norm != "none", self.norm[1]: mixer.norm != "behind_gate"}
        return keys


# Fields whose keys belong to the whole model.
_SHARED_FIELDS = ("eps", "step_limits")


def _read_limits(limits: Any) -> tuple[float, float | None]:
    """Return the limits of steps, or the lower one. JSON has no infinity; transformers writes an object for it."""
    if isinstance(limits, int | float):
        return limits, None
    low, high = limits or (0.0, None)
    return low, None if isinstance(high, Mapping) or high == float("inf") else high


def _read_adjusted_size(config: HFConfig) -> SpecValues:
    size = config.get("block_ff_dim") or config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim", True):
        size = int(2 * size / 3)
        factor, multiple = config.get("block_ffn_dim_multiplier", 1.0), config.get("block_multiple_of", 256)
        if factor is not None:
            size = -(-int(factor * size) // multiple) * multiple
    return {"feed_forward.intermediate_size": size}


def _write_adjusted_size(spec: ModelSpec) -> dict[str, Any]:
    size = field_value(spec, "feed_forward.intermediate_size")
    return {"intermediate_size": size, "block_auto_adjust_ff_dim": False}


# The intermediate size of LFM2, which its config gives before an adjustment.
ADJUSTED_SIZE = ConfigKeys(_read_adjusted_size, _write_adjusted_size)
