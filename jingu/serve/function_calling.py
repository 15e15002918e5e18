"""Tools in chat completions: which functions the model may call, and constraints that make it call one."""

from __future__ import annotations

import json
import secrets
from typing import Any

from jingu.chat.tool_calls import ToolCall
from jingu.infer.request import Constraint
from jingu.serve.http_errors import bad_request
from jingu.serve.protocol import ChatRequest, FunctionDefinition, ToolChoice


def allowed_functions(body: ChatRequest) -> list[FunctionDefinition]:
    """Return the functions that the model may call."""
    if body.tool_choice == "none":
        return []
    return [tool.function for tool in body.tools or []]


def forced_function(body: ChatRequest) -> tuple[str | None, Constraint | None]:
    """Return the constraint that makes the model call a function, and that function's name.

    If a single function is possible, the answer is its arguments. Otherwise the name is None, and the answer is an
    object with `name` and `arguments`. If no call is required, both are None.
    """
    functions = allowed_functions(body)
    choice = body.tool_choice
    if isinstance(choice, ToolChoice):
        functions = [function for function in functions if function.name == choice.function.name]
        if not functions:
            raise bad_request(f"`tool_choice` names {choice.function.name!r}, which is not in `tools`", "tool_choice")
    elif choice != "required":
        return None, None
    if not functions:
        raise bad_request("`tool_choice` requires a tool, but there are no `tools`", "tool_choice")
    # With a single candidate the model has no name to choose, so it writes only the arguments.
    if len(functions) == 1:
        return functions[0].name, Constraint("json_schema", json.dumps(_parameters(functions[0])))
    # One alternative per function: its name is a constant, and its arguments follow its schema.
    variants = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                "arguments": _relocate(_parameters(function), f"#/anyOf/{index}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, function in enumerate(functions)
    ]
    return None, Constraint("json_schema", json.dumps({"anyOf": variants}))


def _parameters(function: FunctionDefinition) -> dict[str, Any]:
    return function.parameters or function.arguments or {"type": "object", "additionalProperties": False}


def _relocate(schema: Any, root: str) -> Any:
    """Return a schema to embed in another at `root`, with its references adjusted."""
    if isinstance(schema, list):
        return [_relocate(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:] if key == "$ref" and str(value).startswith("#") else _relocate(value, root)
        for key, value in schema.items()
    }


def format_tool_call(call: ToolCall) -> dict[str, Any]:
    """Return a tool call in OpenAI's form."""
    # Clients send the id back with the tool's result.
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
