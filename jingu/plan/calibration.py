"""Fitting of a machine's efficiency to measured steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log, sqrt

import numpy as np

from jingu.plan.machine import Efficiency, Machine
from jingu.plan.step_time import step_time
from jingu.plan.workload import Workload

# Standard deviation of the prior on the logarithm of each constant, around its default.
PRIOR_WIDTH = 0.3
# The prior is wider for CPUs, which differ more from one another.
CPU_PRIOR_WIDTH = 2.0
# Standard deviation of the logarithm of one measured step; that of the median of many steps is smaller.
NOISE = 0.05
# The same for a term of a single step. Terms below MIN_SHARE of a step hardly count.
TERM_NOISE = 0.15
MIN_SHARE = 0.02
# Quantiles of measured over planned seconds: 9 of 10 logged steps lie between them.
QUANTILES = (0.05, 0.95)


@dataclass(frozen=True)
class Measurement:
    """A measured step.

    Attributes:
        terms: seconds by term, if they were measured.
        step_seconds: step seconds of each line of the log; `seconds` is their median.
    """

    work: Workload
    machine: Machine
    seconds: float
    terms: Mapping[str, float] = field(default_factory=dict)
    step_seconds: tuple[float, ...] = ()

    @property
    def noise(self) -> float:
        """Standard deviation of the logarithm of `seconds`."""
        return NOISE / sqrt(max(1, len(self.step_seconds)))

    def plan_terms(self, efficiency: Efficiency) -> dict[str, float]:
        """Return the planned seconds by term."""
        return step_time(self.work, self.machine.model_copy(update={"efficiency": efficiency}))


def prediction_errors(measurements: Sequence[Measurement], efficiency: Efficiency) -> list[float]:
    """Return predicted over measured seconds, minus 1."""
    return [sum(m.plan_terms(efficiency).values()) / m.seconds - 1 for m in measurements]


def term_errors(measurement: Measurement, plan: Mapping[str, float]) -> list[float]:
    """Return the logarithm of planned over measured seconds of each term, damped towards 0 for small terms."""
    least = MIN_SHARE * measurement.seconds
    items = measurement.terms.items()
    return [log((plan[term] + least) / (seconds + least)) for term, seconds in items if term in plan]


def residual_interval(measurements: Sequence[Measurement], start: Efficiency | None = None) -> tuple[float, float]:
    """Return quantiles of measured over planned seconds of logged steps.

    With three or more runs, each is predicted with constants fitted to the others (leave-one-out).
    """
    ratios: list[float] = []
    for number, measurement in enumerate(measurements):
        fit = [m for index, m in enumerate(measurements) if index != number or len(measurements) < 3]
        estimate = sum(measurement.plan_terms(fit_efficiency(fit, start)).values())
        ratios += [seconds / estimate for seconds in measurement.step_seconds or (measurement.seconds,)]
    low, high = np.quantile(ratios, QUANTILES)
    return float(low), float(high)


def fit_efficiency(measurements: Sequence[Measurement], start: Efficiency | None = None) -> Efficiency:
    """Return the efficiency that fits measured steps best (a maximum a posteriori estimate).

    It minimizes squared logarithms of predicted over measured seconds, of steps and of their terms, by Gauss-Newton
    steps, with a normal prior on the logarithms of the constants: it stays near `start` where measurements say little.
    """
    start = start or Efficiency()
    names = list(Efficiency.model_fields)
    width = CPU_PRIOR_WIDTH if any(m.machine.is_shared for m in measurements) else PRIOR_WIDTH
    origin = np.log([getattr(start, name) for name in names])

    def residuals(x: np.ndarray) -> np.ndarray:
        efficiency = Efficiency(**dict(zip(names, np.exp(x), strict=True)))
        # Huber loss against outliers: beyond two standard deviations, errors count linearly.
        plans = [m.plan_terms(efficiency) for m in measurements]
        pairs = list(zip(measurements, plans, strict=True))
        totals = [log(sum(plan.values()) / m.seconds) / m.noise for m, plan in pairs]
        errors = np.array(totals + [error / TERM_NOISE for m, plan in pairs for error in term_errors(m, plan)])
        robust = np.sign(errors) * np.sqrt(np.where(abs(errors) < 2, errors**2, 4 * abs(errors) - 4))
        return np.concatenate([robust, (x - origin) / width])

    return Efficiency(**dict(zip(names, np.exp(_least_squares(residuals, origin)), strict=True)))


def _least_squares(residuals: Callable[[np.ndarray], np.ndarray], x: np.ndarray, rounds: int = 15) -> np.ndarray:
    """Minimize a sum of squares by damped Gauss-Newton steps (Levenberg), with a Jacobian of finite differences."""
    damping = 1.0
    values = residuals(x)
    for _ in range(rounds):
        jacobian = np.stack([(residuals(x + 1e-3 * unit) - values) / 1e-3 for unit in np.eye(len(x))], 1)
        step = np.linalg.solve(jacobian.T @ jacobian + damping * np.eye(len(x)), -jacobian.T @ values)
        trial = residuals(x + step)
        if trial @ trial < values @ values:
            is_done = trial @ trial > 0.9999 * (values @ values)
            x, values, damping = x + step, trial, damping / 3
            if is_done:
                break
        else:
            damping *= 4
    return x
