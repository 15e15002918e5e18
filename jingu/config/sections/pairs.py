"""Preference learning from pairs: the settings of each task, with its loss and the rewards that it implies.

A task is one class of this file; a loss of DPO is one function of `DPO_LOSSES`. Functions import PyTorch when they
compute, because settings are read without it.

Shapes: all tensors have the same shape, with one value per pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from jingu.config.sections.base import Fraction, PathText, names_of
from jingu.config.sections.task_base import AuxiliaryModel, TaskBase
from jingu.plugins import Registry, expect_function

if TYPE_CHECKING:
    from torch import Tensor

Coefficient = Annotated[float, Field(ge=0)]
Temperature = Annotated[float, Field(gt=0)]


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


class PairBase(TaskBase):
    """Settings of tasks that learn from log-probabilities of a chosen and a rejected answer."""

    FACTORY: ClassVar[str] = "jingu.align.preference_learning:PREFERENCE_LEARNING"

    if TYPE_CHECKING:
        # Every task has this setting, with its own default.
        beta: float = 0.0

    def pair_losses(self, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> Tensor:
        """Return the loss of each pair; a finite but meaningless value where there is no pair."""
        raise NotImplementedError

    def rewards(self, answers: AnswerLogProbs) -> Tensor:
        """Return the implicit rewards of answers (Rafailov et al., 2023, equation 5)."""
        return self.beta * answers.log_ratio


class Scored(NamedTuple):
    """Answers, and the derivatives of the divergence at their probability ratios."""

    answers: AnswerLogProbs
    scores: Tensor


def _sigmoid(settings: DpoSettings, chosen: Scored, rejected: Scored) -> Tensor:
    right, inverse = _smooth_losses(settings, chosen, rejected)
    return right + inverse


def _robust(settings: DpoSettings, chosen: Scored, rejected: Scored) -> Tensor:
    right, inverse = _smooth_losses(settings, chosen, rejected)
    return (right - inverse) / (1 - 2 * settings.label_smoothing)


def _hinge(settings: DpoSettings, chosen: Scored, rejected: Scored) -> Tensor:
    return (1 - settings.beta * (chosen.scores - rejected.scores)).relu()


def _ipo(settings: DpoSettings, chosen: Scored, rejected: Scored) -> Tensor:
    # Means over tokens: sums would depend on the length. The authors of IPO confirmed this to those of TRL.
    difference = chosen.answers.per_token(chosen.scores) - rejected.answers.per_token(rejected.scores)
    return (difference - 1 / (2 * settings.beta)).square()


def _apo_zero(settings: DpoSettings, chosen: Scored, rejected: Scored) -> Tensor:
    gain, loss = ((settings.beta * side.scores).sigmoid() for side in (chosen, rejected))
    return 1 - gain + loss


DPO_LOSSES: Registry[Callable[[DpoSettings, Scored, Scored], Tensor]] = Registry(
    "losses",
    {"sigmoid": _sigmoid, "robust": _robust, "hinge": _hinge, "ipo": _ipo, "apo_zero": _apo_zero},
    expect_function,
)
"""The losses of DPO by the names of `task.loss`."""

DpoLoss = Annotated[str, names_of(DPO_LOSSES)]


def _smooth_losses(settings: DpoSettings, chosen: Scored, rejected: Scored) -> tuple[Tensor, Tensor]:
    """Return the losses of a pair in the given and in the swapped order, weighted by label smoothing."""
    import torch.nn.functional as F

    margin = settings.beta * (chosen.scores - rejected.scores)
    smoothing = settings.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(margin), -smoothing * F.logsigmoid(-margin)


class DpoSettings(PairBase):
    """Direct preference optimization on pairs (Rafailov et al., 2023, who also use beta=0.1; optimizer.lr=1e-6 is
    usual, and ten times as much with LoRA).

    Attributes:
        loss: sigmoid: DPO, or with label_smoothing conservative DPO (cDPO, Mitchell, 2023). robust: unbiased if a
            fraction `label_smoothing` of the pairs is swapped (Chowdhury et al., 2024). hinge: SLiC (Zhao et al.,
            2023). ipo: squared error of the margin, with log-probabilities averaged over tokens (Azar et al., 2023).
            apo_zero: raises the probability of the chosen answer and lowers that of the rejected one, each by itself,
            for chosen answers that are better than the model's own (APO, D'Oosterlinck et al., 2024).
        divergence: Divergence from the reference model that beta weights (f-DPO, Wang et al., 2024): reverse_kl: that
            of DPO; forward_kl, js (Jensen-Shannon), or alpha. Each replaces log(policy / reference) by another
            increasing function of the ratio.
        alpha: Parameter of the alpha divergence: 1 gives the reverse KL divergence, and 0 the forward one.
        tail_weight: Weight of the tokens of the longer answer that lie beyond the length of the shorter one
            (length-desensitized DPO, LD-DPO, Liu et al., 2024): 1: all tokens count alike; 0: only the common length
            counts.
        beta: Strength of the KL constraint: a larger beta keeps the model closer to the reference model.
        label_smoothing: Assumed fraction of pairs whose preference is swapped.
        sft_weight: Coefficient of the mean negative log-probability per token of the chosen answer (RPO, Pang et al.,
            2024).
        reference: The reference model: a run, a checkpoint, or a Hugging Face folder; null: `initialize.from`.
    """

    type: Literal["dpo"] = "dpo"
    loss: DpoLoss = "sigmoid"
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    alpha: float = 0.5
    tail_weight: Fraction = 1.0
    beta: Temperature = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    sft_weight: Coefficient = 0.0
    reference: PathText | None = None

    def pair_losses(self, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> Tensor:
        answer_scores = [Scored(answers, divergence_scores(self, answers.log_ratio)) for answers in (chosen, rejected)]
        losses = DPO_LOSSES[self.loss](self, *answer_scores)
        return losses - self.sft_weight * chosen.policy_mean if self.sft_weight else losses

    def models(self, initial: str | None) -> tuple[AuxiliaryModel, ...]:
        return (AuxiliaryModel("reference", self.reference or initial, "before"),)


# Largest exponent in the scores of divergences: its exponential is finite in fp32.
_MAX_EXPONENT = 80.0


def divergence_scores(settings: DpoSettings, log_ratio: Tensor) -> Tensor:
    """Return f'(policy / reference) for the f-divergence of the settings, up to a constant (Wang et al., 2024).

    Args:
        log_ratio: log(policy / reference) of answers.
    """
    import torch
    import torch.nn.functional as F

    if settings.divergence == "js":
        return F.logsigmoid(log_ratio)
    power = {"reverse_kl": 0.0, "forward_kl": -1.0, "alpha": settings.alpha - 1.0}[settings.divergence]
    if power == 0.0:
        return log_ratio
    return torch.expm1((power * log_ratio).clamp_max(_MAX_EXPONENT)) / power


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, also accurate near 0."""
    import torch

    x = x.clamp_max(-torch.finfo(x.dtype).eps)
    is_near_0 = x > -0.6931
    # Give each branch only inputs in its domain: a NaN in the unused branch would make the gradient NaN.
    near = torch.log(-torch.expm1(x.where(is_near_0, -0.1)))
    far = torch.log1p(-torch.exp(x.where(~is_near_0, -1.0)))
    return near.where(is_near_0, far)


