"""Settings of the task: what a run learns from, and its loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field

from jingu.config.sections.base import PathText, Settings, default_type
from jingu.config.sections.policies import DistillationSettings, GrpoSettings, PpoSettings

Coefficient = Annotated[float, Field(ge=0)]
Temperature = Annotated[float, Field(gt=0)]


class PretrainingSettings(Settings):
    """Predict the next token, of text or of the answers of instruction data."""

    type: Literal["pretraining"] = "pretraining"


class RewardSettings(Settings):
    """Train a reward model: a scalar head at the end of an answer, with the loss of Bradley and Terry on pairs (Ouyang
    et al., 2022; optimizer.lr=1e-5 is usual).

    Attributes:
        centering: Coefficient of the mean of (chosen + rejected reward)², which keeps rewards around 0 (Eisenstein et
            al., 2023; 0.01 there).
    """

    type: Literal["reward"] = "reward"
    centering: Coefficient = 0.0


class DpoSettings(Settings):
    """Direct preference optimization on pairs (Rafailov et al., 2023; beta of 0.1 as there, optimizer.lr=1e-6 is usual,
    ten times as much with LoRA).

    Attributes:
        loss: sigmoid: DPO itself; with label_smoothing conservative DPO (cDPO, Mitchell, 2023). robust: unbiased if a
            share `label_smoothing` of the pairs is swapped (Chowdhury et al., 2024). hinge: SLiC (Zhao et al., 2023).
            ipo: squared error of the margin, from means over tokens (Azar et al., 2023).
        beta: Strength of the pull towards the reference model.
        label_smoothing: Share of the pairs whose preference is taken to be the other way round.
        sft_weight: Coefficient of the mean negative log-probability per token of the chosen answer (RPO, Pang et al.,
            2024).
        reference: The reference model: a run, a checkpoint, or a Hugging Face folder; null: `initialize.from`.
    """

    type: Literal["dpo"] = "dpo"
    loss: Literal["sigmoid", "robust", "hinge", "ipo"] = "sigmoid"
    beta: Temperature = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    sft_weight: Coefficient = 0.0
    reference: PathText | None = None


class SimpoSettings(Settings):
    """SimPO on pairs: mean log-probabilities per token, no reference (Meng et al., 2024, whose defaults these are;
    optimizer.lr=1e-6 is usual).

    Attributes:
        beta: Factor on the difference of the mean log-probabilities.
        gamma: Margin that this product should exceed.
    """

    type: Literal["simpo"] = "simpo"
    beta: Temperature = 2.0
    gamma: Coefficient = 0.5


class OrpoSettings(Settings):
    """ORPO on pairs: likelihood of the chosen answer and odds ratio, no reference (Hong et al., 2024, whose default
    this is; optimizer.lr=8e-6 is usual).

    Attributes:
        beta: Coefficient of the log odds ratio.
    """

    type: Literal["orpo"] = "orpo"
    beta: Temperature = 0.1


class CpoSettings(Settings):
    """CPO on pairs: DPO without a reference, and likelihood of the chosen answer (Xu et al., 2024, whose defaults these
    are).

    Attributes:
        beta: Factor on the difference of the log-probabilities.
        sft_weight: Coefficient of the mean negative log-probability per token of the chosen answer.
    """

    type: Literal["cpo"] = "cpo"
    beta: Temperature = 0.1
    sft_weight: Coefficient = 1.0


class KtoSettings(Settings):
    """KTO on single answers that are labeled desirable or not (Ethayarajh et al., 2024, whose default beta this is).

    Attributes:
        beta: Strength of the pull towards the reference model.
        desirable_weight: Factor on the loss of desirable answers. Choose both factors so that the two kinds, times
            their factors, are in a ratio from 1:1 to 4:3.
        undesirable_weight: Factor on the loss of undesirable answers.
        reference: The reference model: a run, a checkpoint, or a Hugging Face folder; null: `initialize.from`.
    """

    type: Literal["kto"] = "kto"
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
