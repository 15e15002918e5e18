"""Constraints that make the model call a function."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jingu.infer.request import Constraint
from jingu.serve.chat_run import forced_function
from jingu.serve.http_errors import ApiError
from jingu.serve.protocol import ChatRequest


def chat_request(parameters: dict[str, Any], tool_choice: Any) -> ChatRequest:
    """Return a request with a tool for each name and its parameters."""
    tools = [{"type": "function", "function": {"name": name, "parameters": p}} for name, p in parameters.items()]
    messages = [{"role": "user", "content": "a"}]
    body = {"model": "m", "messages": messages, "tools": tools, "tool_choice": tool_choice}
    return ChatRequest.model_validate(body)


WITH_REFERENCE = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}


def test_a_required_tool_constrains_the_answer() -> None:
    assert forced_function(chat_request({"add": WITH_REFERENCE}, "auto")) == (None, None)
    named = {"type": "function", "function": {"name": "add"}}
    assert forced_function(chat_request({"add": WITH_REFERENCE, "weather": {}}, named)) == (
        "add",
        Constraint("json_schema", json.dumps(WITH_REFERENCE)),
    )
    name, constraint = forced_function(chat_request({"add": WITH_REFERENCE, "weather": {}}, "required"))
    assert name is None and constraint is not None
    first, second = json.loads(constraint.value)["anyOf"]
    assert first["properties"]["name"] == {"const": "add"} and second["properties"]["name"] == {"const": "weather"}
    # References point to where the schema is embedded.
    assert first["properties"]["arguments"]["properties"]["a"] == {"$ref": "#/anyOf/0/properties/arguments/$defs/n"}


@pytest.mark.parametrize(
    ("parameters", "tool_choice"),
    [({}, "required"), ({"add": {}}, {"type": "function", "function": {"name": "other"}})],
)
def test_a_tool_that_does_not_exist_is_refused(parameters: dict[str, Any], tool_choice: Any) -> None:
    with pytest.raises(ApiError):
        forced_function(chat_request(parameters, tool_choice))
