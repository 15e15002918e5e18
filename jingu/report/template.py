"""Load the templates of the reports. They escape all text that is not Markup, and limit the length of texts."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from math import isfinite
from typing import TypeVar

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup

from jingu.errors import pluralize
from jingu.formatting import format_duration, format_number, format_rounded, format_short, show_control_characters
from jingu.report.record import get_number
from jingu.version import __version__

Item = TypeVar("Item")
# Maximum length of a text on a page, in characters.
MAX_CHARS = 4000


@cache
def load_template(name: str) -> Template:
    """Return a template of this package."""

    # A model's output may contain control characters; show them as visible symbols.
    def shown(value: object) -> object:
        return value if isinstance(value, Markup) else show_control_characters(value)

    environment = Environment(
        autoescape=True,
        finalize=shown,
        trim_blocks=True,
        undefined=StrictUndefined,
        loader=FunctionLoader(read_resource),
    )
    environment.globals |= {"plain": format_number, "short": format_short, "rounded": format_rounded}
    environment.globals |= {"duration": format_duration, "count": pluralize, "number": get_number, "finite": isfinite}
    return environment.get_template(name)


def render_document(name: str, script_name: str = "page.js", **values: object) -> str:
    """Render a self-contained page, with its style and its script inline.

    Args:
        name: file of a template that extends base.html.
        script_name: file of the page's script.
        values: variables of the template.
    """
    script = read_resource(script_name)
    return load_template(name).render(
        version=__version__,
        style=Markup(read_resource("page.css")),
        script=Markup(script),
        # The Content Security Policy allows only the script with this hash, in case escaping misses something.
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **values,
    )


def read_resource(name: str) -> str:
    """Return the text of a file of this package."""
    return files("jingu.report").joinpath(name).read_text(encoding="utf-8")


def spread(items: list[Item], most: int) -> list[Item]:
    """Return at most `most` items (2 or more), evenly spaced, including the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def cut_text(text: str) -> str:
    """Return a text, truncated to `MAX_CHARS` characters."""
    return text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + " …"
