"""What the task of a run adds to the plan of a step: generation of answers, and models beside the trained one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jingu.config.schema import RunConfig
from jingu.config.sections.policies import (
    GrpoSettings,
    PolicySettings,
)
from jingu.model.spec import ModelSpec
from jingu.runtime.hub import is_available

if TYPE_CHECKING:
    from jingu.plan.forecast import Forecast


def add_task(result: Forecast, config: RunConfig, spec: ModelSpec) -> Forecast:
    """Return the forecast of a run, extended by what its task adds to a step.

    Models that do not exist yet are assumed to be as large as the trained one. Assumptions are appended to those of
    `result`.

    Args:
        result: forecast of one update of the trained model.
    """
    task = config.task
    models = task.models(config.initialize.from_)
    for model in models:
        if model.role == "before":
            result.assumptions.append(f"log-probabilities of the {model.name} are computed before the first step")
    if "generation" not in task.PHASES:
        return result
    assert isinstance(task, PolicySettings)
    from jingu.plan.alignment import AuxiliarySpec, Rollouts, add_rollouts

    # 1. Models beside the trained one.
    base = spec.model_copy(update={"adapter": None, "frozen_parameters": ()})
    auxiliaries = []
    for model in models:
        if model.role == "before":
            continue
        default = base.model_copy(update={"score_head": True}) if model.has_score_head else base
        model_spec = _spec_of(model.path, default, result)
        if model.role == "trained":
            # A model without a score head gets one, and is trained as a whole.
            model_spec = model_spec.model_copy(update={"score_head": model.has_score_head})
        auxiliaries.append(AuxiliarySpec(model.name, model_spec, model.role))
    # 2. What the forecast leaves out or simplifies.
    if task.rewards:
        result.assumptions.append("rewards take no time")
    if task.generation_source is not None:
        result.assumptions.append("generation counts as a part of the step, though it runs beside training")
    # 3. Generation. Some advantages need one more answer to each prompt, the greedy one.
    greedy = isinstance(task, GrpoSettings) and task.needs_greedy
    rollouts = Rollouts(
        task.prompts_per_step,
        task.answers_per_prompt + greedy,
        task.max_new_tokens,
        task.max_num_seqs,
        task.updates_per_step,
        # Whether matrices are prepacked, as `jingu/align/rollouts.py:Generator.model_of` decides.
        result.machine.is_shared and spec.adapter is None and config.precision.type != "fp8" and not task.exact,
        # Whether answers share prompts. For most models, `jingu/align/policy_checks.py:can_share_prompts` is the same.
        not task.exact,
        auxiliaries,
    )
    return add_rollouts(result, rollouts)


def _spec_of(path: str | None, default: ModelSpec, result: Forecast) -> ModelSpec:
    """Return the spec of the model at a path, else the default. A missing model adds an assumption to `result`."""
    if path is not None and is_available(path):
        from jingu.formats.models import open_model

        return open_model(Path(path)).spec
    if path is not None:
        result.assumptions.append(f"{path} does not exist yet, and is as large as the trained model")
    return default
