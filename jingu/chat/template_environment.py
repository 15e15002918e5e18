"""The Jinja environment of chat templates: the sandbox, the extensions of transformers, and the tracing of writers."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Output, Scope, TemplateData
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jingu.chat.tracing import (
    ANSWER_END,
    ANSWER_START,
    TracedMessage,
    TracedMessages,
    add_filters,
    has_constant_prompt,
    instrument,
)

_DICT_ATTRIBUTES = frozenset(dir(dict))


@cache
def compile_template(source: str) -> tuple[Template, bool]:
    """Return an instrumented template, and whether its generation prompt does not depend on the conversation."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    add_filters(environment)
    tree = environment.parse(source)
    is_constant = has_constant_prompt(tree)
    instrument(tree, environment)
    code = environment.compile(tree)
    return Template.from_code(environment, code, environment.make_globals(None)), is_constant


class _GenerationTag(Extension):
    """The tag `{% generation %}…{% endgeneration %}`, which writes marks around an answer."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (Output([TemplateData(mark)]) for mark in (ANSWER_START, ANSWER_END))
        return Scope([start, *body, end]).set_lineno(line)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which finds keys of dictionaries at once: it would try attributes first, which is slow.

    Messages note what is read.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, dict) and attribute not in _DICT_ATTRIBUTES:
            if attribute not in obj:
                return self.undefined(obj=obj, name=attribute)
            return obj.read(attribute) if type(obj) is TracedMessage else obj[attribute]
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is TracedMessage and isinstance(argument, str) and argument in obj:
            return obj.read(argument)
        return super().getitem(obj, argument)


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Templates may write their messages, which are no list while they are traced.
    options.setdefault("default", lambda item: list(item) if isinstance(item, TracedMessages) else _raise_type(item))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_type(item: Any) -> NoReturn:
    raise TypeError(f"{type(item).__name__} cannot be written as JSON")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
