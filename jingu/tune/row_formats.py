"""Recognize the formats of instruction data (OpenAI, ShareGPT, Alpaca, ...), and convert each row to a `Row`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jingu.chat.messages import ConversationError, JsonObject, Message, Role, Row, check_characters

# A data set stores a weight in one byte, in hundredths.
MAX_WEIGHT = 2.0

# Fields for multimodal models.
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
# Fields with the reasoning of an assistant before its answer.
_REASONING = ("reasoning_content", "thinking", "reasoning")

# Roles by their names in OpenAI's messages and ShareGPT's conversations.
_ROLES: dict[str, Role] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
# Roles that may follow a role; None stands for the start of a conversation.
_ALLOWED_NEXT: dict[str | None, tuple[Role, ...]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant",),
}


def parse_row(value: Any, columns: Mapping[str, str] | None = None) -> Row:
    """Convert a row of any known format.

    The format is recognized by the row's `type`, or else by its fields.

    Args:
        value: the parsed JSON of the row.
        columns: names of fields in the row, by the names that jingu uses.

    Raises:
        ConversationError: the format is unknown, a field is not as expected, or nothing of the row is trained.
    """
    if not isinstance(value, dict):
        raise ConversationError(f"expected an object with fields, not {_quote(value)}")
    value = rename_columns(value, columns or {})
    _check_media(value, "")
    if "chosen" in value and "rejected" in value:
        raise ConversationError("fields chosen and rejected: this is a preference row, not an example to imitate")
    if value.get("label") is False:
        raise ConversationError("field label: false marks an answer not to be imitated, which tuning cannot use")
    row = _parse_form(value)
    weight = _weight(value, "")
    if not weight:
        raise ConversationError("fields weight and train: nothing of the row is to be trained")
    if weight == 1.0:
        return row
    if row.segments:
        raise ConversationError("field weight: expected a row of messages, as only their answers have weights")
    messages = tuple(replace(message, weight=message.weight * weight) for message in row.messages)
    highest = max((message.weight for message in messages if message.role == "assistant"), default=0.0)
    if highest > MAX_WEIGHT:
        expected = f"at most {MAX_WEIGHT:g} when multiplied with the weight of a message"
        raise ConversationError(f"field weight: expected {expected}, not {highest:g}")
    return replace(row, messages=messages)


def rename_columns(value: JsonObject, columns: Mapping[str, str]) -> JsonObject:
    """Return a row whose fields have the names that jingu uses.

    Args:
        columns: names of fields in the row, by the names that jingu uses.
    """
    others = {name: item for name, item in value.items() if name not in {*columns, *columns.values()}}
    return others | {name: value[column] for name, column in columns.items() if column in value}


def _parse_form(value: JsonObject) -> Row:
    """Convert a row without regard to its weight. Raises ConversationError if its format is unknown."""
    kind = value.get("type")
    if isinstance(kind, str) and kind in _PARSERS_BY_TYPE:
        return _PARSERS_BY_TYPE[kind](value)
    for name, (field, parse) in _PARSERS_BY_FIELD.items():
        if field in value:
            return replace(parse(value), kind=name)
    # An unknown `type` is an error only now: a data set of a known format may use that column for something else.
    if kind is not None:
        raise _unexpected("type", ", ".join(_PARSERS_BY_TYPE), kind)
    fields = ", ".join([*(field for field, _ in _PARSERS_BY_FIELD.values()), "type"])
    raise ConversationError(f"expected one of the fields {fields}; it has {', '.join(map(str, value)) or 'none'}")


# Fields


def _quote(value: Any) -> str:
    """Return the start of a value as JSON. Halves of characters, which cannot be printed, are written as escapes."""
    text = json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()
    return text if len(text) <= 40 else f"{text[:40]}…"


def _unexpected(field: str, expected: str, value: Any) -> ConversationError:
    return ConversationError(f"field {field}: expected {expected}, not {_quote(value)}")


def _text(value: JsonObject, name: str) -> str:
    if name not in value:
        raise ConversationError(f"field {name}: expected text, but it is missing")
    return _check_text(value[name], name)


def _optional_text(value: JsonObject, name: str) -> str:
    """Return the text of a field; empty if it is absent, null or empty."""
    return _check_text(value[name], name) if value.get(name) not in (None, "") else ""


def _check_text(text: Any, name: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise _unexpected(name, "text that is not empty", text)
    check_characters(text, f"field {name}: ")
    return text


def _list(value: JsonObject, name: str) -> list[Any]:
    items = value.get(name)
    if not isinstance(items, list) or not items:
        raise _unexpected(name, "a list that is not empty", items)
    return items


def _weight(value: JsonObject, prefix: str) -> float:
    """Return the loss weight of a row or a message; `train: false` stands for 0.

    Args:
        prefix: path of the message in its row, for error messages.
    """
    train = value.get("train")
    if not isinstance(train, bool | None):
        raise _unexpected(f"{prefix}train", "true or false", train)
    weight = value.get("weight")
    return 0.0 if train is False else _check_weight(1.0 if weight is None else weight, f"{prefix}weight")


def _check_weight(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_WEIGHT:
        raise _unexpected(name, f"a number from 0 to {MAX_WEIGHT:g}", value)
    return float(value)


def _check_media(value: JsonObject, prefix: str) -> None:
    for field in _MEDIA:
        if value.get(field):
            raise ConversationError(f"field {prefix}{field}: only text can be trained on")


def _tools(value: JsonObject) -> tuple[JsonObject, ...]:
    """Return the tool definitions of a row, which may be a list or the JSON text of one."""
    tools = value.get("tools") or value.get("apis") or []
    if isinstance(tools, str):
        tools = _parse_json(tools)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _unexpected("tools", "a list of objects", value.get("tools"))
    check_characters(json.dumps(tools, ensure_ascii=False), "field tools: ")
    return tuple(tools)


def _tool_call(value: Any, name: str) -> JsonObject:
    """Return a tool call with its name, arguments and, if it has one, id.

    Args:
        value: an object with `name` and `arguments`, or with `function`, which holds them; or the JSON text of one.
        name: path of the call in its row, for error messages.
    """
    call = _parse_json(value) if isinstance(value, str) else value
    identity = {}
    if isinstance(call, dict):
        if call.get("id"):
            identity = {"id": _check_text(call["id"], f"{name}.id")}
        call = call.get("function", call)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise _unexpected(name, "a call with name and arguments", value)
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parse_json(arguments)
    if not isinstance(arguments, dict):
        raise _unexpected(f"{name}.arguments", "an object", call.get("arguments"))
    check_characters(json.dumps([call["name"], arguments], ensure_ascii=False), f"field {name}: ")
    return {"name": call["name"], "arguments": arguments, **identity}


def _parse_json(text: str) -> Any:
    """Return the value of JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# Forms


