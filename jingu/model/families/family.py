"""What a family is: everything that tells one Hugging Face architecture from another, in one object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from jingu.errors import JinguError
from jingu.model.families.names import Rule
from jingu.model.spec import Activation, Experts, ModelSpec, replaced

Config = Mapping[str, Any]
Values = dict[str, Any]
"""Values of a spec by their places in it, such as `attention.heads`."""


@dataclass(frozen=True)
class Keys:
    """Keys of a `config.json`, and what they say of a spec, in both directions.

    Attributes:
        read: the values that they give, of the config and the values before; raises JinguError on an option that would
            change the numbers.
        write: the keys of a spec.
    """

    read: Callable[[Config, Values], Values] = lambda config, values: {}
    write: Callable[[ModelSpec], dict[str, Any]] = lambda spec: {}


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: as in `model.family`.
        architectures: Hugging Face class names that load it; the first one is written on export.
        template: a spec that holds the family's habits; dimensions are replaced.
        feed_forward_size: the family's rule, from the width.
        keys: of `config.json`, without the special token ids.
        rules: the name map.
        base: prefix of their names that some checkpoints leave out.
        ignored: ends of their names that hold no parameters (masks, tables).
        presets: models that were published, by name.
        replaces_code: whether the family stands in for code that comes with the models (`auto_map`) and is never run.
    """

    name: str
    architectures: tuple[str, ...]
    template: ModelSpec
    feed_forward_size: Callable[[int], int]
    keys: tuple[Keys, ...]
    rules: tuple[Rule, ...]
    base: str = ""
    ignored: tuple[str, ...] = ()
    presets: Mapping[str, ModelSpec] = field(default_factory=dict)
    replaces_code: bool = False

    @property
    def experts(self) -> Experts | None:
        """The family's mixture of experts: its habit, or that of one of its presets."""
        parts = (spec.feed_forward for spec in (self.template, *self.presets.values()))
        return next((part for part in parts if isinstance(part, Experts)), None)

    def spec_from_hf(self, config: Config) -> ModelSpec:
        """The spec of a `config.json`. Raises JinguError on an option that would change the numbers."""
        values: Values = {}
        for keys in self.keys:
            values |= keys.read(config, values)
        return replaced(self.template, **values)

    def hf_config(self, spec: ModelSpec) -> dict[str, Any]:
        """`config.json` of a spec, as far as its keys can say it."""
        config: dict[str, Any] = {}
        for keys in self.keys:
            config |= keys.write(spec)
        return config


_REQUIRED = object()


def key(place: str, *names: str, default: Any = _REQUIRED) -> Keys:
    """One key, of several names for it the first that a config has; the first of all is written.

    Args:
        place: of its value in the spec.
        names: of the key; none: the value follows from others.
        default: the value where the config has none, or a function that makes it of the values before.
    """

    def read(config: Config, values: Values) -> Values:
        found = next((config[name] for name in names if config.get(name) is not None), default)
        if found is _REQUIRED:
            raise JinguError(
                f"the model's config lacks {names[0]!r}.", where="config.json", fix="Restore the original file."
            )
        return {place: found(values) if callable(found) else found}

    return Keys(read, lambda spec: {name: at(spec, place) for name in names[:1]})


def at(spec: ModelSpec, place: str) -> Any:
    """The value at a place; None where there is no such."""
    found: Any = spec
    for part in place.split("."):
        found = getattr(found, part, None)
    return found


def written(**values: Any) -> Keys:
    """Keys that are the same for all models of a family, and are not read."""
    return Keys(write=lambda spec: values)


def only(**values: Sequence[Any]) -> Keys:
    """Options that would change the numbers: each must be absent or have one of the values. They are not written."""

    def read(config: Config, _: Values) -> Values:
        for name, choices in values.items():
            if name in config and config[name] not in choices:
                raise unsupported(name, config[name], f"expected {' or '.join(repr(choice) for choice in choices)}")
        return {}

    return Keys(read)


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
        lambda config, _: {"feed_forward.activation": activation(name, config.get(name) or default)},
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


def exported_config(family: Family, spec: ModelSpec) -> dict[str, Any]:
    """The family's config of a spec. Raises JinguError where it cannot say all that the spec does."""
    config = family.hf_config(spec)
    lost = list(_differing(spec, family.spec_from_hf(config)))
    if lost:
        raise JinguError(
            f"Hugging Face's {family.architectures[0]} has no way to say this model's {', '.join(lost)}.",
            where="model",
            fix="Leave out of the run's file what is not a habit of the family, or choose another family. As a run the "
            "model is used all the same.",
        )
    return config


def _differing(spec: BaseModel, other: BaseModel, within: str = "") -> Iterator[str]:
    """Places at which two specs differ."""
    for name in type(spec).model_fields:
        ours, theirs = getattr(spec, name), getattr(other, name)
        if isinstance(ours, BaseModel) and type(ours) is type(theirs):
            yield from _differing(ours, theirs, f"{within}{name}.")
        elif ours != theirs:
            yield f"{within}{name}"


def sized(
    template: ModelSpec,
    layers: int,
    width: int,
    heads: int,
    feed_forward: int,
    *,
    kv_heads: int | None = None,
    head_size: int | None = None,
    window: int | None = None,
    **changes: Any,
) -> ModelSpec:
    """A published model: the family's habits at these dimensions."""
    sizes = {
        "layers": layers,
        "width": width,
        "attention.heads": heads,
        "attention.kv_heads": kv_heads or heads,
        "attention.head_size": head_size or width // heads,
        "attention.window": window,
        "feed_forward.size": feed_forward,
    }
    return replaced(template, **sizes, **changes)


def four_widths(width: int) -> int:
    """The usual size of a plain feed-forward."""
    return 4 * width


def as_many_heads(values: Values) -> int:
    """Key-value heads: as many as there are heads."""
    heads: int = values["attention.heads"]
    return heads


def shared_width(values: Values) -> int:
    """Size of a head: the width, shared by the heads."""
    size: int = values["width"] // values["attention.heads"]
    return size
