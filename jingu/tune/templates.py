"""Chat templates: a conversation to text, and which of it the model said.

Templates are Jinja, as transformers runs them: a tokenizer's own, or one of those here. They run in Jinja's sandbox.
What the model said is found by rendering, never guessed: a template marks it (`{% generation %}`), or else the text up
to an answer and the text with it must both be beginnings of the whole; a template for which they are not is refused.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer
from jingu.tune.rows import Fields, Message, Row, RowError

BEGIN, END, PLAIN = "\ufdd0", "\ufdd1", "\ufdd2"
"""Around what a template marks, and around what stands for a special token that is only mentioned. No row has them."""
_FIRST = 0xF0000
"""Special token k, mentioned, is the code point this and k between two `PLAIN`."""
_MENTION = re.compile(f"{PLAIN}(.){PLAIN}", re.DOTALL)

_CHATML = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_QWEN = """{%- set system = 'You are a helpful assistant.' %}{% set rest = messages %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}{% endif %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
{{- '\\n\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' }}
{{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
{%- endif %}{{ '<|im_end|>\\n' }}
{%- for message in rest %}
{%- if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' }}{% generation %}{{ message['content'] }}
{%- for call in message.tool_calls or [] %}
{{- ('\\n' if message['content'] or not loop.first else '') + '<tool_call>\\n{"name": "' + call.function.name }}
{{- '", "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- elif message['role'] == 'tool' %}
{%- if loop.previtem['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_LLAMA2 = """{%- set system = '' %}{% set rest = messages %}
{%- if messages[0].role == 'system' %}{% set rest = messages[1:] %}
{%- set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}{% endif %}
{%- for message in rest %}
{%- if message['role'] == 'assistant' %}{% generation %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}
{%- endgeneration %}
{%- else %}{{ bos_token + '[INST] ' }}{{ ((system if loop.first else '') + message['content']) | trim + ' [/INST]' }}
{%- endif %}
{%- endfor %}"""

_LLAMA3 = """{{- bos_token }}{% for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
{%- else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

_ALPACA = """{%- set system = 'Below is an instruction that describes a task. Write a response that appropriately ' +
'completes the request.' %}{% set rest = messages %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}{% endif %}
{{- system + '\\n\\n' }}
{%- for message in rest %}
{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{%- else %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n### Response:\\n' }}{% endif %}
{%- endfor %}"""

_PLAIN = """{%- for message in messages %}
{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{%- else %}{{ message['content'] + '\\n' }}{% endif %}
{%- endfor %}"""

NAMED = {
    "chatml": _CHATML,
    "qwen": _QWEN,
    "llama2": _LLAMA2,
    "llama3": _LLAMA3,
    "alpaca": _ALPACA,
    "bloomz-plain": _PLAIN,
    "plain": _PLAIN,
}
"""Templates by name. `plain` writes no more than the texts themselves, as bloomz was trained."""
WITH_TOOLS = ("qwen",)
"""Those of them that have a place for tools."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` around what the model says."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return BEGIN + str(caller()) + END


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
        self._without_tools = NAMED.get(where) == source and where not in WITH_TOOLS
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise JinguError(f"the template is not Jinja ({error}).", where=where) from error
        self._marks = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        self._names = tokenizer.special_names
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
        if self._without_tools and (row.tools or "tool" in [message.role for message in row.messages]):
            raise RowError(f"the template {self.where} has no place for tools")
        messages: Any = [_as_they_have_it(message) for message in row.messages]
        tools: Any = list(row.tools) or None
        texts = "\0".join([message.content for message in row.messages])
        calls: Any = tools or [message for message in row.messages if message.tool_calls]
        if self._mention is not None and (calls or self._mention.search(texts)):
            messages, tools = self._mentioning(messages), self._mentioning(tools)
        whole = self._render(messages, tools)
        answers: list[tuple[int, int]] = []
        if self._marks:
            whole, answers = _without_marks(whole)
        elif marks:
            answers = [
                (
                    self._beginning(whole, messages[:place], tools, asks=True),
                    self._ended(whole, self._beginning(whole, until, tools)),
                )
                for place, message in enumerate(messages)
                if message["role"] == "assistant"
                for until in [messages[: place + 1]]
            ]
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
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=asks, **self._names
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise RowError(f"the template {self.where} refuses it ({error})") from error

    def _beginning(self, whole: str, messages: list[Any], tools: Any, *, asks: bool = False) -> int:
        part = self._render(messages, tools, asks=asks)
        if not whole.startswith(part):
            raise JinguError(
                "it cannot be proved which text of this template the model says: a conversation up to an answer is "
                "not the beginning of the whole one.",
                where=self.where,
                fix="Mark the answers in it ({% generation %}…{% endgeneration %}), choose another task.template, or "
                "train on all tokens (task.train_on=all).",
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


def find_template(choice: str, tokenizer: Tokenizer, *, obey_special: bool = False) -> Template:
    """The template that a run chooses: `auto` for the tokenizer's own, a name, or a file. Raises JinguError."""
    if choice == "auto":
        if tokenizer.chat_template is None:
            raise JinguError(
                "the tokenizer has no chat template of its own.",
                where="task.template",
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
            where="task.template",
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
    pieces = re.split(f"([{BEGIN}{END}])", text)
    plain, begun, found = "", 0, []
    for piece in pieces:
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
