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
        values: predictions of the critic in generation; None: there is no critic.
        returns: what it should have predicted; NaN: not known.
    """

    advantages: Tensor | None = None
    sampled: Tensor | None = None
    old: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None


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


def value_loss(batch: PolicyBatch, value_BT: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Return the loss of a critic summed over tokens, and the number of tokens whose prediction is clipped.

    The loss is max((V - R)², (V_clipped - R)²) / 2 with V_clipped within `clip` of the prediction in generation
    (Schulman et al., 2017, in their code).

    Args:
        value_BT: predictions of the critic in training.
    """
    assert batch.values is not None and batch.returns is not None
    mask_BT = (batch.labels >= 0) & batch.returns.isfinite()
    old_BT, return_BT = batch.values.to(value_BT.dtype), batch.returns.to(value_BT.dtype).nan_to_num(0.0)
    loss_BT = (value_BT - return_BT).square()
    is_clipped_BT = torch.zeros_like(mask_BT)
    if clip is not None:
        clipped_BT = (old_BT + (value_BT - old_BT).clamp(-clip, clip) - return_BT).square()
        is_clipped_BT = clipped_BT > loss_BT
        loss_BT = torch.maximum(loss_BT, clipped_BT)
    return 0.5 * loss_BT.where(mask_BT, 0.0).sum(), (is_clipped_BT & mask_BT).sum().to(value_BT.dtype)


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
