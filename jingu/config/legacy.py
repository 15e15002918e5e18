"""Old names of configuration keys and of fields of the model spec, and their migration to the current names.

Names are migrated only in files that jingu itself stored: the `config.yaml` and `model.json` of a run, the manifest of
a checkpoint or a data set, the record of a tokenizer. In a file that a user wrote, an old key is an error that names
the new key (`jingu.config.explain`). No old name has been reused, so migrating a new file changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jingu.tables import read_table

Names = dict[str, dict[str, str]]
"""For each section, by its old dotted path: new names by old names."""

_TABLES: dict[str, Names] = read_table(__file__, "legacy.toml")
_CONFIG = _TABLES["config"]
CONFIG_VALUES = _TABLES["config_values"]
"""For each setting, by its old dotted path: new values by old values."""
_DATA_MANIFEST: Names = {
    "": {"vocabulary": "vocab_size", "end_id": "eos_token_id", "held_out": "validation"},
    "train": {"beside": "sidecars"},
    "held_out": {"beside": "sidecars"},
    "settings": {**_CONFIG["data"], "beginning": "bos_ids"},
    "settings.objective": _CONFIG["data.objective"],
}
_DATA_VALUES: Names = {path.replace("data.", "settings.", 1): values for path, values in CONFIG_VALUES.items()}


def migrate_config(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a stored `config.yaml` with the current names."""
    return _migrate(tree, _CONFIG, CONFIG_VALUES)


def migrate_spec(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a stored model spec with the current names."""
    return _migrate(tree, _TABLES["spec"])


def migrate_data_manifest(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of a data set with the current names."""
    return _migrate(tree, _DATA_MANIFEST, _DATA_VALUES)


def migrate_tokenizer_record(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a trained tokenizer with the current names."""
    return _migrate(tree, {"": _CONFIG["tokenizer"]})


def renamed_key(path: tuple[str, ...]) -> str | None:
    """Return the new dotted key for an old one; None if the key was not renamed."""
    new = [_CONFIG.get(".".join(path[:depth]), {}).get(key, key) for depth, key in enumerate(path)]
    return ".".join(new) if new[-1] != path[-1] else None


def _migrate(
    tree: dict[str, Any], keys: Names, values: Mapping[str, dict[str, str]] = {}, path: str = ""
) -> dict[str, Any]:
    """Return a tree with renamed keys and values.

    Args:
        keys: new names by old names, for each section.
        values: new values by old values, for each setting.
        path: dotted path of the tree, in old names.
    """
    # "section[type]" holds the names of one type of a section.
    names = keys.get(path, {}) | keys.get(f"{path}[{tree.get('type')}]", {})
    new_tree = {}
    for key, value in tree.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            value = _migrate(value, keys, values, inner)
        elif isinstance(value, list):
            value = [_migrate(item, keys, values, inner) if isinstance(item, dict) else item for item in value]
        elif isinstance(value, str):
            value = values.get(inner, {}).get(value, value)
        new_tree[names.get(key, key)] = value
    return new_tree
