"""Parse the tool calls out of an assistant's answer while it is generated.

Two forms are recognized: `<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes, Qwen), and an answer that
consists of such an object or of a list of them (Llama 3, Mistral; they may write `parameters` for `arguments`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jingu.chat.messages import JsonObject, Message

# The description of tools for chat templates that do not support tools, with the tags of Hermes and Qwen.
_TOOL_PROMPT = Path(__file__).with_name("tool_prompt.txt").read_text(encoding="utf-8").removesuffix("\n")
OPEN_TAG = "<tool_call>"
_CLOSE_TAG = re.compile(r"\s*</tool_call>")


def _parse_number(text: str) -> float:
    """Parse a number. Raise ValueError unless it is finite: JSON has no infinity and no NaN."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_parse_number, parse_float=_parse_number)


@dataclass(frozen=True)
class ToolCall:
    """A call of a function. `arguments` is the JSON text of an object, as in OpenAI's protocol."""

    name: str
    arguments: str


class ToolCallParser:
    """Splits a growing answer into text and tool calls.

    Args:
        names: functions that may be called. A call of any other function is treated as text.
        forced: the function that must be called. The whole answer then is its arguments, which guided decoding
            ensures. If they are cut off, the answer is text.
        required: whether the answer consists of calls only, so that no text is returned before its end.
        parallel: whether several calls are allowed; otherwise only the first is returned.
    """

    def __init__(
        self, names: set[str], forced: str | None = None, required: bool = False, parallel: bool = True
    ) -> None:
        self._names = names
        self._forced = forced
        self._parallel = parallel
        self._buffer = ""
        self._has_text = False
        # Once a call may have begun, everything is buffered until the answer ends.
        self._in_call = required

    def push(self, text: str) -> str:
        """Add a piece of the answer; return the text that cannot be part of a call."""
        if not self._names:
            return text
        self._buffer += text
        if self._in_call:
            return ""
        if not self._has_text:
            # The first visible character decides whether the whole answer may be JSON.
            first = self._buffer.lstrip()[:1]
            if not first:
                return ""
            self._has_text = True
            if first in "{[":
                self._in_call = True
                return ""
        position = self._buffer.find(OPEN_TAG)
        if position >= 0:
            self._in_call = True
        else:
            # The end of the buffer may be the beginning of a tag: hold it back.
            lengths = range(len(OPEN_TAG) - 1, 0, -1)
            position = len(self._buffer) - next((n for n in lengths if self._buffer.endswith(OPEN_TAG[:n])), 0)
        text, self._buffer = self._buffer[:position], self._buffer[position:]
        return text

    def finish(self) -> tuple[str, list[ToolCall]]:
        """End the answer; return the rest of its text and its calls."""
        buffer, self._buffer = self._buffer, ""
        if self._forced is not None:
            return ("", [ToolCall(self._forced, buffer)]) if _is_object(buffer) else (buffer, [])
        if not buffer.lstrip().startswith(("{", "[", OPEN_TAG)):
            return buffer, []
        text, calls = self._parse(buffer)
        return text, calls if self._parallel else calls[:1]

    def _parse(self, buffer: str) -> tuple[str, list[ToolCall]]:
        """Return the text around the calls, and the calls. If a call is malformed, return the whole answer as text."""
        if OPEN_TAG in buffer:
            text, *parts = buffer.split(OPEN_TAG)
        else:
            text, parts = "", [buffer]
        calls: list[ToolCall] = []
        for part in parts:
            parsed = self._parse_json(part)
            if parsed is None:
                return buffer, []
            part_calls, rest = parsed
            calls += part_calls
            text += rest if rest.strip() else ""
        return text, calls

    def _parse_json(self, text: str) -> tuple[list[ToolCall], str] | None:
        """Return the calls at the beginning of the text, and the rest of it; None if it does not begin with a call."""
        text = text.lstrip()
        try:
            value, end = _DECODER.raw_decode(text)
            calls = [self._read_call(item) for item in (value if isinstance(value, list) else [value])]
        except (ValueError, RecursionError):
            return None
        valid_calls = [call for call in calls if call is not None]
        if not calls or len(valid_calls) < len(calls):
            return None
        return valid_calls, _CLOSE_TAG.sub("", text[end:], count=1)

    def _read_call(self, value: Any) -> ToolCall | None:
        """Return the call that a JSON value describes; None unless it calls an available function with an object."""
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or value["name"] not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, Mapping):
            return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))
        # Some models write the arguments as JSON text.
        is_text_of_object = isinstance(arguments, str) and _is_object(arguments)
        return ToolCall(value["name"], arguments) if is_text_of_object else None


def _is_object(text: str) -> bool:
    """Return whether a text is a JSON object."""
    try:
        return isinstance(_DECODER.decode(text), dict)
    except (ValueError, RecursionError):
        return False


def write_tools_as_text(messages: Sequence[Message], tools: Sequence[JsonObject]) -> tuple[Message, ...]:
    """Write tools, calls and results as text in messages, for chat templates that do not support tools.

    The tools are described in the first message, whatever its role: some templates have no system message either.

    Args:
        messages: at least one.
        tools: definitions of the tools, written as JSON, one per line; none: nothing describes them.
    """
    texts: list[Message] = []
    for message in messages:
        calls = (
            json.dumps({key: call[key] for key in ("name", "arguments")}, ensure_ascii=False)
            for call in message.tool_calls
        )
        parts = [message.content, *(f"{OPEN_TAG}\n{call}\n</tool_call>" for call in calls)]
        text = replace(message, content="\n".join(filter(None, parts)), tool_calls=(), name="", tool_call_id="")
        if message.role == "tool":
            text = replace(text, role="user", content=f"<tool_response>\n{text.content}\n</tool_response>")
            # Join the results of several calls in one message, as many templates require alternating roles.
            if texts[-1:] and texts[-1].role == "user":
                text = replace(text, content=f"{texts.pop().content}\n{text.content}")
        texts.append(text)
    if not tools:
        return tuple(texts)
    description = _TOOL_PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first, *rest = texts
    parts = [first.content, description] if first.role == "system" else [description, first.content]
    return (replace(first, content="\n\n".join(parts)), *rest)
