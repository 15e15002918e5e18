"""The policy-gradient losses of PPO, GRPO and their family, over tokens.

Shapes: R answers, A tokens of the longest one.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from jingu.align.policy_batch import PolicyBatch
from jingu.config.sections.policies import PolicySettings


def batch_loss(batch: PolicyBatch, logprob_RA: Tensor, settings: PolicySettings) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a batch, to divide by the sum of `loss_denominator`, and which tokens are clipped.

    Args:
        logprob_RA: log-probabilities of the sampled tokens under the current model, at the sampling temperature.
    """
    dtype = logprob_RA.dtype
    mask_RA = batch.mask
    assert batch.advantages is not None and batch.old is not None
    old_RA = batch.old.to(dtype)
    loss_RA, clipped_RA = surrogate_loss(logprob_RA, old_RA, batch.advantages.to(dtype), mask_RA, settings)
    if settings.importance_cap is not None:
        assert batch.sampled is not None
        loss_RA = loss_RA * importance_weights(old_RA, batch.sampled.to(dtype), settings.importance_cap)
    if settings.penalty is not None and settings.penalty.estimator != "k1":
        assert batch.reference is not None
        log_ratio_RA = (logprob_RA - batch.reference.to(dtype)).where(mask_RA, 0.0)
        loss_RA = loss_RA + settings.penalty.beta * kl_loss(log_ratio_RA, settings.penalty.estimator)
    if settings.loss == "grpo":
        loss_RA = loss_RA / mask_RA.sum(1, keepdim=True).clamp_min(1)
    return loss_RA.where(mask_RA, 0.0).sum(), clipped_RA


def value_loss(batch: PolicyBatch, value_RA: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Return the loss of a critic summed over tokens, and the number of tokens whose prediction is clipped.

    The loss is max((V - R)², (V_clipped - R)²) / 2, with V_clipped within `clip` of the prediction before the first
    update (Schulman et al., 2017, in their code).

    Args:
        value_RA: predictions of the current critic.
    """
    assert batch.values is not None and batch.returns is not None
    mask_RA = batch.mask & batch.returns.isfinite()
    old_RA, return_RA = batch.values.to(value_RA.dtype), batch.returns.to(value_RA.dtype).nan_to_num(0.0)
    loss_RA = (value_RA - return_RA).square()
    is_clipped_RA = torch.zeros_like(mask_RA)
    if clip is not None:
        clipped_RA = (old_RA + (value_RA - old_RA).clamp(-clip, clip) - return_RA).square()
        is_clipped_RA = clipped_RA > loss_RA
        loss_RA = torch.maximum(loss_RA, clipped_RA)
    return 0.5 * loss_RA.where(mask_RA, 0.0).sum(), (is_clipped_RA & mask_RA).sum().to(value_RA.dtype)


def loss_denominator(batch: PolicyBatch, settings: PolicySettings) -> float:
    """Return the divisor of the summed loss: the number of answers (grpo), of answers times the maximum tokens of one
    (dr_grpo), or of tokens."""
    if settings.loss == "grpo":
        return float(len(batch.mask))
    if settings.loss == "dr_grpo":
        return float(len(batch.mask) * settings.max_new_tokens)
    return float(batch.mask.sum())


def sequence_ratios(log_ratio_RA: Tensor, mask_RA: Tensor) -> Tensor:
    """Return for each token the mean log-ratio of its answer (GSPO, Zheng et al., 2025)."""
    mean_R1 = (log_ratio_RA * mask_RA).sum(1, keepdim=True) / mask_RA.sum(1, keepdim=True).clamp_min(1)
    return mean_R1.expand_as(log_ratio_RA)


def surrogate_loss(
    logprob_RA: Tensor, old_logprob_RA: Tensor, advantage_RA: Tensor, mask_RA: Tensor, settings: PolicySettings
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, without KL and normalization, and whether clipping removes its gradient.

    Args:
        old_logprob_RA: log-probabilities before the first update of the step; equal values give a ratio of 1.
        mask_RA: whether a token belongs to an answer.
    """
    # Mask before exp, not after it: an infinite ratio at a masked position would make its gradient 0 · ∞ = NaN.
    log_ratio_RA = (logprob_RA - old_logprob_RA).where(mask_RA, 0.0)
    if settings.ratio == "sequence":
        log_ratio_RA = sequence_ratios(log_ratio_RA, mask_RA)
    ratio_RA = log_ratio_RA.exp()
    if settings.objective == "gmpo":
        return geometric_surrogate(log_ratio_RA, advantage_RA, mask_RA, settings)
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    if settings.objective == "cispo":
        weight_RA = ratio_RA.detach().clamp(low, high)
        return -weight_RA * advantage_RA * logprob_RA, (ratio_RA > high) & mask_RA
    surrogate_RA = ratio_RA * advantage_RA
    clipped_RA = ratio_RA.clamp(low, high) * advantage_RA
    return -torch.minimum(surrogate_RA, clipped_RA), (clipped_RA < surrogate_RA) & mask_RA


def geometric_surrogate(
    log_ratio_RA: Tensor, advantage_RA: Tensor, mask_RA: Tensor, settings: PolicySettings
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token with the geometric mean of its answer's clipped ratios (GMPO, Zhao et al., 2025).

    Logarithms are clipped on the side on which the advantage would push them further. Also returns whether a token is
    clipped.
    """
    clamped_RA = log_ratio_RA.clamp(-settings.clip_low, settings.clip_high)
    is_better_RA = advantage_RA > 0
    clipped_RA = torch.minimum(log_ratio_RA, clamped_RA).where(is_better_RA, torch.maximum(log_ratio_RA, clamped_RA))
    ratio_RA = sequence_ratios(clipped_RA, mask_RA).exp()
    return -ratio_RA * advantage_RA, (clipped_RA != log_ratio_RA) & mask_RA


def kl_loss(log_ratio_RA: Tensor, estimator: Literal["k2", "k2_sequence"]) -> Tensor:
    """Return the KL penalty of each token in the loss.

    k2 is x²/2, whose gradient x · ∇log π ignores that a token changes the divergence of the tokens after it. For
    k2_sequence the factor x is replaced by its sum over this token and all later ones, so that the expected gradient is
    that of the divergence of whole answers.

    Args:
        log_ratio_RA: x = log π/π_ref of each token; 0 after the end of an answer.
    """
    if estimator == "k2":
        return 0.5 * log_ratio_RA.square()
    return log_ratio_RA.detach().flip(1).cumsum(1).flip(1) * log_ratio_RA


def importance_weights(trained_RA: Tensor, sampled_RA: Tensor, cap: float) -> Tensor:
    """Return min(π_train / π_sampler, cap) of each token (truncated importance sampling, Yao et al., 2025)."""
    return (trained_RA - sampled_RA).detach().exp().clamp_max(cap)
