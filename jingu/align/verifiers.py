"""Verifiers: rule-based rewards, computed from an answer and the columns of its row.

Expected values are checked before the run (`check_expected`). An answer on which a verifier fails in any way, such as
JSON of a thousand levels, is wrong (`verify`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from fractions import Fraction
from typing import Any, NamedTuple

from jingu.align.code_reward import read_tests
from jingu.align.final_answers import conclusion, final_number, parse_number
from jingu.align.formulas import check_formula, is_equivalent, warm_up
from jingu.config.sections import rewards
from jingu.tables import import_name

# An answer: its texts and ids (`jingu.align.answer_view`), and the columns of its row.
Answer = Mapping[str, Any]


def check_expected(settings: rewards.VerifierBase, value: Any) -> None:
    """Raise ValueError, with the reason, if a verifier cannot compare with the value of a column."""
    find_verifier(settings).read(value)


def verify(settings: rewards.Reward, answer: Answer) -> float:
    """Return the reward of an answer; 0 if the verifier fails on it.

    Since the expected values were checked, any failure is due to the answer.
    """
    score = find_verifier(settings).score
    assert score is not None
    try:
        return float(score(settings, answer))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic of a library in Rust is no Exception
        return 0.0


def _text(value: Any) -> str:
    """Return an expected text; that of a whole number, if it is one. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"expected a text, not {_quote(value)}")
    if not value.strip():
        raise ValueError("expected a text that is not empty")
    return value


def _quote(value: Any) -> str:
    """Return the start of a value as JSON."""
    return json.dumps(value)[:60]


def _texts(value: Any) -> list[str]:
    """Return the accepted answers: a text, or a list of texts. Raises ValueError."""
    if isinstance(value, list) and not value:
        raise ValueError("expected a text or a list of texts, not an empty list")
    return [_text(item) for item in (value if isinstance(value, list) else [value])]


def _exact(settings: rewards.ExactReward, answer: Answer) -> bool:
    answers = {text.strip() for text in _conclusions(answer["completion"])}
    return any(text.strip() in answers for text in _texts(answer[settings.column]))


def _conclusions(completion: str) -> list[str]:
    """Return what may be the answer: the whole text, and what follows the reasoning in it, if there is some."""
    return [completion, *([conclusion(completion)] if "</think>" in completion else [])]


def _expected_number(value: Any) -> Fraction:
    """Return an expected number, from JSON or from a text. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected a number, not {_quote(value)}")
    number = parse_number(str(value))
    if number is None:
        raise ValueError(
            f"expected one number and nothing else, such as 42, -0.5, 3/4, 1 1/2, 50%, 1,000 or 2e-3, "
            f"not {_quote(value)}"
        )
    return number


def _number(settings: rewards.NumberReward, answer: Answer) -> bool:
    return final_number(answer["completion"]) == _expected_number(answer[settings.column])


def _expected_formula(value: Any) -> str:
    """Return an expected formula. Raises ValueError if it is none."""
    if isinstance(value, float) and math.isfinite(value):
        return str(value)
    text = _text(value)
    check_formula(text)
    return text


def _math(settings: rewards.MathReward, answer: Answer) -> bool:
    value = answer[settings.column]
    return is_equivalent(value if isinstance(value, str) else str(value), answer["completion"])


def _pattern(value: Any) -> str:
    """Return an expected pattern. Raises ValueError if it is no regular expression."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected a regular expression, not {_quote(value)}")
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"it is not a regular expression ({error})") from error
    return value


def _regex(settings: rewards.RegexReward, answer: Answer) -> bool:
    pattern = settings.pattern or answer[settings.column]
    return re.fullmatch(pattern, answer["completion"], re.DOTALL) is not None


def _schema(value: Any) -> Any:
    """Return the validator of a JSON schema, which may be JSON text. Raises ValueError if it is none."""
    import jsonschema_rs

    def refuse(url: str) -> Any:
        raise ValueError(f"{url} is not in the schema, and nothing is fetched from the network")

    try:
        schema = parse_json(value) if isinstance(value, str) else value
        if not isinstance(schema, dict | bool):
            raise ValueError(f"expected an object, not {_quote(schema)}")
        return jsonschema_rs.validator_for(schema, retriever=refuse)
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"it is not a JSON schema ({reason})") from error


def _json_schema(settings: rewards.JsonSchemaReward, answer: Answer) -> bool:
    schema, values = _schema(answer[settings.column]), []
    for text in _conclusions(answer["completion"]):
        with suppress(ValueError):
            values.append(parse_json(text))
    return any(schema.is_valid(value) for value in values)


def parse_json(text: str) -> Any:
    """Return the value of JSON text. Raises ValueError for what the standard excludes or leaves open: NaN, Infinity,
    numbers beyond float64, and objects with the same key twice; RecursionError if it is nested too deeply."""

    def number(text: str) -> float:
        if not math.isfinite(value := float(text)):
            raise ValueError(f"{text} is not a finite number")
        return value

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(value := dict(items)) < len(items):
            raise ValueError("an object has a key twice")
        return value

    return json.loads(text, parse_constant=number, parse_float=number, object_pairs_hook=pairs)


def _length(settings: rewards.LengthReward, answer: Answer) -> float:
    length = sum(answer["completion_mask"])
    nearest = min(max(length, settings.min_tokens), settings.max_tokens)
    return max(0.0, 1.0 - abs(length - nearest) / max(nearest, 1))


class Verifier(NamedTuple):
    """A verifier.

    Attributes:
        read: reads an expected value; raises ValueError if no answer can be compared with it.
        score: returns the reward of an answer; None for tests, which a sandbox runs.
        is_slow: whether its running time is unbounded, so that it runs in a worker with a timeout.
        package: the package that it needs.
        warm_up: builds what the first answer would otherwise wait for.
    """

    read: Callable[[Any], object]
    score: Callable[[Any, Answer], float] | None
    is_slow: bool = False
    package: str | None = None
    warm_up: Callable[[], object] | None = None


VERIFIERS = {
    "exact": Verifier(_texts, _exact),
    "number": Verifier(_expected_number, _number),
    "math": Verifier(_expected_formula, _math, is_slow=True, package="math_verify", warm_up=warm_up),
    "regex": Verifier(_pattern, _regex, is_slow=True),
    "json_schema": Verifier(_schema, _json_schema, is_slow=True, package="jsonschema_rs"),
    "python_tests": Verifier(read_tests, None),
    "length": Verifier(lambda value: value, _length),
}
"""The verifiers by the types of their settings (`jingu.config.sections.rewards`)."""


def find_verifier(settings: rewards.Reward) -> Verifier:
    """Return the verifier of settings: jingu's, or that of a plug-in."""
    if settings.type in VERIFIERS:
        return VERIFIERS[settings.type]
    assert settings.IMPLEMENTATION is not None
    verifier: Verifier = import_name(settings.IMPLEMENTATION)
    return verifier
