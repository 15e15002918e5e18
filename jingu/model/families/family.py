"""A model family: one object with all differences between one Hugging Face architecture and another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from pydantic import ValidationError

from jingu.errors import JinguError
from jingu.model.components import LayerSpec
from jingu.model.families.name_map import TABLES, NameRule
from jingu.model.feed_forward_specs import Activation, Experts
from jingu.model.spec import ModelSpec, flatten_fields, repeat_pattern, replace_fields
from jingu.tables import read_table

HFConfig = Mapping[str, Any]
# Fields of a spec by their paths, such as `attention.num_heads`.
SpecValues = dict[str, Any]
# Keys of a config whose values are objects, and fields that other fields are derived from.
# Formats of compressed-tensors that are read.
_OBJECTS = ("rope_scaling", "rope_parameters", "quantization_config")
_DIMENSIONS = ("hidden_size", "num_layers", "attention.num_heads")


@dataclass(frozen=True)
class ConfigKeys:
    """A conversion between keys of a `config.json` and fields of a spec, in both directions.

    Attributes:
        read: returns the fields of a config. Raises JinguError for an option that would change the model's results and
            that jingu does not support.
        write: returns the keys of a spec.
    """

    read: Callable[[HFConfig], SpecValues] = lambda config: {}
    write: Callable[[ModelSpec], dict[str, Any]] = lambda spec: {}


def four_times_hidden_size(width: int) -> int:
    """Return four times the hidden size, the usual intermediate size of a plain feed-forward."""
    return 4 * width


@cache
def _published_models() -> Mapping[str, Mapping[str, SpecValues]]:
    """Return the fields of the models in presets.toml, by family and name; or `config`, the keys of a config."""
    fields: dict[str, dict[str, SpecValues]] = {}
    for series in read_table(__file__, "presets.toml").values():
        models = series.pop("models")
        family = fields.setdefault(series.pop("family"), {})
        for name, values in models.items():
            keys = {**series.get("config", {}), **values.get("config", {})}
            family[name] = {**series, **values, **({"config": keys} if keys else {})}
    return fields


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models.

    Attributes:
        architectures: class names of the family in Hugging Face configs. Exports write the first one.
        template: a spec with the family's defaults.
        keys: conversions of the keys of `config.json`, except for special token ids.
        rules: the map of tensor names.
        feed_forward_size: computes the default intermediate size from the hidden size.
        model_type: Hugging Face's name of the family, if it differs from jingu's.
        base: prefix of the body's tensor names, which some checkpoints omit or repeat.
        ignored: suffixes of the names of tensors that are not parameters (masks, tables).
        equivalent: for a family whose models come with their own code (`auto_map`, which jingu never runs): a family of
            transformers with the same computation, to which models are exported.
        constant_tensors: numbers that files contain as tensors, by name (`*` for the number of the block).
        swaps_expert_adapters: whether peft takes the inputs of all experts' matrices for their outputs: transformers
            stores them with inputs first, and does not say so.
        renamed_keys: names of keys in configs of the family, by those that other families have for the same.
        renamed: parts of tensor names in files, and those of the modules in transformers, which peft names, too.
    """

    architectures: tuple[str, ...]
    template: ModelSpec
    keys: tuple[ConfigKeys, ...]
    rules: tuple[NameRule, ...]
    feed_forward_size: Callable[[int], int] = four_times_hidden_size
    model_type: str | None = None
    base: str = ""
    ignored: tuple[str, ...] = ()
    equivalent: str | None = None
    constant_tensors: Mapping[str, float] = field(default_factory=dict)
    renamed_keys: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    swaps_expert_adapters: bool = False

    @property
    def name(self) -> str:
        """The name, as in `model.family`."""
        return self.template.family

    @property
    def has_peft_experts(self) -> bool:
        """Whether peft reads adapters of single experts, although transformers has all experts in one tensor."""
        return bool(TABLES.get(self.name, {}).get("peft_experts"))

    @property
    def peft_refused(self) -> tuple[str, ...]:
        """Ends of the names of modules whose adapters peft refuses."""
        return tuple(TABLES.get(self.name, {}).get("peft_refused", ()))

    @property
    def classifier(self) -> str:
        """Name of Hugging Face's class for the family's reward models."""
        name = self.architectures[0]
        return name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "ForSequenceClassification"

    def stored_name(self, name: str) -> str:
        """Return the name that a tensor of transformers' model has in files."""
        for stored, current in self.renamed.items():
            name = name.replace(current, stored)
        return name

    def module_name(self, name: str) -> str:
        """Return the name in transformers' model of a tensor in files: the inverse of `stored_name`."""
        for stored, current in self.renamed.items():
            name = name.replace(stored, current)
        return name

    @property
    def body(self) -> str:
        """Name of Hugging Face's class for the family's models without their head."""
        name = self.architectures[0]
        for suffix in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"):
            name = name.removesuffix(suffix)
        return name if name.endswith("Model") else f"{name}Model"

    @cached_property
    def presets(self) -> Mapping[str, ModelSpec]:
        """Published models, by name."""
        models = _published_models().get(self.name) or TABLES.get(self.name, {}).get("presets", {})
        return {
            name: self._read_config(values["config"]) if "config" in values else self._build_spec(values)
            for name, values in models.items()
        }

    @property
    def experts(self) -> Experts | None:
        """The family's default mixture of experts, from its template or a preset; None if the family has no experts."""
        parts = (spec.experts for spec in (self.template, *self.presets.values()))
        return next((part for part in parts if part is not None), None)

    def spec_from_hf(self, config: HFConfig) -> ModelSpec:
        """Return the spec of a `config.json`.

        Raises:
            JinguError: a value is missing, wrong, or means an option that jingu does not support.
        """
        try:
            return self._read_config(config)
        except JinguError as error:
            raise JinguError(error.what, where="config.json", fix=error.fix) from error
        except ValidationError as error:
            problems = []
            for problem in error.errors():
                # The input of a missing field is the object that lacks it.
                value = "" if problem["type"] == "missing" else f" is {problem['input']!r}"
                problems.append(f"{'.'.join(map(str, problem['loc']))}{value}: {problem['msg'].lower()}")
            raise _wrong_config("; ".join(problems)) from error
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            raise _wrong_config(str(error)) from error

    def complete(self, config: HFConfig, *, is_part: bool) -> dict[str, Any]:
        """Return a config together with the values that transformers has for keys that it lacks.

        Args:
            is_part: whether the config is that of the decoder in a composite model. These lack usual sizes, too.
                Without them, the config of a separate model is damaged.
        """
        table = TABLES.get(self.name, {})
        values = {**(table.get("sizes", {}) if is_part else {}), **table.get("defaults", {})}
        mixers = table.get("mixers", {})
        if "letters" in mixers:
            # The types of layers say how many there are. In former files they are letters.
            letters, types_key = config.get(mixers["letters"]), mixers["types_key"]
            if letters is not None:
                values.pop(types_key, None)
            values["num_hidden_layers"] = len(config.get(types_key) or letters or values[types_key])
        if config.get("rope_scaling"):
            # The former name.
            values.pop("rope_parameters", None)
        return {**values, **config}

    def _read_config(self, config: HFConfig) -> ModelSpec:
        """Return the spec of a `config.json`; also raises what wrong values cause."""
        for key in _OBJECTS:
            if config.get(key) is not None and not isinstance(config[key], Mapping):
                raise _wrong_config(f"{key} is {config[key]!r}, and should be an object")
        config = {**{key: config[name] for key, name in self.renamed_keys.items() if name in config}, **config}
        values: SpecValues = {}
        for keys in self.keys:
            values |= keys.read(config)
        if self.classifier in (config.get("architectures") or []):
            # transformers writes a name per label. A config without names means two labels ("ab").
            num_labels = len(config.get("id2label") or "ab")
            if num_labels != 1:
                raise unsupported_option("num_labels", num_labels, "expected 1, of a reward model")
            values["score_head"] = True
        for place in _DIMENSIONS:
            if not isinstance(values[place], int | float) or not values[place] >= 1:
                raise _wrong_config(f"{place} is {values[place]!r}, and should be a whole number of at least 1")
        return self._build_spec(values)

    def _build_spec(self, values: SpecValues) -> ModelSpec:
        """Return the template with these values, and with defaults that are derived from them."""
        derived = {
            "num_encoder_layers": self.template.num_encoder_layers and values["num_layers"],
            "layer_pattern": repeat_pattern(self.template.layer_pattern, values["num_layers"]),
            "attention.num_kv_heads": values["attention.num_heads"],
            "attention.head_dim": values["hidden_size"] // values["attention.num_heads"],
            "feed_forward.intermediate_size": self.feed_forward_size(values["hidden_size"]),
        }
        missing = {path: value for path, value in derived.items() if path not in values}
        return replace_fields(self.template, **values, **missing)

    def hf_config(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the `config.json` of a spec. Raises JinguError if Hugging Face's class cannot represent the spec."""
        config: dict[str, Any] = {"model_type": self.model_type or self.name}
        if spec.score_head:
            config |= {"architectures": [self.classifier], "id2label": {"0": "reward"}, "label2id": {"reward": 0}}
        for keys in self.keys:
            config |= {self.renamed_keys.get(key, key): value for key, value in keys.write(spec).items()}
        # Check that reading the config gives the same spec.
        back = self.spec_from_hf(config)
        read_back = flatten_fields(back)
        lost = [path for path, value in flatten_fields(spec).items() if read_back.get(path) != value]
        if back.layers == spec.layers and not spec.num_encoder_layers:
            # Equal layers may be described differently: as one kind, or as a pattern of which only one kind is used.
            # The model's own norm also serves outside of the layers.
            of_layers = {"layer_kinds", "layer_pattern", *LayerSpec.model_fields} - {"norm"}
            lost = [path for path in lost if path.partition(".")[0] not in of_layers]
        # Without such layers, their kind means nothing.
        lost = [path for path in lost if path != "mtp_kind"]
        if spec.mtp_layers and back.prediction_layer != spec.prediction_layer:
            lost.append("mtp_kind")
        if lost:
            raise JinguError(
                f"Hugging Face's {self.architectures[0]} cannot express this model's {', '.join(lost)}.",
                where="model",
                fix="Remove settings that the family does not have from the run's file, or choose another family. "
                "Every command accepts the run itself.",
            )
        return config


def config_key(place: str, *names: str, default: Any = "required") -> ConfigKeys:
    """Return the conversion of one key, which may have several names.

    It reads the first name that a config has, and writes the first of all names.

    Args:
        place: path of the field in the spec.
        names: names of the key.
        default: value of the field if the key is missing; `required` raises JinguError; `derived` leaves the field to
            `Family._build_spec`.
    """

    def read(config: HFConfig) -> SpecValues:
        for name in names:
            if config.get(name) is not None:
                return {place: config[name]}
        if default == "required":
            raise JinguError(
                f"the model's config lacks {names[0]!r}.", where="config.json", fix="Restore the original file."
            )
        return {} if default == "derived" else {place: default}

    def write(spec: ModelSpec) -> dict[str, Any]:
        value = field_value(spec, place)
        if value is None and default not in ("required", "derived"):
            value = default
        return {names[0]: value}

    return ConfigKeys(read, write)


def config_keys(family: str) -> tuple[ConfigKeys, ...]:
    """Return the conversions of the keys and constants that families.toml lists for a family."""
    keys = []
    for place, entry in TABLES[family]["keys"].items():
        if isinstance(entry, dict):
            keys.append(config_key(place, entry["key"], default=entry["default"]))
        else:
            keys.append(config_key(place, *([entry] if isinstance(entry, str) else entry)))
    constants = TABLES[family].get("constants", {})
    return (*keys, ConfigKeys(write=lambda spec: constants))


def load_template(family: str) -> ModelSpec:
    """Return the template of a family in families.toml."""
    return ModelSpec(family=family, **TABLES[family]["template"])


def field_value(spec: ModelSpec, place: str) -> Any:
    """Return the value of a field by its path; None if the spec has no such field."""
    value: Any = spec
    for name in place.split("."):
        value = getattr(value, name, None)
    return value


def supported_options(**values: Sequence[Any]) -> ConfigKeys:
    """Return a conversion that accepts options only if they are absent or have one of these values.

    Other values would change the model's results. The first value of each option is written.
    """

    def read(config: HFConfig) -> SpecValues:
        for name, choices in values.items():
            if name in config and config[name] not in choices:
                raise unsupported_option(
                    name, config[name], f"expected {' or '.join(repr(choice) for choice in choices)}"
                )
        return {}

    return ConfigKeys(read, lambda spec: {name: choices[0] for name, choices in values.items()})


# Names of activation functions in Hugging Face configs.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
# The inverse. Of several names for a function, it has the one that all releases of transformers support.
HF_ACTIVATIONS: dict[Activation, str] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_new",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}


def activation_key(name: str, default: str) -> ConfigKeys:
    """Return the conversion of the key `name` for the activation function.

    Of several names for a function, the default is written if it is one of them: some readers accept no other.
    """

    def write(spec: ModelSpec) -> dict[str, Any]:
        activation = field_value(spec, "feed_forward.activation") or ACTIVATIONS[default]
        return {name: default if ACTIVATIONS[default] == activation else HF_ACTIVATIONS[activation]}

    return ConfigKeys(
        lambda config: {"feed_forward.activation": parse_activation(name, config.get(name) or default)}, write
    )


def parse_activation(key: str, name: str) -> Activation:
    """Return the activation for the value `name` of a config's `key`. Raises JinguError if it is unknown."""
    if name not in ACTIVATIONS:
        raise unsupported_option(key, name, f"known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _wrong_config(reason: str) -> JinguError:
    """Return the error for a config with a wrong value."""
    what = f"this does not describe a model ({reason})."
    return JinguError(what, where="config.json", fix="Restore the original file.")


def unsupported_option(key: str, value: Any, detail: str) -> JinguError:
    """Return the error for an option that jingu does not support."""
    return JinguError(
        f"the model sets {key} to {value!r}, which is not supported ({detail}).",
        where="config.json",
        fix="Without this option its numbers would be wrong, so it is not loaded.",
    )
