"""Chat templates: a conversation to text, and which of it the model said.

Templates are Jinja, as transformers runs them: a tokenizer's own, or one of those here. They run in Jinja's sandbox.
What the model said is found by rendering, never guessed: a template marks it (`{% generation %}`), or else the text up
to an answer and the text with it must both be beginnings of the whole; a template for which they are not is refused.
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

from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer
from jingu.tune.rows import Fields, Message, Row, RowError

BEGIN, END, PLAIN = "\ufdd0", "\ufdd1", "\ufdd2"
"""Around what a template marks, and around what stands for a special token that is only mentioned. No row has them."""
_MARK = re.compile(f"([{BEGIN}{END}])")
_FIRST = 0xF0000
"""Special token k, mentioned, is the code point this and k between two `PLAIN`."""
_MENTION = re.compile(f"{PLAIN}(.){PLAIN}", re.DOTALL)

NAMED = {
    file.name.removesuffix(".jinja"): file.read_text(encoding="utf-8")
    for file in sorted(files("jingu.tune").joinpath("chat").iterdir(), key=lambda file: file.name)
}
"""Templates by name."""
NAMED["bloomz-plain"] = NAMED["plain"]  # bloomz was trained on no more than the texts themselves


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` around what the model says."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (Output([TemplateData(mark)]) for mark in (BEGIN, END))
        return Scope([begin, *body, end]).set_lineno(line)


@dataclass(frozen=True)
class Rendered:
    """A conversation as text."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Where each answer begins and ends."""
    mentioned: tuple[tuple[int, int], ...] = ()
    """Where special tokens are only mentioned."""


