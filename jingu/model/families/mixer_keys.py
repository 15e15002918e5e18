"""Keys of a Hugging Face config that say which layers have a mixer with a state instead of attention, and its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jingu.model.families.family import ConfigKeys, HFConfig, SpecValues, field_value
from jingu.model.spec import ModelSpec

_FULL = "full_attention"


@dataclass(frozen=True, kw_only=True)
class MixerLayers:
    """Which layers of a family have a mixer.

    Attributes:
        layer_type: their name in `layer_types`.
        type: tag of the mixer.
        keys: for each field of the mixer the key that has it, or an object with `key` and `default`.
        interval: key of the period of layers with attention, in configs without `layer_types`.
        default_interval: that period in a config without the key.
        full: key of the list of layers with attention; without it, all have.
    """

    layer_type: str
    type: str
    keys: Mapping[str, Any]
    interval: str | None = None
    default_interval: int = 4
    full: str | None = None

    def read_types(self, config: HFConfig) -> list[str]:
        """Return the type of each layer of a config without `layer_types`."""
        layers = range(config["num_hidden_layers"])
        if self.full is not None:
            full = config.get(self.full)
            return [_FULL if full is None or layer in full else self.layer_type for layer in layers]
        period = config.get(self.interval or "") or self.default_interval
        return [self.layer_type if (layer + 1) % period else _FULL for layer in layers]

    def read(self, config: HFConfig) -> dict[str, Any]:
        """Return the fields of the mixer."""
        fields: dict[str, Any] = {"type": self.type}
        for field, entry in self.keys.items():
            if isinstance(entry, str):
                fields[field] = config[entry]
            else:
                fields[field] = config.get(entry["key"], entry["default"])
        return fields

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys of a model; a model whose layers all have attention gets those of the template."""
        mixer = next((layer.mixer for layer in spec.layers if layer.mixer is not None), None)
        if mixer is None:
            return {entry["key"]: entry["default"] for entry in self.keys.values() if not isinstance(entry, str)}
        return {
            entry if isinstance(entry, str) else entry["key"]: getattr(mixer, field)
            for field, entry in self.keys.items()
        }


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
