"""Render a conversation with a chat template, and trace which message wrote which piece of the text.

Templates are Jinja, with the extensions of transformers, and run in Jinja's sandbox
(`jingu.chat.template_environment`).

A *mention* is a special token that a message contains as text, such as a question about `<|im_end|>`. It must not act
as a special token. Before rendering, each mention is replaced by a private code point between two `_MENTION_MARK`s;
after rendering, it is restored, and its position is recorded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import TemplateError
from jinja2.runtime import Context

from jingu.chat.answer_spans import (
    REASONING_KEYS,
    SpecialTokens,
    find_missing,
)
from jingu.chat.messages import ConversationError, JsonObject, Message, UnsupportedToolsError
from jingu.chat.template_environment import compile_template, to_json
from jingu.chat.tracing import (
    TRACE,
    Span,
    TracedMessage,
    TracedText,
    WriterTrace,
)
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer

# Noncharacters that delimit mentions in rendered text, or mark the end of a message's content.
_MENTION_MARK = "\ufdd2"
MESSAGE_END = "\ufdd3"
_MENTION = re.compile(f"{_MENTION_MARK}(.){_MENTION_MARK}", re.DOTALL)
# The mention of special token k is written as this code point plus k.
_FIRST_MENTION = 0xF0000
# A template that contains one of these has a place for reasoning.
_REASONING_WORDS = ("reasoning", "thinking", "</think>")


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text.

    Attributes:
        answers: start and end of each located answer in `text`, in characters.
        mentions: start and end of each special token that is to be tokenized as text.
        messages: for each located answer, the index of its message.
    """

    text: str
    answers: tuple[Span, ...]
    mentions: tuple[Span, ...] = ()
    messages: tuple[int, ...] = ()


class Conversation(NamedTuple):
    """A conversation as a template takes it, and as it wrote it.

    Attributes:
        messages: the messages as variables of the template, with mentions escaped.
        tools: the tools as a variable.
        options: further variables.
        prefills: by the indices of messages of which the start belongs to the prompt, that start.
    """

    messages: list[TracedMessage]
    tools: list[Any] | None
    options: dict[str, Any]
    traced: TracedText
    prompts: dict[int, RenderedPrompt]
    prefills: dict[int, str]


class RenderedPrompt(NamedTuple):
    """The prompt of an answer.

    Attributes:
        text: the whole prompt; None if it is not needed or not known.
        tail: what the template writes after the messages.
    """

    text: str | None
    tail: str


