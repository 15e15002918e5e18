"""Tool calls are parsed out of an answer, however it is divided into pieces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jingu.chat.tool_calls import ToolCallParser

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
    # What is not a call of an available tool stays text, to the last character.
    ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
    ('{"name": ["add"]}', '{"name": ["add"]}', []),
    ('{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [("add", {"a": 1})]),
    # Arguments that are not a JSON object.
    *(
        (text, text, [])
        for arguments in ('"x"', '""', '"[1]"', "null", "[1]", "1", '{"a": NaN}', '{"a": 1e999}', '"{\\"a\\": NaN}"')
        for text in (
            f'{{"name": "add", "arguments": {arguments}}}',
            f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>',
            f'[{{"name": "weather"}}, {{"name": "add", "parameters": {arguments}}}]',
        )
    ),
    ("{not JSON", "{not JSON", []),
    ("[1, 2]", "[1, 2]", []),
    (f"{ADD}<tool_call>broken", f"{ADD}<tool_call>broken", []),
    ("a <tool_call", "a <tool_call", []),
    ("a < b <tool> c", "a < b <tool> c", []),
    ("  ", "  ", []),
    ("[" * 5000, "[" * 5000, []),
]


def parse(pieces: list[str], names: set[str] = NAMES, **options: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text and the calls of an answer."""
    parser = ToolCallParser(names, **options)
    text = "".join(parser.push(piece) for piece in pieces)
    rest, calls = parser.finish()
    return text + rest, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(("answer", "text", "calls"), CASES)
def test_calls_are_parsed(answer: str, text: str, calls: list[tuple[str, Any]]) -> None:
    assert parse([answer]) == (text, calls)
    assert parse(list(answer)) == (text, calls)
    assert parse([answer], names=set()) == (answer, [])


@given(st.sampled_from(CASES), st.lists(st.integers(0, 60)))
def test_the_division_into_pieces_does_not_matter(case: tuple[str, str, Any], cuts: list[int]) -> None:
    answer, text, calls = case
    borders = sorted({0, len(answer), *(cut for cut in cuts if cut < len(answer))})
    assert parse([answer[start:end] for start, end in itertools.pairwise(borders)]) == (text, calls)


@given(st.text(alphabet="<tool_ca>{[x ", max_size=40))
def test_no_text_is_lost(answer: str) -> None:
    assert parse(list(answer)) == (answer, [])


def test_a_required_call() -> None:
    assert parse(['{"a": ', "1}"], tool_name="add", is_required=True) == ("", [("add", {"a": 1})])
    assert parse(['{"name": "add", "arg', 'uments": {"a": 1}}'], is_required=True) == ("", [("add", {"a": 1})])
    # A truncated call is returned as text, and so are arguments that are not an object.
    assert parse(['{"name": "add", "arg'], is_required=True) == ('{"name": "add", "arg', [])
    for answer in ('{"a": ', "", "[1]"):
        assert parse([answer], tool_name="add", is_required=True) == (answer, [])


def test_only_the_first_of_several_calls_unless_they_may_be_parallel() -> None:
    assert parse([f"{HERMES}{ADD}"], parallel=False) == ("", [("weather", {"place": "北京"})])
