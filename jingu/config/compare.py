"""Whether a run that started with one configuration can be resumed with another."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jingu.config.introspect import format_value
from jingu.config.schema import CheckpointSettings, RunConfig
from jingu.config.sections.train import ConstantSettings, InverseSqrtSettings

CHANGEABLE_KEYS = frozenset(
    {
        # Paths. The contents of tokenizer and data set are checked by their fingerprints.
        "name",
        "runs_dir",
        "tokenizer.path",
        "data.path",
        # Only a new run is initialized.
        "initialize",
        # How data is built and read; the result is the same.
        "data.num_workers",
        "data.reader",
        "data.local_cache",
        # The data that a run was trained on is checked by its receipt.
        "data.drop",
        # How a step is divided. Its loss is one sum over the global batch.
        "batch.micro_batch_size",
        "parallel",
        # How the same numbers are computed and logged.
        "train.compile",
        "train.activation_checkpointing",
        "train.log_every",
        "train.on_divergence",
        "train.tensorboard",
        "train.trackers",
        "train.hang_timeout",
        "train.profile",
        "device",
        # Where answers are generated.
        *(f"task.asynchronous.{name}" for name in ("url", "api_key_file", "timeout", "retries", "concurrency")),
        *(f"task.asynchronous.{name}" for name in ("processes", "threads")),
        # Evaluations and checkpoints do not change training.
        "evaluation",
        # With another URL the run would find no checkpoint, and start again.
        *(f"checkpoint.{name}" for name in CheckpointSettings.model_fields if name != "url"),
    }
)
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


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a tree by their dotted keys."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values
