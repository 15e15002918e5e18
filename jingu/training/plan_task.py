"""What the task of a run adds to the plan of a step: generation of answers, and models beside the trained one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jingu.config.schema import RunConfig
from jingu.config.sections.policies import (
    DistillationSettings,
    GenerationProcessesSettings,
    GrpoSettings,
    PolicySettings,
    PpoSettings,
    SeparateCriticSettings,
)
from jingu.config.sections.rewards import ModelReward
from jingu.config.sections.tasks import DpoSettings, KtoSettings
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
    if isinstance(task, DpoSettings | KtoSettings):
        result.assumptions.append("log-probabilities of the reference are computed before the first step")
    if not isinstance(task, PolicySettings):
        return result
    from jingu.plan.alignment import Companion, Rollouts, add_rollouts

    # 1. Models beside the trained one.
    companions = []
    base = spec.model_copy(update={"adapter": None, "frozen_parameters": ()})
    if isinstance(task, DistillationSettings):
        companions.append(Companion("teacher", _spec_of(task.teacher, base, result), "frozen"))
    elif task.penalty is not None:
        path = task.penalty.reference or config.initialize.from_
        companions.append(Companion("reference", _spec_of(path, base, result), "frozen"))
    scalar = base.model_copy(update={"score_head": True})
    if isinstance(task, PpoSettings) and isinstance(task.critic, SeparateCriticSettings):
        path = task.critic.model or config.initialize.from_
        critic = _spec_of(path, scalar, result).model_copy(update={"score_head": True})
        companions.append(Companion("critic", critic, "trained"))
    scorers = [reward.model for reward in task.rewards if isinstance(reward, ModelReward)]
    for number, path in enumerate(scorers, start=1):
        name = "reward model" + f" {number}" * (len(scorers) > 1)
        companions.append(Companion(name, _spec_of(path, scalar, result), "whole"))
    # 2. What the forecast leaves out or simplifies.
    if task.rewards:
        result.assumptions.append("rewards take no time")
    if task.generation_source is not None:
        result.assumptions.append("generation counts as a part of the step, though it runs beside training")
    if isinstance(task.generation_source, GenerationProcessesSettings):
        copies = range(task.generation_source.processes)
        companions += [Companion(f"generation process {number + 1}", base, "whole") for number in copies]
    # 3. Generation. ReMax generates one more answer per prompt, the greedy one.
    greedy = isinstance(task, GrpoSettings) and task.advantage == "remax"
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
        companions,
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
