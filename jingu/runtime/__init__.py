"""The machine under a run: ranks, devices, files, logs and signals."""

import os
from pathlib import Path


def _request_reproducible_matmuls() -> None:
    """Let MKL add up a row of a matmul in one order, whatever the number of rows, threads, or their addresses.

    MKL calls this strict conditional numerical reproducibility. It offers it on Intel's CPUs only, and reads the
    variable at the first matmul of the process. A value that the user has set stays.
    """
    cpu = Path("/proc/cpuinfo")
    if cpu.exists() and "GenuineIntel" in cpu.read_text(encoding="utf-8"):
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


_request_reproducible_matmuls()
