"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math

from jingu.config.sections.train import (
    ConstantSettings,
    ExponentialSettings,
    LinearSettings,
    NoamSettings,
    Schedule,
    WarmupStableDecaySettings,
    in_steps,
)


def learning_rate(schedule: Schedule, peak: float, step: int, steps: int) -> float:
    """Rate used by step `step` (counted from 0) of a run of `steps`.

    Warm-up is a straight line that reaches the peak at its last step; the shape covers the rest and arrives at its
    lowest value at the run's last step. Once warmed up, the rate never falls below `schedule.minimum`.
    """
    warmup = in_steps(schedule.warmup, steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step + 1 - warmup) / max(1, steps - warmup)  # in (0, 1]
    return max(schedule.minimum, _shape(schedule, peak, step, steps, warmup, min(done, 1.0)))


def _shape(schedule: Schedule, peak: float, step: int, steps: int, warmup: int, done: float) -> float:
    fall = peak - min(schedule.minimum, peak)
    if isinstance(schedule, ConstantSettings):
        return peak
    if isinstance(schedule, LinearSettings):
        return peak - fall * done
    if isinstance(schedule, NoamSettings):
        return peak * math.sqrt(max(1, warmup) / (step + 1))
    if isinstance(schedule, ExponentialSettings):
        return peak * schedule.decay**done
    if isinstance(schedule, WarmupStableDecaySettings):
        decay = in_steps(schedule.decay, steps)
        left = (steps - step - 1) / max(1, decay)
        return peak - fall * (1.0 - min(1.0, left))
    return peak - fall * 0.5 * (1.0 - math.cos(math.pi * done))
