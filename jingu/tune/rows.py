"""Rows of instruction data, in the forms that people have, and the one form that all of them are brought to.

A file is a JSON list or JSON Lines, and may mix the forms; a row is recognised by its fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from jingu.errors import JinguError
from jingu.text.readers import Span, damaged, first_line, json_reason, lines_of
from jingu.text.storage import CorpusFile, damages, is_address

LARGEST_ROW = 10_000_000
"""Bytes; a longer row is taken for a mistake."""
MOST_WEIGHT = 2.0
"""Of an answer; weights are kept in hundredths, in a byte."""
RESERVED = re.compile("[\ufdd0-\ufdd2]")
"""Code points that are no characters; templates mark places with them."""

Role = Literal["system", "user", "assistant", "tool"]
Fields = dict[str, Any]


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str
    tool_calls: tuple[Fields, ...] = ()
    """Each with a `name` and `arguments`."""
    weight: float = 1.0
    """Factor on the loss of an answer's tokens; 0: it is read but not trained."""


@dataclass(frozen=True)
class Row:
    """A conversation; or, in `parts`, text that stands as it is."""

    kind: str
    messages: tuple[Message, ...] = ()
    tools: tuple[Fields, ...] = ()
    parts: tuple[tuple[str, bool], ...] = ()
    """Texts one after another, and whether each is an answer."""


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used: where it is, what was expected, how it begins."""

    file: str
    number: int
    reason: str
    start: str

    def __str__(self) -> str:
        start = " ".join(self.start[:80].split())
        return f"row {self.number}: {self.reason}. It begins: {start}{'…' if len(self.start) > 80 else ''}"


def bad_row(file: str, number: int, reason: str, row: Row) -> BadRow:
    """A row whose form is good, but that cannot be used."""
    return BadRow(file, number, reason, row.messages[0].content if row.messages else row.parts[0][0])


class RowError(ValueError):
    """What is wrong with a row: a field, and what was expected of it."""


def rows_before(span: Span) -> int:
    """Rows of the file before those of a span: of a .json, or lines."""
    if span.file.kind == "json":
        return _share(len(_listed(span.file)), span)[0]
    with closing(span.file.open()) as stream:
        left, count = first_line(stream, span), 0
        stream.seek(0) if left else None  # of what is packed, not every stream can
        while left and (piece := stream.read(min(left, 1 << 24))):
            count, left = count + piece.count(b"\n"), left - len(piece)
    return count


def read_rows(span: Span, bad: Callable[[BadRow], None], largest: int = LARGEST_ROW) -> Iterator[tuple[int, Row]]:
    """The good rows of a span, each with its number there (from 1); `bad` is told of the others.

    Raises:
        JinguError: the file cannot be read, or as a whole is not JSON.
    """
    before = cache(partial(rows_before, span))
    try:
        for number, text, value in (_part if span.file.kind == "json" else _lines)(span, largest):
            try:
                if isinstance(value, ValueError):
                    raise value if isinstance(value, RowError) else RowError(f"it is not JSON ({json_reason(value)})")
                row = parse_row(value)
            except RowError as error:
                text = json.dumps(value, ensure_ascii=False) if text is None else text
                bad(BadRow(span.file.path, before() + number, str(error), text[:100]))
            else:
                yield number, row
    except damages() as error:
        raise damaged(span.file, error) from error


def stop_at(bad: BadRow) -> None:
    """Raise what is told of a bad row where none is to be skipped."""
    raise JinguError(
        f"{bad}.", where=bad.file, fix="Mend the row, or set data.on_error=skip to leave out such rows and list them."
    )


def _lines(span: Span, largest: int) -> Iterator[tuple[int, str | None, Any]]:
    """Each row's number, its text, and its value or the ValueError that says what is wrong with the text."""
    with closing(span.file.open()) as stream:
        for number, (line, place) in enumerate(lines_of(stream, span, largest), start=1):
            wrong = _too_long(largest) if len(line) > largest else None
            try:
                text = line.decode("utf-8-sig" if place == 0 else "utf-8")
            except UnicodeDecodeError as error:
                text = line.decode(errors="replace")
                wrong = wrong or RowError(f"it is not UTF-8 ({error.reason} at byte {error.start} of it)")
            if wrong or text.strip():
                yield number, text, wrong or _parsed(text.rstrip())


