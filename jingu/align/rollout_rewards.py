"""Rewards of the answers of a rollout, and the groups of answers to the same prompt."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jingu.align.prompt_set import Prompt
from jingu.align.reward_list import Rewards
from jingu.align.rollouts import ENVIRONMENT, Sample, describe_answer, describe_error, raise_error
from jingu.config.sections.rewards import Reward
from jingu.errors import JinguError
from jingu.runtime.futures import fulfill
from jingu.runtime.ranks import gather_from_all, wait_until_all_done


def add_rewards(samples: Sequence[Sample], prompts: Sequence[Prompt], rewards: Rewards | None) -> list[Sample]:
    """Return the samples with their rewards, on every rank. Every rank calls this.

    Args:
        prompts: all prompts of the run.
        rewards: the rewards on the first rank, which scores all answers; None on the others.

    Raises:
        StepNotStartedError: a reward failed.
    """
    future: Future[dict[str, Any]] = Future()
    score = partial(_score, samples, prompts, rewards)
    if rewards is not None and dist.get_world_size() > 1:
        # Rewards may take longer than the timeout of a collective, so poll until the first rank is done.
        threading.Thread(target=fulfill, args=(future, score), daemon=True).start()
    else:
        fulfill(future, score)
    wait_until_all_done(lambda seconds: future in wait([future], seconds).done)
    scores = gather_from_all(future.result())[0]
    raise_error(scores)
    return [
        replace(
            sample,
            rewards={**sample.rewards, **parts},
            reward=_add(sample.rewards.get(ENVIRONMENT), total, bool(scores["names"])),
            late=tuple(late),
        )
        for sample, parts, total, late in zip(samples, scores["parts"], scores["totals"], scores["late"], strict=True)
    ]


def _score(samples: Sequence[Sample], prompts: Sequence[Prompt], rewards: Rewards | None) -> dict[str, Any]:
    """Return the values of all rewards and their totals, or the error of a reward, as JSON; {} without rewards."""
    if rewards is None:
        return {}
    answers = [describe_answer(sample, prompts[sample.row]) for sample in samples]
    try:
        parts = rewards.score(answers)
        totals = [rewards.total(values) for values in parts]
        return {"parts": parts, "totals": totals, "late": rewards.late(len(answers)), "names": rewards.trained_names}
    except JinguError as error:
        return describe_error(error)


def split_groups(samples: list[Sample], size: int) -> list[list[Sample]]:
    """Return the answers to each prompt."""
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def is_dead(group: list[Sample]) -> bool:
    """Return whether all rewards of a group are equal, so that all of its advantages are 0."""
    return len({sample.reward for sample in group} - {None}) <= 1


def _add(score: float | None, total: float | None, is_rewarded: bool) -> float | None:
    """Return the score of an environment plus the sum of the rewards.

    Args:
        score: None without an environment that scores.
        total: None if an answer could not be scored, or without rewards.
        is_rewarded: whether there are rewards to train on.
    """
    if total is None:
        return None if is_rewarded else score
    return total + (score or 0.0)


def rewards_of(samples: list[Sample]) -> Tensor:
    """Return the rewards of samples, NaN for those without one."""
    return torch.tensor(
        [math.nan if sample.reward is None else sample.reward for sample in samples], dtype=torch.float64
    )


def find_audits(sample: Sample, settings: Sequence[Reward]) -> list[str]:
    """Return the names of the rewards that are only measured."""
    names = (name for name in sample.rewards if name != ENVIRONMENT)
    return [name for name, reward in zip(names, settings, strict=True) if reward.audit]


def separate_rewards(samples: list[Sample], settings: Sequence[Reward]) -> tuple[Tensor, Tensor]:
    """Return the trained rewards [K, R] of samples one by one, and their weights [K].

    A missing reward is NaN, and so are all rewards of a sample that is not scored.
    """
    names = [name for name in samples[0].rewards if name != ENVIRONMENT]
    weights = {name: reward.weight for name, reward in zip(names, settings, strict=True) if not reward.audit}
    if ENVIRONMENT in samples[0].rewards:
        weights[ENVIRONMENT] = 1.0
    rows = [
        [math.nan if sample.reward is None or (value := sample.rewards[name]) is None else value for sample in samples]
        for name in weights
    ]
    return torch.tensor(rows, dtype=torch.float64), torch.tensor(list(weights.values()), dtype=torch.float64)


def agreement(samples: list[Sample], audit: str, answers_per_prompt: int) -> float:
    """Return the share of pairs of answers that the reward and an audit rank alike: 0.5 is chance.

    The pairs are those of answers to one prompt, or, with one answer to each prompt, of the whole step. Pairs that the
    audit does not tell apart do not count, and equal rewards count half. Without any pair it is NaN.
    """
    size = answers_per_prompt if answers_per_prompt > 1 else len(samples)
    audits = [math.nan if sample.rewards[audit] is None else sample.rewards[audit] for sample in samples]
    audit_PG = torch.tensor(audits, dtype=torch.float64).view(-1, size)
    reward_PG = rewards_of(samples).view(-1, size)
    audit_PGG, reward_PGG = (x_PG[:, :, None] - x_PG[:, None, :] for x_PG in (audit_PG, reward_PG))
    counts_PGG = (audit_PGG > 0) & reward_PGG.isfinite()
    agrees_PGG = (reward_PGG > 0).double() + 0.5 * (reward_PGG == 0)
    return float(agrees_PGG[counts_PGG].mean()) if counts_PGG.any() else math.nan


def describe_answers(samples: list[Sample], answers_per_prompt: int) -> dict[str, float]:
    """Return the means of a rollout by name: rewards, lengths, answers that are truncated, not scored or whose scoring
    took too long, and groups without a difference.

    Args:
        samples: the answers, those to one prompt after another.
    """
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    mean = fmean(rewards) if rewards else math.nan
    better = [len(sample.ids) for sample in samples if sample.reward is not None and sample.reward > mean]
    worse = [len(sample.ids) for sample in samples if sample.reward is not None and sample.reward <= mean]
    metrics = {
        "reward": mean,
        "unscored": fmean(sample.reward is None and bool(sample.rewards) for sample in samples),
        "timeouts": fmean(bool(sample.late) for sample in samples),
        "truncated": fmean(sample.finish_reason == "length" for sample in samples),
        "length": fmean(len(sample.ids) for sample in samples),
        "length_better": fmean(better) if better else math.nan,
        "length_worse": fmean(worse) if worse else math.nan,
    }
    if answers_per_prompt > 1:
        metrics["dead_groups"] = fmean(is_dead(group) for group in split_groups(samples, answers_per_prompt))
    for name in samples[0].rewards:
        values = [value for sample in samples if (value := sample.rewards[name]) is not None]
        metrics[f"rewards/{name}"] = fmean(values) if values else math.nan
    return metrics
