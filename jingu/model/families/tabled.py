"""Families that are tables: the entries of families.toml that name `architectures`.

An entry has

- `architectures` and `model_type`: names of Hugging Face. The first architecture is written.
- `template`: fields that differ from the template of Llama, by their paths.
- `keys`: keys of `config.json` beside those of Llama; false removes one. An entry {key, default, as} converts a number:
  `as` is inverse, inverse_sqrt, or, for flags, sqrt_hidden_size, sandwich (norms before and behind branches), parallel
  or one_norm (attention and feed-forward beside each other), or each_head (`qk_norm_width`).
- `layers`: fields of `LayerOptions`: how windows, positions and feed-forwards differ between layers.
- `shared_experts`: size of the shared expert: the key of its size, or {key, default}: a key of its size as a multiple
  of an expert's.
- `router_groups`: key that says whether experts are chosen by groups, and the value that says so.
- `fixed`: fields that are the same in all models, and have no keys.
- `lists`: keys whose values are lists of numbers, with the field of each.
- `latent`: whether attention is latent.
- `like`: tables whose `template`, `keys`, `names`, `transforms` and `mixers` apply, too.
- `mixers`: fields of `MixerLayers`: which layers have a mixer with a state, and its keys.
- `parallel_experts`: whether configs may have experts beside a dense feed-forward (`PARALLEL_EXPERTS`).
- `per_layer_inputs`: whether layers may have inputs of their own (`PER_LAYER_INPUTS`).
- `parallel_blocks`: whether the keys and norms of blocks are those of Falcon (`PARALLEL_BLOCKS`).
- `feed_forward_multiple`: the default intermediate size in hidden sizes, if it is not that of Llama.
- `adjusted_size`: whether the config has the intermediate size before an adjustment (`ADJUSTED_SIZE`).
- `rope`: fields of `RopeDefaults`: what the config does not say of rotary positions.
- `options`: keys whose other values would change the result, with the values that are read; the first is written.
- `ignored`: suffixes of the names of tensors that are not parameters.
- `base`: prefix of the body's tensors, if it is not `model.`, which then stands for it in the names of other tables.
- `names_of_llama`: whether the names of Llama apply; false if there is a `base`.
- `separate_predictions`: prefix of the layers of multi-token prediction, if their numbers begin at 0.
- `prediction_names`: names in the blocks of these layers that differ from those in other blocks.
- `further_model_types`: names of published models with the same classes.
- `constant_tensors`, `renamed`, `renamed_keys`, `equivalent`, `swaps_expert_adapters`: as in `Family`.
- `equal_keys`: keys that must have the value of another key, or none.
- `sizes` and `defaults`: the values of transformers' class for keys that a config lacks.
- `peft_refused`: ends of the names of modules whose adapters peft refuses.
- `peft_experts`: whether peft reads adapters of single experts.
- `transforms`: rearrangements (`name_map.TRANSFORMS`) of the tensors of some names.
- `names`: modules beside those of Llama; false removes one. Of several modules of jingu in a list, a model has one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jingu.model.families.dense_layers import DenseLayers
from jingu.model.families.family import (
    ConfigKeys,
    Family,
    activation_key,
    config_key,
    field_value,
    supported_options,
    unsupported_option,
)
from jingu.model.families.latent_keys import LATENT_KEYS
from jingu.model.families.layer_keys import LayerOptions, layer_keys
from jingu.model.families.layer_shapes import PARALLEL_EXPERTS, PER_LAYER_INPUTS, LayerShapes
from jingu.model.families.llama import LLAMA
from jingu.model.families.mixer_keys import ADJUSTED_SIZE, MixerLayers
from jingu.model.families.name_map import IDENTITY, TABLES, TRANSFORMS, NameRule, rules_of_names
from jingu.model.families.parallel_blocks import PARALLEL_BLOCK_RULES, PARALLEL_BLOCKS
from jingu.model.families.rope import RopeDefaults
from jingu.model.spec import ModelSpec, replace_fields

# How a number of the config becomes the field of the spec, and back.
_CONVERSIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "inverse": (lambda x: 1 / x, lambda x: 1 / x),
    "inverse_sqrt": (lambda x: x**-0.5, lambda x: x**-2),
    "one_norm": (lambda flag: "parallel_one_norm" if flag else "sequential", lambda x: x == "parallel_one_norm"),
    "parallel": (lambda flag: "parallel" if flag else "sequential", lambda x: x == "parallel"),
    "each_head": (lambda flag: "each_head" if flag else "head", lambda x: x == "each_head"),
    "sandwich": (lambda flag: "around" if flag else "before", lambda x: x == "around"),
    "sqrt_hidden_size": (lambda flag: "sqrt_hidden_size" if flag else 1.0, lambda x: x == "sqrt_hidden_size"),
}


def _has_query_rank(spec: ModelSpec) -> bool:
    return spec.attention.latent is not None and spec.attention.latent.query_rank is not None


# The name of the projection of queries depends on its inputs.
_QUERY_RULES = (
    *rules_of_names({"model.layers.*.self_attn.q_b_proj": "blocks.*.attention.q"}, when=_has_query_rank),
    *rules_of_names(
        {"model.layers.*.self_attn.q_proj": "blocks.*.attention.q"}, when=lambda spec: not _has_query_rank(spec)
    ),
)


def tabled_families() -> tuple[Family, ...]:
    """Return the families that are tables."""
    return tuple(_family(name, table) for name, table in TABLES.items() if "architectures" in table)


def tabled_family(name: str, table: dict[str, Any]) -> Family:
    """Return the family of a table that is not in families.toml, such as a plug-in's.

    Args:
        table: an entry as described above; its `presets` have the form of `models` in presets.toml.
    """
    TABLES.setdefault(name, table)
    return _family(name, TABLES[name])


def _family(name: str, table: dict[str, Any]) -> Family:
    # Later tables override earlier ones.
    bases = [TABLES[base] for base in table.get("like", ())]
    fields = {path: value for each in (*bases, table) for path, value in each.get("template", {}).items()}
    base = table.get("base", "model.")
    transforms = {
        _replace_base(hf, base): name for each in (*bases, table) for hf, name in each.get("transforms", {}).items()
    }
    template = replace_fields(LLAMA.template, family=name, **fields)
    has_experts = template.experts is not None
    tables = [TABLES["llama"], *([TABLES["experts"]] if has_experts else []), *bases, table]
    places = {place: entry for each in tables for place, entry in each.get("keys", {}).items()}
    # The conversion of layers reads the context length.
    places.pop("max_position_embeddings", None)
    is_like_llama = table.get("names_of_llama", base == "model.")
    names = {
        _replace_base(hf, base): name
        for each in tables[not is_like_llama :]
        for hf, name in each.get("names", {}).items()
    }
    rules = _rules(names, transforms)
    if table.get("latent"):
        rules += _QUERY_RULES
    if table.get("parallel_blocks"):
        rules += PARALLEL_BLOCK_RULES
    if table.get("separate_predictions"):
        rules = _separate_predictions(rules, table["separate_predictions"], table.get("prediction_names", {}))
    return Family(
        architectures=tuple(table["architectures"]),
        template=template,
        feed_forward_size=_feed_forward_size(table),
        model_type=table.get("model_type"),
        keys=(
            *(_keys(place, entry) for place, entry in places.items() if entry is not False),
            activation_key(table.get("activation_key", "hidden_act"), table.get("activation", "silu")),
            *_shared_expert_keys(table, places),
            *_group_keys(table),
            ConfigKeys(lambda config: table.get("fixed", {})),
            *(_list_keys(key, places) for key, places in table.get("lists", {}).items()),
            *([LATENT_KEYS] if table.get("latent") else []),
            *([PARALLEL_EXPERTS] if table.get("parallel_experts") else []),
            *([PER_LAYER_INPUTS] if table.get("per_layer_inputs") else []),
            *([PARALLEL_BLOCKS] if table.get("parallel_blocks") else []),
            *([ADJUSTED_SIZE] if table.get("adjusted_size") else []),
            _layer_keys(table, bases),
            supported_options(
                **{
                    key: [None if value == "none" else value for value in values]
                    for key, values in table.get("options", {}).items()
                }
            ),
            *(_equal_keys(key, same) for key, same in table.get("equal_keys", {}).items()),
            # The default id of padding in transformers may be beyond a small vocabulary.
            ConfigKeys(write=lambda spec: {**TABLES["llama"]["constants"], "pad_token_id": None}),
        ),
        rules=rules,
        base=base,
        constant_tensors=table.get("constant_tensors", {}),
        renamed=table.get("renamed", {}),
        renamed_keys=table.get("renamed_keys", {}),
        equivalent=table.get("equivalent"),
        swaps_expert_adapters=table.get("swaps_expert_adapters", False),
        ignored=(".rotary_emb.inv_freq", *table.get("ignored", ())),
    )


def _feed_forward_size(table: dict[str, Any]) -> Callable[[int], int]:
    """Return what computes the default intermediate size of an entry from the hidden size."""
    multiple = table.get("feed_forward_multiple")
    return LLAMA.feed_forward_size if multiple is None else lambda width: multiple * width


def _replace_base(name: str, base: str) -> str:
    """Return a name in the table of another family, with the prefix of this one."""
    return base + name.removeprefix("model.") if name.startswith("model.") else name


def _rules(names: dict[str, Any], transforms: dict[str, str]) -> tuple[NameRule, ...]:
    """Return the rules of an entry's `names` and `transforms`."""
    rules: list[NameRule] = []
    for hf_name, jingu_name in names.items():
        if jingu_name is not False:
            transform = TRANSFORMS[transforms[hf_name]] if hf_name in transforms else IDENTITY
            for name in jingu_name if isinstance(jingu_name, list) else [jingu_name]:
                rules += rules_of_names({hf_name: name}, transform)
    return tuple(rules)