def _part(span: Span, largest: int) -> Iterator[tuple[int, str | None, Any]]:
    """As `_lines`; the text is None where it cannot be longer than a row may be."""
    rows = _listed(span.file)
    first, end = _share(len(rows), span)
    short = span.file.size <= largest and not span.file.compression
    for number, value in enumerate(rows[first:end], start=1):
        text = None if short else json.dumps(value, ensure_ascii=False)
        yield number, text, value if text is None or len(text) <= largest else _too_long(largest)


def _too_long(largest: int) -> RowError:
    return RowError(f"it is longer than {largest:,} bytes, and taken for a mistake")


def _share(rows: int, span: Span) -> tuple[int, int]:
    """Which rows of a .json are those of a span: as large a part of them as it is of the file."""
    size = max(span.file.size, 1)
    return rows * span.start // size, rows * span.end // size


def _listed(file: CorpusFile) -> list[Any]:
    """The rows of a .json file. Raises JinguError."""
    return _read_list(file, 0 if is_address(file.path) else Path(file.path).stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _read_list(file: CorpusFile, _changed: int) -> list[Any]:
    """`_listed`, once for all spans of a file."""
    try:
        with closing(file.open()) as stream:
            text = stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"the file is not UTF-8 ({error.reason} at byte {error.start})."
        raise JinguError(what, where=file.path) from error
    whole = _parsed(text)
    if isinstance(whole, ValueError):
        whole = _parsed(without_comments(text))
    if not isinstance(whole, list):
        what = f"the file is not JSON ({whole})" if isinstance(whole, ValueError) else "the file holds no list of rows"
        raise JinguError(
            f"{what}.", where=file.path, fix="It should hold [row, row, ...]; name it .jsonl where each line is a row."
        )
    return whole


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        return error
    except RecursionError:
        return ValueError("it is nested too deeply")


_STRING_OR_EXTRA = re.compile(
    r'("(?:[^"\\]|\\.)*")|//[^\n]*|/\*.*?\*/|(,)(?=(?:\s|//[^\n]*|/\*.*?\*/)*[\]}])', re.DOTALL
)


def without_comments(text: str) -> str:
    """JSON as people write it, without comments and trailing commas; lines keep their numbers."""
    return _STRING_OR_EXTRA.sub(lambda found: found[1] or "\n" * found[0].count("\n"), text)


# Forms


def parse_row(value: Any) -> Row:
    """A row of any known form. Raises RowError."""
    if not isinstance(value, dict):
        raise RowError(f"expected an object with fields, not {_shown(value)}")
    kind = value.get("type")
    if kind is not None:
        if kind not in _TYPED:
            raise RowError(f"field type: expected {', '.join(_TYPED)}, not {_shown(kind)}")
        return _TYPED[kind](value)
    for name, (needed, parse) in _BY_FIELDS.items():
        if needed in value:
            row = parse(value)
            return row if row.kind == name else replace(row, kind=name)
    known = ", ".join([*(needed for needed, _ in _BY_FIELDS.values()), "type"])
    raise RowError(f"expected one of the fields {known}; it has {', '.join(map(str, value)) or 'none'}")


def _text(value: Fields, name: str, default: str | None = None) -> str:
    """A field that holds text, not empty; `default` where it is absent, null or empty."""
    found = value.get(name)
    if default is not None and found in (None, ""):
        return default
    if name not in value:
        raise RowError(f"field {name}: expected text, but it is missing")
    return _checked(found, name)


def _checked(found: Any, name: str) -> str:
    if not isinstance(found, str) or not found.strip():
        raise RowError(f"field {name}: expected text that is not empty, not {_shown(found)}")
    if reserved := RESERVED.search(found):
        raise RowError(f"field {name}: U+{ord(reserved[0]):04X} is no character and cannot stand in text")
    return found


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _list(value: Fields, name: str) -> list[Any]:
    found = value.get(name)
    if not isinstance(found, list) or not found:
        raise RowError(f"field {name}: expected a list that is not empty, not {_shown(found)}")
    return found


def _weight(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_WEIGHT:
        raise RowError(f"field {name}: expected a number from 0 to {MOST_WEIGHT:g}, not {_shown(value)}")
    return float(value)


def _pretrain(value: Fields) -> Row:
    return Row("pretrain", parts=((_text(value, "text"), True),))


def _completion(value: Fields) -> Row:
    if isinstance(value["prompt"], list):
        rest = value.get("completion", [])
        if not isinstance(rest, list):
            raise RowError(f"field completion: expected a list of messages as in prompt, not {_shown(rest)}")
        return _messages({**value, "messages": [*value["prompt"], *rest]})
    return Row("completion", parts=((_text(value, "prompt"), False), (_text(value, "completion"), True)))


def _asked(instruction: str, more: str) -> str:
    return f"{instruction}\n{more}" if more else instruction


def _instruct(value: Fields) -> Row:
    ask = _asked(_text(value, "instruct"), _text(value, "input", ""))
    return _conversation("instruct", [Message("user", ask), Message("assistant", _text(value, "output"))])


def _alpaca(value: Fields) -> Row:
    history = value.get("history") or []
    if not isinstance(history, list):
        raise RowError(f"field history: expected a list of [question, answer], not {_shown(history)}")
    turns = []
    for number, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError(f"field history[{number}]: expected [question, answer], not {_shown(pair)}")
        question, answer = (_checked(each, f"history[{number}]") for each in pair)
        turns += [Message("user", question), Message("assistant", answer)]
    # Some data sets put the whole question into `input`.
    more = _text(value, "input", "")
    ask = _asked(_text(value, "instruction"), more) if value.get("instruction") or not more else more
    turns += [Message("user", ask), Message("assistant", _text(value, "output"))]
    return _conversation("alpaca", [*_system(value), *turns])


def _system(value: Fields) -> list[Message]:
    text = _text(value, "system", "")
    return [Message("system", text)] if text else []


def _rounds(value: Fields) -> Row:
    turns = _system(value)
    for number, turn in enumerate(_list(value, "rounds")):
        name = f"rounds[{number}]"
        known = isinstance(turn, list) and 2 <= len(turn) <= 3 and turn[0] in ("ask", "ans", "api")
        if not known or (turn[0] == "ask" and len(turn) != 2):
            raise RowError(
                f'field {name}: expected ["ask", text], ["ans", text] or ["api", call, return]',
            )
        if turn[0] == "ask":
            turns.append(Message("user", _checked(turn[1], name)))
        elif turn[0] == "ans":
            weight = _weight(turn[2], f"{name}[2]") if len(turn) == 3 else 1.0
            turns.append(Message("assistant", _checked(turn[1], name), weight=weight))
        else:
            turns.append(Message("assistant", "", (_call(turn[1], f"{name}[1]"),)))
            turns += [Message("tool", _returned(turn[2], name))] if len(turn) == 3 else []
    if value["type"] == "ref_qa":
        reference = _text(value, "reference")
        ask = next((place for place, turn in enumerate(turns) if turn.role == "user"), None)
        if ask is not None:
            turns[ask] = Message("user", f"{reference}\n\n{turns[ask].content}")
    return _conversation(value["type"], turns, _tools(value))


def _returned(value: Any, name: str) -> str:
    return _checked(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), name)


_SHAREGPT: dict[str, Role] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("observation", "tool"), "tool"),
    "system": "system",
}


