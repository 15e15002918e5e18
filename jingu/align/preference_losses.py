"""Losses on rewards of pairs, and on labeled answers. Those on log-probabilities of pairs are in their settings.

Shapes: all tensors have the same shape, with one value per pair or answer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from jingu.config.sections.pairs import AnswerLogProbs
from jingu.config.sections.tasks import KtoSettings


def reward_losses(chosen: Tensor, rejected: Tensor, margin: Tensor, centering: float) -> Tensor:
    """Return Bradley and Terry's loss of each pair of rewards.

    Args:
        margin: by how much the reward of the chosen answer should exceed the other (Touvron et al., 2023).
        centering: coefficient of the squared sum of both rewards, which keeps rewards around 0.
    """
    return -F.logsigmoid(chosen - rejected - margin) + centering * (chosen + rejected).square()


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
