"""`jingu config schema`."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from jingu.config.commands import print_schema
from jingu.config.introspect import find_field
from jingu.config.load import load_config
from jingu.config.schema import RunConfig
from jingu.config.sections.schedules import resolve_steps
from jingu.config.strict_yaml import parse_yaml
from jingu.errors import JinguError


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
        assert node["additionalProperties"] is False or path[-1] in ("columns", "rank_pattern", "alpha_pattern")
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


def is_valid(tree: dict[str, Any], node: dict[str, Any], value: Any) -> bool:
    """Whether a value is valid by the part of JSON Schema that the schema uses."""
    if "$ref" in node:
        return is_valid(tree, tree["$defs"][node["$ref"].removeprefix("#/$defs/")], value)
    types = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    numbers = {"integer": int, "number": (int, float)}
    names = node.get("type", [])
    names = [names] if isinstance(names, str) else names
    number = isinstance(value, int | float) and not isinstance(value, bool)
    checks = [
        not names or any(isinstance(value, numbers[n]) and number if n in numbers else isinstance(value, types[n])
                         for n in names),
        "const" not in node or (type(value), value) == (type(node["const"]), node["const"]),
        "enum" not in node or any((type(value), value) == (type(choice), choice) for choice in node["enum"]),
        "anyOf" not in node or any(is_valid(tree, choice, value) for choice in node["anyOf"]),
        "oneOf" not in node or sum(is_valid(tree, choice, value) for choice in node["oneOf"]) == 1,
    ]  # fmt: skip
    if number:
        low, high = node.get("minimum", -math.inf), node.get("maximum", math.inf)
        over, under = node.get("exclusiveMinimum", -math.inf), node.get("exclusiveMaximum", math.inf)
        checks.append(low <= value <= high and over < value < under)
    if isinstance(value, str):
        checks.append(re.search(node.get("pattern", ""), value) is not None)
        checks.append(node.get("minLength", 0) <= len(value) <= node.get("maxLength", math.inf))
    if isinstance(value, list):
        checks += [is_valid(tree, node["items"], item) for item in value if "items" in node]
    if isinstance(value, dict):
        properties, more = node.get("properties", {}), node.get("additionalProperties", True)
        checks += [key in value for key in node.get("required", [])]
        for key, item in value.items():
            checks.append(is_valid(tree, properties.get(key, more if isinstance(more, dict) else {}), item))
            checks.append(key in properties or more is not False)
    return all(checks)


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("name: 实验-1", True),
        ("name: 2026", True),
        ("name: a b", False),
        ("name: _a", False),
        ("data: {path: 2026, input: [1, 2.5]}", True),
        ("data: {objective: }", True),
        ("optimizer:\ntune:\ncheckpoint:", True),
        ("optimizer: adamw", False),
        ("optimizer: {beta1: 0.8}", True),
        ("optimizer: {momentum: 0.8}", False),
        ("optimizer: {type: muon, momentum: 0.8}", True),
        ("schedule: {decay: 0.1}", False),
        ("schedule: {type: exponential, decay: 1}", True),
        ("train: {compile: auto, max_grad_norm: }", True),
        ("train: {compile: 1}", False),
        ("train: {steps: 0}", False),
        ("train: {steps: 2.5}", False),
        ("initialize: {from: 12}", True),
        ("evaluation: {sample_prompts: [1, true, x]}", True),
        ("evaluation: {sample_prompts: x}", False),
        ("precision: {type: fp16, hysteresis: 3}", True),
        ("precision: {hysteresis: 3}", False),
        ("parallel: {zero_stage: 4}", False),
        ("unknown: 1", False),
    ],
)
def test_the_schema_accepts_what_the_loader_accepts(
    text: str, accepted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with nullcontext() if accepted else pytest.raises(JinguError):
        load_config(file, [])
    tree = printed_schema(capsys)
    assert is_valid(tree, tree, parse_yaml(text, "run.yaml").value) is accepted


def test_a_section_without_its_type_fits_one_variant_of_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    tree = printed_schema(capsys)
    for key, default in (("optimizer", "adamw"), ("schedule", "cosine")):
        free = [node for node in resolved(tree, tree["properties"][key]) if "type" not in node.get("required", [])]
        assert [node["properties"]["type"]["const"] for node in free] == [default]


def test_lengths_in_steps() -> None:
    assert [resolve_steps(length, 200) for length in (0, 1, 500, 0.0, 0.02, 1.0)] == [0, 1, 500, 0, 4, 200]
