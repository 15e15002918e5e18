"""Learning rate schedules: settings of each, and its rate after warmup. A schedule is one class of this file."""

from __future__ import annotations

from math import cos, pi, sqrt
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from jingu.config.sections.base import Fraction, NonNegative, Positive, Settings, registry_of, variants_of


def resolve_steps(length: int | float, steps: int) -> int:
    """Return a length in steps.

    Args:
        length: a number of steps (int), or a fraction of the run (float).
        steps: number of steps of the run.
    """
    return length if isinstance(length, int) else round(length * steps)


class Moment(NamedTuple):
    """A step after warmup, for which a schedule computes the learning rate.

    Attributes:
        peak: the highest learning rate.
        step: number of the step, counted from 0.
        steps: steps of the run; one more if the rate reaches 0 after the last step.
        warmup: steps of the warmup.
    """

    peak: float
    step: int
    steps: int
    warmup: int

    @property
    def progress(self) -> float:
        """Share of the steps after warmup that are taken, including this one, in (0, 1]."""
        return min((self.step + 1 - self.warmup) / max(1, self.steps - self.warmup), 1.0)


class ScheduleBase(Settings):
    """Settings of every schedule.

    Attributes:
        warmup: Linear warmup: steps (a whole number), or a fraction of the run (with a decimal point).
        min_lr: Lower bound of the learning rate after warmup.
    """

    # Whether the rate falls to `min_lr`. If that is 0, the schedule reaches it one step after the run.
    REACHES_MINIMUM: ClassVar[bool] = True
    # Whether the rate of a step depends on the number of steps of the run.
    DEPENDS_ON_LENGTH: ClassVar[bool] = True

    type: str
    warmup: NonNegative | Fraction = 0.02
    min_lr: Annotated[float, Field(ge=0)] = 0.0

    def decayed_rate(self, moment: Moment) -> float:
        """Return the learning rate of a step after warmup. The caller applies the lower bound."""
        raise NotImplementedError

    def decay_range(self, peak: float) -> float:
        """Return the difference of the highest and the lowest learning rate."""
        return peak - min(self.min_lr, peak)


class ConstantSettings(ScheduleBase):
    """Keep the peak learning rate to the end."""

    DEPENDS_ON_LENGTH: ClassVar[bool] = False

    type: Literal["constant"] = "constant"

    def decayed_rate(self, moment: Moment) -> float:
        return moment.peak


class LinearSettings(ScheduleBase):
    """Decay linearly from the peak to the minimum."""

    type: Literal["linear"] = "linear"

    def decayed_rate(self, moment: Moment) -> float:
        return moment.peak - self.decay_range(moment.peak) * moment.progress


class CosineSettings(ScheduleBase):
    """Decay along half a cosine from the peak to the minimum."""

    type: Literal["cosine"] = "cosine"

    def decayed_rate(self, moment: Moment) -> float:
        return moment.peak - self.decay_range(moment.peak) * 0.5 * (1.0 - cos(pi * moment.progress))


class CosineRestartsSettings(ScheduleBase):
    """Decay along half a cosine several times, each time from the peak (SGDR, Loshchilov and Hutter, 2017).

    Attributes:
        cycles: Number of decays, of equal length.
    """

    type: Literal["cosine_with_restarts"] = "cosine_with_restarts"
    cycles: Positive = 2

    def decayed_rate(self, moment: Moment) -> float:
        # Only the end of the last cycle reaches the minimum. The other cycles end where the next one starts.
        progress = 1.0 if moment.progress == 1.0 else self.cycles * moment.progress % 1.0
        return moment.peak - self.decay_range(moment.peak) * 0.5 * (1.0 - cos(pi * progress))


class InverseSqrtSettings(ScheduleBase):
    """Decay with the inverse square root of the step, from the peak at the end of the warmup (Vaswani et al., 2017)."""

    DEPENDS_ON_LENGTH: ClassVar[bool] = False

    type: Literal["inverse_sqrt"] = "inverse_sqrt"

    def decayed_rate(self, moment: Moment) -> float:
        return moment.peak * sqrt(max(1, moment.warmup) / (moment.step + 1))


class ExponentialSettings(ScheduleBase):
    """Decay exponentially over the run.

    Attributes:
        decay: Learning rate at the last step, as a fraction of the peak.
    """

    REACHES_MINIMUM: ClassVar[bool] = False

    type: Literal["exponential"] = "exponential"
    decay: Annotated[float, Field(gt=0, le=1)] = 0.1

    def decayed_rate(self, moment: Moment) -> float:
        return moment.peak * self.decay**moment.progress


class WsdSettings(ScheduleBase):
    """Warmup-stable-decay: constant after warmup, then linear decay over the last part of the run (Hu et al., 2024).

    Attributes:
        decay: Length of the decay: steps (a whole number), or a fraction of the run (with a decimal point).
    """

    type: Literal["wsd"] = "wsd"
    decay: NonNegative | Fraction = 0.2

    def decayed_rate(self, moment: Moment) -> float:
        decay_steps = resolve_steps(self.decay, moment.steps)
        remaining = (moment.steps - moment.step - 1) / max(1, decay_steps)
        return moment.peak - self.decay_range(moment.peak) * (1.0 - min(1.0, remaining))


SCHEDULES = registry_of("schedules", ScheduleBase)
"""The schedules by the names of `schedule.type`."""

Schedule = Annotated[ScheduleBase, variants_of(SCHEDULES, "cosine")]
