"""Families that are tables: the entries of families.toml that name `architectures`.

An entry has

- `architectures` and `model_type`: names of Hugging Face. The first architecture is written.
- `template`: fields that differ from the template of Llama, by their paths.
- `keys`: keys of `config.json` beside those of Llama; false removes one. An entry {key, default, as} converts a number:
  `as` is inverse or inverse_sqrt.
- `layers`: arguments of `layer_keys`, which reads windows and positions.
- `rope`: fields of `RopeDefaults`: what the config does not say of rotary positions.
- `options`: keys whose other values would change the result, with the values that are read; the first is written.
- `ignored`: suffixes of the names of tensors that are not parameters.
- `base`: prefix of the body's tensors, if it is not `model.`; no names of Llama then apply.
- `constant_tensors`, `renamed`: as in `Family`.
- `transforms`: rearrangements (`name_map.TRANSFORMS`) of the tensors of some names.
- `names`: modules beside those of Llama; false removes one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jingu.model.families.family import (
    ConfigKeys,
    Family,
    activation_key,
    config_key,
    field_value,
    supported_options,
)
from jingu.model.families.layer_keys import layer_keys
from jingu.model.families.llama import LLAMA
from jingu.model.families.name_map import IDENTITY, TABLES, TRANSFORMS, NameRule, rules_of_names
from jingu.model.families.rope import RopeDefaults
from jingu.model.spec import replace_fields

# How a number of the config becomes the field of the spec, and back.
_CONVERSIONS: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "inverse": (lambda x: 1 / x, lambda x: 1 / x),
    "inverse_sqrt": (lambda x: x**-0.5, lambda x: x**-2),
}


def tabled_families() -> tuple[Family, ...]:
    """Return the families that are tables."""
    return tuple(_family(name, table) for name, table in TABLES.items() if "architectures" in table)


def _family(name: str, table: dict[str, Any]) -> Family:
    places = {**TABLES["llama"]["keys"], **table.get("keys", {})}
    # The conversion of layers reads the context length.
    places.pop("max_position_embeddings", None)
    inherited = {} if table.get("base", "model.") != "model." else TABLES["llama"]["names"]
    names = {**inherited, **table.get("names", {})}
    return Family(
        architectures=tuple(table["architectures"]),
        template=replace_fields(LLAMA.template, family=name, **table.get("template", {})),
        feed_forward_size=LLAMA.feed_forward_size,
        model_type=table.get("model_type"),
        keys=(
            *(_keys(place, entry) for place, entry in places.items() if entry is not False),
            activation_key(table.get("activation_key", "hidden_act"), table.get("activation", "silu")),
            _layer_keys(table),
            supported_options(
                **{
                    key: [None if value == "none" else value for value in values]
                    for key, values in table.get("options", {}).items()
                }
            ),
            # The default id of padding in transformers may be beyond a small vocabulary.
            ConfigKeys(write=lambda spec: {**TABLES["llama"]["constants"], "pad_token_id": None}),
        ),
        rules=_rules(names, table.get("transforms", {})),
        base=table.get("base", "model."),
        constant_tensors=table.get("constant_tensors", {}),
        renamed=table.get("renamed", {}),
        ignored=(".rotary_emb.inv_freq", *table.get("ignored", ())),
    )


def _rules(names: dict[str, Any], transforms: dict[str, str]) -> tuple[NameRule, ...]:
    """Return the rules of an entry's `names` and `transforms`."""
    rules: list[NameRule] = []
    for hf_name, jingu_name in names.items():
        if jingu_name is not False:
            transform = TRANSFORMS[transforms[hf_name]] if hf_name in transforms else IDENTITY
            rules += rules_of_names({hf_name: jingu_name}, transform)
    return tuple(rules)


def _layer_keys(table: dict[str, Any]) -> ConfigKeys:
    """Return the conversion of an entry's `layers` and `rope`."""
    rope = RopeDefaults(**table.get("rope", {}))
    return layer_keys(**table.get("layers", {}), position=rope)


def _keys(place: str, entry: Any) -> ConfigKeys:
    """Return the conversion of an entry of `keys`."""
    if isinstance(entry, str):
        return config_key(place, entry)
    if isinstance(entry, list):
        return config_key(place, *entry)
    conversion = entry.get("as")
    default = None if entry["default"] == "none" else entry["default"]
    plain = config_key(place, entry["key"], default=default)
    if conversion is None:
        return plain
    to_spec, to_config = _CONVERSIONS[conversion]

    def write(spec: Any) -> dict[str, Any]:
        value = field_value(spec, place)
        number = 0.0 if value is None else round(to_config(value), 9)
        return {entry["key"]: int(number) if number.is_integer() else number}

    def read(config: Any) -> dict[str, Any]:
        return {key: None if value is None else to_spec(value) for key, value in plain.read(config).items()}

    return ConfigKeys(read, write)
