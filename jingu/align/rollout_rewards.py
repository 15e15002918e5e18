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
        "unscored": fmean(sample.reward is None for sample in samples),
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
