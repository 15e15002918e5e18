"""Tables that are data rather than code: TOML files beside the modules that read them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def read_table(module: str, name: str) -> dict[str, Any]:
    """Return the tables of a TOML file beside a module, given the module's `__file__`."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a tree by their dotted keys."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values