def _separate_predictions(rules: tuple[NameRule, ...], prefix: str, parts: dict[str, str]) -> tuple[NameRule, ...]:
    """Return rules of files in which layers of multi-token prediction are not numbered behind the others.

    Args:
        prefix: what these layers have in place of `model.layers.`.
        parts: parts of their names that differ, by those of other blocks.
    """
    result: list[NameRule] = []
    for rule in rules:
        if not rule.jingu_names[0].startswith("blocks."):
            result.append(rule)
            continue
        names = tuple(name.replace("blocks.*", "mtp.*.block") for name in rule.jingu_names)
        result.append(replace(rule, has_predictions=False))
        hf_name = rule.hf_name.replace("model.layers.", prefix, 1)
        for part, name in parts.items():
            hf_name = hf_name.replace(part, name)
        result.append(replace(rule, hf_name=hf_name, jingu_names=names))
    return tuple(result)


def _layer_keys(table: dict[str, Any], bases: list[dict[str, Any]]) -> ConfigKeys:
    """Return the conversion of an entry's `layers` and `rope`, and of the `mixers` of one of its bases."""
    fields = dict(table.get("layers", {}))
    mixers = [each["mixers"] for each in (*bases, table) if "mixers" in each]
    if mixers:
        entries = {field: value for each in mixers for field, value in each.items()}
        keys = {field: entry for each in mixers for field, entry in each.get("keys", {}).items()}
        entries = {field: None if value == "none" else value for field, value in entries.items()}
        fields["mixers"] = MixerLayers(**{**entries, "keys": keys})
    if "shapes" in fields:
        fields["shapes"] = LayerShapes(**fields["shapes"])
    if "dense" in fields:
        fields["dense"] = DenseLayers(**fields["dense"])
    if "window_fields" in fields:
        # TOML has no null.
        fields["window_fields"] = {
            place: None if value == "none" else value for place, value in fields["window_fields"].items()
        }
    return layer_keys(LayerOptions(**fields), RopeDefaults(**table.get("rope", {})))


