"""Find an answer in what its message wrote: where the header ends, and which token ends the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jingu.chat.messages import ConversationError, JsonObject
from jingu.chat.tracing import Span, TracedText

# Keys under which templates expect reasoning; gpt-oss and LFM use the second.
REASONING_KEYS = ("reasoning_content", "thinking")
# How templates write that there is no reasoning. The opening tag may belong to the prompt.
_EMPTY_REASONING = re.compile(
    r"\s*(?:"
    r"(?:<think>\s*)?</think>|(?:<thinking>\s*)?</thinking>|(?:<seed:think>\s*)?</seed:think>|"
    r"(?:\[THINK\]\s*)?\[/THINK\]|(?:◁think▷\s*)?◁/think▷|(?:<\|channel>thought\s*)?<channel\|>|"
    r"(?:<\|START_THINKING\|>\s*)?<\|END_THINKING\|>"
    r")"
)
# A template without any of these writes no such block.
EMPTY_WORDS = ("think", "THINK", "thought")
# What a prompt may have that an answer without reasoning lacks: the begin of a block of reasoning, or an empty one.
_PROMPTED_REASONING = re.compile(
    r"\s*(?:</?think>|</?thinking>|</?seed:think>|\[/?THINK\]|◁/?think▷|<\|channel>thought|<channel\|>|"
    r"<\|(?:START|END)_THINKING\|>|\s)*"
)


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens that a template may write."""

    tokens: Mapping[str, int]
    bos_token: str

    @cached_property
    def longest_first(self) -> list[str]:
        """The tokens, so that one that is a prefix of another does not match in its place."""
        return sorted(self.tokens, key=len, reverse=True)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.longest_first)) or "(?!)")

    @cached_property
    def next_token(self) -> re.Pattern[str]:
        """White space and a special token that can end an answer, as BOS cannot."""
        tokens = [token for token in self.longest_first if token != self.bos_token]
        return re.compile(rf"\s*(?:{'|'.join(map(re.escape, tokens)) or '(?!)'})")

    def last(self, text: str) -> str:
        """Return the special token at the end of a text; empty if there is none."""
        return next((token for token in self.longest_first if text.endswith(token)), "")


