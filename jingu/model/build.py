"""From the settings of a run to the spec of its model."""

from __future__ import annotations

from difflib import get_close_matches

from jingu.config.schema import ModelSettings
from jingu.errors import JinguError
from jingu.model.families import FAMILIES, Family
from jingu.model.spec import ModelSpec, Position, RotaryPositions, replaced


def spec_from_settings(settings: ModelSettings, vocabulary: int, context: int) -> ModelSpec:
    """The family's habits, with the dimensions of the settings.

    Args:
        vocabulary: entries of the run's tokenizer.
        context: tokens a sequence of the run's batches.

    Raises:
        JinguError: an unknown family, dimensions that do not fit together, or a model smaller than the tokenizer or
            the sequences.
    """
    family = find_family(settings.family)
    template = family.template
    tied = settings.tied_embeddings
    epsilon = template.norm.epsilon if settings.norm_epsilon is None else settings.norm_epsilon
    return replaced(
        template,
        vocabulary=_vocabulary(settings, vocabulary),
        width=settings.width,
        layers=settings.layers,
        context=_context(settings, context),
        norm=template.norm.model_copy(update={"epsilon": epsilon}),
        position=_position(settings, family),
        attention=template.attention.model_copy(
            update={
                "heads": settings.heads,
                "kv_heads": settings.kv_heads or settings.heads,
                "head_size": _head_size(settings),
            }
        ),
        feed_forward=template.feed_forward.model_copy(
            update={"size": settings.feed_forward or family.feed_forward_size(settings.width)}
        ),
        tied_embeddings=template.tied_embeddings if tied is None else tied,
        initial_std=settings.initial_std,
    )


def find_family(name: str) -> Family:
    """The family of that name. Raises JinguError with the nearest known one."""
    if name not in FAMILIES:
        near = get_close_matches(name, FAMILIES, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise JinguError(
            f"There is no model family {name!r}.",
            where="model.family",
            fix=f"{hint}Known are {', '.join(FAMILIES)}.",
        )
    return FAMILIES[name]


def _vocabulary(settings: ModelSettings, tokenizer: int) -> int:
    if settings.vocabulary == "auto":
        return tokenizer
    if settings.vocabulary < tokenizer:
        raise JinguError(
            f"The model has {settings.vocabulary} embedding rows, but the tokenizer has {tokenizer} entries.",
            where="model.vocabulary",
            fix=f"Use auto, or at least {tokenizer}.",
        )
    return settings.vocabulary


def _context(settings: ModelSettings, sequence: int) -> int:
    if settings.context is not None and settings.context < sequence:
        raise JinguError(
            f"The model is made for {settings.context} tokens, but the batch has sequences of {sequence}.",
            where="model.context",
            fix=f"Raise model.context to {sequence} or more, or shorten batch.sequence_length.",
        )
    return settings.context or sequence


def _head_size(settings: ModelSettings) -> int:
    if settings.head_size is not None:
        return settings.head_size
    if settings.width % settings.heads:
        below = settings.width // settings.heads * settings.heads
        near = " or ".join(str(width) for width in (below, below + settings.heads) if width)
        raise JinguError(
            f"A width of {settings.width} cannot be divided among {settings.heads} heads.",
            where="model.heads",
            fix=f"Use a width of {near}, another number of heads, or set model.head_size.",
        )
    return settings.width // settings.heads


def _position(settings: ModelSettings, family: Family) -> Position:
    position = family.template.position
    if settings.rope_base is None:
        return position
    if not isinstance(position, RotaryPositions):
        raise JinguError(
            f"The family {family.name!r} has no rotary positions.",
            where="model.rope_base",
            fix="Leave it out, or choose a family that has them (llama).",
        )
    return position.model_copy(update={"base": settings.rope_base})
