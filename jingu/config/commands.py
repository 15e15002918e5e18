"""`jingu config schema`: the JSON Schema of a configuration."""

from __future__ import annotations

import json
from typing import Any

from jingu.config.introspect import fields_by_key, section_types
from jingu.config.schema import RunConfig
from jingu.config.sections.base import Settings


def print_schema() -> None:
    """Print the JSON Schema of a configuration, for editors that complete and validate YAML."""
    print(json.dumps(json_schema(), indent=2))


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a configuration."""
    tree = RunConfig.model_json_schema()
    _require_types(RunConfig, tree["$defs"])
    for node in (tree, *tree["$defs"].values()):
        for setting in node.get("properties", {}).values():
            _accept_what_the_loader_accepts(setting)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **tree, "title": "A run of jingu"}


def _require_types(model: type[Settings], definitions: dict[str, Any]) -> None:
    """Require `type:` in all variants of a section except the default one."""
    for field in fields_by_key(model).values():
        for tag, variant in section_types(field).items():
            if tag and not isinstance(field.get_default(call_default_factory=True), variant):
                definitions[variant.__name__]["required"] = ["type"]
            _require_types(variant, definitions)


def _accept_what_the_loader_accepts(node: dict[str, Any]) -> None:
    """Extend the schema of a setting, in place, to all values that the loader accepts.

    The loader takes unquoted numbers and booleans as text, and an empty section as one of defaults.
    """
    choices = node.get("anyOf", node.get("oneOf", []))
    if node.get("type") == "string" and not {"const", "enum"} & node.keys():
        node["type"] = ["string", "number", "boolean"]
    elif "$ref" in node:
        node["anyOf"] = [{"$ref": node.pop("$ref")}, {"type": "null"}]
    elif choices and all("$ref" in choice for choice in choices):
        choices.append({"type": "null"})
    else:
        for choice in choices:
            if "$ref" not in choice:
                _accept_what_the_loader_accepts(choice)
        if "$ref" not in node.get("items", {"$ref": None}):
            _accept_what_the_loader_accepts(node["items"])
