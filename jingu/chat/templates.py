"""Chat templates: render a conversation as text, and locate the assistant's answers in it.

Templates are Jinja, with the extensions of transformers, and run in Jinja's sandbox. They come from the tokenizer, from
this package or from a file. The positions of answers decide which tokens are trained, so they are computed, never
guessed: either the template marks answers with `{% generation %}`, or the conversation up to an answer and the
conversation including it must both render as prefixes of the whole text. Any other template is refused.

A *mention* is a special token that a message contains as text, such as a question about `<|im_end|>`. It must not act
as a special token. Before rendering, each mention is replaced by a private code point between two `_MENTION_MARK`s;
after rendering, it is restored, and its position is recorded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Output, Scope, TemplateData
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jingu.chat.messages import ConversationError, JsonObject, Message
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer

Span = tuple[int, int]

# Noncharacters that delimit answers and mentions in rendered text, or mark the end of a message's content.
# `check_characters` keeps them out of messages.
_ANSWER_START = "\ufdd0"
_ANSWER_END = "\ufdd1"
_MENTION_MARK = "\ufdd2"
_MESSAGE_END = "\ufdd3"
_ANSWER_MARKS = re.compile(f"([{_ANSWER_START}{_ANSWER_END}])")
_MENTION = re.compile(f"{_MENTION_MARK}(.){_MENTION_MARK}", re.DOTALL)
# Keys under which templates expect reasoning; gpt-oss and LFM use the second.
_REASONING_KEYS = ("reasoning_content", "thinking")
# The mention of special token k is written as this code point plus k.
_FIRST_MENTION = 0xF0000
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

_TEMPLATES = files("jingu.chat").joinpath("jinja")
NAMED_TEMPLATES = {
    file.name.removesuffix(".jinja"): file.read_text(encoding="utf-8")
    for file in sorted(_TEMPLATES.iterdir(), key=lambda file: file.name)
    if file.is_file()
}
# BLOOMZ was trained on the bare texts.
NAMED_TEMPLATES["bloomz-plain"] = NAMED_TEMPLATES["plain"]


class _GenerationTag(Extension):
    """The tag `{% generation %}…{% endgeneration %}`, which writes marks around an answer."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (Output([TemplateData(mark)]) for mark in (_ANSWER_START, _ANSWER_END))
        return Scope([start, *body, end]).set_lineno(line)


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text.

    Attributes:
        answers: start and end of each answer in `text`, in characters.
        mentions: start and end of each special token that is to be tokenized as text.
    """

    text: str
    answers: tuple[Span, ...]
    mentions: tuple[Span, ...] = ()


class ChatTemplate:
    """A chat template together with the special tokens of a tokenizer.

    Args:
        source: the Jinja source.
        where: name of the template in error messages.
        tools_source: the Jinja source for conversations with tools; None: `source`.
        parse_special_tokens: whether special tokens inside messages act as special tokens. Use it for trusted data
            only: a message can then end its own turn.

    Raises:
        JinguError: the source is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        where: str,
        *,
        tools_source: str | None = None,
        parse_special_tokens: bool = False,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.where = where
        # The texts that it renders with: they are a part of the identity of prepared data.
        self.sources = (source,) if tools_source is None else (source, tools_source)
        self._for_tools = self
        if tools_source is not None:
            self._for_tools = ChatTemplate(tools_source, tokenizer, where, parse_special_tokens=parse_special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise JinguError(f"the chat template is not valid Jinja ({error}).", where=where) from error
        self._has_generation_tag = _GENERATION_TAG.search(source) is not None
        self._variables = {**self._template.globals, "documents": None, **tokenizer.special_names}
        self._special_tokens = tuple(tokenizer.special_tokens)
        # Longest first, so that a token that is a prefix of another does not match in its place.
        longest_first = sorted(self._special_tokens, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._escaped_tokens = [] if parse_special_tokens else longest_first

    def render(
        self, messages: tuple[Message, ...], tools: tuple[JsonObject, ...] = (), *, locate_answers: bool = True
    ) -> RenderedChat:
        """Return the conversation as text, with the positions of its answers.

        Args:
            locate_answers: False: do not search for answers that the template does not mark, which fails for some
                templates.

        Raises:
            ConversationError: the template refuses the conversation, ignores its tools, calls or reasoning, or the
                answers cannot be located reliably.
        """
        if tools and self._for_tools is not self:
            return self._for_tools.render(messages, tools, locate_answers=locate_answers)
        variables, tool_variables, text = self._render_messages(messages, tools)
        # A template that renders the same without calls or reasoning would silently drop them.
        for what, keys in (("tools", ("tool_calls",)), ("reasoning", _REASONING_KEYS)):
            if any(keys[0] in message for message in variables):
                without = [{key: value for key, value in entry.items() if key not in keys} for entry in variables]
                self._refuse_if_equal(what, text, without, tool_variables)
        answers: list[Span] = []
        indices = [index for index, message in enumerate(messages) if message.role == "assistant"]
        if self._has_generation_tag:
            # The template marks the answers. Check each, if the marks can be assigned to messages.
            text, spans = _strip_answer_marks(text)
            answers = [(start, self._trim_after_special_token(text, end)) for start, end in spans]
            if len(answers) == len(indices):
                for index, (start, end) in zip(indices, answers, strict=True):
                    self._find_answer(variables[index], text[start:end])
        elif locate_answers:
            # An answer lies between the ends of two prefixes: the messages before it and its header; the same and it.
            for index in indices:
                start = self._prefix_length(text, variables[:index], tool_variables, add_generation_prompt=True)
                end = len(text)
                if index + 1 < len(messages):
                    end = self._prefix_length(text, variables[: index + 1], tool_variables)
                answers.append((start, self._trim_after_special_token(text, end)))
                self._check_span(text, answers, variables[: index + 1], tool_variables)
        return self._restore_mentions(text, answers)

    def render_prompt(
        self,
        messages: tuple[Message, ...],
        tools: tuple[JsonObject, ...] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        continue_final: bool = False,
    ) -> RenderedChat:
        """Return the text of a prompt: the conversation and the header of the answer.

        Args:
            variables: further variables of the template.
            continue_final: whether the model continues the last message. The text then ends with that message's
                content.

        Raises:
            ConversationError: the template refuses the conversation, ignores its tools, or does not write the message
                to continue.
        """
        if tools and self._for_tools is not self:
            return self._for_tools.render_prompt(messages, tools, variables, continue_final=continue_final)
        options = {**(variables or {}), "add_generation_prompt": not continue_final}
        entries, tool_variables, text = self._render_messages(messages, tools, **options)
        if continue_final:
            text = self._cut_after_content(text, entries, tool_variables, **options)
        text, _ = _strip_answer_marks(text)
        return self._restore_mentions(text, [])

    def _cut_after_content(
        self, text: str, messages: list[JsonObject], tools: list[Any] | None, /, **options: Any
    ) -> str:
        """Return the text without what the template writes after the content of the last message.

        The content itself can occur in what follows it, so its end is marked.
        """
        *earlier, last = messages
        content = last["content"]
        marked_text = self._render([*earlier, {**last, "content": content + _MESSAGE_END}], tools, **options)
        if _MESSAGE_END not in marked_text:
            raise ConversationError(f"the chat template {self.where} does not write the message to continue")
        # A template may write the content several times; the last one is the message.
        head, tail = (part.replace(_MESSAGE_END, "") for part in marked_text.rsplit(_MESSAGE_END, 1))
        # A template that trims the content does not trim the white space in front of the mark.
        is_trimmed = head + tail != text
        return head.removesuffix(content[len(content.rstrip()) :]) if is_trimmed else head

    def _refuse_if_equal(
        self, what: str, text: str, messages: list[JsonObject], tools: list[Any] | None, /, **options: Any
    ) -> None:
        """Raise ConversationError if the template ignores a part of the conversation.

        Args:
            what: the part, for the error message.
            text: the rendered text of the whole conversation.
            messages: the messages without that part; if they render as `text`, the template ignores it.
            tools: the tools without that part.
        """
        try:
            is_equal = text == self._render(messages, tools, **options)
        except ConversationError:
            return  # the template needs the part, so it does not ignore it
        if is_equal:
            raise ConversationError(f"the chat template {self.where} does not support {what}")

    def _render_messages(
        self, messages: tuple[Message, ...], tools: tuple[JsonObject, ...], /, **options: Any
    ) -> tuple[list[JsonObject], list[Any] | None, str]:
        """Return the messages and the tools as the template's variables, with mentions escaped; and the text."""
        tool_variables = self._escape_mentions(list(tools)) or None
        variables: list[JsonObject] = [self._escape_mentions(_message_variables(message)) for message in messages]
        calls = [call["function"] for message in variables for call in message.get("tool_calls", [])]
        text = ""
        error: ConversationError | None = None
        try:
            text = self._render(variables, tool_variables, **options)
        except ConversationError as failure:
            error = failure
        # Some templates expect arguments as JSON text: with objects, they fail or write Python's repr.
        if calls and (error or any(call["arguments"] and str(call["arguments"]) in text for call in calls)):
            for call in calls:
                call["arguments"] = _to_json(call["arguments"])
            text = self._render(variables, tool_variables, **options)
        elif error:
            raise error
        # A template that renders the same without tools would silently drop them.
        if tools:
            self._refuse_if_equal("tools", text, variables, None, **options)
        return variables, tool_variables, text

    def _find_answer(self, message: JsonObject, text: str) -> Span:
        """Return start and end of an answer (content and calls) in a text. Raise ConversationError if any is missing.

        The text may be longer than the answer. An answer without content and calls gives (0, 0).
        """
        content = message["content"].strip()
        if content not in text:
            # The content may begin with reasoning, which some templates rewrite: search for the rest only.
            content = content.rpartition("</think>")[2].strip()
        parts = [content, *(call["function"]["name"] for call in message.get("tool_calls", []))]
        parts = [part for part in parts if part]
        missing = next((part for part in parts if part not in text), None)
        if missing is not None:
            raise ConversationError(f"the chat template {self.where} does not write this answer: {missing[:40]}")
        if not parts:
            return 0, 0
        return text.index(parts[0]), max(text.rindex(part) + len(part) for part in parts)

    def _check_span(self, text: str, answers: list[Span], messages: list[JsonObject], tools: list[Any] | None) -> None:
        """Raise ConversationError if the last span contains more than the last message's answer and its end token.

        That both ends of a span are prefixes of the text does not exclude this: the span could include the header of
        this or of the next turn, and the model would be trained to write it.
        """
        *earlier, (start, end) = answers
        answer_start, answer_end = self._find_answer(messages[-1], text[start:end])
        before = text[start : start + answer_start]
        after = text[start + answer_end : end]
        # 1. The header of this turn. It is in the span if the template writes no generation prompt. Signs of it are
        # text before the content, or a special token before it that also occurs outside of answers.
        is_plain = messages[-1]["content"].strip() and "reasoning_content" not in messages[-1]
        has_header = bool(is_plain and before.strip())
        for token in self._special_pattern.findall(before):
            in_answers = sum(text.count(token, *span) for span in earlier)
            has_header = has_header or text.count(token, 0, start) > in_answers
        if has_header:
            with_prompt = self._render(messages[:-1], tools, add_generation_prompt=True)
            if with_prompt == self._render(messages[:-1], tools):
                raise self._wrong_span("the header of an answer", before)
        # 2. The header of the next turn, after the content. The header of this answer serves as an example of it: the
        # text before this answer, from a special token on.
        for token in self._special_pattern.findall(after):
            header = text[max(text.rfind(token, 0, start), 0) : start].strip()
            if header and header in after and header != after.strip():
                raise self._wrong_span("the header of the next turn", header)

    def _wrong_span(self, what: str, text: str) -> ConversationError:
        return ConversationError(
            f"in the chat template {self.where} {what} would be trained ({text.strip()[:40]!r}); mark the answers with "
            "{% generation %}…{% endgeneration %}, or choose another data.objective.template"
        )

    def _render(self, messages: list[Any], tools: list[Any] | None, /, **options: Any) -> str:
        variables = (
            self._variables | {"add_generation_prompt": False} | options | {"messages": messages, "tools": tools}
        )
        try:
            # Does the same as `Template.render`, but does not copy the constant variables.
            context = Context(self._template.environment, variables, self._template.name, self._template.blocks)
            return "".join(self._template.root_render_func(context))
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise ConversationError(f"the chat template {self.where} refuses it ({error})") from error

    def _prefix_length(
        self, text: str, messages: list[Any], tools: list[Any] | None, *, add_generation_prompt: bool = False
    ) -> int:
        """Return the length of the first messages as text. Raise ConversationError unless `text` begins with it."""
        prefix = self._render(messages, tools, add_generation_prompt=add_generation_prompt)
        if not text.startswith(prefix):
            raise ConversationError(
                f"in the chat template {self.where} its answers cannot be located: the conversation up to an answer "
                "does not render as a prefix of the whole conversation; mark the answers with {% generation %}…"
                "{% endgeneration %}, choose another data.objective.template, or train on all tokens "
                "(data.objective.loss_on=all)"
            )
        return len(prefix)

    def _trim_after_special_token(self, text: str, end: int) -> int:
        """Return the end of an answer, without white space after its end token, which a model never generates."""
        stripped = len(text[:end].rstrip())
        return stripped if text.endswith(self._special_tokens, 0, stripped) else end

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
        return self._special_pattern.sub(self._escape, value)

    def _escape(self, match: re.Match[str]) -> str:
        return f"{_MENTION_MARK}{chr(_FIRST_MENTION + self._escaped_tokens.index(match[0]))}{_MENTION_MARK}"

    def _restore_mentions(self, text: str, answers: list[Span]) -> RenderedChat:
        """Restore the escaped special tokens in a text, and shift the positions of the answers accordingly."""
        if _MENTION_MARK not in text:
            return RenderedChat(text, tuple(answers))

        def restore(part: str) -> str:
            return _MENTION.sub(lambda match: self._escaped_tokens[ord(match[1]) - _FIRST_MENTION], part)

        def shift(start: int, end: int) -> Span:
            return len(restore(text[:start])), len(restore(text[:end]))

        return RenderedChat(
            restore(text),
            tuple(shift(start, end) for start, end in answers),
            tuple(shift(*match.span()) for match in _MENTION.finditer(text)),
        )


def load_template(
    name: str,
    tokenizer: Tokenizer,
    *,
    parse_special_tokens: bool = False,
    where: str = "data.objective.template",
    for_training: bool = False,
) -> ChatTemplate:
    """Load a chat template.

    Args:
        name: `auto` for the tokenizer's default template; the name of another template of the tokenizer; a name in
            `NAMED_TEMPLATES`; or a file.
        parse_special_tokens: as for `ChatTemplate`.
        where: the setting that contains the name, for error messages.
        for_training: whether `auto` replaces the templates of known models by versions that mark the answers.

    Raises:
        JinguError: there is no such template, or it is not valid Jinja.
    """
    label = name
    tools_source = None
    if name == "auto":
        if tokenizer.chat_template is None:
            raise JinguError(
                "the tokenizer has no chat template.",
                where=where,
                fix=f"Name one: {', '.join(NAMED_TEMPLATES)}, or a file.",
            )
        source = find_marked_template(tokenizer.chat_template) if for_training else tokenizer.chat_template
        tools_source = tokenizer.chat_templates.get("tool_use")
        label = "of the tokenizer"
    elif name in tokenizer.chat_templates:
        source = tokenizer.chat_templates[name]
    elif name in NAMED_TEMPLATES:
        source = NAMED_TEMPLATES[name]
    else:
        try:
            source = Path(name).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise JinguError(
                f"there is no chat template {name}.",
                where=where,
                fix=f"Use auto (the tokenizer's own), {', '.join(NAMED_TEMPLATES)}, or a file.",
            ) from error
    return ChatTemplate(source, tokenizer, label, tools_source=tools_source, parse_special_tokens=parse_special_tokens)


def find_marked_template(source: str) -> str:
    """Return the version of a known model's template that marks the answers. Return other templates unchanged.

    Some models need it: their own template renders an answer differently once another turn follows, so that answers
    cannot be located, or it refuses tool arguments that are objects.
    """
    folder = _TEMPLATES.joinpath("training")
    names = json.loads(folder.joinpath("hashes.json").read_text(encoding="utf-8"))
    name = names.get(sha256(source.strip().encode()).hexdigest())
    return source if name is None else folder.joinpath(f"{name}.jinja").read_text(encoding="utf-8")


def _message_variables(message: Message) -> JsonObject:
    """Return a message as the dictionary that templates expect, which is that of transformers."""
    variables: JsonObject = {"role": message.role, "content": message.content}
    if message.tool_calls:
        variables["tool_calls"] = []
        for call in message.tool_calls:
            entry = {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            variables["tool_calls"].append({"id": call["id"], **entry} if "id" in call else entry)
    if message.reasoning_content:
        variables |= dict.fromkeys(_REASONING_KEYS, message.reasoning_content)
    for key in ("name", "tool_call_id"):
        if value := getattr(message, key):
            variables[key] = value
    return variables


def _strip_answer_marks(text: str) -> tuple[str, list[Span]]:
    """Return the text without the marks around answers, and the spans that they delimited."""
    plain = ""
    start = 0
    spans = []
    for piece in _ANSWER_MARKS.split(text):
        if piece == _ANSWER_START:
            start = len(plain)
        elif piece == _ANSWER_END:
            spans.append((start, len(plain)))
        else:
            plain += piece
    return plain, spans


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
