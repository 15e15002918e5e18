"""Compare with transformers in fp64, although it computes parts of its models in fp32 whatever their dtype."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch


class Fp64Torch(ModuleType):
    """torch, whose fp32 is fp64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def randomize(model: Any, dtype: torch.dtype, scale: float, share: float = 1.0) -> Any:
    """Return a model for evaluation whose parameters are a share of its own plus normal numbers of a scale.

    Corrections of router scores, and scales of layers that are not trained, are larger.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(share).add_(torch.randn_like(parameter) * scale)
        # Both are buffers.
        for name, buffer in model.named_buffers():
            if "bias" in name or name.endswith("layer_scalar"):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    return model.to(dtype).eval()


@contextmanager
def fp64_in_place_of_fp32(monkeypatch: pytest.MonkeyPatch, *models: str) -> Iterator[ModuleType]:
    """Let transformers' models run with every fp32 of their formulas read as fp64; yield the replacement of torch."""
    replacement = Fp64Torch("torch")
    for name in models:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        monkeypatch.setattr(module, "torch", replacement)
    torch.set_default_dtype(torch.float64)
    try:
        yield replacement
    finally:
        torch.set_default_dtype(torch.float32)
