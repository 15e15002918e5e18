"""Compare what a run on several ranks leaves behind with what one process leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


def assert_same_evaluation_and_tensors(many: Any, one: Any, tensors: dict[str, Tensor], label: object) -> None:
    """Check the evaluations, the samples and all tensors of the last checkpoint.

    Args:
        many: the `Done` of the run on ranks; `one` that of the process.
        tensors: those of the process.
    """
    for name in ("loss", "bits_per_byte", "tokens", "bytes"):
        assert many.column(name, "evaluation") == pytest.approx(one.column(name, "evaluation"), rel=1e-9)
    assert many.column("text", "sample") == one.column("text", "sample")
    own = many.tensors()
    assert own.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(own[name], tensor, rtol=1e-7, atol=1e-10, msg=f"{label} {name}")
