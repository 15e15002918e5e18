"""Templates of task files: Jinja in its sandbox, with a limit on their time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jingu.runtime.time_limit import TimeLimitError, time_limit

# What a wrong template can raise, beside the names of missing columns.
TEMPLATE_ERRORS = (
    *(TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, re.error),
    *(MemoryError, TimeLimitError),
)
# CPU seconds of a template for one document, which takes less than a millisecond.
TEMPLATE_SECONDS = 5.0


@cache
def compile_template(template: str) -> Any:
    """Return a Jinja template, which runs in a sandbox."""
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)

    def replace(text: str, pattern: str, replacement: str, count: int = 0) -> str:
        return re.sub(pattern, replacement, text, count=count)

    environment.filters["regex_replace"] = replace
    return environment.from_string(template)


def render_template(template: str, variables: Mapping[str, Any]) -> str:
    """Return the text of a template. Raise an exception of `TEMPLATE_ERRORS` if it is wrong, or does not end."""
    with time_limit(TEMPLATE_SECONDS):
        return str(compile_template(template).render(**variables))
