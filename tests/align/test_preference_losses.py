"""Losses on pairs equal those of TRL and the formulas of their papers, and their optima are those of the papers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from jingu.align.answers import AnswerBatch
from jingu.align.preference_losses import reward_losses
from jingu.config.sections.pairs import (
    AnswerLogProbs,
    CpoSettings,
    DpoSettings,
    OrpoSettings,
    SimpoSettings,
    divergence_scores,
)

PAIRS = 3
# Tokens of all answers: equal lengths, so that a mean over the batch is the mean of the answers' means.
TOKENS = 4
SETTINGS = [
    DpoSettings(),
    DpoSettings(beta=0.3, label_smoothing=0.1),
    DpoSettings(loss="robust", label_smoothing=0.2),
    DpoSettings(loss="hinge", beta=0.7),
    DpoSettings(loss="ipo", beta=0.2),
    DpoSettings(loss="apo_zero", beta=0.3),
    DpoSettings(sft_weight=0.5),
    DpoSettings(divergence="forward_kl", beta=0.4),
    DpoSettings(divergence="js"),
    DpoSettings(divergence="alpha", alpha=0.3, loss="hinge"),
    DpoSettings(divergence="alpha", alpha=1.7, loss="ipo"),
    DpoSettings(divergence="js", loss="robust", label_smoothing=0.1),
    SimpoSettings(beta=2.5, gamma=1.0),
    OrpoSettings(beta=0.2),
    CpoSettings(beta=0.4, sft_weight=0.3),
]


def draw() -> tuple[Tensor, Tensor]:
    """Log-probabilities [2, pairs, tokens] of policy and reference, first of chosen answers, then of rejected ones."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 2, PAIRS, TOKENS, dtype=torch.float64, generator=generator)
    policy, reference = torch.nn.functional.logsigmoid(logits)
    return policy.clone().requires_grad_(), reference


def compute(settings: Any, policy: Tensor, reference: Tensor) -> Tensor:
    tokens = torch.full((PAIRS,), TOKENS)
    chosen, rejected = (AnswerLogProbs(policy[side].sum(-1), reference[side].sum(-1), tokens) for side in (0, 1))
    return settings.pair_losses(chosen, rejected).mean()


def from_paper(settings: Any, policy: Tensor, reference: Tensor) -> Tensor:
    """The same by the formulas, written with exponentials."""
    chosen, rejected = policy.sum(-1)
    chosen_mean, rejected_mean = policy.mean(-1)
    if isinstance(settings, SimpoSettings):
        losses = torch.log(1 + torch.exp(settings.gamma - settings.beta * (chosen_mean - rejected_mean)))
    elif isinstance(settings, OrpoSettings):
        odds_chosen = chosen_mean.exp() / (1 - chosen_mean.exp())
        odds_rejected = rejected_mean.exp() / (1 - rejected_mean.exp())
        losses = -chosen_mean + settings.beta * torch.log(1 + odds_rejected / odds_chosen)
    elif isinstance(settings, CpoSettings):
        losses = torch.log(1 + torch.exp(settings.beta * (rejected - chosen))) - settings.sft_weight * chosen_mean
    else:
        ratio_chosen, ratio_rejected = derivative_of_divergence(settings, (policy - reference).sum(-1).exp())
        margin = settings.beta * (ratio_chosen - ratio_rejected)
        right, swapped = torch.log(1 + torch.exp(-margin)), torch.log(1 + torch.exp(margin))
        share = settings.label_smoothing
        losses = {
            "sigmoid": (1 - share) * right + share * swapped,
            "robust": ((1 - share) * right - share * swapped) / (1 - 2 * share),
            "hinge": torch.clamp(1 - margin, min=0),
            "apo_zero": 1
            - 1 / (1 + (policy - reference)[0].sum(-1).exp() ** -settings.beta)
            + 1 / (1 + (policy - reference)[1].sum(-1).exp() ** -settings.beta),
            "ipo": ((ratio_chosen - ratio_rejected) / TOKENS - 1 / (2 * settings.beta)) ** 2,
        }[settings.loss]
        losses = losses - settings.sft_weight * chosen_mean
    return losses.mean()