def _pretrain(value: JsonObject) -> Row:
    return Row("pretrain", segments=((_text(value, "text"), True),))


def _completion(value: JsonObject) -> Row:
    if not isinstance(value["prompt"], list):
        return Row("completion", segments=((_text(value, "prompt"), False), (_text(value, "completion"), True)))
    # Both are lists of messages: one conversation, divided into prompt and completion.
    completion = value.get("completion", [])
    if not isinstance(completion, list):
        raise _unexpected("completion", "a list of messages as in prompt", completion)
    return _openai({**value, "messages": [*value["prompt"], *completion]})


def _question(instruction: str, text: str) -> Message:
    return Message("user", f"{instruction}\n{text}" if text else instruction)


def _instruct(value: JsonObject) -> Row:
    question = _question(_text(value, "instruct"), _optional_text(value, "input"))
    return _conversation("instruct", [question, Message("assistant", _text(value, "output"))])


def _alpaca(value: JsonObject, question: str = "instruction", answer: str = "output") -> Row:
    """Parse a question, perhaps with an input, and its answer, after an optional system message and history.

    Args:
        question: the field of the question.
        answer: the field of the answer.
    """
    messages = _system(value)
    history = value.get("history") or []
    if not isinstance(history, list):
        raise _unexpected("history", "a list of [question, answer]", history)
    for index, pair in enumerate(history):
        name = f"history[{index}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise _unexpected(name, "[question, answer]", pair)
        messages += [Message("user", _check_text(pair[0], name)), Message("assistant", _check_text(pair[1], name))]
    text = _optional_text(value, "input")
    if text and not value.get(question):
        # Some data sets put the whole question into `input`.
        messages.append(Message("user", text))
    else:
        messages.append(_question(_text(value, question), text))
    messages.append(Message("assistant", _text(value, answer)))
    return _conversation("alpaca", messages)


