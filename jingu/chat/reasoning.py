"""Separate the reasoning, `<think>…</think>`, from the answer that follows it, while they are generated."""

from __future__ import annotations

OPEN_TAG = "<think>"
_CLOSE_TAG = "</think>"


class ReasoningParser:
    """Splits a text, as it grows, into reasoning and answer. Only a text that begins with the tag has reasoning.

    Args:
        is_open: whether the prompt ends with the tag, as with templates that begin the reasoning.
    """

    def __init__(self, is_open: bool = False) -> None:
        self._buffer = ""
        self._is_inside = is_open
        # Before the first visible character of the text, of the reasoning or of the answer.
        self._at_start = True
        self._is_answer = False

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Add a piece of the text; return the reasoning and the answer that it completes."""
        self._buffer += text
        if not self._is_inside and not self._is_answer:
            stripped = self._buffer.lstrip()
            if OPEN_TAG.startswith(stripped[: len(OPEN_TAG)]) and len(stripped) < len(OPEN_TAG) and not is_last:
                return "", ""  # it may become the tag
            self._is_inside = stripped.startswith(OPEN_TAG)
            self._is_answer = not self._is_inside
            self._at_start = self._is_inside
            self._buffer = stripped.removeprefix(OPEN_TAG) if self._is_inside else self._buffer
        reasoning = ""
        if self._is_inside:
            reasoning = self._take_reasoning(is_last)
            if self._is_inside:
                return reasoning, ""
        answer = self._buffer.lstrip() if self._at_start else self._buffer
        self._at_start = self._at_start and not answer
        self._buffer = ""
        return reasoning, answer

    def _take_reasoning(self, is_last: bool) -> str:
        """Return the reasoning in the buffer. Withhold what may be white space before the closing tag, or its start."""
        reasoning, tag, rest = self._buffer.partition(_CLOSE_TAG)
        lengths = range(len(_CLOSE_TAG) - 1, 0, -1)
        if not tag and not is_last:
            partial = next((length for length in lengths if reasoning.endswith(_CLOSE_TAG[:length])), 0)
            reasoning = reasoning[: len(reasoning) - partial]
        reasoning = reasoning.rstrip()
        self._buffer = rest if tag else self._buffer[len(reasoning) :]
        if self._at_start:
            reasoning = reasoning.lstrip()
        # The answer begins after the tag.
        self._at_start = bool(tag) or (self._at_start and not reasoning)
        self._is_inside = not tag
        self._is_answer = bool(tag)
        return reasoning