class Template:
    """A chat template, with the special tokens of a tokenizer."""

    def __init__(self, source: str, tokenizer: Tokenizer, where: str, *, obey_special: bool = False) -> None:
        """`obey_special`: whether special tokens written in a conversation's texts are such tokens.

        Raises:
            JinguError: the template is not Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        self.where = where
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise JinguError(f"the template is not Jinja ({error}).", where=where) from error
        self._marks = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        self._given = {**self._template.globals, "documents": None, **tokenizer.special_names}
        self._ends = tuple(tokenizer.special_tokens)
        self._special = [] if obey_special else sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._mention = re.compile("|".join(map(re.escape, self._special))) if self._special else None

    def render(self, row: Row, *, marks: bool = True) -> Rendered:
        """The conversation as text, and where its answers are.

        Args:
            marks: False where nobody asks for the answers, so that nothing need be proved of them.

        Raises:
            RowError: the template has no place for it.
            JinguError: it cannot be proved what the model said.
        """
        messages: Any = [_as_they_have_it(message) for message in row.messages]
        tools: Any = list(row.tools) or None
        calls = any(message.tool_calls for message in row.messages)
        texts = "\0".join([message.content for message in row.messages])
        if self._mention is not None and (tools or calls or self._mention.search(texts)):
            messages, tools = self._mentioning(messages), self._mentioning(tools)
        whole = self._render(messages, tools)
        if (tools and whole == self._render(messages, None)) or (
            calls and whole == self._render([{**message, "tool_calls": None} for message in messages], tools)
        ):
            raise RowError(f"the template {self.where} has no place for tools")
        answers: list[tuple[int, int]] = []
        if self._marks:
            whole, answers = _without_marks(whole)
        elif marks:
            ends = [place for place, message in enumerate(messages, start=1) if message["role"] == "assistant"]
            begins = [self._beginning(whole, messages[: end - 1], tools, asks=True) for end in ends]
            after = [
                len(whole) if end == len(messages) else self._beginning(whole, messages[:end], tools) for end in ends
            ]
            answers = [(begin, self._ended(whole, end)) for begin, end in zip(begins, after, strict=True)]
        return self._without_mentions(whole, answers)

    def prompt(self, messages: tuple[Message, ...], tools: tuple[Fields, ...] = ()) -> Rendered:
        """Text after which the model is to answer.

        Raises:
            RowError: the template has no place for it, or would leave the tools out.
        """
        shown = [self._mentioning(_as_they_have_it(message)) for message in messages]
        told = self._mentioning(list(tools)) or None
        text = self._render(shown, told, asks=True)
        if tools and text == self._render(shown, None, asks=True):
            raise RowError(f"the template {self.where} has no place for tools")
        return self._without_mentions(_without_marks(text)[0], [])

    def _render(self, messages: list[Any], tools: Any, *, asks: bool = False) -> str:
        try:
            # As `Template.render`, which goes through all that is always given once more.
            given = {**self._given, "messages": messages, "tools": tools, "add_generation_prompt": asks}
            context = Context(self._template.environment, given, self._template.name, self._template.blocks)
            return "".join(self._template.root_render_func(context))
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise RowError(f"the template {self.where} refuses it ({error})") from error

    def _beginning(self, whole: str, messages: list[Any], tools: Any, *, asks: bool = False) -> int:
        part = self._render(messages, tools, asks=asks)
        if not whole.startswith(part):
            raise JinguError(
                "it cannot be proved which text of this template the model says: a conversation up to an answer is "
                "not the beginning of the whole one.",
                where=self.where,
                fix="Mark the answers in it ({% generation %}…{% endgeneration %}), choose another "
                "data.objective.template, or train on all tokens (data.objective.train_on=all).",
            )
        return len(part)

    def _ended(self, whole: str, end: int) -> int:
        """Where an answer ends: no model writes the space after its end token."""
        before = len(whole[:end].rstrip())
        return before if whole.endswith(self._ends, 0, before) else end

    def _mentioning(self, value: Any) -> Any:
        """A value whose texts only mention special tokens."""
        if self._mention is None or not value:
            return value
        if isinstance(value, dict):
            return {key: self._mentioning(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._mentioning(item) for item in value]
        if not isinstance(value, str):
            return value
        return self._mention.sub(lambda found: f"{PLAIN}{chr(_FIRST + self._special.index(found[0]))}{PLAIN}", value)

    def _without_mentions(self, text: str, answers: list[tuple[int, int]]) -> Rendered:
        """The text with special tokens spelled out again where they are mentioned; places move with it."""
        found = list(_MENTION.finditer(text)) if PLAIN in text else []
        if not found:
            return Rendered(text, tuple(answers))
        shown = [self._special[ord(each[1]) - _FIRST] for each in found]

        def moved(place: int) -> int:
            return place + sum(len(name) - 3 for name, each in zip(shown, found, strict=True) if each.end() <= place)

        return Rendered(
            _MENTION.sub(lambda each: self._special[ord(each[1]) - _FIRST], text),
            tuple((moved(start), moved(end)) for start, end in answers),
            tuple((moved(each.start()), moved(each.end())) for each in found),
        )


def find_template(
    choice: str, tokenizer: Tokenizer, *, obey_special: bool = False, where: str = "data.objective.template"
) -> Template:
    """The template that is chosen (`where`): `auto` for the tokenizer's own, a name, or a file. Raises JinguError."""
    if choice == "auto":
        if tokenizer.chat_template is None:
            raise JinguError(
                "the tokenizer has no chat template of its own.",
                where=where,
                fix=f"Name one: {', '.join(NAMED)}, or a file.",
            )
        return Template(tokenizer.chat_template, tokenizer, "of the tokenizer", obey_special=obey_special)
    if choice in NAMED:
        return Template(NAMED[choice], tokenizer, choice, obey_special=obey_special)
    try:
        source = Path(choice).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise JinguError(
            f"there is no template {choice}.",
            where=where,
            fix=f"Known are auto (the tokenizer's own), {', '.join(NAMED)}, and files.",
        ) from error
    return Template(source, tokenizer, choice, obey_special=obey_special)


def _as_they_have_it(message: Message) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        shown["tool_calls"] = [{"type": "function", "function": dict(call)} for call in message.tool_calls]
    return shown


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Text without the marks of a template, and what was between them."""
    plain, begun, found = "", 0, []
    for piece in _MARK.split(text):
        if piece == BEGIN:
            begun = len(plain)
        elif piece == END:
            found.append((begun, len(plain)))
        else:
            plain += piece
    return plain, found


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
