"""The fields of a row: one table of what each means, for tuning, for preferences and for prompts.

A parser reads fields from a `Fields` object, which removes them. What remains is not used by the row's format. It is
refused if it carries a part of the conversation, its loss or its rendering; otherwise it is carried along.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import isnan
from typing import Any, Literal, NamedTuple, get_args

from jingu.chat.messages import ConversationError, JsonObject
from jingu.tables import read_table

Scope = Literal["row", "message"]


class RowField(NamedTuple):
    """A field that jingu knows: an entry of `row_fields.toml`.

    Attributes:
        name: name of the field.
        effect: what it does, as Markdown.
        scopes: where it stands.
        spellings: other names with the same meaning.
        shapes_prompt: whether it changes the text of a prompt. Rows of prompts use such a field or refuse it.
        may_repeat: whether a row may have it beside a format that does not use it, if it repeats text of the row.
        is_optional: whether a format that does not use it carries it along.
        refusal: why every row with it is refused; empty if some format uses it.
        allows_false: whether false counts as no value.
    """

    name: str
    effect: str
    scopes: Sequence[Scope] = ("row",)
    spellings: Sequence[str] = ()
    shapes_prompt: bool = False
    may_repeat: bool = False
    is_optional: bool = False
    refusal: str = ""
    allows_false: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.spellings)


_FIELDS = [
    RowField(name, **{key: value for key, value in entry.items() if key != "names"})
    for entry in read_table(__file__, "row_fields.toml")["fields"]
    for name in entry["names"]
]
TABLES: dict[Scope, list[RowField]] = {
    scope: [field for field in _FIELDS if scope in field.scopes] for scope in get_args(Scope)
}
# Names of the same field by the name of the field.
_SPELLINGS = {
    (scope, field.name): dict.fromkeys(field.names).keys() for scope, fields in TABLES.items() for field in fields
}
# Names that jingu gives to the fields of rows.
KNOWN_NAMES = frozenset(name for field in TABLES["row"] for name in field.names)
# Names of fields with the loss weight of a row or a message.
WEIGHT_NAMES = frozenset((*_SPELLINGS["message", "train"], *_SPELLINGS["message", "weight"]))
# Fields of an answer. They may repeat a part of the trained answer, such as its result.
_ANSWERS = ("output", "answer", "response", "completion")
# A text of this many characters that occurs in a message repeats it; a shorter one may be there by chance.
_MIN_REPEATED_CHARS = 16
# What stands in names of a message's fields that say whether it is trained.
_LIKE_A_MASK = re.compile("loss|train|mask|weight|supervis")
# Names of fields to remember, so that rows with random ones do not fill the memory.
_MAX_NAMES = 1 << 12


@lru_cache(maxsize=_MAX_NAMES)
def find_field(name: str, scope: Scope = "row") -> RowField | None:
    """Return what jingu knows of a field. Upper case and separators make no difference; None if it is unknown."""
    return _fields_by_key(scope).get(_key(name))


@lru_cache
def _fields_by_key(scope: Scope) -> dict[str, RowField]:
    return {_key(name): field for field in TABLES[scope] for name in field.names}


def _key(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")


class Fields(dict[str, Any]):
    """The fields of a row or of a message that are not read yet. Fields without a value are left out.

    Attributes:
        carried: names of fields that are not used, of the row and of its messages.
    """

    __slots__ = ("carried", "num_prompt", "scope")

    def __init__(self, value: Mapping[str, Any], scope: Scope = "row") -> None:
        super().__init__(
            {
                name: item
                for name, item in value.items()
                if item is not None and not (type(item) is float and isnan(item))
            }
        )
        self.scope: Scope = scope
        self.carried: dict[str, None] = {}
        self.num_prompt = 0

    def spelling(self, name: str) -> str:
        """Return the first spelling of a field that the row has; its name if it has none."""
        return next((spelling for spelling in _SPELLINGS[self.scope, name] if spelling in self), name)

    def take(self, name: str) -> Any:
        """Read a field under any of its spellings; None if it is absent.

        Raises:
            ConversationError: two spellings have different values.
        """
        names = _SPELLINGS[self.scope, name]
        if names.isdisjoint(self):
            return None
        spellings = [spelling for spelling in names if spelling in self]
        values = [self.pop(spelling) for spelling in spellings]
        values = [value for value in values if not is_empty(value)] or values[:1]
        if any(value != values[0] for value in values):
            raise ConversationError(f"fields {' and '.join(spellings)}: they mean the same, but differ")
        return values[0]

    def account_for_rest(self, kind: str, texts: Sequence[str], *, prefix: str = "", hint: str = "") -> None:
        """Add the names of the remaining fields to `carried`.

        Args:
            kind: what has the fields, for error messages.
            texts: the texts of the row, in order; the last one is its answer.
            prefix: path of the message in its row, for error messages.
            hint: what to do about a field that is refused, with {name} for its name.

        Raises:
            ConversationError: a remaining field means something that the format cannot use.
        """
        for name, value in self.items():
            field = find_field(name, self.scope)
            if is_empty(value) or (value is False and field is not None and field.allows_false):
                continue
            if field is None and self.scope == "message" and _LIKE_A_MASK.search(name.lower()):
                raise ConversationError(f"field {prefix}{name}: it may be about the loss; write train or weight")
            if field is None or field.is_optional or _repeats(field, value, texts):
                self.carried["messages[]." * (self.scope == "message") + name] = None
                continue
            reason = field.refusal or f"{kind} has no place for it"
            if name not in field.names and not field.refusal:
                reason = f"it is spelled {field.name}"
            raise ConversationError(f"field {prefix}{name}: {reason}{hint.format(name=name)}")
        self.clear()


def is_missing(value: Any) -> bool:
    """Return whether a value stands for an absent field: null, or NaN, which tables write in its place."""
    return value is None or (isinstance(value, float) and isnan(value))


def is_empty(value: Any) -> bool:
    """Return whether a field has no content: an empty text, list or object."""
    return is_missing(value) or (isinstance(value, str | list | dict) and not value)


def _repeats(field: RowField, value: Any, texts: Sequence[str]) -> bool:
    """Return whether the texts of a row contain all texts of a field, or the field contains all of them."""
    if not field.may_repeat:
        return False

    def occurs(part: str) -> bool:
        if any(part == text.strip() for text in texts) or (field.name in _ANSWERS and part in texts[-1]):
            return True
        return len(part) >= _MIN_REPEATED_CHARS and any(part in text for text in texts)

    parts = [part.strip() for part in _collect_texts(value)]
    if not parts:
        return False
    return all(occurs(part) for part in parts) or any(all(text in part for text in texts) for part in parts)


def _collect_texts(value: Any) -> Iterator[str]:
    """Yield the texts of a value: a text or number, messages, or lists of them."""
    if isinstance(value, dict):
        for name in ("content", "value", "text"):
            yield from _collect_texts(value.get(name) or [])
    elif isinstance(value, list):
        for item in value:
            yield from _collect_texts(item)
    else:
        yield str(value)


def rename_columns(value: JsonObject, columns: Mapping[str, str]) -> JsonObject:
    """Return a row whose fields have the names that jingu uses.

    Args:
        columns: names of fields in the row, by the names that jingu uses; an empty one leaves out the field.
    """
    other_fields = {name: item for name, item in value.items() if name not in {*columns, *columns.values()}}
    return other_fields | {name: value[column] for name, column in columns.items() if column in value}


def describe_fields(scope: Scope) -> str:
    """Return the table of the fields as Markdown."""
    lines = ["| field | what it does |", "|---|---|"]
    fields_by_type: dict[str, list[str]] = {}
    for field in TABLES[scope]:
        fields_by_type.setdefault(field.effect, []).extend(field.names)
    for effect, names in fields_by_type.items():
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {effect} |")
    return "\n".join(lines)
