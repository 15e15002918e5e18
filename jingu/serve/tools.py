"""Tools in a conversation: how the model is made to call one, and how its calls are read out of what it says.

Calls are read in the forms that models are trained on: `<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes,
Qwen), or an answer that is such an object, or a list of them (Llama 3, Mistral; theirs may say `parameters`).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from jingu.infer.request import Constraint
from jingu.infer.text import overlap
from jingu.serve.errors import invalid
from jingu.serve.schema import ChatRequest, Function, ToolChoice

MARK = "<tool_call>"
_CLOSE = re.compile(r"\s*</tool_call>")
_DECODER = json.JSONDecoder()


def offered(body: ChatRequest) -> list[Function]:
    """The functions that the model may call."""
    return [] if body.tool_choice == "none" else [tool.function for tool in body.tools or []]


def forced(body: ChatRequest) -> tuple[str | None, Constraint | None]:
    """The one function that must be called (None: one of several, or none at all), and what the answer must then be.

    With one function the answer is its arguments; of several, an object with `name` and `arguments`.
    """
    functions = offered(body)
    wanted = body.tool_choice
    if isinstance(wanted, ToolChoice):
        functions = [each for each in functions if each.name == wanted.function.name]
        if not functions:
            raise invalid(f"`tool_choice` names {wanted.function.name!r}, which is none of `tools`", "tool_choice")
    elif wanted != "required":
        return None, None
    if not functions:
        raise invalid("`tool_choice` asks for a tool, but there are no `tools`", "tool_choice")
    if len(functions) == 1:
        return functions[0].name, Constraint("json_schema", json.dumps(_parameters(functions[0])))
    variants = [
        {
            "type": "object",
            "properties": {
                "name": {"const": each.name},
                "arguments": _moved(_parameters(each), f"#/anyOf/{place}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for place, each in enumerate(functions)
    ]
    return None, Constraint("json_schema", json.dumps({"anyOf": variants}))


def _parameters(function: Function) -> dict[str, Any]:
    return function.parameters or function.arguments or {"type": "object", "additionalProperties": False}


def _moved(schema: Any, root: str) -> Any:
    """A schema that stands inside another, at `root`: its references lead there."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:] if key == "$ref" and str(value).startswith("#") else _moved(value, root)
        for key, value in schema.items()
    }


def as_called(name: str, arguments: str, place: int = 0) -> dict[str, Any]:
    """A call in OpenAI's form."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function, "index": place}


class Calls:
    """An answer as it grows, told apart into text and calls.

    Args:
        names: functions that may be called; what calls another is text.
        forced: the function whose arguments the answer is.
        must: whether the answer is a call and nothing else.
        many: whether there may be several calls; else only the first is told.
    """

    def __init__(self, names: set[str], forced: str | None = None, must: bool = False, many: bool = True) -> None:
        self._names = names
        self._forced, self._many = forced, many
        self._held = ""
        self._begun = False
        self._calling = must

    def push(self, text: str) -> str:
        """The text, of this and of what was held back, that is no call for sure."""
        if not self._names:
            return text
        self._held += text
        if self._calling:
            return ""
        if not self._begun:
            start = self._held.lstrip()[:1]
            if not start:
                return ""
            self._begun, self._calling = True, start in ("{", "[")
            if self._calling:
                return ""
        place = self._held.find(MARK)
        self._calling = place >= 0
        if place < 0:
            place = len(self._held) - overlap(self._held, MARK)
        shown, self._held = self._held[:place], self._held[place:]
        return shown

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """The text still held back, and the calls."""
        held, self._held = self._held, ""
        if self._forced is not None:
            return "", [as_called(self._forced, held)]
        if not held.lstrip().startswith(("{", "[", MARK)):
            return held, []
        text, found = self._read(held)
        found = found if self._many else found[:1]
        return text, [as_called(name, arguments, place) for place, (name, arguments) in enumerate(found)]

    def _read(self, held: str) -> tuple[str, list[tuple[str, str]]]:
        """The text around calls, and the calls; all of it is text where one cannot be read."""
        first, *marked = held.split(MARK) if MARK in held else ("", held)
        read = [self._calls(part) for part in marked]
        tails = [each[1] for each in read if each is not None]
        if len(tails) < len(read):
            return held, []
        return first + "".join(tail for tail in tails if tail.strip()), [
            call for each in read if each is not None for call in each[0]
        ]

    def _calls(self, text: str) -> tuple[list[tuple[str, str]], str] | None:
        """The calls that a text begins with, and what follows them."""
        text = text.lstrip()
        try:
            value, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            return None
        calls = [self._call(each) for each in (value if isinstance(value, list) else [value])]
        known = [each for each in calls if each is not None]
        return (known, _CLOSE.sub("", text[end:], count=1)) if known and len(known) == len(calls) else None

    def _call(self, value: Any) -> tuple[str, str] | None:
        if not isinstance(value, Mapping) or value.get("name") not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        return value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
