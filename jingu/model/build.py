"""From the settings of a run to the spec of its model."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from jingu.config.sections.model import ModelSettings
from jingu.errors import JinguError
from jingu.model.families import FAMILIES, Family
from jingu.model.spec import Experts, ModelSpec, RotaryPositions, replaced


def spec_from_settings(
    settings: ModelSettings, vocabulary: int, context: int, start: ModelSpec | None = None
) -> ModelSpec:
    """The preset, or else the family's habits, with the dimensions that the settings give.

    What follows from a dimension (the size of a head, say, from the width) follows from the given one again.

    Args:
        vocabulary: entries of the run's tokenizer.
        context: tokens a sequence of the run's batches.
        start: a model that stands in the place of a preset.

    Raises:
        JinguError: an unknown family or preset, dimensions that do not fit together, or a model smaller than the
            tokenizer or the sequences.
    """
    preset = start or _preset(settings)
    family = find_family(settings.family or (preset.family if preset else "llama"))
    template = preset or family.template
    if preset and preset.family != family.name:
        raise JinguError(
            f"the {f'preset {settings.preset!r}' if start is None else 'model that the run begins with'} is of the "
            f"family {preset.family!r}, not {family.name!r}.",
            where="model.family",
            fix=f"Leave it out: a {'preset' if start is None else 'model'} says its family.",
        )
    _check_family(settings, template, family)
    heads, head_size = settings.heads or template.attention.heads, settings.head_size
    if head_size is None and (settings.width or settings.heads):
        head_size = _head_size(settings.width or template.width, heads)
    given = {
        "vocabulary": _vocabulary(settings, vocabulary, preset),
        "context": _context(settings, context, preset),
        "width": settings.width,
        "layers": settings.layers,
        "encoder_layers": template.encoder_layers and (settings.encoder_layers or settings.layers),
        "norm.epsilon": settings.norm_epsilon,
        "position.base": settings.rope_base,
        "attention.heads": settings.heads,
        "attention.kv_heads": settings.kv_heads or settings.heads,
        "attention.head_size": head_size,
        "tied_embeddings": settings.tied_embeddings,
        "scaled_head": template.scaled_head and settings.tied_embeddings is not False,
        "initial_std": settings.initial_std,
        **_feed_forward(settings, template, family),
    }
    return replaced(template, **{place: value for place, value in given.items() if value is not None})


def _check_family(settings: ModelSettings, template: ModelSpec, family: Family) -> None:
    """JinguError for settings of what the family has not."""
    experts = settings.experts.model_dump(exclude_none=True)
    encoded, turned = template.encoder_layers is not None, isinstance(template.position, RotaryPositions)
    for asked, has, what, where, example in (
        (settings.encoder_layers, encoded, "encoder", "model.encoder_layers", "one (t5)"),
        (settings.rope_base, turned, "rotary positions", "model.rope_base", "them (llama)"),
        (experts, family.experts, "experts", f"model.experts.{next(iter(experts), None)}", "them (mixtral)"),
    ):
        if asked and not has:
            fix = f"Leave it out, or choose a family that has {example}."
            raise JinguError(f"the family {family.name!r} has no {what}.", where=where, fix=fix)


def _preset(settings: ModelSettings) -> ModelSpec | None:
    if settings.preset is None:
        return None
    presets = {name: spec for family in FAMILIES.values() for name, spec in family.presets.items()}
    _check_known("preset", settings.preset, presets)
    return presets[settings.preset]


def find_family(name: str) -> Family:
    """The family of that name. Raises JinguError with the nearest known ones."""
    _check_known("family", name, FAMILIES)
    return FAMILIES[name]


def _check_known(kind: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        near = get_close_matches(name, known, n=3)
        hint = f"The nearest are {', '.join(near)}; " if near else ""
        raise JinguError(
            f"there is no {kind} {name!r}.", where=f"model.{kind}", fix=f"{hint}`jingu model list` shows all."
        )


def _vocabulary(settings: ModelSettings, tokenizer: int, preset: ModelSpec | None) -> int:
    if settings.vocabulary == "auto":
        return max(tokenizer, preset.vocabulary) if preset else tokenizer
    if settings.vocabulary < tokenizer:
        raise JinguError(
            f"the model has {settings.vocabulary} embedding rows, but the tokenizer has {tokenizer} entries.",
            where="model.vocabulary",
            fix=f"Use auto, or at least {tokenizer}.",
        )
    return settings.vocabulary


def _context(settings: ModelSettings, sequence: int, preset: ModelSpec | None) -> int:
    context = settings.context or (preset.context if preset else sequence)
    if context < sequence:
        raise JinguError(
            f"the model is made for {context} tokens, but the batch has sequences of {sequence}.",
            where="model.context",
            fix=f"Raise model.context to {sequence} or more, or shorten batch.sequence_length.",
        )
    return context


def _head_size(width: int, heads: int) -> int:
    if width % heads:
        below = width // heads * heads
        near = " or ".join(str(width) for width in (below, below + heads) if width)
        raise JinguError(
            f"a width of {width} cannot be divided among {heads} heads.",
            where="model.heads",
            fix=f"Use a width of {near}, another number of heads, or set model.head_size.",
        )
    return width // heads


def _feed_forward(settings: ModelSettings, template: ModelSpec, family: Family) -> dict[str, object]:
    """Values by their places in the spec."""
    given, part, found = settings.experts.model_dump(exclude_none=True), template.feed_forward, dict[str, object]()
    if given and not isinstance(part, Experts):
        assert family.experts is not None
        found = {"": family.experts, ".size": part.size, ".activation": part.activation}
        part = family.experts
    if settings.feed_forward or settings.width:
        found[".size"] = settings.feed_forward or family.feed_forward_size(settings.width or template.width)
    router = given.pop("router", None)
    if isinstance(part, Experts) and router not in (None, part.router.type):  # else with the family's habits
        given["router"] = {"type": router}
    found |= {f".{name}": value for name, value in given.items()}
    return {f"feed_forward{place}": value for place, value in found.items()}
