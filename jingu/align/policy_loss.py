"""The policy-gradient losses of PPO, GRPO and their family, over tokens.

Shapes: B rows, T tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jingu.config.sections.policies import PolicySettings
from jingu.data.batch import Batch


@dataclass(frozen=True)
class PolicyBatch(Batch):
    """Rows with what the loss needs of each predicted token, [B, T]; all are 0 where nothing is trained.

    Attributes:
        advantages: of the tokens.
        sampled: log-probabilities in generation.
        old: log-probabilities before the first update of the step; None: those of this forward pass.
        reference: log-probabilities of the reference model; None: not needed.
    """

    advantages: Tensor | None = None
    sampled: Tensor | None = None
    old: Tensor | None = None
    reference: Tensor | None = None


def batch_loss(batch: PolicyBatch, logprob_BT: Tensor, settings: PolicySettings) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a batch, to be divided by the sum of `loss_denominator`; and which tokens are clipped.

    Args:
        logprob_BT: of the sampled tokens by the model in training, at the temperature of sampling.
    """
    dtype = logprob_BT.dtype
    mask_BT = batch.labels >= 0
    assert batch.advantages is not None and batch.old is not None
    old_BT = batch.old.to(dtype)
    loss_BT, clipped_BT = surrogate_loss(logprob_BT, old_BT, batch.advantages.to(dtype), mask_BT, settings)
    if settings.importance_cap is not None:
        assert batch.sampled is not None
        loss_BT = loss_BT * importance_weights(old_BT, batch.sampled.to(dtype), settings.importance_cap)
    if settings.penalty is not None and settings.penalty.estimator == "k2":
        assert batch.reference is not None
        loss_BT = loss_BT + settings.penalty.beta * kl_loss(logprob_BT, batch.reference.to(dtype), mask_BT)
    if settings.loss == "grpo":
        loss_BT = loss_BT / mask_BT.sum(1, keepdim=True).clamp_min(1)
    return loss_BT.where(mask_BT, 0.0).sum(), clipped_BT


def loss_denominator(batch: Batch, settings: PolicySettings) -> float:
    """Return what the summed loss is divided by: answers, tokens, or the longest answers that there could be."""
    if settings.loss == "grpo":
        return float(len(batch.labels))
    if settings.loss == "dr_grpo":
        return float(len(batch.labels) * settings.max_new_tokens)
    return float((batch.labels >= 0).sum())


def sequence_ratios(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean of the log-ratios over each row, for each of its tokens (GSPO, Zheng et al., 2025)."""
    mean_B1 = (log_ratio_BT * mask_BT).sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp_min(1)
    return mean_B1.expand_as(log_ratio_BT)


def surrogate_loss(
    logprob_BT: Tensor, old_logprob_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, settings: PolicySettings
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, without KL and normalization; and whether clipping ended its gradient.

    Args:
        old_logprob_BT: the same before the first update of the step; equal values are a ratio of 1.
        mask_BT: tokens of answers.
    """
    # Differences where nothing is trained are cut off first: exp would make them infinite, and 0 · ∞ is NaN.
    log_ratio_BT = (logprob_BT - old_logprob_BT).where(mask_BT, 0.0)
    if settings.ratio == "sequence":
        log_ratio_BT = sequence_ratios(log_ratio_BT, mask_BT)
    ratio_BT = log_ratio_BT.exp()
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    if settings.objective == "cispo":
        weight_BT = ratio_BT.detach().clamp(low, high)
        return -weight_BT * advantage_BT * logprob_BT, (ratio_BT > high) & mask_BT
    surrogate_BT = ratio_BT * advantage_BT
    clipped_BT = ratio_BT.clamp(low, high) * advantage_BT
    return -torch.minimum(surrogate_BT, clipped_BT), (clipped_BT < surrogate_BT) & mask_BT


def kl_loss(logprob_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return k2 = (log π/π_ref)² / 2 of each token, whose gradient is that of the KL divergence on average."""
    return 0.5 * (logprob_BT - reference_BT).where(mask_BT, 0.0).square()


def importance_weights(trained_BT: Tensor, sampled_BT: Tensor, cap: float) -> Tensor:
    """Return min(π_train / π_sampler, cap) of each token (truncated importance sampling, Yao et al., 2025)."""
    return (trained_BT - sampled_BT).detach().exp().clamp_max(cap)