def derivative_of_divergence(settings: DpoSettings, u: Tensor) -> Tensor:
    """The derivative f'(u) of each divergence in table 1 of Wang et al. (2024); they give alpha as 1 - alpha."""
    if settings.divergence == "reverse_kl":
        return u.log() + 1
    if settings.divergence == "forward_kl":
        return -1 / u
    if settings.divergence == "js":
        return torch.log(2 * u / (1 + u))
    return (u ** (settings.alpha - 1) - 1) / (settings.alpha - 1)


def check_loss(
    settings: Any, compute_reference: Callable[..., Tensor], rtols: tuple[float, float], atol: float
) -> None:
    """Check that a loss and its gradient are those of a reference, each within its relative tolerance."""
    policy, reference = draw()
    values = [function(settings, policy, reference) for function in (compute, compute_reference)]
    gradients = [torch.autograd.grad(value, policy)[0] for value in values]
    for pair, rtol in zip((values, gradients), rtols, strict=True):
        torch.testing.assert_close(*pair, rtol=rtol, atol=atol)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_the_formula_of_the_paper(settings: Any) -> None:
    check_loss(settings, from_paper, (1e-12, 1e-11), atol=1e-12)


def from_trl(settings: Any, policy: Tensor, reference: Tensor) -> Tensor:
    """The same by TRL's own functions, called without a model."""
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    if isinstance(settings, OrpoSettings):
        from trl.experimental.orpo import ORPOTrainer

        fake = SimpleNamespace(beta=settings.beta, accelerator=accelerator)
        odds_losses, *_ = ORPOTrainer.odds_ratio_loss(fake, *policy.mean(-1))
        # TRL returns the term that is subtracted from the likelihood's loss.
        return -policy[0].mean() - odds_losses.mean()
    if isinstance(settings, SimpoSettings | CpoSettings):
        from trl.experimental.cpo import CPOTrainer

        is_simpo = isinstance(settings, SimpoSettings)
        fake = SimpleNamespace(
            beta=settings.beta,
            loss_type="simpo" if is_simpo else "sigmoid",
            alpha=0.0,
            simpo_gamma=settings.gamma if is_simpo else 0.0,
            label_smoothing=0.0,
            accelerator=accelerator,
        )
        losses, *_ = CPOTrainer.cpo_loss(fake, *(policy.mean(-1) if is_simpo else policy.sum(-1)))
        return losses.mean() - (0.0 if is_simpo else settings.sft_weight) * policy[0].mean()
    return _from_dpo_trainer(settings, policy, reference, accelerator)


def _from_dpo_trainer(
    settings: DpoSettings, policy: Tensor, reference: Tensor, accelerator: Any, lengths: Tensor | None = None
) -> Tensor:
    """The same by TRL's trainer.

    Args:
        lengths: tokens of each answer [2, pairs]; None: all of them. The reference then counts no tail.
    """
    from trl import DPOTrainer

    # TRL's exponents are clamped by a table without float64.
    log_probs = policy.flatten(0, 1).to(torch.float32 if settings.divergence == "alpha" else torch.float64)
    outputs = SimpleNamespace(
        log_probs=log_probs,
        entropy=log_probs.detach(),
        mean_logits=log_probs.detach(),
        is_top1=log_probs > 0,
    )
    fake = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        aux_loss_enabled=False,
        ld_alpha=None if settings.tail_weight == 1.0 else settings.tail_weight,
        precompute_ref_logps=True,
        f_divergence_type={"js": "js_divergence", "alpha": "alpha_divergence"}.get(
            settings.divergence, settings.divergence
        ),
        f_alpha_divergence_coef=settings.alpha,
        loss_types=[settings.loss, "sft"],
        loss_weights=[1.0, settings.sft_weight],
        beta=settings.beta,
        label_smoothing=settings.label_smoothing,
        use_weighting=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    ids = torch.ones(2 * PAIRS, TOKENS + 1, dtype=torch.long)
    mask = ids.clone()
    mask[:, 0] = 0
    if lengths is not None:
        mask *= torch.arange(TOKENS + 1) <= lengths.flatten()[:, None]
        outputs.log_probs = log_probs * mask[:, 1:]  # the model gives 0 where there is no label
    chosen, rejected = reference.sum(-1).to(log_probs.dtype)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "completion_mask": mask,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    return DPOTrainer._compute_loss(fake, lambda **_: outputs, inputs, False).double()


