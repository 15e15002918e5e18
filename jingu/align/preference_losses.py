"""Losses on pairs of a chosen and a rejected answer, from the log-probabilities of both.

Shapes: any, one value for each pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from jingu.config.sections.tasks import CpoSettings, DpoSettings, KtoSettings, OrpoSettings, SimpoSettings

PairSettings = DpoSettings | SimpoSettings | OrpoSettings | CpoSettings


@dataclass(frozen=True)
class AnswerLogProbs:
    """Log-probabilities of answers, summed over their tokens (the end token included).

    Attributes:
        policy: under the model that is trained.
        reference: under the reference model; 0 without one.
        tokens: tokens of each answer, 0 where there is none.
    """

    policy: Tensor
    reference: Tensor
    tokens: Tensor

    @property
    def exists(self) -> Tensor:
        """Whether there is an answer."""
        return self.tokens > 0

    @property
    def log_ratio(self) -> Tensor:
        """log(policy / reference)."""
        return self.policy - self.reference

    @property
    def policy_mean(self) -> Tensor:
        """Mean log-probability of a token under the policy; -1 where there is no answer."""
        return self._mean(self.policy)

    @property
    def log_ratio_mean(self) -> Tensor:
        """Mean log ratio of a token."""
        return self._mean(self.log_ratio)

    def _mean(self, sums: Tensor) -> Tensor:
        # The value of an absent answer does not matter, as long as all losses of it are finite.
        return (sums / self.tokens.clamp_min(1)).where(self.exists, -1.0)


def pair_losses(settings: PairSettings, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> Tensor:
    """Return the loss of each pair; finite and without meaning where there is no pair."""
    if isinstance(settings, DpoSettings):
        loss = _dpo_losses(settings, chosen, rejected)
        return loss - settings.sft_weight * chosen.policy_mean if settings.sft_weight else loss
    if isinstance(settings, SimpoSettings):
        return -F.logsigmoid(settings.beta * (chosen.policy_mean - rejected.policy_mean) - settings.gamma)
    if isinstance(settings, CpoSettings):
        contrast = -F.logsigmoid(settings.beta * (chosen.policy - rejected.policy))
        return contrast - settings.sft_weight * chosen.policy_mean
    # ORPO: the odds of an answer are p / (1 - p), with p = exp(mean log-probability).
    log_odds = chosen.policy_mean - rejected.policy_mean
    log_odds = log_odds - _log1mexp(chosen.policy_mean) + _log1mexp(rejected.policy_mean)
    return -chosen.policy_mean - settings.beta * F.logsigmoid(log_odds)


def _dpo_losses(settings: DpoSettings, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> Tensor:
    if settings.loss == "ipo":
        # Means over tokens, as the authors of the paper confirmed to those of TRL: sums would depend on the length.
        difference = chosen.log_ratio_mean - rejected.log_ratio_mean
        return (difference - 1 / (2 * settings.beta)).square()
    margin = settings.beta * (chosen.log_ratio - rejected.log_ratio)
    if settings.loss == "hinge":
        return torch.relu(1 - margin)
    smoothing = settings.label_smoothing
    right = -(1 - smoothing) * F.logsigmoid(margin)
    swapped = -smoothing * F.logsigmoid(-margin)
    if settings.loss == "robust":
        return (right - swapped) / (1 - 2 * smoothing)
    return right + swapped


def reward_losses(chosen: Tensor, rejected: Tensor, margin: Tensor, centering: float) -> Tensor:
    """Return Bradley and Terry's loss of each pair of rewards.

    Args:
        margin: by how much the reward of the chosen answer should be the higher one (Touvron et al., 2023).
        centering: coefficient of the square of the sum of both rewards.
    """
    return -F.logsigmoid(chosen - rejected - margin) + centering * (chosen + rejected).square()


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, accurate near 0 too."""
    x = x.clamp_max(-torch.finfo(x.dtype).eps)
    is_near_0 = x > -0.6931
    # Each branch sees only values that it can compute, or its gradient would be NaN.
    near = torch.log(-torch.expm1(x.where(is_near_0, -0.1)))
    far = torch.log1p(-torch.exp(x.where(~is_near_0, -1.0)))
    return near.where(is_near_0, far)


def kto_losses(settings: KtoSettings, answers: AnswerLogProbs, is_desirable: Tensor, divergence: Tensor) -> Tensor:
    """Return KTO's loss of each answer.

    Args:
        divergence: estimate of the divergence of policy and reference, of which no gradient is taken.
    """
    advantage = settings.beta * (answers.log_ratio - divergence)
    desirable = settings.desirable_weight * torch.sigmoid(-advantage)
    undesirable = settings.undesirable_weight * torch.sigmoid(advantage)
    return desirable.where(is_desirable, undesirable)
