"""The report's templates: what they are filled with is text, never markup, unless it says so."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from jingu.words import plain, short, visible


@cache
def template(name: str) -> Template:
    """A template in this room's folder."""

    def shown(value: object) -> object:
        return value if isinstance(value, Markup) else visible(value)

    environment = Environment(autoescape=True, finalize=shown, trim_blocks=True, undefined=StrictUndefined)
    environment.globals |= {"plain": plain, "short": short}
    return environment.from_string(content(name))


def content(name: str) -> str:
    """The text of a file in this room's folder."""
    return files("jingu.report").joinpath(name).read_text(encoding="utf-8")
