"""Fixtures of plans."""

from __future__ import annotations

import pytest
import torch

from jingu.compat.torch import set_recompile_limit
from jingu.model import document_mask, matmul_kernels
from jingu.training import replay_run


@pytest.fixture
def bf16_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in bf16 also on CPUs without units for it, where matmuls and attention would save operands in fp32."""
    monkeypatch.setattr(matmul_kernels, "CPU_HAS_BF16_UNITS", True)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without limits, and with the attention of GPUs; that of compiled blocks on CPUs saves probabilities."""
    torch.compiler.reset()
    set_recompile_limit(64)
    for module in (document_mask, matmul_kernels):
        monkeypatch.setattr(module, "use_blockwise_attention", lambda _: False)


@pytest.fixture
def compiled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the blocks of steps that `replay_run.prepare_step` prepares."""
    layout = replay_run.training_layout
    monkeypatch.setattr(replay_run, "training_layout", lambda config, compile: layout(config, compile=True))
