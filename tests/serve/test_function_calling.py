"""Constraints that make the model call a function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from jingu.infer.engine import Engine
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
    # Each schema is a resource of its own, so that its references mean the same as in the schema alone.
    assert first["properties"]["arguments"] == {"$id": "jingu:schema/0", **WITH_REFERENCE}


def accepts(constraint: Constraint, value: Any) -> bool:
    """Return whether a constraint allows an answer, by llguidance with bytes as tokens."""
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(constraint.value), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(json.dumps(value))
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


INTEGER = {"type": "integer"}
CLOSED = {"type": "object", "additionalProperties": False}
# By name: a schema of arguments, arguments that follow it, and arguments that do not.
SCHEMAS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "data called $ref": (
        {**CLOSED, "properties": {"x": {"const": {"$ref": "#z"}}}, "required": ["x"]},
        {"x": {"$ref": "#z"}},
        {"x": {"$ref": "#/anyOf/0"}},
    ),
    "an example with $ref": (
        {**CLOSED, "properties": {"x": {"enum": [{"$ref": "#/a"}, 5], "default": {"$ref": "#/b"}}}},
        {"x": {"$ref": "#/a"}},
        {"x": 6},
    ),
    "a property called $ref": ({**CLOSED, "properties": {"$ref": INTEGER, "$id": INTEGER}}, {"$ref": 1}, {"$ref": "a"}),
    "the root": ({**CLOSED, "properties": {"child": {"$ref": "#"}, "n": INTEGER}}, {"child": {"n": 1}}, {"child": 1}),
    "an anchor": (
        {**CLOSED, "properties": {"n": {"$ref": "#here"}}, "$defs": {"a": {"$anchor": "here", **INTEGER}}},
        {"n": 1},
        {"n": "a"},
    ),
    "an id": (
        {
            "$id": "https://example.com/schema",
            **CLOSED,
            "properties": {"n": {"$ref": "https://example.com/schema#/$defs/a"}, "m": {"$ref": "#/$defs/a"}},
            "$defs": {"a": INTEGER},
        },
        {"n": 1, "m": 2},
        {"n": "a"},
    ),
    "an id within": (
        {
            **CLOSED,
            "properties": {
                "n": {"$id": "https://example.com/inner", "$ref": "#/$defs/a", "$defs": {"a": INTEGER}},
                "m": {"$ref": "https://example.com/inner"},
            },
        },
        {"n": 1, "m": 1},
        {"m": "a"},
    ),
    "draft 7": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            **CLOSED,
            "properties": {"n": {"$ref": "#here"}},
            "definitions": {"a": {"$id": "#here", **INTEGER}},
        },
        {"n": 1},
        {"n": "a"},
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("others", [0, 1, 9])
def test_a_schema_means_the_same_beside_others(name: str, others: int) -> None:
    schema, valid, invalid = SCHEMAS[name]
    tools = {"tool": schema, **{f"other{index}": WITH_REFERENCE for index in range(others)}}
    _, constraint = forced_function(chat_request(tools, "required"))
    assert constraint is not None
    wrap = (lambda value: {"name": "tool", "arguments": value}) if others else (lambda value: value)
    assert accepts(constraint, wrap(valid)) and not accepts(constraint, wrap(invalid))
    # Beside a schema of the answer.
    body = chat_request(tools, "auto")
    combined = chat_run._allow_calls(Constraint("json_schema", json.dumps(schema)), chat_run.allowed_functions(body))
    assert accepts(combined, valid) and not accepts(combined, invalid)
    assert accepts(combined, {"name": "tool", "arguments": valid})
    assert not accepts(combined, {"name": "tool", "arguments": invalid})


def test_different_schemas_with_one_id_are_refused() -> None:
    schemas = [
        {"$id": "https://example.com/a", "type": "object", "properties": {"n": {"type": t}}}
        for t in ("integer", "null")
    ]
    with pytest.raises(ApiError, match=r"different schemas have the same \$id, 'https://example.com/a'"):
        forced_function(chat_request({"a": schemas[0], "b": schemas[1]}, "required"))
    forced_function(chat_request({"a": schemas[0], "b": schemas[0]}, "required"))


@pytest.mark.parametrize("schema", [{"type": "object"}, {"type": "object", "properties": {}}, {}])
def test_a_function_without_parameters_gets_no_arguments(schema: dict[str, Any]) -> None:
    _, constraint = forced_function(chat_request({"now": schema}, "required"))
    assert constraint is not None
    assert accepts(constraint, {}) and not accepts(constraint, {"zone": "UTC"})
    _, constraint = forced_function(
        chat_request({"now": {**schema, "type": "object", "additionalProperties": True}}, "required")
    )
    assert constraint is not None and accepts(constraint, {"zone": "UTC"})


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_an_error_in_a_tools_schema_is_blamed_on_tools(tool_choice: str, serve: Serve) -> None:
    server = serve()
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": kind}}}
        for name, kind in (("a", "object"), ("b", "objekt"))
    ]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": tool_choice}
    answer_schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    status, answer, _ = server.call("/v1/chat/completions", {**body, "response_format": answer_schema})
    assert status == 400 and answer["error"]["param"] == "tools" and "objekt" in answer["error"]["message"]
    answer_schema["json_schema"]["schema"] = {"type": "objekt"}
    body["tools"] = tools[:1]
    status, answer, _ = server.call(
        "/v1/chat/completions", {**body, "tool_choice": "auto", "response_format": answer_schema}
    )
    assert status == 400 and answer["error"]["param"] == "response_format"
    answer_schema["json_schema"]["schema"] = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    status, answer, _ = server.call(
        "/v1/chat/completions", {**body, "tool_choice": "none", "response_format": answer_schema}
    )
    assert status == 400 and "write anyOf" in answer["error"]["message"]


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


CONVERSATION = [{"role": "user", "content": "a"}]
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
ANTHROPIC_TOOLS = [{"name": "weather", "input_schema": {"type": "object"}}]


def test_a_forced_call_that_is_cut_off_is_text(serve: Serve, tiny_model: InferenceModel) -> None:
    text = '{"city": "the end is far"}'
    server = serve(ScriptedEngine(tiny_model, lambda _: text))
    body: dict[str, Any] = {"model": "tiny", "messages": CONVERSATION, "max_tokens": 6}
    status, answer, _ = server.call("/v1/messages", {**body, "tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "any"}})
    assert (status, answer["stop_reason"]) == (200, "max_tokens")
    (block,) = answer["content"]
    assert block["type"] == "text" and text.startswith(block["text"]) and 0 < len(block["text"]) < len(text)
    (choice,) = server.call("/v1/chat/completions", {**body, "tools": TOOLS, "tool_choice": "required"})[1]["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", block["text"])
    assert "tool_calls" not in choice["message"]
    whole = {**body, "tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 99}
    (block,) = server.call("/v1/messages", whole)[1]["content"]
    assert (block["name"], block["input"]) == ("weather", json.loads(text))


@pytest.mark.parametrize("arguments", ['"x"', '""', "null", "[1]", '{"a": NaN}', '{"a": 1e999}'])
def test_arguments_that_are_not_an_object_are_text(arguments: str, serve: Serve, tiny_model: InferenceModel) -> None:
    text = f'{{"name": "weather", "arguments": {arguments}}}'
    server = serve(ScriptedEngine(tiny_model, lambda _: text))
    body: dict[str, Any] = {"model": "tiny", "messages": CONVERSATION}
    answer = server.call("/v1/messages", {**body, "tools": ANTHROPIC_TOOLS, "max_tokens": 99})[1]
    assert (answer["content"], answer["stop_reason"]) == ([{"type": "text", "text": text}], "end_turn")
    answer = server.call("/api/chat", {**body, "tools": TOOLS, "stream": False})[1]
    assert answer["message"] == {"role": "assistant", "content": text}
    (choice,) = server.call("/v1/chat/completions", {**body, "tools": TOOLS})[1]["choices"]
    assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]


@pytest.mark.parametrize("schema", ["not json", "[" * 100_000, '{"items": ' * 800 + "{}" + "}" * 800, "3"])
def test_a_schema_that_is_not_json_is_refused_with_tools(schema: str, serve: Serve, tiny_model: InferenceModel) -> None:
    body = {"model": "tiny", "messages": CONVERSATION, "tools": TOOLS, "guided_json": schema}
    status, answer, _ = serve(Engine(tiny_model)).call("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "response_format"), answer


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_calls": [{"function": {"name": "weather", "arguments": '{"a": "\\ud800"}'}}]},
        {"tool_calls": [{"function": {"name": "weather", "arguments": '{"a": NaN}'}}]},
        {"tool_calls": [{"function": {"name": "weather", "arguments": '{"a": ' + "[" * 900 + "]" * 900 + "}"}}]},
        {"tool_calls": [{"function": {"name": "weather", "arguments": {"a": "\ufdd2x\ufdd2"}}}]},
        {"tool_calls": [{"id": "\ufdd2x\ufdd2", "function": {"name": "weather", "arguments": {}}}]},
        {"reasoning_content": "\ufdd2x\ufdd2"},
        {"name": "\ufdd2x\ufdd2"},
        {"tool_call_id": "\ufdd2x\ufdd2"},
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(
    fields: dict[str, Any], serve: Serve, tiny_model: InferenceModel, tmp_path: Path
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages | tojson }}")
    server = serve(ScriptedEngine(tiny_model), template=str(template))
    message = {"role": "assistant", "content": "a", **fields}
    status, answer, _ = server.call("/v1/chat/completions", {"model": "tiny", "messages": [*CONVERSATION, message]})
    assert (status, answer["error"]["param"]) == (400, "messages"), answer
