"""What a family is: everything that tells one Hugging Face architecture from another, in one object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jingu.errors import JinguError
from jingu.model.families.names import Rule
from jingu.model.spec import Activation, Experts, ModelSpec, replaced

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: as in `model.family`.
        architectures: Hugging Face class names that load it; the first one is written on export.
        template: a spec that holds the family's habits; dimensions are replaced.
        feed_forward_size: the family's rule, from the width.
        spec_from_hf: from `config.json`; raises JinguError on an option that would change the numbers.
        hf_config: `config.json` of a spec, without the special token ids.
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
    spec_from_hf: Callable[[Config], ModelSpec]
    hf_config: Callable[[ModelSpec], dict[str, Any]]
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
    parts = {
        "heads": heads,
        "kv_heads": kv_heads or heads,
        "head_size": head_size or width // heads,
        "window": window,
    }
    return replaced(
        template,
        layers=layers,
        width=width,
        attention=template.attention.model_copy(update=parts),
        feed_forward=template.feed_forward.model_copy(update={"size": feed_forward}),
        **changes,
    )


def exported_config(family: Family, spec: ModelSpec) -> dict[str, Any]:
    """The family's config of a spec. Raises JinguError where it cannot say all that the spec does."""
    config = family.hf_config(spec)
    back = family.spec_from_hf(config)
    if back != spec:
        lost = [name for name in ModelSpec.model_fields if getattr(back, name) != getattr(spec, name)]
        raise JinguError(
            f"Hugging Face's {family.architectures[0]} has no way to say this model's {', '.join(lost)}.",
            where="model",
            fix="Leave out of the run's file what is not a habit of the family, or choose another family.",
        )
    return config


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


def required(config: Config, *keys: str) -> Any:
    """A value the config must have, under the first of several names for it."""
    value = next((config[key] for key in keys if config.get(key) is not None), None)
    if value is None:
        raise JinguError(
            f"the model's config lacks {keys[0]!r}.", where="config.json", fix="Restore the original file."
        )
    return value


def activation(config: Config, key: str, default: str) -> Activation:
    """The activation named in the config."""
    name = config.get(key) or default
    if name not in ACTIVATIONS:
        raise unsupported(key, name, f"known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def expect(config: Config, values: Mapping[str, Iterable[Any]]) -> None:
    """Refuse options that would change the numbers: each key must be absent or have one of the values."""
    for key, allowed in values.items():
        choices = list(allowed)
        if key in config and config[key] not in choices:
            raise unsupported(key, config[key], f"expected {' or '.join(repr(choice) for choice in choices)}")


def unsupported(key: str, value: Any, detail: str) -> JinguError:
    """The error for an option jingu does not compute."""
    return JinguError(
        f"the model sets {key} to {value!r}, which is not supported ({detail}).",
        where="config.json",
        fix="Without this option its numbers would be wrong, so it is not loaded.",
    )
