"""Read tables of data: TOML files beside the modules that use them, and names of functions."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

from jingu.errors import JinguError


def read_table(module: str, name: str) -> dict[str, Any]:
    """Return the contents of a TOML file beside a module.

    Args:
        module: the module's `__file__`.
        name: name of the TOML file.
    """
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))


def import_name(reference: str) -> Any:
    """Return what `module:name` refers to. Tables name in this way what their readers need not import.

    Raises:
        JinguError: a module that is not jingu's fails, or has no such name.
    """
    module, _, name = reference.partition(":")
    try:
        return getattr(import_module(module), name)
    except (Exception, SystemExit) as error:
        if module.partition(".")[0] == "jingu":
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        fix = "Correct or uninstall its package, which `jingu plugins` shows."
        raise JinguError(f"it cannot be imported ({reason}).", where=reference, fix=fix) from error


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a nested mapping by their dotted keys, each with `prefix`."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values
