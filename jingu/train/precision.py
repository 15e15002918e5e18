"""From the precision's name to dtypes: what is computed in, and what the master weights are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jingu.config.schema import PrecisionSettings
from jingu.runtime.device import has_fast_bf16


@dataclass(frozen=True)
class Precision:
    """`compute` is the dtype of products and activations, `masters` that of weights, gradients and optimizer state."""

    name: str
    compute: torch.dtype
    masters: torch.dtype


def choose_precision(settings: PrecisionSettings, device: torch.device) -> Precision:
    """Resolve `auto`: bf16 where the device has units for it, else fp32."""
    name = settings.type
    if name == "auto":
        name = "bf16" if has_fast_bf16(device) else "fp32"
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[name]
    return Precision(name, compute, torch.float64 if name == "fp64" else torch.float32)
