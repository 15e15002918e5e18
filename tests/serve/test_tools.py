"""Calls of tools: read out of what a model says, however it is cut into pieces; and forced."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jingu.infer.request import Constraint
from jingu.serve.errors import ServeError
from jingu.serve.schema import ChatRequest
from jingu.serve.tools import Calls, forced

NAMES = {"weather", "add"}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"place": "北京"}}\n</tool_call>'
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
CASES: list[tuple[str, str, list[tuple[str, Any]]]] = [
    ("Plain words.", "Plain words.", []),
    (HERMES, "", [("weather", {"place": "北京"})]),
    (f"Look:\n{HERMES}", "Look:\n", [("weather", {"place": "北京"})]),
    (f"{HERMES}\n{ADD}", "", [("weather", {"place": "北京"}), ("add", {"a": 1})]),
    (f"{ADD} and so on", " and so on", [("add", {"a": 1})]),
    ('{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
    (' [{"name": "add", "arguments": {}}, {"name": "weather"}]', "", [("add", {}), ("weather", {})]),
    # What is no call of a tool that there is stays text, to the last character.
    ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
    ("{not JSON", "{not JSON", []),
    ("[1, 2]", "[1, 2]", []),
    (f"{ADD}<tool_call>broken", f"{ADD}<tool_call>broken", []),
    ("a <tool_call", "a <tool_call", []),
    ("a < b <tool> c", "a < b <tool> c", []),
    ("  ", "  ", []),
    ("[" * 5000, "[" * 5000, []),
]


def read(pieces: list[str], names: set[str] = NAMES, **options: Any) -> tuple[str, list[tuple[str, Any]]]:
    calls = Calls(names, **options)
    text = "".join(calls.push(piece) for piece in pieces)
    rest, found = calls.finish()
    assert [call["index"] for call in found] == list(range(len(found)))
    return text + rest, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]


@pytest.mark.parametrize(("said", "text", "calls"), CASES)
def test_calls_are_read(said: str, text: str, calls: list[tuple[str, Any]]) -> None:
    assert read([said]) == (text, calls)
    assert read(list(said)) == (text, calls)
    assert read([said], names=set()) == (said, [])


@given(st.sampled_from(CASES), st.lists(st.integers(0, 60)))
def test_pieces_make_no_difference(case: tuple[str, str, Any], cuts: list[int]) -> None:
    said, text, calls = case
    places = sorted({0, len(said), *(cut for cut in cuts if cut < len(said))})
    assert read([said[a:b] for a, b in itertools.pairwise(places)]) == (text, calls)


@given(st.text(alphabet="<tool_ca>{[x ", max_size=40))
def test_no_text_is_lost(said: str) -> None:
    text, calls = read(list(said))
    assert (text, calls) == (said, [])


def body(tools: dict[str, Any], choice: Any) -> ChatRequest:
    functions = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in tools.items()]
    asked = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": functions, "tool_choice": choice}
    return ChatRequest.model_validate(asked)


REFERS = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}


def test_a_tool_that_must_be_called_is_all_that_can_be_said() -> None:
    assert forced(body({"add": REFERS}, "auto")) == (None, None)
    named = {"type": "function", "function": {"name": "add"}}
    assert forced(body({"add": REFERS, "weather": {}}, named)) == ("add", Constraint("json_schema", json.dumps(REFERS)))
    name, constraint = forced(body({"add": REFERS, "weather": {}}, "required"))
    assert name is None and constraint is not None
    first, second = json.loads(constraint.value)["anyOf"]
    assert first["properties"]["name"] == {"const": "add"} and second["properties"]["name"] == {"const": "weather"}
    # References lead to where the schema now stands.
    assert first["properties"]["arguments"]["properties"]["a"] == {"$ref": "#/anyOf/0/properties/arguments/$defs/n"}
    for choice in ("required", {"type": "function", "function": {"name": "other"}}):
        with pytest.raises(ServeError):
            forced(body({} if choice == "required" else {"add": {}}, choice))


def test_what_must_be_a_call_is_one() -> None:
    assert read(['{"a": ', "1}"], forced="add", must=True) == ("", [("add", {"a": 1})])
    assert read(['{"name": "add", "arg', 'uments": {"a": 1}}'], must=True) == ("", [("add", {"a": 1})])
    # Cut short, it is told as it is.
    assert read(['{"name": "add", "arg'], must=True) == ('{"name": "add", "arg', [])