def _shared_expert_keys(table: dict[str, Any], places: dict[str, Any]) -> list[ConfigKeys]:
    """Return the conversion of an entry's `shared_experts`; none if it has no such entry."""
    entry = table.get("shared_experts")
    place = "feed_forward.shared_intermediate_size"
    if entry is None:
        return []
    if isinstance(entry, str):
        # The shared expert is as large as this key says, which may be that of an expert.
        return [ConfigKeys(lambda config: {place: config[entry]}, lambda spec: {entry: field_value(spec, place)})]
    key, default, size_key = entry["key"], entry["default"], places["feed_forward.intermediate_size"]

    def read(config: Any) -> dict[str, Any]:
        number = config.get(key)
        return {place: (default if number is None else number) * config[size_key] or None}

    def write(spec: Any) -> dict[str, Any]:
        shared = field_value(spec, place) or 0
        return {key: shared // spec.feed_forward.intermediate_size}

    return [ConfigKeys(read, write)]


def _group_keys(table: dict[str, Any]) -> list[ConfigKeys]:
    """Return the conversion of an entry's `router_groups`; none if it has no such entry."""
    if "router_groups" not in table:
        return []
    (key, by_groups) = table["router_groups"]

    def read(config: Any) -> dict[str, Any]:
        places = {"num_groups": "n_group", "num_groups_per_token": "topk_group"}
        uses_groups = config.get(key, "greedy") == by_groups
        return {
            f"feed_forward.router.{place}": (config.get(name) or 1) if uses_groups else 1
            for place, name in places.items()
        }

    def write(spec: Any) -> dict[str, Any]:
        router = spec.feed_forward.router
        return {
            key: by_groups if router.num_groups > 1 else "greedy",
            "n_group": router.num_groups,
            "topk_group": router.num_groups_per_token,
        }

    return [ConfigKeys(read, write)]


def _equal_keys(key: str, same: str) -> ConfigKeys:
    """Return the conversion of an entry of `equal_keys`."""

    def read(config: Any) -> dict[str, Any]:
        if config.get(key, config[same]) not in (None, config[same]):
            raise unsupported_option(key, config[key], f"expected {config[same]}, as {same}")
        return {}

    return ConfigKeys(read, lambda spec: {key: field_value(spec, same)})


def _list_keys(key: str, places: list[str]) -> ConfigKeys:
    """Return the conversion of an entry of `lists`. Numbers are 1 in configs without the key."""

    def read(config: Any) -> dict[str, Any]:
        numbers = config.get(key)
        return dict(zip(places, [1.0] * len(places) if numbers is None else numbers, strict=True))

    return ConfigKeys(read, lambda spec: {key: [field_value(spec, place) for place in places]})


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
        number = to_config(1.0 if value is None else value)
        if isinstance(number, bool):
            return {entry["key"]: number}
        number = round(number, 9)
        return {entry["key"]: int(number) if number.is_integer() else number}

    def read(config: Any) -> dict[str, Any]:
        return {key: None if value is None else to_spec(value) for key, value in plain.read(config).items()}

    return ConfigKeys(read, write)