class SimpoSettings(PairBase):
    """SimPO on pairs: mean log-probabilities per token, without a reference model (defaults as in Meng et al., 2024;
    optimizer.lr=1e-6 is usual).

    Attributes:
        beta: Factor on the difference of the mean log-probabilities.
        gamma: Target margin, subtracted from beta times this difference.
    """

    type: Literal["simpo"] = "simpo"
    beta: Temperature = 2.0
    gamma: Coefficient = 0.5

    def pair_losses(self, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> Tensor:
        import torch.nn.functional as F

        return -F.logsigmoid(self.beta * (chosen.policy_mean - rejected.policy_mean) - self.gamma)

    def rewards(self, answers: AnswerLogProbs) -> Tensor:
        return self.beta * answers.policy_mean


class OrpoSettings(PairBase):
    """ORPO on pairs: likelihood of the chosen answer plus an odds ratio term, without a reference model (default as in
    Hong et al., 2024; optimizer.lr=8e-6 is usual).

    Attributes:
        beta: Coefficient of the log odds ratio.
    """

    type: Literal["orpo"] = "orpo"
    beta: Temperature = 0.1

    def pair_losses(self, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> Tensor:
        import torch.nn.functional as F

        # The odds of an answer are p / (1 - p), with p = exp(mean log-probability).
        log_odds = chosen.policy_mean - rejected.policy_mean
        log_odds = log_odds - _log1mexp(chosen.policy_mean) + _log1mexp(rejected.policy_mean)
        return -chosen.policy_mean - self.beta * F.logsigmoid(log_odds)


class CpoSettings(PairBase):
    """CPO on pairs: DPO without a reference model, plus the likelihood of the chosen answer (defaults as in Xu et al.,
    2024).

    Attributes:
        beta: Factor on the difference of the log-probabilities.
        sft_weight: Coefficient of the mean negative log-probability per token of the chosen answer.
    """

    type: Literal["cpo"] = "cpo"
    beta: Temperature = 0.1
    sft_weight: Coefficient = 1.0

    def pair_losses(self, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> Tensor:
        import torch.nn.functional as F

        contrast = -F.logsigmoid(self.beta * (chosen.policy - rejected.policy))
        return contrast - self.sft_weight * chosen.policy_mean
