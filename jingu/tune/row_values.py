"""Read the values of the fields of instruction data: texts, lists, switches, weights, tools, variables and calls."""

from __future__ import annotations

import json
from typing import Any

from jingu.chat.messages import ConversationError, JsonObject, check_characters
from jingu.tune.row_fields import WEIGHT_NAMES, Fields, is_empty, is_missing

# A data set stores a weight in one byte, in hundredths.
MAX_WEIGHT = 2.0
# Spellings of true and false, in lower case.
_SWITCHES = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
# Variables of a template that belong to the conversation, or to the way it is rendered.
_RESERVED_VARIABLES = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_dict",
)


def quote_value(value: Any) -> str:
    """Return the start of a value as JSON. Halves of characters, which cannot be printed, are written as escapes."""
    text = json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()
    return text if len(text) <= 40 else f"{text[:40]}…"


def unexpected_value(field: str, expected: str, value: Any) -> ConversationError:
    """Return the error about a value of a field; `expected` describes the values that it may have."""
    return ConversationError(f"field {field}: expected {expected}, not {quote_value(value)}")


def take_text(fields: Fields, name: str) -> str:
    """Remove a field, and return its text. Raises ConversationError if it is absent, or no text, or empty."""
    if name not in fields:
        raise ConversationError(f"field {name}: expected text, but it is missing")
    return check_text(fields.pop(name), name)


def optional_text(value: Any, name: str) -> str:
    """Return the text of a field; empty if it is absent or empty."""
    return "" if value is None or value == "" else check_text(value, name)


def check_text(text: Any, name: str) -> str:
    """Return a text. Raises ConversationError if it is none, or empty, or has characters that cannot be encoded."""
    if not isinstance(text, str) or not text.strip():
        raise unexpected_value(name, "text that is not empty", text)
    check_characters(text, f"field {name}: ")
    return text


def check_list(items: Any, name: str) -> list[Any]:
    """Return a list. Raises ConversationError if it is none, or empty."""
    if not isinstance(items, list) or not items:
        raise unexpected_value(name, "a list that is not empty", items)
    return items


def parse_switch(value: Any) -> bool | None:
    """Return a value that stands for true or false: a boolean, 1 or 0, or one of these as text; None for any other."""
    return _SWITCHES.get(str(value).strip().lower())


def is_negative(value: Any) -> bool:
    """Return whether a value is a number below 0."""
    return isinstance(value, int | float) and value < 0


def take_weight(fields: Fields, prefix: str) -> float:
    """Return the loss weight of a row or a message; a false `train` stands for 0.

    Args:
        prefix: path of the message in its row, for error messages.
    """
    if WEIGHT_NAMES.isdisjoint(fields):
        return 1.0
    train_name, weight_name = (f"{prefix}{fields.spelling(name)}" for name in ("train", "weight"))
    train = fields.take("train")
    weight = fields.take("weight")
    is_trained = True if train is None else parse_switch(train)
    if is_trained is None:
        raise unexpected_value(train_name, "true or false", train)
    factor = 1.0 if weight is None else check_weight(weight, weight_name)
    return factor if is_trained else 0.0


def check_weight(value: Any, name: str) -> float:
    """Return a weight of a loss. Raises ConversationError unless it is a number from 0 to `MAX_WEIGHT`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_WEIGHT:
        raise unexpected_value(name, f"a number from 0 to {MAX_WEIGHT:g}", value)
    return float(value)


def take_tools(fields: Fields) -> tuple[JsonObject, ...]:
    """Return the tool definitions of a row, which may be a list or the JSON text of one."""
    name = fields.spelling("tools")
    value = fields.take("tools")
    if is_empty(value) or value == "null":
        return ()
    tools = _parse_json(value) if isinstance(value, str) else value
    if isinstance(tools, list):
        tools = [_parse_json(tool) if isinstance(tool, str) else tool for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise unexpected_value(name, "a list of objects", value)
    check_characters(json.dumps(tools, ensure_ascii=False), f"field {name}: ")
    return tuple(tools)


def take_variables(fields: Fields) -> JsonObject:
    """Return the variables that a row gives to its chat template."""
    name = fields.spelling("chat_template_kwargs")
    value = fields.take("chat_template_kwargs")
    if is_empty(value) or value == "null":
        return {}
    variables = _parse_json(value) if isinstance(value, str) else value
    if not isinstance(variables, dict):
        raise unexpected_value(name, "an object", value)
    for key in _RESERVED_VARIABLES:
        if key in variables:
            raise ConversationError(f"field {name}: {key} is not a variable that a row can set")
    check_characters(json.dumps(variables, ensure_ascii=False), f"field {name}: ")
    # Tables write null for the variables of other rows.
    return {key: item for key, item in variables.items() if not is_missing(item)}


def parse_tool_call(value: Any, name: str) -> JsonObject:
    """Return a tool call with its name, arguments and, if it has one, id.

    Args:
        value: an object with `name` and `arguments`, or with `function`, which holds them; or the JSON text of one.
        name: path of the call in its row, for error messages.
    """
    call = _parse_json(value) if isinstance(value, str) else value
    identity = {}
    if isinstance(call, dict):
        if call.get("id"):
            identity = {"id": check_text(call["id"], f"{name}.id")}
        call = call.get("function", call)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise unexpected_value(name, "a call with name and arguments", value)
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parse_json(arguments)
    if not isinstance(arguments, dict):
        raise unexpected_value(f"{name}.arguments", "an object", call.get("arguments"))
    check_characters(json.dumps([call["name"], arguments], ensure_ascii=False), f"field {name}: ")
    return {"name": call["name"], "arguments": arguments, **identity}


def _parse_json(text: str) -> Any:
    """Return the value of JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