# TRL computes these in other places: cDPO it has no longer, of a batch.
TRL_SETTINGS = [
    settings for settings in SETTINGS if getattr(settings, "label_smoothing", 0) == 0 or settings.loss != "sigmoid"
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", TRL_SETTINGS, ids=str)
def test_equals_trl(settings: Any) -> None:
    check_loss(settings, from_trl, (1e-6, 1e-6), atol=1e-6)


LENGTHS = torch.tensor([[4, 1, 3], [2, 3, 3]])
"""Tokens of the chosen and the rejected answer of each pair."""


def weigh_tails(values: Tensor, weight: float) -> Tensor:
    """The sums of tokens [2, pairs] of answers with the batch's function; the pairs lie in one row, behind prompts."""
    labels, documents, places = [], [], []
    for number, (pair, side) in enumerate((pair, side) for pair in range(PAIRS) for side in range(2)):
        length = int(LENGTHS[side, pair])
        labels += [-100] * 2 + [5] * length
        documents += [number] * (2 + length)
        places += [(side, pair, None)] * 2 + [(side, pair, token) for token in range(length)]
    labels, documents = [*labels, -100, -100], [*documents, -1, -1]
    rows = torch.tensor([labels]), torch.tensor([documents])
    batch = AnswerBatch(rows[0], rows[0], documents=rows[1], reference=torch.zeros(1, 2 * PAIRS))
    zero = values.sum() * 0.0
    tokens = [values[place[0], place[1], place[2]] if place[2] is not None else zero for place in places]
    sums = batch.sum_by_answer(batch.weigh_tails(torch.stack([*tokens, zero, zero])[None], weight))[0]
    return torch.stack([sums[0::2], sums[1::2]])


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_tails_of_the_longer_answer_weigh_less(weight: float) -> None:
    policy, _ = draw()
    expected = torch.zeros(2, PAIRS, dtype=torch.float64)
    for side in range(2):
        for pair in range(PAIRS):
            shared = int(LENGTHS[:, pair].min())
            whole = policy[side, pair, : LENGTHS[side, pair]]
            expected[side, pair] = weight * whole.sum() + (1 - weight) * whole[:shared].sum()
    torch.testing.assert_close(weigh_tails(policy, weight), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_length_desensitized_losses_equal_trl(weight: float) -> None:
    policy, reference = draw()
    settings = DpoSettings(tail_weight=weight)
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    expected = _from_dpo_trainer(settings, policy, reference, accelerator, LENGTHS)
    chosen, rejected = (
        AnswerLogProbs(sums, side.sum(-1), lengths)
        for sums, side, lengths in zip(weigh_tails(policy, weight), reference, LENGTHS, strict=True)
    )
    loss = settings.pair_losses(chosen, rejected).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(value, policy)[0] for value in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


def test_the_limits_of_the_alpha_divergence() -> None:
    ratio = torch.linspace(-3, 3, 7, dtype=torch.float64)
    at_0, at_1 = (divergence_scores(DpoSettings(divergence="alpha", alpha=alpha), ratio) for alpha in (0.0, 1.0))
    torch.testing.assert_close(at_0, divergence_scores(DpoSettings(divergence="forward_kl"), ratio))
    assert torch.equal(at_1, ratio)
    # An answer that has become impossible gives a finite loss.
    far = divergence_scores(DpoSettings(divergence="forward_kl"), torch.tensor([-1e4, 1e4]))
    assert far.isfinite().all()


@pytest.mark.parametrize("margin", [0.0, 1.5])
def test_reward_loss_equals_its_formula(margin: float) -> None:
    """Logsigmoid of the difference minus the margin, and the centering term."""
    chosen = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.1, 0.4, -3.0], dtype=torch.float64)
    losses = reward_losses(chosen, rejected, torch.full((3,), margin, dtype=torch.float64), 0.01)
    expected = -torch.log(torch.sigmoid(chosen - rejected - margin)) + 0.01 * (chosen + rejected) ** 2
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("centering", [None, 0.01])
def test_reward_loss_equals_that_of_trl(centering: float | None) -> None:
    from trl import RewardTrainer

    scores = torch.tensor([0.3, -1.2, 2.0, 0.1, 0.4, -3.0], dtype=torch.float64, requires_grad=True)
    margins = torch.tensor([0.0, 1.5, 0.2], dtype=torch.float64)
    fake = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=centering),
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"margin": margins, "attention_mask": torch.ones(6, 1)}
    expected = RewardTrainer.compute_loss(fake, lambda **_: SimpleNamespace(logits=scores[:, None]), inputs)
    loss = reward_losses(scores[:3], scores[3:], margins, centering or 0.0).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(value, scores)[0] for value in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("share", [0.55, 0.9])
