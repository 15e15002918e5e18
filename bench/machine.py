"""A description of this machine for docs/benchmarks.md."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

from jingu.runtime.gpus import num_usable_cores


def describe_machine() -> str:
    """Return cores, CPU, vector instructions, versions of Python and torch, and the date as one line."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    return (
        f"{num_usable_cores()} cores of {model} ({torch.backends.cpu.get_cpu_capability()}), "
        f"Python {platform.python_version()}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}"
    )
