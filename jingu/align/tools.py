"""Tools: Python functions that a model may call, described by their signatures and docstrings.

The descriptions are those of `transformers.utils.get_json_schema`, without the type of the result.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter, ValidationError, validate_call

from jingu.chat.messages import JsonObject

Tool = Callable[..., Any]
# A section heading of a Google-style docstring; and an argument with its description, which may continue on more
# deeply indented lines.
_SECTION = re.compile(r"^(Args|Arguments|Returns?|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^( +)(\w+)(?: ?\([^)\n]*\))?:\s*(.*(?:\n\1 +.*)*)", re.MULTILINE)


def describe_tool(name: str, tool: Tool) -> JsonObject:
    """Return the definition of a tool, as chat templates take it: name, description, and a JSON schema of arguments.

    Raises:
        ValueError: it has no docstring, or an argument whose type has no JSON schema.
    """
    text = inspect.getdoc(tool)
    if not text:
        raise ValueError(f"the tool {name} has no docstring, from which the model learns what it does")
    description, *sections = _SECTION.split(text)
    arguments = next(
        (body for title, body in zip(sections[::2], sections[1::2], strict=True) if title[:3] == "Arg"), ""
    )
    untyped_parameters = [
        key for key, value in inspect.signature(tool).parameters.items() if value.annotation is value.empty
    ]
    if untyped_parameters:
        raise ValueError(f"the argument {untyped_parameters[0]} of the tool {name} has no type")
    try:
        schema = TypeAdapter[Any](tool).json_schema()  # type: ignore[arg-type]
    except Exception as error:
        raise ValueError(f"the arguments of the tool {name} cannot be written as JSON: {error}") from error
    properties = {key: _clean(value) for key, value in schema["properties"].items()}
    for match in _ARGUMENT.finditer(arguments):
        if match[2] in properties:
            properties[match[2]]["description"] = " ".join(match[3].split())
    parameters = {**_clean(schema), "properties": properties}
    function = {"name": name, "description": description.strip(), "parameters": parameters}
    return {"type": "function", "function": function}


def call_tool(tool: Tool, arguments: str) -> str:
    """Call a tool with arguments in JSON, and return its result as a text for the model: a text as it is, other values
    as JSON. Errors also become texts, since the model's arguments may have caused them."""
    try:
        result = validate_call(tool)(**json.loads(arguments))
        if inspect.isawaitable(result):
            result = asyncio.run(_wait(result))
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        return f"error: {'; '.join(problems)}"
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"


async def _wait(result: Any) -> Any:
    return await result


def _clean(schema: JsonObject) -> JsonObject:
    """Return a schema as transformers writes it. The type comes first: some templates print the schema verbatim."""
    fields = {key: value for key, value in schema.items() if key not in ("title", "default", "additionalProperties")}
    return {"type": schema["type"], **fields} if "type" in schema else fields
