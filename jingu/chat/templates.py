"""Chat templates: render a conversation as text, and locate the assistant's answers in it.

Templates are Jinja, as transformers runs them: the tokenizer's own, or one of those shipped here. They run in Jinja's
sandbox. The answers are located by rendering, never by guessing. Either the template marks them with
`{% generation %}`, or both the text up to an answer and the text including it must be prefixes of the whole; a template
for which this does not hold is refused.

A special token that a message merely mentions must stay ordinary text. Before rendering, each mention is replaced by a
private code point between two `_MENTION_MARK`s, and spelled out again in the rendered text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
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

# Noncharacters around what a template marks as an answer, and around a mention. `check_characters` keeps them out of
# messages.
_ANSWER_START = "\ufdd0"
_ANSWER_END = "\ufdd1"
_MENTION_MARK = "\ufdd2"
_ANSWER_MARKS = re.compile(f"([{_ANSWER_START}{_ANSWER_END}])")
_MENTION = re.compile(f"{_MENTION_MARK}(.){_MENTION_MARK}", re.DOTALL)
# The mention of special token k is written as this code point plus k.
_FIRST_MENTION = 0xF0000
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

NAMED_TEMPLATES = {
    file.name.removesuffix(".jinja"): file.read_text(encoding="utf-8")
    for file in sorted(files("jingu.chat").joinpath("jinja").iterdir(), key=lambda file: file.name)
}
# BLOOMZ was trained on nothing but the texts.
NAMED_TEMPLATES["bloomz-plain"] = NAMED_TEMPLATES["plain"]


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` around an answer."""

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
        answers: start and end of each answer in `text`.
        mentions: start and end of each special token that is only mentioned.
    """

    text: str
    answers: tuple[Span, ...]
    mentions: tuple[Span, ...] = ()


class ChatTemplate:
    """A chat template together with the special tokens of a tokenizer.

    Args:
        source: the Jinja source.
        where: names the template in error messages.
        parse_special_tokens: whether special tokens written inside messages act as such.

    Raises:
        JinguError: the source is not valid Jinja.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, where: str, *, parse_special_tokens: bool = False) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        self.where = where
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise JinguError(f"the chat template is not valid Jinja ({error}).", where=where) from error
        self._has_generation_tag = _GENERATION_TAG.search(source) is not None
        self._variables = {**self._template.globals, "documents": None, **tokenizer.special_names}
        self._special_tokens = tuple(tokenizer.special_tokens)
        # Longest first, so that a token that is a prefix of another does not match in its place.
        self._escaped_tokens = [] if parse_special_tokens else sorted(self._special_tokens, key=len, reverse=True)
        self._escaped_pattern = re.compile("|".join(map(re.escape, self._escaped_tokens)))

    def render(
        self, messages: tuple[Message, ...], tools: tuple[JsonObject, ...] = (), *, locate_answers: bool = True
    ) -> RenderedChat:
        """Return the conversation as text, with the positions of its answers.

        Args:
            locate_answers: False skips locating them, which some templates do not allow.

        Raises:
            ConversationError: the template refuses the conversation or ignores its tools.
            JinguError: the answers cannot be located reliably.
        """
        variables, tool_variables = self._message_variables(messages, tools)
        text = self._render(variables, tool_variables)
        # A template that renders the same without tools, or without calls, would silently drop them.
        if tools and text == self._render(variables, None):
            raise self._tools_unsupported()
        if any(message.tool_calls for message in messages):
            without_calls = [{**message, "tool_calls": None} for message in variables]
            if text == self._render(without_calls, tool_variables):
                raise self._tools_unsupported()
        answers: list[Span] = []
        if self._has_generation_tag:
            text, answers = _strip_answer_marks(text)
        elif locate_answers:
            for index, message in enumerate(messages):
                if message.role == "assistant":
                    start = self._prefix_length(text, variables[:index], tool_variables, add_generation_prompt=True)
                    end = len(text)
                    if index + 1 < len(messages):
                        end = self._prefix_length(text, variables[: index + 1], tool_variables)
                    answers.append((start, self._trim_after_special_token(text, end)))
        return self._restore_mentions(text, answers)

    def render_prompt(self, messages: tuple[Message, ...], tools: tuple[JsonObject, ...] = ()) -> RenderedChat:
        """Return the text after which the model is to answer.

        Raises:
            ConversationError: the template refuses the conversation or ignores its tools.
        """
        variables, tool_variables = self._message_variables(messages, tools)
        text = self._render(variables, tool_variables, add_generation_prompt=True)
        if tools and text == self._render(variables, None, add_generation_prompt=True):
            raise self._tools_unsupported()
        return self._restore_mentions(_strip_answer_marks(text)[0], [])

    def _tools_unsupported(self) -> ConversationError:
        return ConversationError(f"the chat template {self.where} does not support tools")

    def _message_variables(
        self, messages: tuple[Message, ...], tools: tuple[JsonObject, ...]
    ) -> tuple[list[Any], list[Any] | None]:
        """Return messages and tools as templates expect them, with mentions escaped."""
        variables: list[Any] = []
        for message in messages:
            entry: JsonObject = {"role": message.role, "content": self._escape_mentions(message.content)}
            if message.tool_calls:
                calls = [{"type": "function", "function": dict(call)} for call in message.tool_calls]
                entry["tool_calls"] = self._escape_mentions(calls)
            variables.append(entry)
        return variables, self._escape_mentions(list(tools)) or None

    def _render(self, messages: list[Any], tools: list[Any] | None, *, add_generation_prompt: bool = False) -> str:
        variables = {
            **self._variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            # Like `Template.render`, which would copy the constant variables once more.
            context = Context(self._template.environment, variables, self._template.name, self._template.blocks)
            return "".join(self._template.root_render_func(context))
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise ConversationError(f"the chat template {self.where} refuses it ({error})") from error

    def _prefix_length(
        self, text: str, messages: list[Any], tools: list[Any] | None, *, add_generation_prompt: bool = False
    ) -> int:
        """Return the length of the first messages when rendered. Raise JinguError unless the text begins with them."""
        prefix = self._render(messages, tools, add_generation_prompt=add_generation_prompt)
        if not text.startswith(prefix):
            raise JinguError(
                "the answers in this chat template cannot be located: a conversation up to an answer does not render "
                "as a prefix of the whole conversation.",
                where=self.where,
                fix="Mark the answers in the template ({% generation %}…{% endgeneration %}), choose another "
                "data.objective.template, or train on all tokens (data.objective.loss_on=all).",
            )
        return len(prefix)

    def _trim_after_special_token(self, text: str, end: int) -> int:
        """Return where an answer ends: no model writes the white space after its end token."""
        stripped = len(text[:end].rstrip())
        return stripped if text.endswith(self._special_tokens, 0, stripped) else end

    def _escape_mentions(self, value: Any) -> Any:
        """Return a JSON value in whose texts the special tokens are escaped."""
        if not self._escaped_tokens:
            return value
        if isinstance(value, dict):
            return {key: self._escape_mentions(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._escape_mentions(item) for item in value]
        if not isinstance(value, str):
            return value
        return self._escaped_pattern.sub(self._escape, value)

    def _escape(self, match: re.Match[str]) -> str:
        return f"{_MENTION_MARK}{chr(_FIRST_MENTION + self._escaped_tokens.index(match[0]))}{_MENTION_MARK}"

    def _restore_mentions(self, text: str, answers: list[Span]) -> RenderedChat:
        """Spell out the escaped special tokens; positions behind them move accordingly."""
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
    name: str, tokenizer: Tokenizer, *, parse_special_tokens: bool = False, where: str = "data.objective.template"
) -> ChatTemplate:
    """Load a chat template.

    Args:
        name: `auto` for the tokenizer's own, the name of a shipped template, or a file.
        where: the setting that names it, for error messages.

    Raises:
        JinguError: there is no such template, or it is not valid Jinja.
    """
    label = name
    if name == "auto":
        if tokenizer.chat_template is None:
            raise JinguError(
                "the tokenizer has no chat template.",
                where=where,
                fix=f"Name one: {', '.join(NAMED_TEMPLATES)}, or a file.",
            )
        source = tokenizer.chat_template
        label = "of the tokenizer"
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
    return ChatTemplate(source, tokenizer, label, parse_special_tokens=parse_special_tokens)


def _strip_answer_marks(text: str) -> tuple[str, list[Span]]:
    """Return the text without the template's marks, and the spans that were between them."""
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
