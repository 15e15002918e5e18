"""Settings of the task, which defines the training data and the loss of a run."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from jingu.config.sections.base import PathText, find_variants, registry_of, variants_of
from jingu.config.sections.pairs import Coefficient, PairBase, Temperature
from jingu.config.sections.policies import DistillationSettings, GrpoSettings, PpoSettings
from jingu.config.sections.task_base import AuxiliaryModel, TaskBase


class PretrainingSettings(TaskBase):
    """Predict the next token, in plain text or in the answers of instruction data."""

    FACTORY: ClassVar[str] = "jingu.training.pretraining:PRETRAINING"

    type: Literal["pretraining"] = "pretraining"


class RewardSettings(TaskBase):
    """Train a reward model: a scalar head at the end of an answer, with the Bradley-Terry loss on pairs (Ouyang et al.,
    2022; optimizer.lr=1e-5 is usual).

    Attributes:
        centering: Coefficient of the mean of (chosen reward + rejected reward)². This term keeps rewards around 0
            (Eisenstein et al., 2023, who use 0.01).
    """

    FACTORY: ClassVar[str] = "jingu.align.preference_learning:REWARD_LEARNING"

    type: Literal["reward"] = "reward"
    centering: Coefficient = 0.0


class KtoSettings(TaskBase):
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

    FACTORY: ClassVar[str] = "jingu.align.preference_learning:KTO_LEARNING"

    type: Literal["kto"] = "kto"
    loss: Literal["kto", "bco"] = "kto"
    beta: Temperature = 0.1
    desirable_weight: Coefficient = 1.0
    undesirable_weight: Coefficient = 1.0
    reference: PathText | None = None

    def models(self, initial: str | None) -> tuple[AuxiliaryModel, ...]:
        return (AuxiliaryModel("reference", self.reference or initial, "before"),)


_PREFERENCES: tuple[type[TaskBase], ...] = (RewardSettings, *find_variants(PairBase), KtoSettings)
_POLICIES: tuple[type[TaskBase], ...] = (GrpoSettings, PpoSettings, DistillationSettings)
TASKS = registry_of("tasks", TaskBase, PretrainingSettings, *_PREFERENCES, *_POLICIES)
"""The tasks by the names of `task.type`."""

Task = Annotated[TaskBase, variants_of(TASKS, "pretraining")]
