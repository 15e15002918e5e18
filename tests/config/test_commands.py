"""`jingu config schema`."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from jingu.config.commands import print_schema
from jingu.config.introspect import find_field
from jingu.config.schema import RunConfig
from jingu.config.sections.train import resolve_steps


def printed_schema(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    print_schema()
    tree: dict[str, Any] = json.loads(capsys.readouterr().out)
    return tree


def resolved(tree: dict[str, Any], node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects that a node of the schema can be."""
    if "$ref" in node:
        node = tree["$defs"][node["$ref"].removeprefix("#/$defs/")]
    if node.get("type") == "object":
        yield node
    for inner in node.get("oneOf", node.get("anyOf", [])):
        yield from resolved(tree, inner)


def test_the_schema_is_json_schema_with_our_words(capsys: pytest.CaptureFixture[str]) -> None:
    tree = printed_schema(capsys)
    assert tree["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert tree["title"] == "A run of jingu"
    assert list(tree["properties"]) == list(RunConfig.model_fields)

    def walk(node: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        # Only a mapping of names has keys of the user's choice.
        assert node["additionalProperties"] is False or path[-1] == "columns"
        for key, inner in node.get("properties", {}).items():
            field = find_field((*path, key))
            assert field is not None
            objects = list(resolved(tree, inner))
            if not objects and key != "type":
                assert inner["description"].strip(), (*path, key)
            yield (*path, key)
            for each in objects:
                yield from walk(each, (*path, key))

    found = list(walk(tree, ()))
    assert ("optimizer", "eps") in found
    assert ("schedule", "decay") in found


def test_a_section_without_its_type_fits_one_variant_of_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    tree = printed_schema(capsys)
    for key, default in (("optimizer", "adamw"), ("schedule", "cosine")):
        free = [node for node in resolved(tree, tree["properties"][key]) if "type" not in node.get("required", [])]
        assert [node["properties"]["type"]["const"] for node in free] == [default]


def test_lengths_in_steps() -> None:
    assert [resolve_steps(length, 200) for length in (0, 1, 500, 0.0, 0.02, 1.0)] == [0, 1, 500, 0, 4, 200]
