"""What jingu lacks for architectures that it does not read, and the families nearest to them by their components."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jingu.errors import JinguError
from jingu.tables import read_table

UNREAD: dict[str, dict[str, Any]] = read_table(__file__, "unread.toml")
COMPONENTS: Mapping[str, str] = UNREAD.pop("components")


def unread_architecture(what: str, names: Iterable[str], where: Path, families: Iterable[str]) -> JinguError:
    """Return the error for an architecture that is not read.

    Args:
        what: the problem, without a full stop.
        names: names of the architecture: its class, its `model_type` or its name in GGUF.
        where: the file.
        families: names of those that could be read in this format; the nearest families are chosen among them.
    """
    entry = find_unread(names)
    if entry is None:
        return JinguError(f"{what}.", where=where, fix="`jingu model list` shows the families that it reads.")
    missing = ", ".join(COMPONENTS[component] for component in entry["missing"])
    near = [family for family in entry["near"] if family in set(families)]
    fix = f"The nearest families that it reads are {', '.join(near)}." if near else "No family that it reads is near."
    return JinguError(f"{what}. Missing: {missing}.", where=where, fix=fix)


def find_unread(names: Iterable[str]) -> dict[str, Any] | None:
    """Return the entry of an architecture that has one of the names; None: it is unknown."""
    for name in names:
        for model_type, entry in UNREAD.items():
            aliases = (model_type, model_type.removesuffix("_text"), *entry["architectures"], *entry.get("gguf", ()))
            if name in aliases:
                return entry
    return None
