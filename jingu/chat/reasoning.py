"""Separate the reasoning, `<think>…</think>`, from the answer after it while a text is generated."""

from __future__ import annotations

OPEN_TAG = "<think>"
_CLOSE_TAG = "</think>"


class ReasoningParser:
    """Splits a growing text into reasoning and answer. A text that does not begin with `<think>` is all answer.

    White space around the tags is removed.

    Attributes:
        num_pieces: how many of the pieces so far belong to the reasoning, with its tags.

    Args:
        is_open: whether the prompt already ends with `<think>`, as some templates write it. The text then begins with
            reasoning.
    """

    def __init__(self, is_open: bool = False) -> None:
        self._buffer = ""
        self._is_inside = is_open
        # Whether the current part (reasoning or answer) has no visible character yet: leading spaces are dropped.
        self._at_start = True
        self._is_answer = False
        # Pieces of the text that belong to the reasoning, and those at the beginning that may turn out to.
        self.num_pieces = 0
        self._num_undecided = 0

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Add a piece of the text; return the new reasoning and the new answer text, either of which can be empty.

        Args:
            is_last: whether the text ends here. Withheld characters are then returned, too.
        """
        was_inside = self._is_inside
        reasoning, answer = self._divide(text, is_last)
        if was_inside or self._is_inside or reasoning:
            self.num_pieces += 1 + self._num_undecided
            self._num_undecided = 0
        elif not self._is_answer:
            self._num_undecided += 1
        return reasoning, answer

    def _divide(self, text: str, is_last: bool) -> tuple[str, str]:
        """Add a piece of the text; see `push`."""
        self._buffer += text
        # Decide, at the beginning of the text, whether it starts with the tag.
        if not self._is_inside and not self._is_answer:
            stripped_text = self._buffer.lstrip()
            if (
                OPEN_TAG.startswith(stripped_text[: len(OPEN_TAG)])
                and len(stripped_text) < len(OPEN_TAG)
                and not is_last
            ):
                return "", ""  # it may become the tag
            self._is_inside = stripped_text.startswith(OPEN_TAG)
            self._is_answer = not self._is_inside
            self._at_start = self._is_inside
            self._buffer = stripped_text.removeprefix(OPEN_TAG) if self._is_inside else self._buffer
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
        """Return the reasoning in the buffer, except for an end that may belong to the closing tag.

        That end stays in the buffer: white space, which is dropped before a closing tag, or the tag's first characters.
        """
        reasoning, tag, remainder = self._buffer.partition(_CLOSE_TAG)
        lengths = range(len(_CLOSE_TAG) - 1, 0, -1)
        if not tag and not is_last:
            partial = next((length for length in lengths if reasoning.endswith(_CLOSE_TAG[:length])), 0)
            reasoning = reasoning[: len(reasoning) - partial]
        reasoning = reasoning.rstrip()
        self._buffer = remainder if tag else self._buffer[len(reasoning) :]
        if self._at_start:
            reasoning = reasoning.lstrip()
        # The answer begins after the tag.
        self._at_start = bool(tag) or (self._at_start and not reasoning)
        self._is_inside = not tag
        self._is_answer = bool(tag)
        return reasoning
