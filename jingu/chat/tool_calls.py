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
# The beginning of a call up to its arguments, at the beginning of the calls or after the arguments of another one.
_CALL_HEAD = re.compile(
    r"\s*(?:\}\s*(?:</tool_call>)?\s*,?\s*)?(?:<tool_call>)?\s*\[?\s*"
    r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


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


@dataclass(frozen=True)
class CallFragment:
    """A part of a tool call that is being generated.

    Attributes:
        index: which call of the answer it belongs to.
        name: the called function, in the first fragment of each call; empty in the others.
        arguments: the next part of the arguments' JSON text.
    """

    index: int
    name: str
    arguments: str


class _ArgumentsReader:
    """Reads the arguments of calls while they are generated, as far as they are certain to be arguments of a call.

    Args:
        names: functions that may be called.
        forced: the function whose arguments the whole answer is; None: the answer names it.
    """

    def __init__(self, names: set[str], tool_name: str | None) -> None:
        self._names = names
        self._position = 0
        self._has_started = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._name = tool_name
        self._next_name = tool_name or ""
        self.num_calls = 0

    @property
    def has_started(self) -> bool:
        """Whether there were any fragments."""
        return self._has_started

    def rest(self, buffer: str) -> str:
        """Return the text after the last complete call; empty within a call."""
        return buffer[self._position :] if self._name is None else ""

    def read(self, buffer: str) -> list[CallFragment]:
        """Return the fragments in the text of the calls since the last time; `buffer` is that text so far."""
        fragments: list[CallFragment] = []
        while True:
            if self._name is None:
                head = _CALL_HEAD.match(buffer, self._position)
                if head is None or head["name"] not in self._names:
                    return fragments
                self._name = self._next_name = head["name"]
                self._position = head.end()
            start = self._position
            is_complete = self._skip_object(buffer)
            if self._position > start:
                fragments.append(CallFragment(self.num_calls, self._next_name, buffer[start : self._position]))
                self._next_name = ""
                self._has_started = True
            if not is_complete:
                return fragments
            self.num_calls += 1
            self._name = None

    def _skip_object(self, buffer: str) -> bool:
        """Move the position to the end of the JSON object that it is in, or of the buffer; return whether it ended."""
        for position in range(self._position, len(buffer)):
            character = buffer[position]
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._position = position + 1
                    return True
        self._position = len(buffer)
        return False


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
        self, names: set[str], tool_name: str | None = None, is_required: bool = False, parallel: bool = True
    ) -> None:
        self._names = names
        self._tool_name = tool_name
        self._parallel = parallel
        self._buffer = ""
        self._has_text = False
        self._reader = _ArgumentsReader(names, tool_name)
        # Once a call may have begun, everything is buffered until the answer ends.
        self._in_call = is_required

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

    def read_fragments(self) -> list[CallFragment]:
        """Return the fragments of calls since the last time.

        These are the calls of `finish`, unless the answer ends within a call: then `finish` returns its text.
        """
        if not self._in_call or (self._reader.num_calls and not self._parallel):
            return []
        fragments = self._reader.read(self._buffer)
        return [fragment for fragment in fragments if self._parallel or not fragment.index]

    def finish_fragments(self) -> tuple[str, list[CallFragment]]:
        """End the answer; return the rest of its text, and the fragments of calls that have not been returned yet."""
        fragments = self.read_fragments()
        buffer = self._buffer
        text, calls = self.finish()
        if self._reader.has_started and not calls:
            # A call was cut off, or is malformed. Its beginning has been returned, so it cannot become text.
            return self._reader.rest(buffer), fragments
        first = self._reader.num_calls
        return text, [
            *fragments,
            *(CallFragment(first + place, call.name, call.arguments) for place, call in enumerate(calls[first:])),
        ]

    def finish(self) -> tuple[str, list[ToolCall]]:
        """End the answer; return the rest of its text and its calls."""
        buffer, self._buffer = self._buffer, ""
        if self._tool_name is not None:
            return ("", [ToolCall(self._tool_name, buffer)]) if _is_object(buffer) else (buffer, [])
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
            parsed_part = self._parse_json(part)
            if parsed_part is None:
                return buffer, []
            part_calls, remainder = parsed_part
            calls += part_calls
            text += remainder if remainder.strip() else ""
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
    first, *other_texts = texts
    parts = [first.content, description] if first.role == "system" else [description, first.content]
    return (replace(first, content="\n\n".join(parts)), *other_texts)
