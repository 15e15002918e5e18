"""Checks of a reinforcement learning or distillation run, before a model is built."""

from __future__ import annotations

from pathlib import Path

from jingu.align.environment import Environments, encode_reply, tool_messages
from jingu.align.json_client import check_url
from jingu.align.prompt_set import PromptSet, load_prompts
from jingu.align.reward_list import Rewards, check_columns
from jingu.chat.tool_calls import ToolCall
from jingu.config.sections.policies import (
    DistillationSettings,
    GenerationServerSettings,
    GrpoSettings,
    PolicySettings,
    PpoSettings,
    RewardedSettings,
    SeparateCriticSettings,
)
from jingu.errors import JinguError, pluralize, refuse
from jingu.formats.models import open_model
from jingu.model.adapter_specs import Lora
from jingu.model.feed_forward_specs import BalancedRouter
from jingu.runtime.ranks import is_first_process
from jingu.training.run import Run


def load_run_prompts(run: Run, environments: Environments | None) -> PromptSet:
    """Return the prompts of a run that learns from rewards.

    Args:
        environments: the environments whose tools the prompts describe.

    Raises:
        JinguError: there are no prompts, or a prompt does not fit.
    """
    settings = run.config.task
    assert isinstance(settings, PolicySettings)
    tools = environments.tools if environments is not None else ()
    return load_prompts(settings, run.tokenizer, run.config.batch.sequence_length, run.config.initialize.from_, tools)


def check_policy_run(run: Run) -> None:
    """Check prompts, rewards and model before a model is built.

    Raises:
        JinguError: the run cannot start.
    """
    settings = run.config.task
    assert isinstance(settings, PolicySettings)
    prompts, updates = settings.prompts_per_step, settings.updates_per_step
    refuse(prompts % updates > 0, "task.prompts_per_step", prompts, f"a multiple of task.updates_per_step, {updates}")
    rows = run.config.batch.global_batch_size
    expected_rows = settings.rows_per_update
    refuse(
        rows != expected_rows,
        "batch.global_batch_size",
        rows,
        f"left out, or {expected_rows}, which follows from the task",
    )
    if isinstance(run.spec.adapter, Lora) and run.spec.adapter.dropout > 0:
        what = "with dropout, training would compute other probabilities than generation."
        raise JinguError(what, where="tune.dropout", fix="Set it to 0.")
    if run.config.train.neftune_alpha:
        what = "with noise, training would compute other probabilities than generation."
        raise JinguError(what, where="train.neftune_alpha", fix="Set it to 0.")
    if run.spec.num_encoder_layers is not None or any(run.spec.prompts):
        what = "learning from rewards supports only decoders without virtual tokens."
        raise JinguError(what, where="task.type", fix="Choose another model, or LoRA.")
    _check_asynchronous(run, settings)
    environments = Environments(settings.environment) if settings.environment is not None else None
    prompt_set = load_run_prompts(run, environments)
    if isinstance(settings, DistillationSettings):
        is_other = settings.beta is not None and settings.loss != "dapo"
        refuse(is_other, "task.loss", settings.loss, "dapo: with task.beta the loss is a mean over all tokens")
        open_model(Path(settings.teacher))
    elif settings.penalty is not None and (path := settings.penalty.reference or run.config.initialize.from_):
        open_model(Path(path))
    _check_combinations(settings)
    if environments is not None:
        if isinstance(settings, GrpoSettings) and settings.needs_greedy:
            what = f"an environment replies to sampled answers, and {settings.advantage} compares with a greedy one."
            raise JinguError(what, where="task.advantage", fix="Choose rloo, say.")
        chat_format = prompt_set.chat_format
        if any(prompt.messages for prompt in prompt_set.prompts) and not (chat_format and chat_format.eos_token_ids):
            what = "the template has no token that ends an answer, after which an environment could reply."
            raise JinguError(what, where="task.template", fix="Choose another one, such as chatml.")
        if environments.tools:
            # Fail now if the template cannot render the result of a tool.
            call = ToolCall(environments.tools[0]["function"]["name"], "{}")
            encode_reply(*tool_messages([call], ["result"]), prompt_set, run.tokenizer)
    has_score = environments is not None and environments.has_score
    if not has_score and isinstance(settings, RewardedSettings) and all(reward.audit for reward in settings.rewards):
        raise JinguError("there is no reward to train on.", where="task.rewards", fix="Add one without audit.")
    if isinstance(settings, PpoSettings) and isinstance(settings.critic, SeparateCriticSettings):
        if settings.critic.model is not None:
            open_model(Path(settings.critic.model))
        if run.config.precision.type == "fp16":
            what = "fp16 scales the loss of one model, and the critic is another."
            raise JinguError(what, where="precision.type", fix="Set it to bf16 or fp32, or task.critic.type=shared.")
    check_columns(settings.rewards, prompt_set.prompts, settings.prompts)
    rewards = Rewards(settings.rewards, prompt_set.columns, run.tokenizer)
    try:
        # Reading many formulas takes long, so one process checks the rows.
        if is_first_process():
            rewards.check_rows(prompt_set.prompts, settings.prompts)
    finally:
        rewards.close()


