"""Formulas in LaTeX: whether an answer is equivalent to the expected one, by math-verify (sympy)."""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from typing import Any

from jingu.align.final_answers import conclusion, denies, final_number, marked_answer, parse_number

# Characters of an answer's formula; a longer one is wrong.
_MAX_FORMULA = 2_000
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$((?:\\.|[^$\\])+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_WRAPPED_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox)\s*\{([^{}]*)\}")
_TEXT = re.compile(r"[^\W\d_]{3,}(?:[ '-][^\W\d_]+)*")
# A unit behind a number: \text{ cm}^2, or words.
_UNIT = re.compile(
    r"(?:\\[,;: ]|~|\s)*(?:\\(?:text|textrm|mathrm|mbox)\s*\{\s*([^{}]*)\}|(?<=[\d}) ])([A-Za-z]{2,}(?:/[A-Za-z]+)?))"
    r"\s*(\^\s*\{?\s*-?\d\s*\}?)?\s*\.?\s*$"
)
# A unit of one letter, which is a variable in a formula.
_LETTER_UNIT = re.compile(r"\d\s*([A-Za-z])\s*\.?\s*$")
_CHOICE = re.compile(r"(?:(?:option|choice)\s+)?[(\[]?([A-J])[)\]]?(?:[.):]\s.*)?", re.DOTALL)
_SEVERAL_CHOICES = re.compile(r"\b(?:or|and)\s*\(?[A-J]\b|/\s*[A-J]\b")
# What math-verify drops: a relation that says that the value is another one, and the base of a number.
_OTHER_VALUE = re.compile(r"\\n(?:e|eq|ot)(?![a-zA-Z])|≠|\\pm|±|…|\\[lc]?dots")
_BASE = re.compile(r"\d\s*_\s*\{?\s*(\d+)")
# A power of a power, or an exponent of five digits: evaluating them may take for ever.
_TOWER = re.compile(r"\^\s*\{?[^{}^]*\^|\^\s*\{?\s*\d{5,}|\d{4,}\s*!|!\s*!|\*\*.*\*\*")


def check_formula(text: str) -> None:
    """Raise ValueError unless a text is a choice, a word, or a formula that can be compared."""
    if parse_number(text) is not None or _CHOICE.fullmatch(text.strip()) or _words(text) is not None:
        return
    if not _parse(_split_unit(_bare(text))[0]):
        raise ValueError("it is no formula in LaTeX, no choice such as B, and no word")


def is_equivalent(expected: str, completion: str) -> bool:
    """Return whether the answer in a text is equivalent to the expected one: a number, a formula, a choice or a word.

    The answer is the marked one (`jingu.align.final_answers`), else the last formula, else the whole text.
    """
    bare = _bare(expected)
    if _CHOICE.fullmatch(bare):
        return _choice(completion) == bare.strip("()[] .")
    if (words := _words(expected)) is not None:
        return words == _words(_answer(completion) or "", is_answer=True)
    answer = _answer(completion)
    value, unit = _split_unit(bare)
    if (number := parse_number(value)) is not None and answer is not None:
        verdict = _compare_numbers(number, unit, completion, answer)
        if verdict is not None:
            return verdict
    if answer is None or len(answer) > _MAX_FORMULA or _OTHER_VALUE.search(answer) != _OTHER_VALUE.search(bare):
        return False
    if _BASE.findall(answer) != _BASE.findall(bare) or (_TOWER.search(answer) and not _TOWER.search(bare)):
        return False
    answer_value, answer_unit = _split_unit(answer)
    if unit and answer_unit and unit != answer_unit:
        return False
    from math_verify import verify

    gold, target = _parse(value), _parse(answer_value)
    return bool(gold and target and verify(gold, target, timeout_seconds=None))


def _compare_numbers(number: Fraction, unit: str, completion: str, answer: str) -> bool | None:
    """Return whether the answer is a number of this value and unit; None if it must be compared as a formula."""
    value = final_number(completion)
    if value is None:
        return None
    answer_unit = _split_unit(answer)[1]
    if unit and not answer_unit and (letter := _LETTER_UNIT.search(answer)):
        answer_unit = letter[1]
    return value == number and not (unit and answer_unit and unit != answer_unit)


def _parse(formula: str) -> list[Any]:
    """Return a formula as math-verify reads it; empty if it cannot."""
    from math_verify import parse

    # The worker enforces the timeout. math_verify would warn about its own timeout being off for every formula.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    values = parse(f"${formula}$", parsing_timeout=None) if formula.strip() else []
    # With one value, only the text was recognized. zoo: a division by 0.
    return values if len(values) > 1 and str(values[0]) not in ("zoo", "nan") else []


def _bare(text: str) -> str:
    """Return a formula without the marks around it."""
    text = text.strip().removesuffix(".").strip()
    boxed_answer = marked_answer(text)
    if boxed_answer is not None and not boxed_answer[1]:
        text = boxed_answer[0].strip()
    match = _FORMULA.fullmatch(text)
    return next(filter(None, match.groups())).strip() if match else text


def _answer(completion: str) -> str | None:
    """Return the formula, choice or word that a text gives as its answer; None if there is none."""
    boxed_answer = marked_answer(completion)
    if boxed_answer is not None and not boxed_answer[1]:
        # A unit may stand behind the box.
        tail = re.match(
            r"\s*(\\text\{[^{}]*\}(?:\^\{?\d\}?)?)",
            completion[completion.rfind(boxed_answer[0]) + len(boxed_answer[0]) + 1 :],
        )
        return _bare(f"{boxed_answer[0]}{tail[1] if tail else ''}")
    text = boxed_answer[0] if boxed_answer is not None else conclusion(completion)
    formulas = [*_FORMULA.finditer(text)]
    if formulas:
        match = formulas[0 if boxed_answer is not None else -1]
        if denies(text[: match.start()]):
            return None
        return next(filter(None, match.groups())).strip()
    return _bare(text)


def _choice(completion: str) -> str | None:
    """Return the letter of the choice that a text gives as its answer."""
    answer = _WRAPPED_TEXT.sub(r"\1", _answer(completion) or "").replace("*", "").strip().removesuffix(".")
    match = _CHOICE.fullmatch(answer)
    return None if match is None or _SEVERAL_CHOICES.search(answer) else match[1]


def _words(text: str, *, is_answer: bool = False) -> str | None:
    """Return a text of words in lower case; None if it is a formula.

    Args:
        is_answer: whether any text of words is meant as such, even one letter.
    """
    plain = _bare(text).replace("*", "")
    content = _WRAPPED_TEXT.sub(r"\1", plain).strip().removesuffix(".")
    is_text = _TEXT.fullmatch(content) or (content != plain and re.fullmatch(r"[^\W\d_][^\\$^_{}\d]*", content))
    return " ".join(content.casefold().split()) if is_text or is_answer else None


def _split_unit(formula: str) -> tuple[str, str]:
    """Return a formula without its unit, and the unit without spaces; empty if there is none."""
    match = _UNIT.search(formula)
    if match is None or not formula[: match.start()].strip():
        return formula, ""
    if match[2] is not None and formula[: match.start(2)].rstrip().endswith("\\"):
        return formula, ""
    name = re.sub(r"[\s.]", "", match[1] if match[1] is not None else match[2])
    name = name.removesuffix("s") if len(name) > 3 else name
    return formula[: match.start()].strip(), name + re.sub(r"[\s{}]", "", match[3] or "")
