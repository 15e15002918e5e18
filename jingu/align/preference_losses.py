"""Losses on pairs of a chosen and a rejected answer, from the log-probabilities of both.

Shapes: all tensors have the same shape, with one value per pair.
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
        reference: under the reference model; 0 if there is no reference model.
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
        return self.per_token(self.policy)

    def per_token(self, sums: Tensor) -> Tensor:
        """Divide values of answers by their numbers of tokens; -1 where there is no answer."""
        # Absent answers are masked later. Any value works here as long as every loss of it is finite.
        return (sums / self.tokens.clamp_min(1)).where(self.exists, -1.0)


def pair_losses(settings: PairSettings, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> Tensor:
    """Return the loss of each pair; a finite but meaningless value where there is no pair."""
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
    chosen_score, rejected_score = (divergence_scores(settings, side.log_ratio) for side in (chosen, rejected))
    if settings.loss == "ipo":
        # Means over tokens: sums would depend on the length. The authors of IPO confirmed this to those of TRL.
        difference = chosen.per_token(chosen_score) - rejected.per_token(rejected_score)
        return (difference - 1 / (2 * settings.beta)).square()
    margin = settings.beta * (chosen_score - rejected_score)
    if settings.loss == "hinge":
        return torch.relu(1 - margin)
    smoothing = settings.label_smoothing
    right = -(1 - smoothing) * F.logsigmoid(margin)
    swapped_loss = -smoothing * F.logsigmoid(-margin)
    if settings.loss == "robust":
        return (right - swapped_loss) / (1 - 2 * smoothing)
    return right + swapped_loss


# Largest exponent in the scores of divergences: its exponential is finite in fp32.
_MAX_EXPONENT = 80.0


def divergence_scores(settings: DpoSettings, log_ratio: Tensor) -> Tensor:
    """Return f'(policy / reference) for the f-divergence of the settings, up to a constant (Wang et al., 2024).

    Args:
        log_ratio: log(policy / reference) of answers.
    """
    if settings.divergence == "js":
        return F.logsigmoid(log_ratio)
    power = {"reverse_kl": 0.0, "forward_kl": -1.0, "alpha": settings.alpha - 1.0}[settings.divergence]
    if power == 0.0:
        return log_ratio
    return torch.expm1((power * log_ratio).clamp_max(_MAX_EXPONENT)) / power


def reward_losses(chosen: Tensor, rejected: Tensor, margin: Tensor, centering: float) -> Tensor:
    """Return Bradley and Terry's loss of each pair of rewards.

    Args:
        margin: by how much the reward of the chosen answer should exceed the other (Touvron et al., 2023).
        centering: coefficient of the squared sum of both rewards, which keeps rewards around 0.
    """
    return -F.logsigmoid(chosen - rejected - margin) + centering * (chosen + rejected).square()


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, also accurate near 0."""
    x = x.clamp_max(-torch.finfo(x.dtype).eps)
    is_near_0 = x > -0.6931
    # Give each branch only inputs in its domain: a NaN in the unused branch would make the gradient NaN.
    near = torch.log(-torch.expm1(x.where(is_near_0, -0.1)))
    far = torch.log1p(-torch.exp(x.where(~is_near_0, -1.0)))
    return near.where(is_near_0, far)


def kto_losses(settings: KtoSettings, answers: AnswerLogProbs, is_desirable: Tensor, divergence: Tensor) -> Tensor:
    """Return KTO's or BCO's loss of each answer.

    Args:
        divergence: estimated KL divergence of policy and reference; for BCO the threshold of the log ratio. No gradient
            flows through it.
    """
    advantage = settings.beta * (answers.log_ratio - divergence)
    if settings.loss == "bco":
        desirable = -settings.desirable_weight * F.logsigmoid(advantage)
        return desirable.where(is_desirable, -settings.undesirable_weight * F.logsigmoid(-advantage))
    desirable = settings.desirable_weight * torch.sigmoid(-advantage)
    undesirable = settings.undesirable_weight * torch.sigmoid(advantage)
    return desirable.where(is_desirable, undesirable)