def _check_combinations(settings: PolicySettings) -> None:
    """Raise JinguError for settings that contradict each other, or that the others leave without effect."""
    name = "task.overlong_tokens"
    if isinstance(settings, RewardedSettings):
        limit = settings.max_new_tokens
        refuse(
            settings.overlong_tokens > limit, name, settings.overlong_tokens, f"at most task.max_new_tokens, {limit}"
        )
    # CISPO usually has no lower bound (MiniMax, 2025).
    if settings.objective != "gmpo" and not (settings.objective == "cispo" and settings.clip_low == 1):
        refuse(settings.clip_low >= 1, "task.clip_low", settings.clip_low, "below 1")
    if isinstance(settings, GrpoSettings) and settings.advantage != "group" and settings.scale != "group":
        what = (
            f"it is {settings.scale}, and task.advantage={settings.advantage} does not divide by a group's deviation."
        )
        raise JinguError(what, where="task.scale", fix="Leave it out, or set task.advantage=group.")
    if isinstance(settings, DistillationSettings) and settings.beta is not None:
        defaults = DistillationSettings()
        names = ("ratio", "objective", "clip_low", "clip_high")
        other_settings = [key for key in names if getattr(settings, key) != getattr(defaults, key)]
        if other_settings:
            what = "with task.beta whole distributions are compared, without a ratio of sampled tokens."
            raise JinguError(what, where=f"task.{other_settings[0]}", fix="Leave it out, or task.beta.")


def can_share_prompts(run: Run) -> bool:
    """Return whether the answers to a prompt can share one copy of it in training."""
    settings = run.config.task
    assert isinstance(settings, PolicySettings)
    experts = run.spec.experts
    # Exact training computes row by row. With a capacity or a balancing router, the routing of a token depends on the
    # other tokens of its row.
    depends_on_row = experts is not None and (
        experts.capacity_factor is not None or isinstance(experts.router, BalancedRouter)
    )
    return not (settings.exact or depends_on_row)


def _check_asynchronous(run: Run, settings: PolicySettings) -> None:
    """Raise JinguError for settings that asynchronous generation does not support."""
    source = settings.generation_source
    if source is None:
        return
    is_server = isinstance(source, GenerationServerSettings)
    staleness = "task.asynchronous.staleness"
    if source.staleness and settings.importance_cap is None:
        what = f"answers by weights that are {pluralize(source.staleness, 'step')} old need importance sampling."
        raise JinguError(what, where=staleness, fix="Set task.importance_cap=2.")
    if settings.exact and (source.staleness or is_server):
        what = "older weights, or another program, do not compute the same log-probabilities."
        raise JinguError(what, where="task.exact", fix=f"Set it to false, or {staleness}=0 with processes.")
    if isinstance(settings, GrpoSettings) and settings.max_resampling:
        what = "resampling depends on the rewards, which are computed only after all answers of a step."
        raise JinguError(what, where="task.max_resampling", fix="Set it to 0, or leave out task.asynchronous.")
    if not isinstance(source, GenerationServerSettings):
        return
    check_url(source.url, "task.asynchronous.url")
    where = "task.asynchronous.type"
    if not isinstance(run.spec.adapter, Lora) or run.config.initialize.from_ is None:
        what = "a server takes the weights of each step as a LoRA adapter, and this run trains other weights."
        fix = "Set tune.type=lora and initialize.from, or task.asynchronous.type=processes."
        raise JinguError(what, where=where, fix=fix)
    if settings.environment is not None:
        what = "environments work with generation processes, not with a server."
        raise JinguError(what, where=where, fix="Set it to processes.")
    if settings.temperature != 1.0:
        what = "a server returns log-probabilities before temperature."
        raise JinguError(what, where="task.temperature", fix="Set it to 1, or task.asynchronous.type=processes.")
