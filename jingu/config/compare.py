"""Compare configurations: can a run that started with one configuration resume with another?"""

from __future__ import annotations

from collections.abc import Collection

from jingu.config.introspect import format_value
from jingu.config.schema import CheckpointSettings, RunConfig
from jingu.tables import flatten, read_table

_CHECKPOINT_KEYS = (f"checkpoint.{name}" for name in CheckpointSettings.model_fields if name != "url")
_TABLE = read_table(__file__, "changeable_keys.toml")
CHANGEABLE_KEYS = frozenset([*_TABLE["keys"], *_CHECKPOINT_KEYS])
"""Keys and whole sections that may change when a run resumes. The run stays the same, up to rounding."""


def breaking_changes(old: RunConfig, new: RunConfig, further_keys: Collection[str] = ()) -> list[str]:
    """Return the changes that forbid resuming, because the result would be a mix of two runs.

    Args:
        further_keys: further keys and sections that may change.

    Returns:
        Texts of the form `key: old → new`.
    """
    changeable = CHANGEABLE_KEYS | set(further_keys)
    if _is_independent_of_length(old) and _is_independent_of_length(new):
        changeable |= {"train.steps"}
    prefixes = tuple(f"{key}." for key in changeable)
    return [text for key, text in changed_settings(old, new).items() if not f"{key}.".startswith(prefixes)]


def resume_options_for(changes: Collection[str]) -> str:
    """Return the options with which a run resumes in spite of changes `key: old → new`; empty if it cannot."""
    keys = [change.partition(":")[0] for change in changes]
    # Master weights of other precisions are fp32, and no checkpoint is converted.
    if any(change.startswith("precision.type:") and "fp64" in change for change in changes):
        return ""
    if any(f"{key}.".startswith(tuple(f"{fixed_key}." for fixed_key in _TABLE["fixed"])) for key in keys):
        return ""
    options = [f"--allow {key}" for key in keys]
    if any(key in _TABLE["fresh_optimizer"] for key in keys):
        options.append("--fresh-optimizer")
    return " ".join(options)


def changed_settings(old: RunConfig, new: RunConfig) -> dict[str, str]:
    """Return all changed settings by key, each as the text `key: old → new`."""
    before = flatten(old.model_dump())
    after = flatten(new.model_dump())
    # A key that only one side has follows from the `type:` of its section, which is reported itself. Types are compared
    # too, because in Python 1, 1.0 and True are equal.
    return {
        key: f"{key}: {format_value(before[key])} → {format_value(after[key])}"
        for key in before
        if key in after and (before[key], type(before[key])) != (after[key], type(after[key]))
    }


def _is_independent_of_length(config: RunConfig) -> bool:
    """Return whether the learning rate at each step is independent of `train.steps`."""
    warmup_in_steps = isinstance(config.schedule.warmup, int) or config.schedule.warmup == 0.0
    return warmup_in_steps and not config.schedule.DEPENDS_ON_LENGTH
