"""Settings of the task, which defines the training data and the loss of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field

from jingu.config.sections.base import Fraction, PathText, Settings, default_type
from jingu.config.sections.policies import DistillationSettings, GrpoSettings, PpoSettings

Coefficient = Annotated[float, Field(ge=0)]
Temperature = Annotated[float, Field(gt=0)]


class PretrainingSettings(Settings):
    """Predict the next token, in plain text or in the answers of instruction data."""

    type: Literal["pretraining"] = "pretraining"


class RewardSettings(Settings):
    """Train a reward model: a scalar head at the end of an answer, with the Bradley-Terry loss on pairs (Ouyang et al.,
    2022; optimizer.lr=1e-5 is usual).

    Attributes:
        centering: Coefficient of the mean of (chosen reward + rejected reward)². This term keeps rewards around 0
            (Eisenstein et al., 2023, who use 0.01).
    """

    type: Literal["reward"] = "reward"
    centering: Coefficient = 0.0


class DpoSettings(Settings):
    """Direct preference optimization on pairs (Rafailov et al., 2023, who also use beta=0.1; optimizer.lr=1e-6 is
    usual, and ten times as much with LoRA).

    Attributes:
        loss: sigmoid: DPO, or with label_smoothing conservative DPO (cDPO, Mitchell, 2023). robust: unbiased if a
            fraction `label_smoothing` of the pairs is swapped (Chowdhury et al., 2024). hinge: SLiC (Zhao et al.,
            2023). ipo: squared error of the margin, with log-probabilities averaged over tokens (Azar et al., 2023).
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
    loss: Literal["sigmoid", "robust", "hinge", "ipo"] = "sigmoid"
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    alpha: float = 0.5
    tail_weight: Fraction = 1.0
    beta: Temperature = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    sft_weight: Coefficient = 0.0
    reference: PathText | None = None


class SimpoSettings(Settings):
    """SimPO on pairs: mean log-probabilities per token, without a reference model (defaults as in Meng et al., 2024;
    optimizer.lr=1e-6 is usual).

    Attributes:
        beta: Factor on the difference of the mean log-probabilities.
        gamma: Target margin, subtracted from beta times this difference.
    """

    type: Literal["simpo"] = "simpo"
    beta: Temperature = 2.0
    gamma: Coefficient = 0.5


class OrpoSettings(Settings):
    """ORPO on pairs: likelihood of the chosen answer plus an odds ratio term, without a reference model (default as in
    Hong et al., 2024; optimizer.lr=8e-6 is usual).

    Attributes:
        beta: Coefficient of the log odds ratio.
    """

    type: Literal["orpo"] = "orpo"
    beta: Temperature = 0.1


class CpoSettings(Settings):
    """CPO on pairs: DPO without a reference model, plus the likelihood of the chosen answer (defaults as in Xu et al.,
    2024).

    Attributes:
        beta: Factor on the difference of the log-probabilities.
        sft_weight: Coefficient of the mean negative log-probability per token of the chosen answer.
    """

    type: Literal["cpo"] = "cpo"
    beta: Temperature = 0.1
    sft_weight: Coefficient = 1.0


class KtoSettings(Settings):
    """KTO on single answers that are labeled desirable or undesirable (default beta as in Ethayarajh et al., 2024).

    Attributes:
        loss: kto: KTO. bco: binary classifier optimization (Jung et al., 2024): the log-likelihood of a classifier
            whose threshold is halfway between the mean rewards of the desirable and the undesirable answers of a step.
        beta: Strength of the KL constraint: a larger beta keeps the model closer to the reference model.
        desirable_weight: Factor on the loss of desirable answers. Choose both factors so that (desirable_weight ×
            number of desirable answers) : (undesirable_weight × number of undesirable answers) is between 1:1 and 4:3.
        undesirable_weight: Factor on the loss of undesirable answers.
        reference: The reference model: a run, a checkpoint, or a Hugging Face folder; null: `initialize.from`.
    """

    type: Literal["kto"] = "kto"
    loss: Literal["kto", "bco"] = "kto"
    beta: Temperature = 0.1
    desirable_weight: Coefficient = 1.0
    undesirable_weight: Coefficient = 1.0
    reference: PathText | None = None


PairSettings = RewardSettings | DpoSettings | SimpoSettings | OrpoSettings | CpoSettings
"""Tasks that learn from pairs of a chosen and a rejected answer."""

Task = Annotated[
    PretrainingSettings | PairSettings | KtoSettings | GrpoSettings | PpoSettings | DistillationSettings,
    Discriminator("type"),
    default_type("pretraining"),
]