def _sharegpt(value: Fields) -> Row:
    turns = _system(value)
    for number, turn in enumerate(_list(value, "conversations")):
        name = f"conversations[{number}]"
        if not isinstance(turn, dict) or "from" not in turn:
            raise RowError(f"field {name}: expected an object with from and value, not {_shown(turn)}")
        who, weight = turn["from"], _weight(turn.get("weight", 1), f"{name}.weight")
        if who == "function_call":
            turns.append(Message("assistant", "", (_call(turn.get("value"), f"{name}.value"),), weight))
            continue
        if who not in _SHAREGPT:
            raise RowError(f"field {name}.from: expected {', '.join([*_SHAREGPT, 'function_call'])}, not {_shown(who)}")
        turns.append(Message(_SHAREGPT[who], _checked(turn.get("value"), f"{name}.value"), weight=weight))
    return _conversation("sharegpt", turns, _tools(value))


_OPENAI: dict[str, Role] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function"), "tool"),
    "user": "user",
    "assistant": "assistant",
}


def _messages(value: Fields) -> Row:
    turns = []
    for number, turn in enumerate(_list(value, "messages")):
        name = f"messages[{number}]"
        if not isinstance(turn, dict):
            raise RowError(f"field {name}: expected an object with role and content, not {_shown(turn)}")
        if turn.get("role") not in _OPENAI:
            raise RowError(f"field {name}.role: expected {', '.join(_OPENAI)}, not {_shown(turn.get('role'))}")
        calls = turn.get("tool_calls") or []
        if not isinstance(calls, list):
            raise RowError(f"field {name}.tool_calls: expected a list, not {_shown(calls)}")
        called = tuple(_call(call, f"{name}.tool_calls[{place}]") for place, call in enumerate(calls))
        content = turn.get("content")
        if isinstance(content, list):  # parts, of which text can be read
            content = "".join(_text(part, "text") if isinstance(part, dict) else "" for part in content)
        text = "" if called and not content else _checked(content, f"{name}.content")
        weight = _weight(turn.get("weight", 1), f"{name}.weight")
        turns.append(Message(_OPENAI[turn["role"]], text, called, weight))
    return _conversation("messages", turns, _tools(value))


