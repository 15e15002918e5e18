"""Operating-system services for a run: ranks, devices, files, logs and signals."""

import os
from pathlib import Path


def _request_reproducible_matmuls() -> None:
    """Make MKL's matmuls independent of the number of rows, the number of threads, and memory alignment.

    MKL calls this strict conditional numerical reproducibility (CNR), and offers it only on Intel CPUs. It reads
    `MKL_CBWR` at the first matmul of the process. A value that the user has set is kept.
    """
    cpu = Path("/proc/cpuinfo")
    if cpu.exists() and "GenuineIntel" in cpu.read_text(encoding="utf-8"):
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


_request_reproducible_matmuls()
