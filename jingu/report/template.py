"""Load the report's templates. They escape everything that is not marked as markup."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from math import isfinite

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from jingu.errors import pluralize
from jingu.formatting import format_duration, format_number, format_rounded, format_short, show_control_characters
from jingu.report.record import get_number


@cache
def load_template(name: str) -> Template:
    """Return a template of this package."""

    def shown(value: object) -> object:
        return value if isinstance(value, Markup) else show_control_characters(value)

    environment = Environment(autoescape=True, finalize=shown, trim_blocks=True, undefined=StrictUndefined)
    environment.globals |= {"plain": format_number, "short": format_short, "rounded": format_rounded}
    environment.globals |= {"duration": format_duration, "count": pluralize, "number": get_number, "finite": isfinite}
    return environment.from_string(read_resource(name))


def read_resource(name: str) -> str:
    """Return the text of a file of this package."""
    return files("jingu.report").joinpath(name).read_text(encoding="utf-8")
