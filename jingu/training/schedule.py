"""Learning rate schedules, as pure functions of the step."""

from __future__ import annotations

from jingu.config.schema import RunConfig
from jingu.config.sections import schedules as settings
from jingu.errors import JinguError, pluralize


def learning_rate(schedule: settings.Schedule, peak: float, step: int, steps: int) -> float:
    """Return the learning rate of a step (counted from 0) of a run of `steps` steps.

    Warmup is linear and reaches the peak at its last step. The decay covers the other steps. Linear, cosine and WSD
    schedules reach `schedule.min_lr` at the run's last step; if that is 0, they reach it one step later, because a step
    with learning rate 0 would be wasted. After warmup, the learning rate never falls below `schedule.min_lr`.

    Args:
        peak: the highest learning rate, `optimizer.lr`.
    """
    warmup = settings.resolve_steps(schedule.warmup, steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.min_lr == 0 and schedule.REACHES_MINIMUM:
        steps += 1
    return max(schedule.min_lr, schedule.decayed_rate(settings.Moment(peak, step, steps, warmup)))


def check_schedule(config: RunConfig) -> None:
    """Raise JinguError if the schedule does not fit the learning rate or the length of the run."""
    schedule = config.schedule
    if schedule.min_lr > config.optimizer.lr:
        raise JinguError(
            f"the lowest rate, {schedule.min_lr:g}, is above the peak (optimizer.lr), {config.optimizer.lr:g}.",
            where="schedule.min_lr",
            fix="It is a rate, and not a share of the peak; lower it.",
        )
    if settings.resolve_steps(schedule.warmup, config.train.steps) > config.train.steps:
        raise JinguError(
            f"{pluralize(int(schedule.warmup), 'step')} of warmup are more than the run's {config.train.steps:,} "
            "(train.steps), which would never reach its learning rate.",
            where="schedule.warmup",
            fix="Shorten it; a number with a decimal point is a fraction of the run.",
        )
