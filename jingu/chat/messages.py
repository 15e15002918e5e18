"""The messages of a conversation, and the rows of instruction data that hold them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
JsonObject = dict[str, Any]

# Halves of surrogate pairs, which have no UTF-8 form, and noncharacters with which templates mark positions in a text.
# No message may contain them.
_RESERVED_CHARACTERS = re.compile("[\ud800-\udfff\ufdd0-\ufdd2]")


class ConversationError(ValueError):
    """A row or conversation that cannot be used: the field at fault and what was expected there."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Attributes:
        tool_calls: what an assistant calls; each has a `name` and `arguments`, and may have an `id`.
        weight: factor on the loss of an assistant's tokens. With 0 the model reads the turn but is not trained on it.
        reasoning_content: what an assistant thought before its answer.
        name: of the author, or of the tool whose result this is.
        tool_call_id: the call whose result this is.
    """

    role: Role
    content: str
    tool_calls: tuple[JsonObject, ...] = ()
    weight: float = 1.0
    reasoning_content: str = ""
    name: str = ""
    tool_call_id: str = ""


@dataclass(frozen=True)
class Row:
    """One row of instruction data: either a conversation (`messages`) or plain text (`segments`).

    Attributes:
        kind: the form in which the row was written, for statistics.
        tools: definitions of the tools that the assistant may call.
        segments: consecutive texts, each with whether the model is trained on it. No template is applied.
    """

    kind: str
    messages: tuple[Message, ...] = ()
    tools: tuple[JsonObject, ...] = ()
    segments: tuple[tuple[str, bool], ...] = ()


def check_characters(text: str, label: str = "") -> None:
    """Raise ConversationError if the text contains a reserved character; `label` begins the message."""
    if match := _RESERVED_CHARACTERS.search(text):
        raise ConversationError(f"{label}U+{ord(match[0]):04X} is not a character and cannot appear in text")
