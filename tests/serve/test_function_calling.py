"""Constraints that make the model call a function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jingu.infer.inference_model import InferenceModel
from jingu.infer.request import Constraint
from jingu.serve import chat_run
from jingu.serve.chat_run import forced_function
from jingu.serve.http_errors import ApiError
from jingu.serve.protocol import ChatRequest
from tests.serve.conftest import ScriptedEngine, Serve


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


@pytest.mark.parametrize("template", ["chatml", "llama2"])
def test_tools_are_described_where_the_template_has_no_place_for_them(
    template: str, serve: Serve, tiny_model: InferenceModel
) -> None:
    server = serve(ScriptedEngine(tiny_model), template=template)
    chat_run._warn_of_tool_prompt.cache_clear()
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [call, call]},
        {"role": "tool", "content": "3 degrees", "tool_call_id": "1"},
        {"role": "tool", "content": "4 degrees", "tool_call_id": "1"},
    ]
    body = {"model": "tiny", "messages": messages, "tools": [tool], "max_tokens": 900}
    prompts: list[str] = []
    server.engine.says = lambda prompt: prompts.append(prompt) or "far"
    status, answer, _ = server.call("/v1/chat/completions", body)
    assert status == 200, answer
    (prompt,) = prompts
    assert f"<tools>\n{json.dumps(tool)}\n</tools>" in prompt
    wanted = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert prompt.index("Weather?") < prompt.index(wanted) < prompt.index("<tool_response>\n3 degrees")
    assert "3 degrees\n</tool_response>\n<tool_response>\n4 degrees" in prompt
    assert "does not support tools; jingu describes them" in str(server.lines)


def test_a_template_that_cannot_even_write_calls_as_text_names_one_that_can(
    serve: Serve, tiny_model: InferenceModel, tmp_path: Path
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% if messages | length > 1 %}{{ raise_exception('one question') }}{% endif %}a")
    server = serve(ScriptedEngine(tiny_model), template=str(template))
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "3 degrees", "tool_call_id": "1"},
    ]
    status, answer, _ = server.call("/v1/chat/completions", {"model": "tiny", "messages": messages, "tools": [tool]})
    assert status == 400
    assert answer["error"]["message"].endswith("one question); start the server with --template qwen to use tools")
