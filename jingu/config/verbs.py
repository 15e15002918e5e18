"""`jingu config schema` and `jingu config show`."""

from __future__ import annotations

import json
from typing import Any

from jingu.config.schema import RunConfig
from jingu.config.sections.base import Settings
from jingu.config.tree import fields, sections


def schema() -> None:
    """Print the JSON Schema of a run's file, for editors that complete and check YAML."""
    print(json.dumps(json_schema(), indent=2))


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a run's file."""
    tree = RunConfig.model_json_schema()
    _require_types(RunConfig, tree["$defs"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **tree, "title": "A run of jingu"}


def _require_types(model: type[Settings], definitions: dict[str, Any]) -> None:
    """Without its `type:` a section is of the default type, and only of that."""
    for field in fields(model).values():
        for tag, variant in sections(field).items():
            if tag and not isinstance(field.get_default(call_default_factory=True), variant):
                definitions[variant.__name__]["required"] = ["type"]
            _require_types(variant, definitions)
