"""Verifiers: rule-based rewards, computed from an answer and the columns of its row."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from jingu.config.sections import rewards

NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")

# An answer: `prompt`, `completion`, `completion_ids`, and the columns of its row.
Answer = Mapping[str, Any]


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text; None if it has none."""
    numbers = NUMBER.findall(text)
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:
        return None


def _exact(settings: rewards.ExactReward, answer: Answer) -> bool:
    return bool(answer["completion"].strip() == str(answer[settings.column]).strip())


def _number(settings: rewards.NumberReward, answer: Answer) -> bool:
    number = last_number(answer["completion"])
    return number is not None and number == last_number(str(answer[settings.column]))


def _math(settings: rewards.MathReward, answer: Answer) -> bool:
    from math_verify import parse, verify

    # The worker enforces the timeout. math_verify would warn about its own timeout being off for every formula.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    expected = parse(str(answer[settings.column]), parsing_timeout=None)
    return bool(verify(expected, parse(answer["completion"], parsing_timeout=None), timeout_seconds=None))


def _regex(settings: rewards.RegexReward, answer: Answer) -> bool:
    pattern = settings.pattern or str(answer[settings.column])
    return re.fullmatch(pattern, answer["completion"], re.DOTALL) is not None


def _json_schema(settings: rewards.JsonSchemaReward, answer: Answer) -> bool:
    import jsonschema_rs

    schema = answer[settings.column]
    try:
        value = json.loads(answer["completion"])
    except ValueError:
        return False
    return bool(jsonschema_rs.is_valid(json.loads(schema) if isinstance(schema, str) else schema, value))


def _length(settings: rewards.LengthReward, answer: Answer) -> float:
    length = len(answer["completion_ids"])
    nearest = min(max(length, settings.min_tokens), settings.max_tokens)
    return max(0.0, 1.0 - abs(length - nearest) / max(nearest, 1))


VERIFIERS: dict[str, Callable[[Any, Answer], float]] = {
    "exact": _exact,
    "number": _number,
    "math": _math,
    "regex": _regex,
    "json_schema": _json_schema,
    "length": _length,
}
# Verifiers whose running time is unbounded; they run in a worker with a timeout.
SLOW_VERIFIERS = {"math", "regex", "json_schema"}
# Packages that a verifier needs.
REQUIRED_PACKAGES = {"math": "math_verify", "json_schema": "jsonschema_rs"}
