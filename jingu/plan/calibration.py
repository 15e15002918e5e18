"""Fit a machine's efficiency to measured steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jingu.plan.machine import Efficiency, Machine
from jingu.plan.step_time import step_time
from jingu.plan.workload import Workload

# Few measurements move a constant by about this factor, as a logarithm, away from its default.
PRIOR_WIDTH = 0.3
# Logarithm of a measurement's typical error.
NOISE = 0.05


@dataclass(frozen=True)
class Measurement:
    """A measured step."""

    work: Workload
    machine: Machine
    seconds: float


def prediction_errors(measurements: Sequence[Measurement], efficiency: Efficiency) -> list[float]:
    """Return predicted over measured seconds, less 1."""
    machines = [m.machine.model_copy(update={"efficiency": efficiency}) for m in measurements]
    times = [sum(step_time(m.work, machine).values()) for m, machine in zip(measurements, machines, strict=True)]
    return [time / m.seconds - 1 for m, time in zip(measurements, times, strict=True)]


def fit_efficiency(measurements: Sequence[Measurement], start: Efficiency | None = None) -> Efficiency:
    """Return the efficiency that explains measured steps best, near the default where they say little.

    It minimizes squared logarithms of predicted over measured seconds by Gauss-Newton steps, with a normal prior on
    the logarithms of the constants.
    """
    start = start or Efficiency()
    names = list(Efficiency.model_fields)
    origin = np.log([getattr(start, name) for name in names])

    def residuals(x: np.ndarray) -> np.ndarray:
        efficiency = Efficiency(**dict(zip(names, np.exp(x), strict=True)))
        # Few outliers should not decide: beyond two widths of the noise, errors count linearly.
        scaled = np.log1p(prediction_errors(measurements, efficiency)) / NOISE
        robust = np.sign(scaled) * np.sqrt(np.where(abs(scaled) < 2, scaled**2, 4 * abs(scaled) - 4))
        return np.concatenate([robust, (x - origin) / PRIOR_WIDTH])

    return Efficiency(**dict(zip(names, np.exp(_least_squares(residuals, origin)), strict=True)))


def _least_squares(residuals: Callable[[np.ndarray], np.ndarray], x: np.ndarray, rounds: int = 15) -> np.ndarray:
    """Minimize a sum of squares by Levenberg's damped Gauss-Newton steps, with differences as derivatives."""
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
