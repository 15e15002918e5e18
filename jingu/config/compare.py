"""Whether a run that was begun with one configuration can go on with another."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jingu.config.schema import CheckpointSettings, RunConfig
from jingu.config.sections.train import ConstantSettings, NoamSettings
from jingu.config.tree import written

HARMLESS = frozenset(
    {
        # Where things lie. The contents of tokenizer and data set are checked by their fingerprints.
        "name",
        "runs",
        "tokenizer.path",
        "data.path",
        # A run that has begun does not begin again.
        "initialize",
        # How fast the data set is built; the result is the same.
        "data.workers",
        "data.reading",
        "data.local",
        # What a run has been trained on, its receipt checks.
        "data.drop",
        # How a step is divided. Its loss is one sum over the global batch, however that is cut.
        "batch.micro_size",
        "parallel",
        # How the same numbers are computed, and what is told of them.
        "train.compile",
        "train.activation_checkpointing",
        "train.log_every",
        "train.tensorboard",
        "device",
        # What is measured and saved on the way; training does not see it.
        "evaluation",
        # (Elsewhere the run would find no checkpoint, and begin again.)
        *(f"checkpoint.{name}" for name in CheckpointSettings.model_fields if name != "address"),
    }
)
"""Keys and whole sections that can change in the middle of a run: it stays the same run, up to rounding."""


def harmful_differences(old: RunConfig, new: RunConfig, allowed: Collection[str] = ()) -> list[str]:
    """The changes, each as `key: old → new`, that would make a run's later steps belong to another run.

    Args:
        allowed: keys and sections that may change all the same.
    """
    harmless = HARMLESS | {"train.steps"} if _endless(old) and _endless(new) else HARMLESS
    fine = tuple(f"{one}." for one in harmless | set(allowed))
    return [text for key, text in differences(old, new).items() if not f"{key}.".startswith(fine)]


def differences(old: RunConfig, new: RunConfig) -> dict[str, str]:
    """All changes, each as `key: old → new`, by key."""
    before, after = flat(old.model_dump()), flat(new.model_dump())
    # A key that only one type of a section has follows from that section's type.
    return {
        key: f"{key}: {written(before[key])} → {written(after[key])}"
        for key in before
        if key in after and (before[key], type(before[key])) != (after[key], type(after[key]))
    }


def _endless(config: RunConfig) -> bool:
    """Whether the learning rate of a step does not depend on how many follow."""
    whole = isinstance(config.schedule.warmup, int) or config.schedule.warmup == 0.0
    return whole and isinstance(config.schedule, ConstantSettings | NoamSettings)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys and their values."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found
