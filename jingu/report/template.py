"""Load the report's templates. They escape everything that is not marked as markup."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from jingu.formatting import format_number, format_short, show_control_characters


@cache
def load_template(name: str) -> Template:
    """Return a template of this package."""

    def shown(value: object) -> object:
        return value if isinstance(value, Markup) else show_control_characters(value)

    environment = Environment(autoescape=True, finalize=shown, trim_blocks=True, undefined=StrictUndefined)
    environment.globals |= {"plain": format_number, "short": format_short}
    return environment.from_string(read_resource(name))


def read_resource(name: str) -> str:
    """Return the text of a file of this package."""
    return files("jingu.report").joinpath(name).read_text(encoding="utf-8")