def _system(value: JsonObject) -> list[Message]:
    text = _optional_text(value, "system")
    return [Message("system", text)] if text else []


def _rounds(value: JsonObject) -> Row:
    """Parse a list of rounds: ["ask", text], ["ans", text, weight?] or ["api", call, result?]."""
    messages = _system(value)
    for index, turn in enumerate(_list(value, "rounds")):
        name = f"rounds[{index}]"
        match turn:
            case ["ask", text]:
                messages.append(Message("user", _check_text(text, name)))
            case ["ans", text]:
                messages.append(Message("assistant", _check_text(text, name)))
            case ["ans", text, weight]:
                weight = _check_weight(weight, f"{name}[2]")
                message = Message("assistant", _check_text(text, name), weight=weight)
                messages.append(message)
            case ["api", call, *results] if len(results) <= 1:
                messages.append(Message("assistant", "", (_tool_call(call, f"{name}[1]"),)))
                messages += [Message("tool", _tool_result(result, name)) for result in results]
            case _:
                raise ConversationError(f'field {name}: expected ["ask", text], ["ans", text] or ["api", call, return]')
    if value["type"] == "ref_qa":
        # The first question is about a reference text, which goes before it.
        reference = _text(value, "reference")
        first = next((index for index, message in enumerate(messages) if message.role == "user"), None)
        if first is not None:
            messages[first] = Message("user", f"{reference}\n\n{messages[first].content}")
    return _conversation(value["type"], messages, _tools(value))


def _tool_result(value: Any, name: str) -> str:
    return _check_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), name)


def _sharegpt(value: JsonObject) -> Row:
    first = _list(value, "conversations")[0]
    # Some data sets use OpenAI's keys in ShareGPT's field `conversations`.
    keys = ("role", "content") if isinstance(first, dict) and "role" in first else ("from", "value")
    messages = _system(value) + _messages(value, "conversations", *keys)
    return _conversation("sharegpt", messages, _tools(value))


def _openai(value: JsonObject) -> Row:
    return _conversation("messages", _messages(value, "messages", "role", "content"), _tools(value))