def _tools(value: Fields) -> tuple[Fields, ...]:
    """What can be called, given as a list or as its JSON."""
    found = value.get("tools") or value.get("apis") or []
    found = _parsed(found) if isinstance(found, str) else found
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise RowError(f"field tools: expected a list of objects, not {_shown(value.get('tools'))}")
    return tuple(found)


def _call(value: Any, name: str) -> Fields:
    """A call of a tool: an object with name and arguments, perhaps under `function`, perhaps as JSON in text."""
    found = _parsed(value) if isinstance(value, str) else value
    found = found.get("function", found) if isinstance(found, dict) else found
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise RowError(f"field {name}: expected a call with name and arguments, not {_shown(value)}")
    arguments = found.get("arguments", {})
    arguments = _parsed(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise RowError(f"field {name}.arguments: expected an object, not {_shown(found.get('arguments'))}")
    return {"name": found["name"], "arguments": arguments}


_MAY_FOLLOW: dict[str | None, tuple[Role, ...]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant",),
}


def _conversation(kind: str, turns: list[Message], tools: tuple[Fields, ...] = ()) -> Row:
    """A conversation whose roles are in order; turns of one role in a row are joined."""
    joined: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        last = joined[-1] if joined else None
        if last is not None and last.role == turn.role and last.role != "tool" and last.weight == turn.weight:
            content = "\n".join(text for text in (last.content, turn.content) if text)
            joined[-1] = Message(turn.role, content, last.tool_calls + turn.tool_calls, turn.weight)
            continue
        allowed = _MAY_FOLLOW[last.role if last else None]
        again = last is not None and last.role == turn.role and turn.role in ("tool", "assistant")
        answers_no_call = turn.role == "tool" and last is not None and not (last.tool_calls or last.role == "tool")
        if (turn.role not in allowed and not again) or answers_no_call:
            before = f"after {last.role}" if last else "first"
            raise RowError(
                f"roles out of order: {turn.role} stands {before}, as turn {number}; expected {' or '.join(allowed)}"
            )
        joined.append(turn)
    if joined[-1].role != "assistant":
        raise RowError(f"expected an answer at the end; the last turn is of {joined[-1].role}")
    return Row(kind, tuple(joined), tools)


_TYPED: dict[str, Callable[[Fields], Row]] = {
    "pretrain": _pretrain,
    "instruct": _instruct,
    "conversation": _rounds,
    "conver_has_api": _rounds,
    "ref_qa": _rounds,
}
_BY_FIELDS: dict[str, tuple[str, Callable[[Fields], Row]]] = {
    "messages": ("messages", _messages),
    "sharegpt": ("conversations", _sharegpt),
    "alpaca": ("instruction", _alpaca),
    "completion": ("prompt", _completion),
    "text": ("text", _pretrain),
}
