"""Bounds on the difference between the log-probabilities of sampled tokens in generation and in training.

Both compute the same function, so the difference is rounding, unless something else differs: the temperature, an
adapter, the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from jingu.config.sections.policies import GenerationServerSettings, PolicySettings
from jingu.errors import JinguError
from jingu.model.spec import ModelSpec


@dataclass(frozen=True)
class MismatchBounds:
    """Bounds on the difference of a step, in nats.

    Attributes:
        usual: mean over tokens above which the run warns.
        mean: mean over tokens above which the run stops.
        largest: difference of one token above which the run stops.
        cause: what makes a difference below these bounds usual, in words.
    """

    usual: float
    mean: float
    largest: float
    cause: str

    def check(self, mean: float, largest: float, folder: Path) -> str:
        """Return a warning about an unusual mean, or no text.

        Raises:
            JinguError: the mean or the largest difference exceeds its bound, or is not a number.
        """
        rows = (
            ("on average over the tokens of a step", mean, self.mean, "task.max_mean_mismatch"),
            ("for one token", largest, self.largest, "task.max_mismatch"),
        )
        for where, value, bound, setting in rows:
            if not value <= bound:
                raise JinguError(
                    f"the log-probabilities in generation and in training differ by {value:.3g} nats {where}, more "
                    f"than {bound:g}: answers are not sampled from the probabilities that are trained.",
                    where=folder,
                    fix="Look for what generation and training do not share: temperature, adapter, weights, kernels. "
                    "If it is only rounding, compute in a wider precision (precision.type=fp32); or raise "
                    f"{setting}, without exact, and set task.importance_cap=2.",
                )
        if mean <= self.usual:
            return ""
        return (
            f"The log-probabilities in generation and in training differ by {mean:.2g} nats a token on average, and "
            f"{self.cause} explains at most {self.usual:g}. Something else may differ, such as the temperature, the "
            "adapter or the weights. Look at mismatch_mean."
        )


# By precision. Measured on CPUs with tiny models: means of 3e-15 in fp64, 1e-7 to 1e-6 in fp32, and up to 0.02 in bf16.
# A temperature that is off by 5% gives 0.04.
_WIDE = {
    "fp64": MismatchBounds(1e-10, 1e-8, 1e-6, "rounding in fp64"),
    "fp32": MismatchBounds(3e-5, 1e-3, 0.1, "rounding in fp32"),
}
_NARROW = MismatchBounds(0.03, 0.1, 1.0, "rounding in a narrow precision")
_SERVER = MismatchBounds(0.05, 0.2, 2.0, "another program")
_STALE = MismatchBounds(0.1, 1.0, math.inf, "training since the answers were generated")
_EXACT = MismatchBounds(0.0, 0.0, 0.0, "rounding")


def choose_bounds(settings: PolicySettings, spec: ModelSpec, precision: str, staleness: int) -> MismatchBounds:
    """Return the bounds of a step.

    Args:
        precision: `precision.type` of the run.
        staleness: age in steps of the weights that generated the answers.
    """
    if settings.exact:
        return _EXACT
    if staleness:
        bounds = _STALE
    elif isinstance(settings.generation_source, GenerationServerSettings):
        bounds = _SERVER
    elif spec.quantization is not None:
        bounds = _NARROW
    else:
        bounds = _WIDE.get(precision, _NARROW)
        if spec.experts is not None:
            # Rounding can choose another expert where two are nearly equal, which changes single tokens by much.
            bounds = replace(bounds, largest=_NARROW.largest)
    if settings.max_mean_mismatch is not None:
        bounds = replace(bounds, mean=settings.max_mean_mismatch)
    # With older weights, the difference of a single token says nothing.
    if settings.max_mismatch is not None and not staleness:
        bounds = replace(bounds, largest=settings.max_mismatch)
    return bounds