def _messages(value: JsonObject, field: str, role_key: str, content_key: str) -> list[Message]:
    """Return the messages in a field of the row, a list of objects.

    Args:
        role_key: key of the role in each object.
        content_key: key of the content in each object.
    """
    messages = []
    for index, turn in enumerate(_list(value, field)):
        name = f"{field}[{index}]"
        if not isinstance(turn, dict) or role_key not in turn:
            raise _unexpected(name, f"an object with {role_key} and {content_key}", turn)
        role = turn[role_key]
        content = turn.get(content_key)
        calls = turn.get("tool_calls") or []
        if role == "function_call":
            # ShareGPT has a role for tool calls; the content is the call.
            role, calls, content = "assistant", [content], None
        if not isinstance(role, str) or role not in _ROLES:
            raise _unexpected(f"{name}.{role_key}", ", ".join([*_ROLES, "function_call"]), role)
        if not isinstance(calls, list):
            raise _unexpected(f"{name}.tool_calls", "a list", calls)
        tool_calls = tuple(_tool_call(call, f"{name}.tool_calls[{place}]") for place, call in enumerate(calls))
        _check_media(turn, f"{name}.")
        if isinstance(content, list):
            content = "".join(_content_part(part, f"{name}.{content_key}[{at}]") for at, part in enumerate(content))
        text = _check_text(content, f"{name}.{content_key}") if content or not tool_calls else ""
        reasoning = next((_optional_text(turn, field) for field in _REASONING if turn.get(field)), "")
        if reasoning and _ROLES[role] != "assistant":
            raise ConversationError(f"field {name}: only an assistant's turn can have reasoning, not that of {role}")
        names = {field: _optional_text(turn, field) for field in ("name", "tool_call_id")}
        weight = _weight(turn, f"{name}.")
        if turn.get("label") is False:
            weight = 0.0
        messages.append(Message(_ROLES[role], text, tool_calls, weight, reasoning, **names))
    return messages


def _content_part(part: Any, name: str) -> str:
    """Return the text of one part of a message's content: a text, or an object with type `text`."""
    if isinstance(part, dict):
        if part.get("type", "text") != "text":
            raise ConversationError(f"field {name}: only text can be trained on, not {_quote(part['type'])}")
        part = part.get("text")
    return _check_text(part, name)


def _conversation(kind: str, messages: list[Message], tools: tuple[JsonObject, ...] = ()) -> Row:
    """Return a conversation, with consecutive messages of one role merged where that is possible.

    Raises:
        ConversationError: the roles are in a wrong order, or the last message is not an answer.
    """
    merged: list[Message] = []
    for number, message in enumerate(messages, start=1):
        last = merged[-1] if merged else None
        repeats = last is not None and last.role == message.role
        if last is not None and repeats and _can_merge(last, message):
            content = "\n".join(text for text in (last.content, message.content) if text)
            merged[-1] = replace(last, content=content, tool_calls=last.tool_calls + message.tool_calls)
            continue
        # These may follow each other unmerged: results of several calls, and answers with different weights.
        may_repeat = repeats and message.role in ("tool", "assistant")
        answers_no_call = message.role == "tool" and last is not None and last.role != "tool" and not last.tool_calls
        allowed = _ALLOWED_NEXT[last.role if last else None]
        if (message.role not in allowed and not may_repeat) or answers_no_call:
            place = f"after {last.role}" if last else "first"
            raise ConversationError(
                f"roles out of order: {message.role} stands {place}, as turn {number}; expected {' or '.join(allowed)}"
            )
        merged.append(message)
    if merged[-1].role != "assistant":
        raise ConversationError(f"expected an answer at the end; the last turn is of {merged[-1].role}")
    return Row(kind, tuple(merged), tools)


def _can_merge(first: Message, second: Message) -> bool:
    """Return whether two messages of one role can be merged; in the result, the text stands before the tool calls."""
    if first.role == "tool" or (first.tool_calls and second.content) or second.reasoning_content:
        return False
    return (first.weight, first.name) == (second.weight, second.name)


_PARSERS_BY_TYPE: dict[str, Callable[[JsonObject], Row]] = {
    "pretrain": _pretrain,
    "instruct": _instruct,
    "conversation": _rounds,
    "conver_has_api": _rounds,
    "ref_qa": _rounds,
}
# By the kind of row: the field that identifies it, and its parser. The first field that a row has decides.
_PARSERS_BY_FIELD: dict[str, tuple[str, Callable[[JsonObject], Row]]] = {
    "messages": ("messages", _openai),
    "sharegpt": ("conversations", _sharegpt),
    "alpaca": ("instruction", _alpaca),
    "query and response": ("query", partial(_alpaca, question="query", answer="response")),
    "question and answer": ("question", partial(_alpaca, question="question", answer="answer")),
    "completion": ("prompt", _completion),
    "text": ("text", _pretrain),
}
