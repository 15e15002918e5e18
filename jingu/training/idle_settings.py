"""Settings whose precondition a run lacks: they are refused, or named when the run starts."""

from __future__ import annotations

from functools import reduce
from typing import Any

from jingu.config.schema import RunConfig
from jingu.config.sections.data import RowSettings
from jingu.config.sections.policies import RolloutSettings
from jingu.config.sections.tasks import DpoSettings
from jingu.config.sections.tune import FullSettings
from jingu.errors import JinguError, join_words
from jingu.model.spec import ModelSpec
from jingu.tables import read_table

TABLE = read_table(__file__, "idle_settings.toml")


def find_idle_settings(config: RunConfig, spec: ModelSpec, *, has_validation: bool) -> tuple[str, ...]:
    """Return warnings of settings that have less effect than they say.

    Args:
        has_validation: whether the run has validation rows.

    Raises:
        JinguError: a setting depends on evaluations that the run does not have.
    """
    _check_best_metric(config, has_validation=has_validation)
    evaluation = config.evaluation
    warnings = []
    if evaluation.every not in (0, type(evaluation)().every) and not (
        has_validation or evaluation.tasks or evaluation.sample_prompts
    ):
        warnings.append(
            f"evaluation.every is {evaluation.every}, but there are no validation rows, tasks or sample prompts: "
            "nothing is evaluated."
        )
    settings = config.tune
    if isinstance(settings, FullSettings) and settings.num_trainable_layers and spec.tie_word_embeddings:
        warnings.append(
            "tune.num_trainable_layers does not train the head: it is tied to the embedding, which is frozen."
        )
    for condition in _conditions(config):
        entry = TABLE["idle"][condition]
        keys = [key for key in entry["keys"] if _differs(config, key)]
        if keys:
            verb = "has" if len(keys) == 1 else "have"
            warnings.append(f"{join_words(keys, 'and')} {verb} no effect: {entry['when']}.")
    return tuple(warnings)


def _check_best_metric(config: RunConfig, *, has_validation: bool) -> None:
    """Raise JinguError if `checkpoint.best_metric` decides something, but is never measured."""
    evaluation, metric = config.evaluation, config.checkpoint.best_metric
    reason = "" if has_validation or metric.startswith("tasks/") else "the run has no validation rows"
    if metric == "bits_per_byte" and config.data.objective.type == "span_corruption":
        reason = "span corruption has no bits per byte"
    if not evaluation.every:
        reason = "the run never evaluates (evaluation.every is 0)"
    values = {"evaluation.patience": evaluation.patience, "checkpoint.keep_best": config.checkpoint.keep_best}
    for key, value in values.items():
        if value and reason:
            raise JinguError(
                f"it is {value}, but {reason}, so {metric} (checkpoint.best_metric) is never measured.",
                where=key,
                fix="Set it to 0; or evaluate, on tasks or on data built with data.validation_fraction above 0.",
            )


def _conditions(config: RunConfig) -> list[str]:
    """Return the conditions of the table that hold for a run."""
    task = config.task
    holds = {
        "rows": isinstance(config.data.objective, RowSettings) and not isinstance(task, RolloutSettings),
        "prompts": isinstance(task, RolloutSettings),
        "unevaluated": not config.evaluation.every,
        "unsampled": not config.evaluation.sample_prompts,
        "untested": not config.evaluation.tasks,
        "undropped": config.data.drop.file is None,
        "stored_activations": config.train.activation_checkpointing.type == "none",
        "without_pipeline": config.parallel.pipeline == 1,
        "without_context": config.parallel.context == 1,
        "without_tensor": config.parallel.tensor == 1,
        "waiting_saves": not config.checkpoint.async_save,
        "not_in_memory": not config.checkpoint.in_memory.every,
        "unranked": not (config.checkpoint.keep_best or config.evaluation.patience),
        "other_divergence": isinstance(task, DpoSettings) and task.divergence != "alpha",
        "unsmoothed": isinstance(task, DpoSettings) and task.loss in ("hinge", "ipo"),
    }
    return [condition for condition in TABLE["idle"] if holds[condition]]


def _differs(config: RunConfig, key: str) -> bool:
    """Return whether a setting or section has another value than its default."""
    *sections, name = key.split(".")
    section: Any = reduce(getattr, sections, config)
    return getattr(section, name) != type(section).model_fields[name].get_default(call_default_factory=True)
