"""What a family is: everything that tells one Hugging Face architecture from another, in one object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jingu.errors import JinguError
from jingu.model.families.names import Rule
from jingu.model.spec import Activation, Experts, ModelSpec, places, replaced

Config = Mapping[str, Any]
Values = dict[str, Any]
"""Values of a spec by their places in it, such as `attention.heads`."""


@dataclass(frozen=True)
class Keys:
    """Keys of a `config.json`, and what they say of a spec, in both directions.

    Attributes:
        read: the values that they give; raises JinguError on an option that would change the numbers.
        write: the keys of a spec.
    """

    read: Callable[[Config], Values] = lambda config: {}
    write: Callable[[ModelSpec], dict[str, Any]] = lambda spec: {}


def four_widths(width: int) -> int:
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
    keys: tuple[Keys, ...]
    rules: tuple[Rule, ...]
    presets: Mapping[str, ModelSpec]
    feed_forward_size: Callable[[int], int] = four_widths
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

    def spec_from_hf(self, config: Config) -> ModelSpec:
        """The spec of a `config.json`. Raises JinguError on an option that would change the numbers."""
        if config.get("quantization_config") is not None:
            raise unsupported("quantization_config", config["quantization_config"], "expected None")
        values: Values = {}
        for keys in self.keys:
            values |= keys.read(config)
        follow = {
            "attention.kv_heads": values["attention.heads"],
            "attention.head_size": values["width"] // values["attention.heads"],
            "feed_forward.size": self.feed_forward_size(values["width"]),
        }
        return replaced(self.template, **{**follow, **values})

    def hf_config(self, spec: ModelSpec) -> dict[str, Any]:
        """`config.json` of a spec. Raises JinguError where it cannot say all that the spec does."""
        config: dict[str, Any] = {"model_type": self.model_type or self.name}
        for keys in self.keys:
            config |= keys.write(spec)
        said = places(self.spec_from_hf(config))
        lost = [place for place, value in places(spec).items() if said.get(place) != value]
        if lost:
            raise JinguError(
                f"Hugging Face's {self.architectures[0]} has no way to say this model's {', '.join(lost)}.",
                where="model",
                fix="Leave out of the run's file what is not a habit of the family, or choose another family. As a run "
                "the model is used all the same.",
            )
        return config


REQUIRED, FOLLOWS = object(), object()
"""In place of a key's default: there must be one; or the value follows from others, as `spec_from_hf` knows."""


def key(place: str, *names: str, default: Any = REQUIRED) -> Keys:
    """One key, of several names for it the first that a config has; the first of all is written."""

    def read(config: Config) -> Values:
        found = next((config[name] for name in names if config.get(name) is not None), default)
        if found is REQUIRED:
            raise JinguError(
                f"the model's config lacks {names[0]!r}.", where="config.json", fix="Restore the original file."
            )
        return {} if found is FOLLOWS else {place: found}

    return Keys(read, lambda spec: {names[0]: at(spec, place)})


def at(spec: ModelSpec, place: str) -> Any:
    """The value at a place; None where there is no such."""
    return places(spec).get(place)


def written(**values: Any) -> Keys:
    """Keys that are the same for all models of a family, and are not read."""
    return Keys(write=lambda spec: values)


def only(**values: Sequence[Any]) -> Keys:
    """Options that would change the numbers: each must be absent or have one of the values. The first is written."""

    def read(config: Config) -> Values:
        for name, choices in values.items():
            if name in config and config[name] not in choices:
                raise unsupported(name, config[name], f"expected {' or '.join(repr(choice) for choice in choices)}")
        return {}

    return Keys(read, lambda spec: {name: choices[0] for name, choices in values.items()})


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


def activation_key(name: str, default: str) -> Keys:
    """The key that names the activation."""
    return Keys(
        lambda config: {"feed_forward.activation": activation(name, config.get(name) or default)},
        lambda spec: {name: HF_ACTIVATIONS[spec.feed_forward.activation]},
    )


def activation(key: str, name: str) -> Activation:
    """The activation that a config's key names."""
    if name not in ACTIVATIONS:
        raise unsupported(key, name, f"known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def unsupported(key: str, value: Any, detail: str) -> JinguError:
    """The error for an option jingu does not compute."""
    return JinguError(
        f"the model sets {key} to {value!r}, which is not supported ({detail}).",
        where="config.json",
        fix="Without this option its numbers would be wrong, so it is not loaded.",
    )


def sized(
    template: ModelSpec,
    layers: int,
    width: int,
    heads: int,
    feed_forward: int,
    *,
    kv_heads: int | None = None,
    head_size: int | None = None,
    **changes: Any,
) -> ModelSpec:
    """A published model: the family's habits at these dimensions."""
    sizes = {
        "layers": layers,
        "encoder_layers": template.encoder_layers and layers,
        "width": width,
        "attention.heads": heads,
        "attention.kv_heads": kv_heads or heads,
        "attention.head_size": head_size or width // heads,
        "feed_forward.size": feed_forward,
    }
    return replaced(template, **sizes, **changes)
