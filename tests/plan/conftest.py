"""Fixtures of plans."""

from __future__ import annotations

import pytest

from jingu.model import matmul_kernels


@pytest.fixture
def bf16_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in bf16 also on CPUs without units for it, where matmuls and attention would save operands in fp32."""
    monkeypatch.setattr(matmul_kernels, "CPU_HAS_BF16_UNITS", True)
