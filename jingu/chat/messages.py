"""The messages of a conversation, and the rows of instruction data that hold them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
JsonObject = dict[str, Any]

# Characters that no message may contain: halves of surrogate pairs, which UTF-8 cannot encode, and the noncharacters
# that `jingu.chat.templates` and `jingu.chat.tracing` use as marks in rendered text.
_RESERVED_CHARACTERS = re.compile("[\ud800-\udfff\ufdd0-\ufdd4]")


class ConversationError(ValueError):
    """A row or conversation cannot be used. The message names the field at fault and what was expected there."""


class UnsupportedToolsError(ConversationError):
    """A chat template leaves out tools or calls."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Attributes:
        tool_calls: calls that an assistant makes; each has a `name` and `arguments`, and may have an `id`.
        weight: factor on the loss of an assistant's tokens. With 0, the turn is context and is not trained on. Of other
            messages, it matters only if the loss is on all tokens.
        reasoning_content: an assistant's reasoning before its answer.
        name: name of the author or, if the role is `tool`, of the tool that returned this result.
        tool_call_id: id of the call that this message answers; empty if it has none.
        is_prompt: whether it belongs to the prompt of a row of prompt and completion. Nothing of it is trained, unless
            the loss is on all tokens.
        prefill_length: number of characters at the start of an assistant's content that belong to the prompt.
    """

    role: Role
    content: str
    tool_calls: tuple[JsonObject, ...] = ()
    weight: float = 1.0
    reasoning_content: str = ""
    name: str = ""
    tool_call_id: str = ""
    is_prompt: bool = False
    prefill_length: int = 0


@dataclass(frozen=True)
class Row:
    """One row of instruction data: either a conversation (`messages`) or plain text (`segments`).

    Attributes:
        kind: format of the row in its source file, for statistics.
        tools: definitions of the tools that the assistant may call.
        segments: consecutive texts, each with the factor on its loss; 0: it is context. No template is applied.
        variables: further variables of the chat template.
        carried: names of fields of the row, and of its messages, that have no effect.
    """

    kind: str
    messages: tuple[Message, ...] = ()
    tools: tuple[JsonObject, ...] = ()
    segments: tuple[tuple[str, float], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    carried: tuple[str, ...] = ()


def check_characters(text: str, label: str = "") -> None:
    """Raise ConversationError if the text contains a reserved character. `label` is the prefix of the message."""
    if match := _RESERVED_CHARACTERS.search(text):
        raise ConversationError(f"{label}U+{ord(match[0]):04X} is not a character and cannot appear in text")