class TemplateRenderer:
    """Renders conversations with a chat template and the special tokens of a tokenizer.

    Args:
        source: the Jinja source.
        where: name of the template in error messages.
        parse_special_tokens: whether special tokens inside messages act as special tokens.

    Raises:
        JinguError: the source is not valid Jinja.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, where: str, *, parse_special_tokens: bool) -> None:
        self.source = source
        self.where = where
        try:
            self._template, self.has_constant_prompt = compile_template(source)
        except TemplateError as error:
            raise JinguError(f"the chat template is not valid Jinja ({error}).", where=where) from error
        self._has_reasoning = any(word in source for word in _REASONING_WORDS)
        self._variables = {**self._template.globals, "documents": None, **tokenizer.special_names}
        self._variables["add_generation_prompt"] = False
        self.special_tokens = SpecialTokens(tokenizer.special_tokens, tokenizer.special_names["bos_token"])
        self._escaped_tokens = [] if parse_special_tokens else self.special_tokens.longest_first

    def start_conversation(
        self,
        messages: tuple[Message, ...],
        tools: tuple[JsonObject, ...],
        variables: Mapping[str, Any] | None,
        **options: Any,
    ) -> Conversation:
        """Render a conversation. Raise ConversationError if the template refuses it or ignores its tools."""
        if variables:
            options = {**self._escape_mentions(dict(variables)), **options}
        tool_entries = self._escape_mentions(list(tools)) if tools else None
        entries = [self._message_variables(message) for message in messages]
        calls = [call["function"] for entry in entries for call in dict.get(entry, "tool_calls", ())]
        traced_text: TracedText | None = None
        error: ConversationError | None = None
        try:
            traced_text = self.trace(entries, tool_entries, options)
        except ConversationError as failure:
            error = failure
        # Some templates expect arguments as JSON text: with objects, they fail or write Python's repr.
        if calls and (
            traced_text is None
            or any(call["arguments"] and str(call["arguments"]) in traced_text.text for call in calls)
        ):
            for call in calls:
                call["arguments"] = to_json(call["arguments"])
            traced_text = self.trace(entries, tool_entries, options)
        if traced_text is None:
            assert error is not None
            raise error
        prefills = {index: self._escape_prefill(item) for index, item in enumerate(messages) if item.prefill_length}
        conversation = Conversation(entries, tool_entries, options, traced_text, {}, prefills)
        if tool_entries and not self._writes_tools(conversation):
            raise UnsupportedToolsError(f"the chat template {self.where} does not support tools")
        return conversation

    def _writes_tools(self, conversation: Conversation) -> bool:
        """Return whether the text has all tools."""
        traced_text = conversation.traced
        names = [tool.get("function", tool).get("name") for tool in conversation.tools or [] if isinstance(tool, dict)]
        names = [name for name in names if isinstance(name, str) and name]
        if not all(name in traced_text.text for name in names):
            return False
        # What precedes the first message that a loop wrote has only words of the template, tools, and other messages.
        start = min((pieces[0][0] for pieces in traced_text.pieces if pieces), default=0)
        other_text = "".join(
            plain_content(message)
            for message, pieces in zip(conversation.messages, traced_text.pieces, strict=True)
            if not pieces
        )
        before = traced_text.text[:start]
        if any(name in before and name not in self.source and name not in other_text for name in names):
            return True
        return traced_text.text != self._try_render(conversation.messages, None, conversation.options)

    def _message_variables(self, message: Message) -> TracedMessage:
        """Return a message as the dictionary that templates expect, which is that of transformers."""
        escape = self._escape_mentions
        content = escape(message.content)
        variables = TracedMessage(role=message.role, content=_content_parts(content) if self._takes_parts else content)
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                entry = {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
                calls.append({"id": call["id"], **entry} if "id" in call else entry)
            variables["tool_calls"] = escape(calls)
        if message.reasoning_content:
            variables.update(dict.fromkeys(REASONING_KEYS, escape(message.reasoning_content)))
        if message.name:
            variables["name"] = escape(message.name)
        if message.tool_call_id:
            variables["tool_call_id"] = escape(message.tool_call_id)
        return variables

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template expects contents as lists of parts, as those of models that also read images do."""
        word = "jxqzw"
        parts = [{"role": "user", "content": _content_parts(word)}]
        for content, expected_text in ((word, False), (parts[0]["content"], True)):
            text = self._try_render([{"role": "user", "content": content}], None, {}) or ""
            if word in text and "'type'" not in text and '"type"' not in text:
                return expected_text
        return False

    def cut(self, conversation: Conversation, count: int) -> Conversation:
        """Return the first messages of a conversation."""
        messages = conversation.messages[:count]
        traced_text = self.trace(messages, conversation.tools, conversation.options)
        return conversation._replace(messages=messages, traced=traced_text)

    def _escape_prefill(self, message: Message) -> str:
        """Return the part of a message's content that belongs to the prompt, as the template takes it.

        Raises:
            ConversationError: it ends inside a special token.
        """
        prefill, remainder = (
            self._escape_mentions(part)
            for part in (message.content[: message.prefill_length], message.content[message.prefill_length :])
        )
        if prefill + remainder != self._escape_mentions(message.content):
            raise ConversationError("the text that an answer continues ends inside a special token")
        return str(prefill)

    def probe_content(self, text: str) -> Any:
        return _content_parts(text) if self._takes_parts else text

    def cut_after_content(self, conversation: Conversation) -> str:
        """Return the text without what the template writes after the content of the last message.

        The content itself can occur in what follows it, so its end is marked.
        """
        text = conversation.traced.text
        *earlier, last = conversation.messages
        content = plain_content(last)
        marked_content = content + MESSAGE_END
        marked_message = {**last, "content": _content_parts(marked_content) if self._takes_parts else marked_content}
        marked_text = self.trace([*earlier, marked_message], conversation.tools, conversation.options).text
        if MESSAGE_END not in marked_text:
            raise ConversationError(f"the chat template {self.where} does not write the message to continue")
        # A template may write the content several times; the last one is the message.
        head, tail = (part.replace(MESSAGE_END, "") for part in marked_text.rsplit(MESSAGE_END, 1))
        # A template that trims the content does not trim the white space in front of the mark.
        is_trimmed = head + tail != text
        return head.removesuffix(content[len(content.rstrip()) :]) if is_trimmed else head

    def check_written(self, conversation: Conversation, answers: Sequence[int]) -> None:
        """Raise ConversationError if the template leaves out a part of the conversation.

        Args:
            answers: indices of the answers whose reasoning must be written, too. A template may drop that of others,
                if it has a place for reasoning at all.
        """
        traced_text = conversation.traced
        for index, message in enumerate(conversation.messages):
            # Most messages have nothing but a content, which the template writes as it is.
            pieces = traced_text.pieces[index]
            content = message["content"]
            if (
                len(message) == 2
                and pieces
                and type(content) is str
                and content in traced_text.text[slice(*pieces[-1])]
            ):
                continue
            is_complete = index in answers or not self._has_reasoning
            message_text = "\n".join(traced_text.text[slice(*piece)] for piece in traced_text.pieces[index])
            missing = find_missing(message, message_text, is_complete)
            if missing and not message_text.strip():
                # Another message, or a line outside of loops, may have written it.
                missing = find_missing(message, traced_text.text, is_complete)
                if not missing and not self._is_surely_written(conversation, index):
                    missing = "content"
            if missing:
                role = "tool result" if message["role"] == "tool" else f"{message['role']} message"
                if missing == "tools":
                    raise UnsupportedToolsError(
                        f"the chat template {self.where} does not support tools: it leaves out a call"
                    )
                if missing == "reasoning":
                    raise ConversationError(
                        f"the chat template {self.where} does not support reasoning here: it leaves that of message "
                        f"{index + 1} out"
                    )
                raise ConversationError(
                    f"the chat template {self.where} does not write this {role} (message {index + 1}): "
                    f"{plain_content(message).strip()[:40]}"
                )

    def _is_surely_written(self, conversation: Conversation, index: int) -> bool:
        """Return whether the content of a message is in the text because the template wrote it, not by coincidence."""
        content = plain_content(conversation.messages[index])
        if not content.strip():
            return True
        text = conversation.traced.text
        other_parts = [*conversation.messages[:index], *conversation.messages[index + 1 :], conversation.tools or []]
        part = content.strip()
        if part not in self.source and part not in to_json(other_parts) and len(part) > 12:
            return True
        # Change the content; the text must change with it.
        changed_message = {**conversation.messages[index]}
        changed_message["content"] = _content_parts(part + MESSAGE_END) if self._takes_parts else part + MESSAGE_END
        messages = [*conversation.messages[:index], changed_message, *conversation.messages[index + 1 :]]
        other_text = self._try_render(messages, conversation.tools, conversation.options)
        return other_text is not None and other_text != text

    def _try_render(
        self, messages: Sequence[JsonObject], tools: list[Any] | None, options: Mapping[str, Any]
    ) -> str | None:
        """Return the text of messages; None if the template refuses them."""
        try:
            return self.trace(messages, tools, options).text
        except ConversationError:
            return None

    def trace(self, messages: Sequence[JsonObject], tools: list[Any] | None, options: Mapping[str, Any]) -> TracedText:
        """Render messages, and trace which of them wrote each piece of the text."""
        trace = WriterTrace(messages)
        traced_text = trace.divide(self._run(trace, tools, options))
        if trace.is_captured:
            # The template may have processed a text with marks in it.
            silent = WriterTrace(messages, is_silent=True)
            if silent.divide(self._run(silent, tools, options)).text != traced_text.text:
                raise ConversationError(
                    f"the chat template {self.where} processes the text of a loop over messages (line "
                    f"{max(traced_text.lines, default=0)}), so its answers cannot be located"
                )
        return traced_text

    def _run(self, trace: WriterTrace, tools: list[Any] | None, options: Mapping[str, Any]) -> str:
        """Return what the template writes, with the marks of a trace."""
        variables = {**self._variables, **options, "messages": trace.messages, "tools": tools, TRACE: trace}
        try:
            # Does the same as `Template.render`, but does not copy the constant variables.
            context = Context(self._template.environment, variables, self._template.name, self._template.blocks)
            return "".join(self._template.root_render_func(context))
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise ConversationError(f"the chat template {self.where} refuses it ({error})") from error

    def _escape_mentions(self, value: Any) -> Any:
        """Return a JSON value with the special tokens in its strings escaped."""
        if not self._escaped_tokens:
            return value
        if isinstance(value, dict):
            return {key: self._escape_mentions(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._escape_mentions(item) for item in value]
        if not isinstance(value, str):
            return value
        return self.special_tokens.pattern.sub(self._escape, value)

    def _escape(self, match: re.Match[str]) -> str:
        return f"{_MENTION_MARK}{chr(_FIRST_MENTION + self._escaped_tokens.index(match[0]))}{_MENTION_MARK}"

    def restore_mentions(self, text: str, spans: Sequence[Span], messages: Sequence[int]) -> RenderedChat:
        """Restore the escaped special tokens in a text, and shift the positions of the answers accordingly."""
        if _MENTION_MARK not in text:
            return RenderedChat(text, tuple(spans), (), tuple(messages))

        def restore(part: str) -> str:
            return _MENTION.sub(lambda match: self._escaped_tokens[ord(match[1]) - _FIRST_MENTION], part)

        def shift(start: int, end: int) -> Span:
            return len(restore(text[:start])), len(restore(text[:end]))

        return RenderedChat(
            restore(text),
            tuple(shift(start, end) for start, end in spans),
            tuple(shift(*match.span()) for match in _MENTION.finditer(text)),
            tuple(messages),
        )


def _content_parts(text: str) -> list[JsonObject]:
    return [{"type": "text", "text": text}]


def plain_content(message: JsonObject) -> str:
    content = message["content"]
    return content if isinstance(content, str) else str(content[0]["text"])
