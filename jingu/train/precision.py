"""From the precision's name to dtypes: what is computed in, and what the master weights are; and the scale of fp16."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from jingu.config.sections.train import FP16Settings
from jingu.config.sections.train import Precision as PrecisionChoice
from jingu.runtime.device import PRECISIONS, has_fast_bf16


@dataclass(frozen=True)
class Precision:
    """`compute` is the dtype of products and activations, `masters` that of weights, gradients and optimizer state,
    and `reduce` the one that gradients are added up in."""

    name: str
    compute: torch.dtype
    masters: torch.dtype
    reduce: torch.dtype


def choose_precision(settings: PrecisionChoice, device: torch.device) -> Precision:
    """Resolve `auto`: bf16 where the device has units for it, else fp32."""
    name: str = settings.type
    if name == "auto":
        name = "bf16" if has_fast_bf16(device) else "fp32"
    masters = torch.float64 if name == "fp64" else torch.float32
    return Precision(
        name, PRECISIONS[name], masters, masters if settings.reduce == "auto" else PRECISIONS[settings.reduce]
    )


@dataclass
class LossScale:
    """The factor on the loss that keeps fp16's gradients in range (Micikevicius et al., 2018, arXiv:1710.03740).

    It goes with the step: every rank comes to the same one, and a checkpoint remembers it.
    """

    value: float = 1.0
    """Factor on the mean loss."""
    overflows: int = 0
    """Overflows since the scale was last doubled."""
    steady: int = 0
    """Steps since the last overflow or doubling."""
    skipped: int = 0
    """Steps of the run that were skipped."""

    def update(self, settings: FP16Settings, *, finite: bool) -> None:
        """Take in whether the gradient of a step was finite. Where it was not, that step is skipped."""
        if finite:
            self.steady += 1
            if self.steady == settings.window:
                self.value, self.steady, self.overflows = 2 * self.value, 0, 0
            return
        self.skipped += 1
        self.steady = 0
        self.overflows += 1
        if self.overflows >= settings.hysteresis:
            self.value = max(self.value / 2, settings.minimum_scale)

    def on_sum(self, tokens: int) -> float:
        """The factor on a loss that is summed over `tokens`: that on their mean, to within the next power of two.

        A power of two rounds nothing.
        """
        return self.value / 2 ** math.floor(math.log2(tokens))


def first_scale(settings: PrecisionChoice) -> LossScale:
    """The scale that a run begins with: 1 where the precision needs none."""
    return LossScale(settings.initial_scale) if isinstance(settings, FP16Settings) else LossScale()
