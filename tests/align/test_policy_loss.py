"""Losses and advantages of policies: equal to TRL's, to formulas, and to what enumeration gives."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jingu.align.advantages import (
    best_advantages,
    generalized_advantages,
    greedy_advantages,
    group_advantages,
    leave_one_out_advantages,
    overlong_penalty,
    returns_to_go,
    separate_advantages,
    whiten,
)
from jingu.align.distillation import generalized_jsd
from jingu.align.policy_batch import PolicyBatch
from jingu.align.policy_loss import batch_loss, importance_weights, kl_loss, loss_denominator, value_loss
from jingu.align.rollout_rewards import agreement, separate_rewards
from jingu.align.rollouts import Sample
from jingu.config.sections.policies import GrpoSettings, KlSettings
from jingu.config.sections.rewards import LengthReward

LENGTHS = (3, 5, 1, 4)


def make_batch(seed: int = 0) -> tuple[PolicyBatch, Tensor]:
    """Rows of answers of several lengths, with log-probabilities far enough from the old ones to be clipped."""
    generator = torch.Generator().manual_seed(seed)
    old_BT = -torch.rand(4, 5, generator=generator, dtype=torch.float64) * 3
    logprob_BT = old_BT + 0.5 * torch.randn(4, 5, generator=generator, dtype=torch.float64)
    advantages_B1 = torch.randn(4, 1, generator=generator, dtype=torch.float64)
    labels_BT = torch.where(torch.arange(5) < torch.tensor(LENGTHS)[:, None], 7, -100)
    places_BT = torch.arange(20).view(4, 5).where(labels_BT >= 0, -1)
    batch = PolicyBatch(
        labels_BT,
        labels_BT,
        places=places_BT,
        advantages=advantages_B1.expand(4, 5),
        sampled=old_BT + 0.1,
        old=old_BT,
        reference=old_BT,
    )
    return batch, logprob_BT.requires_grad_()


def loss_and_gradient(settings: GrpoSettings) -> tuple[Tensor, Tensor]:
    batch, logprob_BT = make_batch()
    loss = batch_loss(batch, logprob_BT, settings)[0] / loss_denominator(batch, settings)
    return loss.detach(), torch.autograd.grad(loss, logprob_BT)[0]


def trl_loss_and_gradient(trainer: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
    """The same by GRPOTrainer, which gets the log-probabilities in the place of those of a model."""
    trl = pytest.importorskip("trl")
    batch, logprob_BT = make_batch()
    mask_BT = (batch.labels >= 0).long()
    assert batch.advantages is not None
    fake = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprob_BT, torch.zeros(4, 5), None),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(delta=None, steps_per_generation=1, use_bias_correction_kl=False),
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        importance_sampling_level="token",
        loss_type="dapo",
        epsilon_low=0.2,
        epsilon_high=0.28,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        beta=0.0,
        use_vllm=False,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_clip_max=2.0,
        max_completion_length=9,
    )
    vars(fake).update(options)
    inputs = {
        "prompt_ids": torch.zeros(4, 2, dtype=torch.long),
        "prompt_mask": torch.ones(4, 2, dtype=torch.long),
        "completion_ids": torch.zeros(4, 5, dtype=torch.long),
        "completion_mask": mask_BT,
        "advantages": batch.advantages[:, 0],
        "num_items_in_batch": mask_BT.sum().double(),
        "old_per_token_logps": batch.old,
    }
    assert batch.old is not None and batch.sampled is not None
    # TRL computes it with the rollout, and multiplies the loss by it.
    ratio_BT = (batch.old - batch.sampled).exp()
    inputs["importance_sampling_ratio"] = ratio_BT.clamp_max(fake.vllm_importance_sampling_clip_max)
    loss = (trainer or trl.GRPOTrainer)._compute_loss(fake, None, inputs)
    return loss.detach(), torch.autograd.grad(loss, logprob_BT)[0]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss": "grpo"}, {"loss_type": "grpo"}),
    "dapo": ({}, {}),
    "dr_grpo": ({"loss": "dr_grpo", "max_new_tokens": 9}, {"loss_type": "dr_grpo"}),
    "gspo": ({"loss": "grpo", "ratio": "sequence"}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    # TRL bounds the weight from above alone, by its absolute value.
    "cispo": ({"objective": "cispo", "clip_low": 1.0, "clip_high": 0.3}, {"loss_type": "cispo", "epsilon_high": 1.3}),
    # Weights of tokens between training and sampling, which differ by exp(-0.1) there.
    "tis": ({"importance_cap": 2.0}, {"use_vllm": True}),
    "tis_capped": ({"importance_cap": 0.8}, {"use_vllm": True, "vllm_importance_sampling_clip_max": 0.8}),
    "narrow": ({"clip_low": 0.05, "clip_high": 0.05}, {"epsilon_low": 0.05, "epsilon_high": 0.05}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_losses_equal_trl(name: str) -> None:
    ours, theirs = CASES[name]
    for one, other in zip(loss_and_gradient(GrpoSettings(**ours)), trl_loss_and_gradient(**theirs), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def test_the_first_update_is_plain_policy_gradient() -> None:
    batch, logprob_BT = make_batch()
    mask_BT = batch.labels >= 0
    assert batch.advantages is not None
    expected_BT = -(batch.advantages * mask_BT) / mask_BT.sum()
    for changes in ({}, {"objective": "cispo"}, {"ratio": "sequence", "loss": "grpo"}):
        settings = GrpoSettings(**changes)  # type: ignore[arg-type]
        on_policy = PolicyBatch(**{**vars(batch), "old": logprob_BT.detach()})
        loss = batch_loss(on_policy, logprob_BT, settings)[0] / loss_denominator(batch, settings)
        gradient_BT = torch.autograd.grad(loss, logprob_BT)[0]
        if "loss" in changes:
            expected_BT = -(batch.advantages * mask_BT) / mask_BT.sum(1, keepdim=True) / 4
        assert torch.allclose(gradient_BT, expected_BT, rtol=1e-12)


def test_truncated_importance_weights() -> None:
    sampled = torch.tensor([-1.0, -2.0, -3.0])
    assert torch.equal(importance_weights(sampled, sampled, 2.0), torch.ones(3))
    weights = importance_weights(sampled, sampled - torch.tensor([0.5, 5.0, -0.5]), 2.0)
    assert weights.tolist() == pytest.approx([1.6487, 2.0, 0.6065], abs=1e-4)


# Advantages


def test_advantages_of_groups_by_hand() -> None:
    reward_PG = torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 3.0, 3.0, 3.0], [2.0, torch.nan, 4.0, torch.nan]]).double()
    plain_PG = group_advantages(reward_PG, "none")
    assert plain_PG.tolist() == [[0.5, -0.5, -0.5, 0.5], [0.0] * 4, [-1.0, 0.0, 1.0, 0.0]]
    scaled_PG = group_advantages(reward_PG, "group")
    assert torch.allclose(scaled_PG[0], plain_PG[0] / (reward_PG[0].std() + 1e-4))
    assert torch.allclose(scaled_PG[2], plain_PG[2] / (2.0**0.5 + 1e-4))
    left_PG = leave_one_out_advantages(reward_PG)
    assert left_PG[0, 0].item() == pytest.approx(1.0 - (0.0 + 0.0 + 1.0) / 3)
    assert best_advantages(reward_PG).tolist() == [[1.0, 0.0, 0.0, 0.0], [0.0] * 4, [0.0, 0.0, 1.0, 0.0]]
    assert greedy_advantages(reward_PG, torch.tensor([1.0, 0.0, 1.0]).double())[2].tolist() == [1.0, 0.0, 3.0, 0.0]


@given(st.lists(st.lists(st.floats(-10, 10), min_size=3, max_size=3), min_size=1, max_size=5))
def test_advantages_of_a_group_sum_to_0(rewards: list[list[float]]) -> None:
    reward_PG = torch.tensor(rewards, dtype=torch.float64)
    for advantage_PG in (group_advantages(reward_PG, "group"), leave_one_out_advantages(reward_PG)):
        assert torch.allclose(advantage_PG.sum(1), torch.zeros(len(rewards)).double(), atol=1e-9)


@pytest.mark.parametrize("group", [2, 3, 4])
def test_bias_of_baselines_by_enumeration(group: int) -> None:
    """The mean of the group scales the policy gradient by (G - 1) / G; leaving one out gives it exactly."""
    logits_A = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reward_A = torch.tensor([1.0, 0.0, 0.4], dtype=torch.float64)
    expected_A = torch.autograd.grad(logits_A.softmax(0) @ reward_A, logits_A)[0]
    totals = {"group": torch.zeros(3).double(), "rloo": torch.zeros(3).double(), "std": torch.zeros(3).double()}
    for answers in product(range(3), repeat=group):
        chosen_G = torch.tensor(answers)
        logprob_A = logits_A.log_softmax(0)
        probability = logprob_A[chosen_G].sum().exp().detach()
        reward_1G = reward_A[chosen_G][None]
        for name, advantage_1G in (
            ("group", group_advantages(reward_1G, "none")),
            ("rloo", leave_one_out_advantages(reward_1G)),
            ("std", group_advantages(reward_1G, "group")),
        ):
            surrogate = (logprob_A[chosen_G] * advantage_1G[0]).mean()
            totals[name] += probability * torch.autograd.grad(surrogate, logits_A, retain_graph=True)[0]
    assert torch.allclose(totals["group"], expected_A * (group - 1) / group, rtol=1e-12, atol=1e-15)
    assert torch.allclose(totals["rloo"], expected_A, rtol=1e-12, atol=1e-15)
    factors = totals["std"] / expected_A
    assert factors.max() - factors.min() > 0.01  # the standard deviation changes the direction


def test_generalized_advantages_have_their_limits() -> None:
    generator = torch.Generator().manual_seed(1)
    reward_RT, value_RT = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    returns_RT = reward_RT.flip(1).cumsum(1).flip(1)
    assert torch.allclose(generalized_advantages(reward_RT, value_RT, 1.0, 1.0), returns_RT - value_RT)
    assert torch.allclose(returns_to_go(reward_RT), returns_RT)
    next_RT = torch.cat([value_RT[:, 1:], torch.zeros(3, 1)], 1)
    differences_RT = reward_RT + 0.9 * next_RT - value_RT
    assert torch.allclose(generalized_advantages(reward_RT, value_RT, 0.9, 0.0), differences_RT)
    # The recursion of Schulman et al., for one place in the middle.
    advantages_RT = generalized_advantages(reward_RT, value_RT, 0.9, 0.8)
    expected_R = sum((0.9 * 0.8) ** step * differences_RT[:, 2 + step] for step in range(4))
    assert torch.allclose(advantages_RT[:, 2], torch.as_tensor(expected_R))


def test_whitening_and_overlong_penalty() -> None:
    values_RT = torch.tensor([[1.0, 2.0, 9.0], [3.0, 4.0, 9.0]], dtype=torch.float64)
    mask_RT = torch.tensor([[True, True, False], [True, True, False]])
    white_RT = whiten(values_RT, mask_RT)
    assert white_RT[mask_RT].mean().item() == pytest.approx(0.0) and white_RT[mask_RT].std().item() == pytest.approx(1)
    assert white_RT[:, 2].tolist() == [0.0, 0.0]
    # Where nothing is scorable, there is nothing to learn.
    assert whiten(torch.full((2, 3), torch.nan), torch.zeros(2, 3, dtype=torch.bool)).tolist() == [[0.0] * 3] * 2
    penalties = overlong_penalty(torch.tensor([10.0, 80.0, 85.0, 90.0, 100.0]), 100, 20)
    assert penalties.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k2_sequence"])
def test_kl_reaches_the_optimum_of_regularized_learning(estimator: str) -> None:
    """By exact gradients over 5 answers: both placements end at π_ref · exp(r / β) / Z."""
    generator = torch.Generator().manual_seed(3)
    reference_A = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)
    reward_A = torch.rand(5, generator=generator, dtype=torch.float64)
    beta = 0.5
    optimum_A = (reference_A + reward_A / beta).softmax(0)
    logits_A = reference_A.clone().requires_grad_()
    for _ in range(3000):
        logprob_A = logits_A.log_softmax(0)
        probability_A = logprob_A.detach().exp()
        score_A = reward_A.clone()
        loss_A = torch.zeros_like(score_A)
        if estimator == "k1":
            score_A -= beta * (logprob_A.detach() - reference_A)
        else:
            loss_A = beta * kl_loss((logprob_A - reference_A)[:, None], estimator)[:, 0]  # type: ignore[arg-type]
        score_A -= (probability_A * score_A).sum()
        gradient_A = torch.autograd.grad((probability_A * (loss_A - score_A * logprob_A)).sum(), logits_A)[0]
        with torch.no_grad():
            logits_A -= 1.0 * gradient_A
    assert 0.5 * (logits_A.softmax(0) - optimum_A).abs().sum() < 1e-3


TWO_TOKENS = 4
"""Vocabulary of the answers of two tokens."""


def learn_two_tokens(estimator: Any, reference_A2: Tensor, reward_A: Tensor, beta: float, length_A: Tensor) -> Tensor:
    """Train a table of logits by exact gradients over all answers of two tokens; return their probabilities [A].

    Args:
        reference_A2: log-probabilities of the tokens of each answer under the reference.
        length_A: tokens of each answer; an answer of one token counts once for each second token.
    """
    first, second = (torch.zeros(*size, TWO_TOKENS, dtype=torch.float64) for size in ((), (TWO_TOKENS,)))
    logits = [first.requires_grad_(), second.requires_grad_()]
    token_A2 = torch.tensor(list(product(range(TWO_TOKENS), repeat=2)))
    mask_A2 = torch.arange(2) < length_A[:, None]
    optimizer = torch.optim.Adam(logits, lr=0.03)
    for step in range(3000):
        optimizer.param_groups[0]["lr"] = 0.03 * (1 - step / 3000)
        logprob_A2 = torch.stack(
            [logits[0].log_softmax(0)[token_A2[:, 0]], logits[1].log_softmax(1)[token_A2[:, 0], token_A2[:, 1]]], 1
        )
        probability_A = logprob_A2.detach().sum(1).exp()
        ratio_A2 = (logprob_A2 - reference_A2).where(mask_A2, 0.0)
        score_A = reward_A.clone()
        penalty_A = torch.zeros_like(score_A)
        if estimator == "k1":
            score_A -= beta * ratio_A2.detach().sum(1)
        else:
            penalty_A = beta * kl_loss(ratio_A2, estimator).sum(1)
        score_A -= (probability_A * score_A).sum()
        loss = (probability_A * (penalty_A - score_A * (logprob_A2 * mask_A2).sum(1))).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return probability_A


@pytest.mark.parametrize("has_short_answers", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2_sequence", "k2"])
def test_kl_of_answers_of_two_tokens(estimator: str, has_short_answers: bool) -> None:
    """With later tokens, k1 and k2_sequence end at π_ref · exp(r / β) / Z. The per-token k2 does not."""
    generator = torch.Generator().manual_seed(4)
    token_A2 = torch.tensor(list(product(range(TWO_TOKENS), repeat=2)))
    logits, logits_next = torch.randn(2, TWO_TOKENS, TWO_TOKENS, generator=generator, dtype=torch.float64)
    reference_A2 = torch.stack(
        [logits[0].log_softmax(0)[token_A2[:, 0]], logits_next.log_softmax(1)[token_A2[:, 0], token_A2[:, 1]]], 1
    )
    reward_A = torch.rand(TWO_TOKENS**2, generator=generator, dtype=torch.float64)
    length_A = torch.full((TWO_TOKENS**2,), 2)
    if has_short_answers:
        # The first token 0 ends the answer.
        length_A[:TWO_TOKENS] = 1
        reward_A[:TWO_TOKENS] = reward_A[0].item()
    beta = 0.3
    optimum_A = (reference_A2.sum(1) + reward_A / beta).softmax(0)
    result_A = learn_two_tokens(estimator, reference_A2, reward_A, beta, length_A)
    if has_short_answers:
        optimum_A, result_A = (
            torch.cat([x_A[:TWO_TOKENS].sum()[None], x_A[TWO_TOKENS:]]) for x_A in (optimum_A, result_A)
        )
    variation = 0.5 * float((result_A - optimum_A).abs().sum())
    assert (variation < 1e-3) == (estimator != "k2"), variation


def test_estimators_of_kl_that_mislead_are_not_offered() -> None:
    with pytest.raises(ValueError, match="k2"):
        KlSettings(estimator="k3")  # type: ignore[arg-type]


# The critic


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_loss_of_values_equals_its_formula(clip: float | None) -> None:
    """As PPO's codes have it: 0.5 · masked mean of max((V - R)², (clip(V, V_old - ε, V_old + ε) - R)²)."""
    generator = torch.Generator().manual_seed(5)
    old_BT, noise_BT, return_BT = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    value_BT = (old_BT + 0.3 * noise_BT).requires_grad_()
    batch, _ = make_batch()
    mask_BT = batch.labels >= 0
    # The second answer is not scorable, and its tokens have no gradient.
    return_BT[1] = torch.nan
    loss, clipped = value_loss(replace(batch, values=old_BT, returns=return_BT), value_BT, clip)
    (gradient_BT,) = torch.autograd.grad(loss, value_BT)
    mask_BT[1] = False
    first_BT = (value_BT - return_BT) ** 2
    second_BT = first_BT
    if clip is not None:
        second_BT = (torch.clamp(value_BT, old_BT - clip, old_BT + clip) - return_BT) ** 2
    expected = 0.5 * torch.max(first_BT, second_BT)[mask_BT].sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(gradient_BT, torch.autograd.grad(expected, value_BT)[0].nan_to_num(0.0), rtol=1e-12)
    assert clipped.item() == (second_BT > first_BT)[mask_BT].sum().item()
    assert bool(clipped > 0) == (clip is not None)


