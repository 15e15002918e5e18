"""Names that configuration keys and fields of the model spec had in older versions.

They are migrated only in files that jingu stored itself: the `config.yaml` and `model.json` of a run, the manifest of a
checkpoint or a data set, the record of a tokenizer. In a file that a user wrote, an old key is an error that names the
new key (`jingu.config.explain`). No old name is in use again, so migrating a new file changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jingu.tables import read_table

Names = dict[str, dict[str, str]]
"""New names by old names, for each section; sections go by their old dotted paths."""

_TABLES: dict[str, Names] = read_table(__file__, "legacy.toml")
_CONFIG = _TABLES["config"]
CONFIG_VALUES = _TABLES["config_values"]
"""New values by old values, for each setting; settings go by their old dotted paths."""
_DATA_MANIFEST: Names = {
    "": {"vocabulary": "vocab_size", "end_id": "eos_token_id", "held_out": "validation"},
    "train": {"beside": "sidecars"},
    "held_out": {"beside": "sidecars"},
    "settings": {**_CONFIG["data"], "beginning": "bos_ids"},
    "settings.objective": _CONFIG["data.objective"],
}
_DATA_VALUES: Names = {path.replace("data.", "settings.", 1): values for path, values in CONFIG_VALUES.items()}


def migrate_config(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a stored `config.yaml` with today's names."""
    return _migrate(tree, _CONFIG, CONFIG_VALUES)


def migrate_spec(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a stored model spec with today's names."""
    return _migrate(tree, _TABLES["spec"])


def migrate_data_manifest(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of a data set with today's names."""
    return _migrate(tree, _DATA_MANIFEST, _DATA_VALUES)


def migrate_tokenizer_record(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a trained tokenizer with today's names."""
    return _migrate(tree, {"": _CONFIG["tokenizer"]})


def renamed_key(path: tuple[str, ...]) -> str | None:
    """Return the new dotted key of an old one; None for a key that was not renamed."""
    new = [_CONFIG.get(".".join(path[:depth]), {}).get(key, key) for depth, key in enumerate(path)]
    return ".".join(new) if new[-1] != path[-1] else None


def _migrate(
    tree: dict[str, Any], keys: Names, values: Mapping[str, dict[str, str]] = {}, path: str = ""
) -> dict[str, Any]:
    """Rename keys and values of a tree. `path` is its dotted path in old names."""
    names = keys.get(path, {}) | keys.get(f"{path}[{tree.get('type')}]", {})
    migrated = {}
    for key, value in tree.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            value = _migrate(value, keys, values, inner)
        elif isinstance(value, list):
            value = [_migrate(item, keys, values, inner) if isinstance(item, dict) else item for item in value]
        elif isinstance(value, str):
            value = values.get(inner, {}).get(value, value)
        migrated[names.get(key, key)] = value
    return migrated
