"""The dtypes of a precision, and the loss scale of fp16."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jingu.config.sections.train import FP8Settings, FP16Settings
from jingu.config.sections.train import Precision as PrecisionSettings
from jingu.parallel.layout import Precision
from jingu.runtime.device import DTYPES, check_fp8, check_number_format, has_fast_bf16


def choose_precision(settings: PrecisionSettings, device: torch.device) -> Precision:
    """Return the dtypes of a precision; `auto` is bf16 if the device has bf16 hardware, else fp32.

    Raises:
        JinguError: the device does not support the precision.
    """
    name: str = settings.type
    if isinstance(settings, FP8Settings):
        check_fp8(device)
        reduce = torch.float32 if settings.reduce == "auto" else DTYPES[settings.reduce]
        return Precision(name, torch.bfloat16, torch.float32, reduce, settings.scaling)
    if name == "auto":
        name = "bf16" if has_fast_bf16(device) else "fp32"
    check_number_format(DTYPES[name], device)
    masters = torch.float64 if name == "fp64" else torch.float32
    reduce = masters if settings.reduce == "auto" else DTYPES[settings.reduce]
    return Precision(name, DTYPES[name], masters, reduce)


@dataclass
class LossScale:
    """The dynamic loss scale, which keeps the gradients of fp16 in range (Micikevicius et al., 2018, arXiv:1710.03740).

    It depends only on the steps so far, so all ranks compute the same value. Checkpoints store it.

    Attributes:
        value: factor on the mean loss.
        overflows: number of overflows since the scale was last doubled.
        steady: number of steps since the last overflow or doubling.
        skipped: number of steps of the run that were skipped.
    """

    value: float = 1.0
    overflows: int = 0
    steady: int = 0
    skipped: int = 0

    def update(self, settings: FP16Settings, *, finite: bool) -> None:
        """Adapt the scale after a step.

        Args:
            finite: whether the gradient was finite; if not, the step was skipped.
        """
        if finite:
            self.steady += 1
            if self.steady == settings.loss_scale_window:
                # No overflow for a whole window: try a larger scale.
                self.value *= 2
                self.steady = 0
                self.overflows = 0
            return
        self.skipped += 1
        self.steady = 0
        self.overflows += 1
        if self.overflows >= settings.hysteresis:
            self.value = max(self.value / 2, settings.min_loss_scale)


def initial_loss_scale(settings: PrecisionSettings) -> LossScale:
    """Return the scale that a run starts with: 1 for every precision but fp16."""
    return LossScale(settings.initial_loss_scale) if isinstance(settings, FP16Settings) else LossScale()