# Distillation


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_divergences_equal_trl(beta: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd")
    generator = torch.Generator().manual_seed(7)
    student_MV, teacher_MV = 3 * torch.randn(2, 5, 37, generator=generator, dtype=torch.float64)
    student_MV.requires_grad_()
    expected = gkd.GKDTrainer.generalized_jsd_loss(student_MV[None], teacher_MV[None], beta=beta, reduction="sum")
    losses_M, gradient_MV = generalized_jsd(student_MV.detach(), teacher_MV, beta)
    assert losses_M.sum().item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(gradient_MV, torch.autograd.grad(expected, student_MV)[0], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergences_equal_their_formula(beta: float) -> None:
    generator = torch.Generator().manual_seed(8)
    student_MV, teacher_MV = 3 * torch.randn(2, 5, 37, generator=generator, dtype=torch.float64)
    student_MV.requires_grad_()
    p_MV, q_MV = student_MV.softmax(1), teacher_MV.softmax(1)
    mixture_MV = beta * q_MV + (1 - beta) * p_MV
    expected_M = beta * (q_MV * (q_MV / mixture_MV).log()).sum(1) + (1 - beta) * (p_MV * (p_MV / mixture_MV).log()).sum(
        1
    )
    if beta in (0.0, 1.0):
        first_MV, second_MV = (q_MV, p_MV) if beta == 0.0 else (p_MV, q_MV)
        expected_M = (first_MV * (first_MV / second_MV).log()).sum(1)
    losses_M, gradient_MV = generalized_jsd(student_MV.detach(), teacher_MV, beta)
    assert torch.allclose(losses_M, expected_M, rtol=1e-12)
    assert torch.allclose(gradient_MV, torch.autograd.grad(expected_M.sum(), student_MV)[0], rtol=1e-9, atol=1e-14)


# Members of the families with rewards apart


def test_gdpo_equals_trl_and_its_formula() -> None:
    """Each reward is normalized in its group, and the weighted sum over the batch, as TRL's normalize_then_sum does."""
    generator = torch.Generator().manual_seed(9)
    reward_KPG = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    reward_KPG[1] *= 100.0
    weight_K = torch.tensor([1.0, 0.5], dtype=torch.float64)
    mean_KP1, std_KP1 = reward_KPG.mean(2, keepdim=True), reward_KPG.std(2, keepdim=True)
    total_PG = (weight_K[:, None, None] * (reward_KPG - mean_KP1) / (std_KP1 + 1e-4)).sum(0)
    expected_PG = (total_PG - total_PG.mean()) / (total_PG.std() + 1e-4)
    torch.testing.assert_close(separate_advantages(reward_KPG, weight_K), expected_PG, rtol=1e-12, atol=1e-12)
    # A reward whose range is 100 times larger counts no more.
    scaled_KPG = reward_KPG * torch.tensor([1.0, 1000.0])[:, None, None]
    torch.testing.assert_close(separate_advantages(scaled_KPG, weight_K), expected_PG, rtol=1e-4, atol=1e-4)
    # An answer that is not scored gets 0, and the others are normalized without it.
    reward_KPG[:, 1, 2] = torch.nan
    advantage_PG = separate_advantages(reward_KPG, weight_K)
    assert advantage_PG[1, 2] == 0.0 and advantage_PG.isfinite().all()
    assert advantage_PG.sum().item() == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("weights", [[1.0, 0.5], [1.0, 1.0]])
def test_rewards_are_separated_without_audits(weights: list[float]) -> None:
    settings = [
        LengthReward(name="first", max_tokens=3, weight=weights[0]),
        LengthReward(name="truth", max_tokens=3, audit=True),
        LengthReward(name="second", max_tokens=3, weight=weights[1]),
    ]
    values = [
        {"first": 1.0, "truth": 0.0, "second": None},
        {"environment": 2.0, "first": 3.0, "truth": 1.0, "second": 4.0},
    ]
    samples = [Sample("", 0, 0, (1,), (2,), (-1.0,), "", "end", rewards=value, reward=1.0) for value in values]
    reward_KR, weight_K = separate_rewards(samples[:1], settings)
    assert weight_K.tolist() == weights and reward_KR[0].tolist() == [1.0] and reward_KR[1].isnan().all()
    reward_KR, weight_K = separate_rewards(samples[1:], settings)
    assert weight_K.tolist() == [*weights, 1.0] and reward_KR[:, 0].tolist() == [3.0, 4.0, 2.0]


@pytest.mark.slow
def test_gmpo_equals_trl() -> None:
    """With the geometric mean's clipping in log space, and with answers on both sides of it."""
    gmpo = pytest.importorskip("trl.experimental.gmpo")
    settings = GrpoSettings(loss="grpo", objective="gmpo", clip_low=0.2, clip_high=0.3)
    theirs = trl_loss_and_gradient(trainer=gmpo.GMPOTrainer, epsilon_low=0.2, epsilon_high=0.3)
    for one, other in zip(loss_and_gradient(settings), theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def make_samples(rewards: list[float], audits: list[float | None]) -> list[Sample]:
    return [
        Sample("", 0, 0, (1,), (2,), (-1.0,), "", "end", rewards={"r": reward, "truth": audit}, reward=reward)
        for reward, audit in zip(rewards, audits, strict=True)
    ]


@pytest.mark.parametrize(
    ("rewards", "audits", "size", "share"),
    [
        ([1, 2, 3, 4], [0, 0, 1, 1], 4, 1.0),
        ([4, 3, 2, 1], [0, 0, 1, 1], 4, 0.0),
        ([1, 1, 1, 1], [0, 0, 1, 1], 4, 0.5),
        ([1, 2, 0, 3], [0, 1, 1, 0], 2, 0.5),  # one pair in each group: alike, and not
        ([1, 2, 0, 3], [0, 1, 0, 2], 1, 1.0),  # all pairs of a step
        ([1, 2, 0, 3], [None, 1, None, 0], 1, 0.0),
        ([1, 2], [1, 1], 2, math.nan),
    ],
)
def test_agreement_of_reward_and_audit(
    rewards: list[float], audits: list[float | None], size: int, share: float
) -> None:
    assert agreement(make_samples(rewards, audits), "truth", size) == pytest.approx(share, nan_ok=True)