def test_rewards_differ_by_the_log_odds_of_the_preference(share: float) -> None:
    """The minimum of the loss by Bradley and Terry; the gradient there is 0, and it is convex."""
    rewards = torch.tensor([math.log(share / (1 - share)) + 3.0, 3.0], dtype=torch.float64, requires_grad=True)
    first, second = rewards[:1], rewards[1:]
    zero = torch.zeros(1, dtype=torch.float64)
    loss = share * reward_losses(first, second, zero, 0.0) + (1 - share) * reward_losses(second, first, zero, 0.0)
    assert torch.autograd.grad(loss.sum(), rewards)[0].abs().max() < 1e-12


def minimize(settings: DpoSettings, share: float) -> float:
    """The log ratio's difference with the lowest expected loss, if a share of the comparisons prefers the first."""
    difference = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([difference], lr=0.5, max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-15)
    one = torch.ones(())
    zero = torch.zeros((), dtype=torch.float64)

    def closure() -> Tensor:
        optimizer.zero_grad()
        first = AnswerLogProbs(difference, zero, one)
        second = AnswerLogProbs(zero, zero, one)
        loss = share * settings.pair_losses(first, second) + (1 - share) * settings.pair_losses(second, first)
        loss.backward()
        return loss

    optimizer.step(closure)
    return difference.item()


@pytest.mark.parametrize(("share", "beta"), [(0.8, 0.1), (0.6, 0.5)])
def test_optimal_margins(share: float, beta: float) -> None:
    """With a probability q of the preference: DPO log(q / (1 - q)) / β, IPO (2q - 1) / 2β."""
    assert minimize(DpoSettings(beta=beta), share) == pytest.approx(math.log(share / (1 - share)) / beta, rel=1e-5)
    assert minimize(DpoSettings(loss="ipo", beta=beta), share) == pytest.approx((2 * share - 1) / (2 * beta), rel=1e-6)


def test_smoothing_bounds_the_margin_and_robust_restores_the_clean_one() -> None:
    """cDPO with certain labels: log((1 - ε) / ε) / β. Robust DPO with ε of the labels swapped: that of clean ones."""
    noise, beta, clean = 0.1, 0.2, 0.8
    certain = minimize(DpoSettings(beta=beta, label_smoothing=noise), 1.0)
    assert certain == pytest.approx(math.log((1 - noise) / noise) / beta, rel=1e-5)
    noisy = clean * (1 - noise) + (1 - clean) * noise
    robust = minimize(DpoSettings(loss="robust", beta=beta, label_smoothing=noise), noisy)
    assert robust == pytest.approx(math.log(clean / (1 - clean)) / beta, rel=1e-5)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_absent_pairs_have_finite_losses_and_gradients(settings: Any) -> None:
    policy = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(2, dtype=torch.float64)
    tokens = torch.tensor([0, 3])
    losses = settings.pair_losses(
        AnswerLogProbs(policy[0] - tokens, zero, tokens), AnswerLogProbs(policy[1], zero, tokens * 0)
    )
    losses[0].backward()
    assert losses.isfinite().all() and policy.grad is not None and policy.grad.isfinite().all()
