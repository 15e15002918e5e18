"""Whether a run that started with one configuration can be resumed with another."""

from __future__ import annotations

from collections.abc import Collection

from jingu.config.introspect import format_value
from jingu.config.schema import CheckpointSettings, RunConfig
from jingu.config.sections.train import ConstantSettings, InverseSqrtSettings
from jingu.tables import flatten, read_table

_CHECKPOINT_KEYS = (f"checkpoint.{name}" for name in CheckpointSettings.model_fields if name != "url")
CHANGEABLE_KEYS = frozenset([*read_table(__file__, "changeable_keys.toml")["keys"], *_CHECKPOINT_KEYS])
"""Keys and whole sections that may change in the middle of a run. It stays the same run, up to rounding."""


def breaking_changes(old: RunConfig, new: RunConfig, allowed: Collection[str] = ()) -> list[str]:
    """Return the changes, each as `key: old → new`, with which resuming would mix two runs.

    Args:
        allowed: keys and sections that may change all the same.
    """
    changeable = CHANGEABLE_KEYS | set(allowed)
    if _is_independent_of_length(old) and _is_independent_of_length(new):
        changeable |= {"train.steps"}
    prefixes = tuple(f"{key}." for key in changeable)
    return [text for key, text in changed_settings(old, new).items() if not f"{key}.".startswith(prefixes)]


def changed_settings(old: RunConfig, new: RunConfig) -> dict[str, str]:
    """Return all changes, each as `key: old → new`, by key."""
    before = flatten(old.model_dump())
    after = flatten(new.model_dump())
    # A key that exists on one side only follows from the `type:` of its section. 1, 1.0 and true are different values.
    return {
        key: f"{key}: {format_value(before[key])} → {format_value(after[key])}"
        for key in before
        if key in after and (before[key], type(before[key])) != (after[key], type(after[key]))
    }


def _is_independent_of_length(config: RunConfig) -> bool:
    """Return whether the learning rate of a step does not depend on the length of the run."""
    warmup_in_steps = isinstance(config.schedule.warmup, int) or config.schedule.warmup == 0.0
    return warmup_in_steps and isinstance(config.schedule, ConstantSettings | InverseSqrtSettings)
