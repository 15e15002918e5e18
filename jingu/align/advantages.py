"""Advantages: how much better an answer, or a token of it, is than expected.

Shapes: P prompts, G answers to each, R = P · G rows, T tokens of a row, A tokens of the longest answer. A NaN reward
marks an answer that could not be scored; group statistics ignore it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from jingu.align.rollout_rewards import rewards_of, separate_rewards
from jingu.align.rollouts import Sample
from jingu.align.step_data import StepData
from jingu.config.sections.policies import GrpoSettings, PpoSettings, RewardedSettings

# Added to the standard deviation before dividing by it: 1e-4 for groups, as in TRL; 1e-8 for batches, as in common PPO
# implementations.
GROUP_EPSILON = 1e-4
BATCH_EPSILON = 1e-8


@dataclass(frozen=True)
class StepRewards:
    """The rewards of a step in fp64; NaN for an answer that could not be scored.

    Attributes:
        data: the answers.
        answers: [R] reward of each answer, after shaping.
        penalties: [R, A] KL penalty of each token.
        tokens: [R, A] reward of each token: less its penalty, and with the answer's reward at its last token.
        scorable: [R, A] whether there is a token of an answer with a reward.
        greedy: greedy answers to the prompts, if the advantage needs them.
    """

    data: StepData
    answers: Tensor
    penalties: Tensor
    tokens: Tensor
    scorable: Tensor
    greedy: list[Sample]

    @property
    def net(self) -> Tensor:
        """[R] reward of each answer, less the penalties of its tokens."""
        return self.answers - self.penalties.sum(1)


def shape_rewards(settings: RewardedSettings, data: StepData, greedy: list[Sample]) -> StepRewards:
    """Return the rewards of a step, with the penalties of the settings."""
    samples = data.samples
    answer_R = rewards_of(samples)
    if settings.overlong_tokens:
        # The token limit includes the replies of an environment.
        length_R = torch.tensor([len(sample.ids) for sample in samples], dtype=torch.float64)
        answer_R += overlong_penalty(length_R, settings.max_new_tokens, settings.overlong_tokens)
    # KL penalty on the reward of each token (k1 estimator).
    penalty_RA = torch.zeros_like(data.sampled)
    if settings.penalty is not None and settings.penalty.estimator == "k1":
        assert data.reference is not None
        penalty_RA = settings.penalty.beta * (data.logprobs - data.reference)
    # The reward of the whole answer is given at its last token.
    token_RA = -penalty_RA
    token_RA[torch.arange(len(samples)), data.mask.sum(1) - 1] += answer_R
    scorable_RA = data.mask & answer_R.isfinite()[:, None]
    return StepRewards(data, answer_R, penalty_RA, token_RA, scorable_RA, greedy)


def add_returns(settings: PpoSettings, data: StepData, rewards: StepRewards) -> tuple[StepData, Tensor]:
    """Return the data with the critic's targets, and the GAE advantages [R, A] from the critic's predictions."""
    assert data.values is not None
    scorable_RA = rewards.scorable
    advantage_RA = generalized_advantages(rewards.tokens, data.values, settings.discount, settings.gae_lambda)
    return_RA = (advantage_RA + data.values).where(scorable_RA, math.nan)
    return_N, value_N = return_RA[scorable_RA], data.values[scorable_RA]
    explained_variance = math.nan
    if len(return_N) > 1:
        explained_variance = float(1.0 - (return_N - value_N).var() / return_N.var())
    data = replace(data, returns=return_RA.where(data.mask, 0.0), explained_variance=explained_variance)
    if settings.whiten:
        return data, whiten(advantage_RA, scorable_RA)
    return data, advantage_RA.where(scorable_RA, 0.0)


# The functions of the table `ADVANTAGES` (`jingu.config.sections.policies`): advantages [P, G] or, if their entry says
# so, [R, A].


def group(settings: GrpoSettings, rewards: StepRewards) -> Tensor:
    return group_advantages(_by_prompt(settings, rewards.net), settings.scale)


def leave_one_out(settings: GrpoSettings, rewards: StepRewards) -> Tensor:
    return leave_one_out_advantages(_by_prompt(settings, rewards.net))


def greedy(settings: GrpoSettings, rewards: StepRewards) -> Tensor:
    return greedy_advantages(_by_prompt(settings, rewards.net), rewards_of(rewards.greedy))


def best(settings: GrpoSettings, rewards: StepRewards) -> Tensor:
    return best_advantages(_by_prompt(settings, rewards.net))


def reinforce(_settings: GrpoSettings, rewards: StepRewards) -> Tensor:
    return whiten(returns_to_go(rewards.tokens), rewards.scorable)


def separate(settings: GrpoSettings, rewards: StepRewards) -> Tensor:
    """Penalties, which are differences of the shaped reward from the sum, count as one more reward."""
    samples = rewards.data.samples
    reward_KR, weight_K = separate_rewards(samples, settings.rewards)
    shaping_R = rewards.net - rewards_of(samples)
    if shaping_R.nan_to_num(0.0).any():
        reward_KR = torch.cat([reward_KR, shaping_R[None]])
        weight_K = torch.cat([weight_K, torch.ones(1, dtype=weight_K.dtype)])
    return separate_advantages(reward_KR.view(len(reward_KR), -1, settings.answers_per_prompt), weight_K)


def _by_prompt(settings: GrpoSettings, reward_R: Tensor) -> Tensor:
    return reward_R.view(-1, settings.answers_per_prompt)


# Their formulas


def group_advantages(reward_PG: Tensor, scale: Literal["group", "none"]) -> Tensor:
    """Return rewards minus the mean of their group (GRPO, Shao et al., 2024); 0 for answers without a reward.

    Args:
        scale: "group" also divides by the group's standard deviation, with Bessel's correction.
    """
    mean_P1 = reward_PG.nanmean(1, keepdim=True)
    centered_PG = reward_PG - mean_P1
    if scale == "group":
        count_P1 = centered_PG.isfinite().sum(1, keepdim=True)
        variance_P1 = centered_PG.square().nansum(1, keepdim=True) / (count_P1 - 1).clamp_min(1)
        centered_PG = centered_PG / (variance_P1.sqrt() + GROUP_EPSILON)
    return centered_PG.nan_to_num(0.0)


def leave_one_out_advantages(reward_PG: Tensor) -> Tensor:
    """Return rewards minus the mean of the others in their group (RLOO, Ahmadian et al., 2024)."""
    # Dividing two integer tensors would give fp32.
    count_P1 = reward_PG.isfinite().sum(1, keepdim=True).to(reward_PG.dtype)
    return group_advantages(reward_PG, "none") * (count_P1 / (count_P1 - 1).clamp_min(1))


def separate_advantages(reward_KPG: Tensor, weight_K: Tensor) -> Tensor:
    """Return advantages from rewards that are normalized one by one (GDPO, Liu et al., 2026).

    Each reward is normalized within its group, then the weighted sum over all answers. An answer without any reward
    gets 0.

    Args:
        reward_KPG: K rewards of each answer.
        weight_K: their weights.
    """
    scaled_KPG = torch.stack([group_advantages(reward_PG, "group") for reward_PG in reward_KPG])
    total_PG = (scaled_KPG * weight_K[:, None, None]).sum(0)
    scored_PG = reward_KPG.isfinite().any(0)
    values_N = total_PG[scored_PG]
    if len(values_N) < 2:
        return torch.zeros_like(total_PG)
    scaled_PG = (total_PG - values_N.mean()) / (values_N.std() + GROUP_EPSILON)
    return scaled_PG.where(scored_PG, 0.0)


def greedy_advantages(reward_PG: Tensor, greedy_P: Tensor) -> Tensor:
    """Return rewards minus that of the greedy answer (ReMax, Li et al., 2023)."""
    return (reward_PG - greedy_P.unsqueeze(1)).nan_to_num(0.0)


def best_advantages(reward_PG: Tensor) -> Tensor:
    """Return 1 for the best answer of each group (the first of a tie) and 0 for the others (RAFT, Dong et al., 2023).

    A group whose rewards are all equal gets only zeros.
    """
    comparable_PG = reward_PG.nan_to_num(-torch.inf)
    best_P1 = comparable_PG.argmax(1, keepdim=True)
    worst_P1 = reward_PG.nan_to_num(torch.inf).amin(1, keepdim=True)
    differs_P1 = comparable_PG.gather(1, best_P1) > worst_P1
    return torch.zeros_like(reward_PG).scatter(1, best_P1, differs_P1.to(reward_PG.dtype))


def returns_to_go(reward_RT: Tensor) -> Tensor:
    """Return for each token the sum of its reward and of all later ones."""
    return generalized_advantages(reward_RT, torch.zeros_like(reward_RT), 1.0, 1.0)


def generalized_advantages(reward_RT: Tensor, value_RT: Tensor, discount: float, decay: float) -> Tensor:
    """Return generalized advantage estimates (GAE, Schulman et al., 2016).

    Args:
        reward_RT: of each token; 0 after the end of an answer.
        value_RT: expected return before each token; 0 after the end of an answer.
        discount: γ.
        decay: λ; 0 gives temporal differences, 1 gives returns minus values.
    """
    advantage_RT = torch.zeros_like(reward_RT)
    following_R = torch.zeros_like(reward_RT[:, 0])
    next_value_R = torch.zeros_like(following_R)
    for t in reversed(range(reward_RT.shape[1])):
        difference_R = reward_RT[:, t] + discount * next_value_R - value_RT[:, t]
        following_R = difference_R + discount * decay * following_R
        advantage_RT[:, t] = following_R
        next_value_R = value_RT[:, t]
    return advantage_RT


def whiten(advantage_RT: Tensor, mask_RT: Tensor) -> Tensor:
    """Return advantages with mean 0 and standard deviation 1 over the tokens of the mask, and 0 elsewhere."""
    values_N = advantage_RT[mask_RT]
    if len(values_N) < 2:
        return torch.zeros_like(advantage_RT)
    scaled_RT = (advantage_RT - values_N.mean()) / (values_N.var().sqrt() + BATCH_EPSILON)
    return scaled_RT.where(mask_RT, 0.0)


def overlong_penalty(length_R: Tensor, max_tokens: int, interval: int) -> Tensor:
    """Return the soft overlong penalty of each answer (DAPO, Yu et al., 2025, equation 13).

    It falls linearly from 0 to -1 over the last `interval` tokens before `max_tokens`.
    """
    return -((length_R - (max_tokens - interval)) / interval).clamp(0.0, 1.0)
