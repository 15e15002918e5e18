"""Settings that the package adds. They need no PyTorch: what computes is named, or imported where it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from jingu.config.sections.optimizers import OptimizerBase, Slot, Slots
from jingu.config.sections.pairs import AnswerLogProbs, DpoSettings, PairBase, Scored
from jingu.config.sections.policies import AdvantageEntry
from jingu.config.sections.rewards import RewardBase, VerifierBase
from jingu.config.sections.schedules import Moment, ScheduleBase

if TYPE_CHECKING:
    from torch import Tensor


class SignumSettings(OptimizerBase):
    """Signum (Bernstein et al., 2018): updates by the sign of the momentum.

    Attributes:
        lr: Peak learning rate.
        momentum: Decay rate of the momentum.
        weight_decay: Decoupled weight decay, multiplied by the learning rate; never applied to norms and biases.
    """

    IMPLEMENTATION: ClassVar[str] = "jingu_example.optimizer:Signum"

    type: Literal["signum"] = "signum"
    lr: Annotated[float, Field(gt=0)] = 1e-4
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 0.0

    def slots(self, shape: tuple[int, ...], *, is_in_block: bool) -> Slots:
        return {"momentum": Slot("sharded", shape)}


class PolynomialSettings(ScheduleBase):
    """Decay as a power of the remaining share of the run.

    Attributes:
        power: The exponent; 1 is a linear decay.
    """

    type: Literal["polynomial"] = "polynomial"
    power: Annotated[float, Field(gt=0)] = 2.0

    def decayed_rate(self, moment: Moment) -> float:
        return moment.peak - self.decay_range(moment.peak) * (1.0 - (1.0 - moment.progress) ** self.power)


class MarginSettings(PairBase):
    """A margin between the mean log-probabilities of the chosen and the rejected answer, without a reference model.

    Attributes:
        beta: Factor on the mean log-probabilities.
        margin: The difference from which a pair has no loss.
    """

    type: Literal["margin"] = "margin"
    beta: Annotated[float, Field(gt=0)] = 1.0
    margin: Annotated[float, Field(ge=0)] = 1.0

    def pair_losses(self, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> Tensor:
        return (self.margin - self.beta * (chosen.policy_mean - rejected.policy_mean)).relu()

    def rewards(self, answers: AnswerLogProbs) -> Tensor:
        return self.beta * answers.policy_mean


def squared_hinge(settings: DpoSettings, chosen: Scored, rejected: Scored) -> Tensor:
    """A loss of DPO (`task.loss`): the square of SLiC's."""
    return (1 - settings.beta * (chosen.scores - rejected.scores)).relu().square()


# An advantage of GRPO (`task.advantage`).
RANK = AdvantageEntry("jingu_example.advantages:rank")


class PalindromeReward(VerifierBase):
    """1 if the answer reads the same backwards, but is not the text of its row's column."""

    IMPLEMENTATION: ClassVar[str] = "jingu_example.rewards:PALINDROME"

    type: Literal["palindrome"] = "palindrome"


class KeywordsReward(RewardBase):
    """The share of words that occur in the answer.

    Attributes:
        words: The words.
    """

    IMPLEMENTATION: ClassVar[str] = "jingu_example.rewards:KeywordsScorer"

    type: Literal["keywords"] = "keywords"
    words: list[str] = ["def", "return"]