def common_length(first: str, second: str) -> int:
    """Return the length of the common beginning of two texts."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(index for index in range(length) if first[index] != second[index])


def find_turn(trace: TracedText, index: int, message: JsonObject, where: str) -> Span | None:
    """Return start and end of what a message wrote; None if it is empty and wrote nothing.

    Raises:
        ConversationError: it wrote several pieces, or its pieces cannot be told from those of others.
    """
    if len(trace.pieces[index]) == 1:
        return trace.pieces[index][0]
    # Earlier loops over the messages may write white space.
    pieces = [piece for piece in trace.pieces[index] if trace.text[slice(*piece)].strip()]
    pieces = pieces or trace.pieces[index][-1:]
    if len(pieces) == 1:
        return pieces[0]
    if len(pieces) > 1:
        raise ConversationError(
            f"the chat template {where} writes an answer in {len(pieces)} places (the last one in line "
            f"{trace.lines[index]}), so it cannot be located"
        )
    if any(list_parts(message)):
        reason = f"does not write this answer: {_plain(message).strip()[:40]}"
        if trace.unclear:
            reason = f"writes several messages at once in line {trace.unclear}, so its answers cannot be located"
        raise ConversationError(f"the chat template {where} {reason}")
    return None


def find_header(prompt: str, output: str, header: str) -> int | None:
    """Return the length of the header in what an answer's message wrote: its common beginning with the prompt.

    Args:
        prompt: the generation prompt.
        header: what answers have in common before their content.

    Returns:
        None if the answer does not continue the prompt, even apart from a begin of reasoning.
    """
    if output.startswith(prompt):
        return len(prompt)
    length = common_length(prompt[: common_length(prompt, header)], output)
    return length if _PROMPTED_REASONING.fullmatch(prompt, length) else None


def find_end(text: str, span: Span, message: JsonObject, special: SpecialTokens) -> int | None:
    """Return the end of an answer, after its end token; None if no special token ends it.

    Args:
        span: from the end of the header to the end of what the message wrote.
    """
    start, stop = span
    # 1. The last special token that the message wrote after its content, and only white space after it.
    content_end = start
    for part in list_parts(message):
        position = text.find(part, content_end, stop)
        content_end = position + len(part) if position >= 0 else content_end
    limit = stop
    for match in reversed(list(special.pattern.finditer(text, content_end, stop))):
        is_end = not text[match.end() : limit].strip() and not _closes(match[0], text[start : match.start()])
        if is_end:
            return match.end()
        # What follows is the header of the next turn; this token may begin it.
        limit = match.start()
    # 2. A special token right after it, which the next message or a line after the loop writes.
    following = special.next_token.match(text, stop)
    return following.end() if following else None


def _closes(token: str, text: str) -> bool:
    """Return whether a token is a closing tag whose opening tag is in a text."""
    if token.startswith("</"):
        return f"<{token[2:]}" in text
    return token.endswith("|>") and not token.startswith("<|") and f"<|{token[1:-2]}>" in text


def check_mark(trace: TracedText, turn: Span, span: Span, message: JsonObject, where: str) -> None:
    """Raise ConversationError unless the template's marks of answers agree with an answer that was located.

    The marks of some templates include the header, and some exclude an empty block of reasoning.
    """
    marks = [mark for mark in trace.marks if mark[0] < turn[1] and mark[1] > turn[0]]
    text = trace.text
    reason = "does not mark"
    if marks:
        start, end = marks[0][0], marks[-1][1]
        starts_late = start > span[0] and skip_empty_reasoning(text, span[0], span[1], message) < start
        starts_late = starts_late and bool(text[span[0] : start].strip())
        # The end token of the last answer may be missing in the text.
        ends_early = bool(text[end : span[1]].strip())
        ends_late = bool(text[span[1] : end].strip())
        if start >= turn[0] and not starts_late and not ends_early and not ends_late:
            return
        reason = f"marks {text[start:end][:20]!r}…{text[start:end][-20:]!r} as"
    raise ConversationError(
        f"the chat template {where} {reason} an answer with {{% generation %}}, but the model generates "
        f"{text[slice(*span)][:20]!r}…{text[slice(*span)][-20:]!r}; correct the marks, or leave them out"
    )


def skip_empty_reasoning(text: str, start: int, end: int, message: JsonObject) -> int:
    """Return the start of an answer after the empty block of reasoning that the template writes before it."""
    if any(key in message for key in REASONING_KEYS):
        return start
    match = _EMPTY_REASONING.match(text, start, end)
    content = _plain(message)
    # The answer itself may begin with such a block.
    if match is None or _EMPTY_REASONING.match(content):
        return start
    after = text[match.end() : end]
    start = match.end() + len(after) - len(after.lstrip())
    # White space at the begin of the content belongs to the answer.
    margin = content[: len(content) - len(content.lstrip())]
    return start - len(margin) if text.endswith(margin, match.end(), start) else start


def find_missing(message: JsonObject, text: str, needs_reasoning: bool) -> str:
    """Return which part of a message is missing in a text: content, reasoning or tools; empty if none is."""
    reasoning, content = split_reasoning(message)
    if not _contains(text, content):
        return "content"
    if needs_reasoning and not _contains(text, reasoning):
        return "reasoning"
    position = 0
    for call in message.get("tool_calls", []):
        function = call["function"]
        place = text.find(function["name"], position)
        if place < 0 or not all(_contains(text, leaf) for leaf in _leaves(function["arguments"])):
            return "tools"
        position = place + len(function["name"])
    return ""


def split_reasoning(message: JsonObject) -> tuple[str, str]:
    """Return the reasoning of a message and its content, which may begin with the reasoning."""
    content = _plain(message).strip()
    if len(message) == 2 and "</think>" not in content:
        return "", content
    reasoning = str(message.get(REASONING_KEYS[0], "")).strip()
    if message["role"] == "assistant" and "</think>" in content:
        before, _, content = content.rpartition("</think>")
        reasoning = reasoning or before.rpartition("<think>")[2].strip()
    return reasoning, content.strip()


def list_parts(message: JsonObject) -> list[str]:
    """Return what an answer consists of in the order of most templates: content, and names of calls."""
    calls = [call["function"]["name"] for call in message.get("tool_calls", [])]
    return [part for part in (split_reasoning(message)[1], *calls) if part]


def _plain(message: JsonObject) -> str:
    content = message["content"]
    return content if isinstance(content, str) else str(content[0]["text"])


def _contains(text: str, part: str) -> bool:
    """Return whether a text has a part, as it is or in JSON."""
    return part in text or any(json.dumps(part, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True))


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts and numbers of the arguments of a call, with the names of their fields."""
    if isinstance(value, str):
        try:
            parsed_value = json.loads(value)
        except ValueError:
            parsed_value = None
        if isinstance(parsed_value, dict | list):
            yield from _leaves(parsed_value)
        else:
            yield value.strip()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield json.dumps(value)
