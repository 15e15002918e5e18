"""What a family is: everything that tells one Hugging Face architecture from another, in one object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jingu.errors import JinguError
from jingu.model.families.name_map import NameRule
from jingu.model.spec import Activation, Experts, ModelSpec, flatten_fields, replace_fields

HFConfig = Mapping[str, Any]
# Values of a spec by their places in it, such as `attention.num_heads`.
SpecValues = dict[str, Any]


@dataclass(frozen=True)
class ConfigKeys:
    """Keys of a `config.json`, and what they say of a spec, in both directions.

    Attributes:
        read: the values that they give; raises JinguError on an option that would change the numbers.
        write: the keys of a spec.
    """

    read: Callable[[HFConfig], SpecValues] = lambda config: {}
    write: Callable[[ModelSpec], dict[str, Any]] = lambda spec: {}


def four_times_hidden_size(width: int) -> int:
    """The usual size of a plain feed-forward."""
    return 4 * width


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models.

    Attributes:
        architectures: Hugging Face class names that load it; the first one is written on export.
        template: a spec that holds the family's habits; dimensions are replaced.
        keys: of `config.json`, without the special token ids.
        rules: the name map.
        presets: models that were published, by name.
        feed_forward_size: the family's rule, from the width.
        model_type: Hugging Face's name of the family, where it is another.
        base: prefix of their names that some checkpoints leave out.
        ignored: ends of their names that hold no parameters (masks, tables).
        replaces_code: whether the family stands in for code that comes with the models (`auto_map`) and is never run.
    """

    architectures: tuple[str, ...]
    template: ModelSpec
    keys: tuple[ConfigKeys, ...]
    rules: tuple[NameRule, ...]
    presets: Mapping[str, ModelSpec]
    feed_forward_size: Callable[[int], int] = four_times_hidden_size
    model_type: str | None = None
    base: str = ""
    ignored: tuple[str, ...] = ()
    replaces_code: bool = False

    @property
    def name(self) -> str:
        """As in `model.family`."""
        return self.template.family

    @property
    def experts(self) -> Experts | None:
        """The family's mixture of experts: its habit, or that of one of its presets."""
        parts = (spec.feed_forward for spec in (self.template, *self.presets.values()))
        return next((part for part in parts if isinstance(part, Experts)), None)

    def spec_from_hf(self, config: HFConfig) -> ModelSpec:
        """The spec of a `config.json`. Raises JinguError on an option that would change the numbers."""
        if config.get("quantization_config") is not None:
            raise unsupported_option("quantization_config", config["quantization_config"], "expected None")
        values: SpecValues = {}
        for keys in self.keys:
            values |= keys.read(config)
        follow = {
            "attention.num_kv_heads": values["attention.num_heads"],
            "attention.head_dim": values["hidden_size"] // values["attention.num_heads"],
            "feed_forward.intermediate_size": self.feed_forward_size(values["hidden_size"]),
        }
        return replace_fields(self.template, **{**follow, **values})

    def hf_config(self, spec: ModelSpec) -> dict[str, Any]:
        """`config.json` of a spec. Raises JinguError where it cannot say all that the spec does."""
        config: dict[str, Any] = {"model_type": self.model_type or self.name}
        for keys in self.keys:
            config |= keys.write(spec)
        said = flatten_fields(self.spec_from_hf(config))
        lost = [place for place, value in flatten_fields(spec).items() if said.get(place) != value]
        if lost:
            raise JinguError(
                f"Hugging Face's {self.architectures[0]} has no way to say this model's {', '.join(lost)}.",
                where="model",
                fix="Leave out of the run's file what is not a habit of the family, or choose another family. As a run "
                "the model is used all the same.",
            )
        return config


# In place of a key's default: there must be one; or the value follows from others, as `spec_from_hf` knows.
REQUIRED, DERIVED = object(), object()


def config_key(place: str, *names: str, default: Any = REQUIRED) -> ConfigKeys:
    """One key, of several names for it the first that a config has; the first of all is written."""

    def read(config: HFConfig) -> SpecValues:
        value = next((config[name] for name in names if config.get(name) is not None), default)
        if value is REQUIRED:
            raise JinguError(
                f"the model's config lacks {names[0]!r}.", where="config.json", fix="Restore the original file."
            )
        return {} if value is DERIVED else {place: value}

    return ConfigKeys(read, lambda spec: {names[0]: field_value(spec, place)})


def field_value(spec: ModelSpec, place: str) -> Any:
    """The value at a place; None where there is no such."""
    return flatten_fields(spec).get(place)


def constant_keys(**values: Any) -> ConfigKeys:
    """Keys that are the same for all models of a family, and are not read."""
    return ConfigKeys(write=lambda spec: values)


def supported_options(**values: Sequence[Any]) -> ConfigKeys:
    """Options that would change the numbers: each must be absent or have one of the values. The first is written."""

    def read(config: HFConfig) -> SpecValues:
        for name, choices in values.items():
            if name in config and config[name] not in choices:
                raise unsupported_option(
                    name, config[name], f"expected {' or '.join(repr(choice) for choice in choices)}"
                )
        return {}

    return ConfigKeys(read, lambda spec: {name: choices[0] for name, choices in values.items()})


ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
# The other way; of several names for one function, that which every release of transformers knows.
HF_ACTIVATIONS: dict[Activation, str] = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}


def activation_key(name: str, default: str) -> ConfigKeys:
    """The key that names the activation."""
    return ConfigKeys(
        lambda config: {"feed_forward.activation": parse_activation(name, config.get(name) or default)},
        lambda spec: {name: HF_ACTIVATIONS[spec.feed_forward.activation]},
    )


def parse_activation(key: str, name: str) -> Activation:
    """The activation that a config's key names."""
    if name not in ACTIVATIONS:
        raise unsupported_option(key, name, f"known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def unsupported_option(key: str, value: Any, detail: str) -> JinguError:
    """The error for an option jingu does not compute."""
    return JinguError(
        f"the model sets {key} to {value!r}, which is not supported ({detail}).",
        where="config.json",
        fix="Without this option its numbers would be wrong, so it is not loaded.",
    )


def preset(
    template: ModelSpec,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    intermediate_size: int,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    **changes: Any,
) -> ModelSpec:
    """A published model: the family's habits at these dimensions."""
    sizes = {
        "num_layers": num_layers,
        "num_encoder_layers": template.num_encoder_layers and num_layers,
        "hidden_size": hidden_size,
        "attention.num_heads": num_heads,
        "attention.num_kv_heads": num_kv_heads or num_heads,
        "attention.head_dim": head_dim or hidden_size // num_heads,
        "feed_forward.intermediate_size": intermediate_size,
    }
    return replace_fields(template, **sizes, **changes)
