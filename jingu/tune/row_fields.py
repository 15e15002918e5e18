"""The fields of a row: one table of what each means, for tuning, for preferences and for prompts.

A parser reads fields from a `Fields` object, which removes them. What remains is not used by the row's format. It is
refused if it carries a part of the conversation, its loss or its rendering; otherwise it is carried along.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import isnan
from typing import Any, Literal, NamedTuple

from jingu.chat.messages import ConversationError, JsonObject

Scope = Literal["row", "message"]


class RowField(NamedTuple):
    """A field that jingu knows.

    Attributes:
        name: name of the field.
        effect: what it does, as Markdown.
        spellings: other names with the same meaning.
        shapes_prompt: whether it changes the text of a prompt. Rows of prompts use such a field or refuse it.
        may_repeat: whether a row may have it beside a format that does not use it, if it repeats text of the row.
        is_optional: whether a format that does not use it carries it along.
        refusal: why every row with it is refused; empty if some format uses it.
        allows_false: whether false counts as no value.
    """

    name: str
    effect: str
    spellings: tuple[str, ...] = ()
    shapes_prompt: bool = False
    may_repeat: bool = False
    is_optional: bool = False
    refusal: str = ""
    allows_false: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.spellings)


_UNUSED_TEXT = "part of some formats; beside another one, the row is refused unless the field repeats text of the row"
_ONLY_TEXT = "only text can be trained on"
_MEDIA = RowField(
    "images",
    "refused unless empty: only text can be trained on",
    ("image", "image_url", "image_path", "video", "videos", "audio", "audios"),
    shapes_prompt=True,
    refusal=_ONLY_TEXT,
    allows_false=True,
)
_MASK = RowField(
    "mask",
    "refused: it does not say whether true means trained or left out; write `train`",
    ("masked", "loss_masked", "ignore_loss", "mask_loss"),
    refusal="it does not say whether true means trained or left out; write train",
)
_TRAIN = RowField(
    "train",
    "whether the row, or an answer, is trained: true or false, 1 or 0, or one of these as text. False is a weight of 0",
    ("training", "trainable", "train_on_turn", "loss", "loss_mask", "compute_loss"),
)
_WEIGHT = RowField(
    "weight",
    "factor on the loss of the row, or of an answer, from 0 (context only) to 2; factors of row and answer are "
    "multiplied. Preference rows have none",
    ("loss_weight", "loss_scale", "sample_weight"),
)
_PART_MASK = RowField(
    "train_detail",
    "refused: loss weights apply to whole messages",
    ("training_detail", "token_weights", "loss_weights"),
    refusal="loss weights apply to whole messages",
)
_REASONING = RowField(
    "reasoning_content",
    "reasoning of an assistant before its answer; beside a single answer, that of the answer",
    ("thinking", "reasoning", "thought"),
)

ROW_FIELDS = (
    RowField("messages", f"the conversation; {_UNUSED_TEXT}", ("conversations",), may_repeat=True),
    *(
        RowField(name, _UNUSED_TEXT, may_repeat=True)
        for name in (
            *("rounds", "reference", "instruct", "instruction", "input", "output", "question", "answer", "query"),
            *("response", "prompt", "completion", "text", "context", "passage"),
        )
    ),
    RowField("type", "names a format (`pretrain`, `instruct`, `conversation`, …); otherwise carried", is_optional=True),
    RowField(
        "system",
        "the system message, which goes first; a row whose messages begin with another one is refused",
        ("system_prompt", "system_message", "system_msg", "system_instruction", "sys_prompt"),
        shapes_prompt=True,
        may_repeat=True,
    ),
    RowField(
        "history",
        "earlier turns, after the system message: pairs `[question, answer]`, or messages",
        ("chat_history", "conversation_history"),
        shapes_prompt=True,
    ),
    RowField(
        "tools",
        "definitions of tools: a list of objects, or the JSON text of one",
        ("functions", "apis", "available_tools", "tool_definitions", "function_definitions"),
        shapes_prompt=True,
    ),
    RowField(
        "chat_template_kwargs",
        "further variables of the chat template: an object, or the JSON text of one",
        ("chat_template_args", "template_kwargs"),
        shapes_prompt=True,
    ),
    RowField(
        "enable_thinking",
        "refused: variables of the template stand in `chat_template_kwargs`",
        ("reasoning_effort", "thinking_budget", "add_generation_prompt", "continue_final_message", "documents"),
        shapes_prompt=True,
        refusal="a variable of the chat template stands in chat_template_kwargs",
    ),
    _REASONING,
    _TRAIN,
    _WEIGHT,
    RowField(
        "label",
        "of preference rows: whether the answer is desirable. Tuning refuses a row where it is false",
        ("kto_tag",),
        is_optional=True,
    ),
    RowField("chosen", "the better answer of a preference row", may_repeat=True),
    RowField("rejected", "the worse answer of a preference row", may_repeat=True),
    RowField("ranking", "several answers of a preference row", may_repeat=True),
    RowField("scores", "numbers of the answers in `ranking`", is_optional=True),
    RowField("margin", "by how much `chosen` is better, in units of reward", is_optional=True),
    _MASK,
    _PART_MASK,
    RowField(
        "input_ids",
        "refused: rows are text, which jingu tokenizes",
        ("labels", "attention_mask", "completion_mask", "assistant_masks"),
        refusal="rows are text, which jingu tokenizes",
    ),
    _MEDIA,
)
MESSAGE_FIELDS = (
    RowField("role", "who speaks; beside `content`", ("from",), may_repeat=True),
    RowField("content", "the text, or a list of parts with `text`", ("value",), may_repeat=True),
    RowField("tool_calls", "calls of an assistant"),
    RowField("function_call", "a single call of an assistant"),
    RowField("name", "name of the author, or of the tool that returned this result"),
    RowField("tool_call_id", "id of the call that a tool's result answers"),
    _REASONING,
    _TRAIN._replace(
        spellings=(*_TRAIN.spellings, "label"),
        effect="whether the answer is trained, as above; of another message only false is accepted",
    ),
    _WEIGHT,
    _MASK,
    _PART_MASK,
    RowField("text", "refused unless it repeats text of the row", ("parts", "message"), may_repeat=True),
    RowField(
        "tools",
        "refused: definitions of tools stand beside the messages",
        ("functions", "apis"),
        refusal="definitions of tools stand beside the messages",
    ),
    RowField(
        "prefix",
        "refused unless false: a message is trained whole",
        ("partial", "refusal"),
        refusal="a message is trained whole, as content",
        allows_false=True,
    ),
    _MEDIA,
)
TABLES: Mapping[Scope, tuple[RowField, ...]] = {"row": ROW_FIELDS, "message": MESSAGE_FIELDS}
# Names of the same field by the name of the field.
_SPELLINGS = {
    (scope, field.name): dict.fromkeys(field.names).keys() for scope, fields in TABLES.items() for field in fields
}
# Names that jingu gives to the fields of rows.
KNOWN_NAMES = frozenset(name for field in ROW_FIELDS for name in field.names)
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
