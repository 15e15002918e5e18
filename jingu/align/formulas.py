"""Formulas in LaTeX: whether an answer is equivalent to the expected one, by math-verify (sympy)."""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from jingu.align.final_answers import conclusion, denies, final_number, marked_answer, parse_number
from jingu.align.formula_syntax import LIMIT, FormulaSyntaxError, measure, open_operations, read_formula
from jingu.align.normal_form import compare

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
# Comparisons of all usual kinds.
_EXAMPLES = [
    (r"\frac{\sqrt{3}}{2}+x^{2}", r"x^2+\frac{1}{2}\sqrt 3"),
    (r"2\pi", r"\pi \cdot 2"),
    (r"(x+1)^2", r"x^2+2x+1"),
    (r"3\sqrt{5}", r"\sqrt{45}"),
    (r"\frac{\sqrt{2}}{2}", r"\sin\left(\frac{\pi}{4}\right)"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("(1,2)", "(1,-2)"),
    ("[1,2)", r"[1,2) \cup (3,\infty)"),
    ("y=2x+1", "2x-y=-1"),
    ("x>5", "5<x"),
    (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
    (r"e^{2}+i", "i+e^2"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"5\%", "0.05"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
]
_MATRIX = re.compile(r"(\\begin|\\end)\s*\{(?:b|small)?matrix\}")
# Two values in one: ±, of one formula without other values beside it.
_BOTH_SIGNS = re.compile(r"(?:([A-Za-z])\s*=)?([^,;=<>\\±]*(?:\\(?!pm)[^,;=<>\\±]*)*)(?:\\pm|±)([^,;=<>±]*)")
# The sine of an angle in degrees, which math-verify reads as radians.
_ARGUMENT_IN_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc))\s*(?:\\left)?[({]?\s*(\d{1,4})\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ)|°|\\degree)"
    r"\s*(?:\\right)?[)}]?"
)
_SPACE = re.compile(r"\s+|\\(?:[,;:! ]|(?:left|right|displaystyle)(?![a-zA-Z]))")


def check_formula(text: str) -> None:
    """Raise ValueError unless a text is a choice, a word, or a formula that can be compared."""
    if parse_number(text) is not None or _CHOICE.fullmatch(text.strip()) or _words(text) is not None:
        return
    if not _parse(_split_unit(_bare(text))[0]):
        raise ValueError("it is no formula in LaTeX, no choice such as B, and no word")


def is_equivalent(solution: str, completion: str) -> bool:
    """Return whether the answer in a text is equivalent to the expected one: a number, a formula, a choice or a word.

    The answer is the marked one (`jingu.align.final_answers`), else the last formula, else the whole text.
    """
    bare = _bare(solution)
    if _CHOICE.fullmatch(bare):
        return _choice(completion) == bare.strip("()[] .")
    if (words := _words(solution)) is not None:
        return words == _words(_answer(completion) or "", is_answer=True)
    answer = _answer(completion)
    value, unit = _split_unit(bare)
    if (number := parse_number(value)) is not None and answer is not None:
        verdict = _compare_numbers(number, unit, completion, answer)
        if verdict is not None:
            return verdict
    if not answer or len(answer) > _MAX_FORMULA:
        return False
    if _has_same_text(answer, bare):
        return True
    if (r"\pm" in answer or "±" in answer) != (r"\pm" in bare or "±" in bare):
        answer, bare = _write_signs(answer), _write_signs(bare)
        value, unit = _split_unit(bare)
    if _OTHER_VALUE.findall(answer) != _OTHER_VALUE.findall(bare):
        return False
    if _BASE.findall(answer) != _BASE.findall(bare):
        return False
    answer_value, answer_unit = _split_unit(answer)
    if unit and answer_unit and unit != answer_unit:
        return False
    return _has_same_text(answer_value, value) or _compare_formulas(value, answer_value)


def warm_up() -> None:
    """Compare a few formulas, so that the parser and sympy have built what they need before this process is forked."""
    for solution, answer in _EXAMPLES:
        _compare_formulas(solution, answer)


def _has_same_text(answer: str, solution: str) -> bool:
    """Return whether two formulas are the same text, apart from spaces."""
    return _SPACE.sub("", answer) == _SPACE.sub("", solution)


@lru_cache(maxsize=4_096)
def _compare_formulas(solution: str, answer: str) -> bool:
    """Return whether two formulas are equivalent.

    An answer that states an operation instead of its result (a sum, an integral), or that could take long to compare,
    is wrong unless the expected formula is of that kind.
    """
    if open_operations(answer) - open_operations(solution):
        return False
    try:
        node = read_formula(answer)
    except FormulaSyntaxError:
        return False
    try:
        expected_node = read_formula(solution)
    except FormulaSyntaxError:
        # Of another syntax than the usual one, which the check of the rows has admitted.
        limit = LIMIT
    else:
        limit = LIMIT.union(measure(expected_node))
        verdict = compare(node, expected_node)
        if verdict is not None:
            return verdict
    if not measure(node).fits(limit):
        return False
    from math_verify import verify

    gold, target = _parse(solution), _parse(answer)
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


@lru_cache(maxsize=4_096)
def _parse(formula: str) -> list[Any]:
    """Return a formula as math-verify reads it; empty if it cannot."""
    from math_verify import parse

    formula = _ARGUMENT_IN_DEGREES.sub(r"\1\\left(\\frac{\2\\pi}{180}\\right)", formula)

    # The worker enforces the timeout. math_verify would warn about its own timeout being off for every formula.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    values = parse(f"${formula}$", parsing_timeout=None) if formula.strip() else []
    # With one value, only the text was recognized. zoo: a division by 0.
    return values if len(values) > 1 and str(values[0]) not in ("zoo", "nan") else []


def _bare(text: str) -> str:
    """Return a formula without the marks around it, its matrices in round brackets."""
    text = _MATRIX.sub(r"\1{pmatrix}", text).strip().removesuffix(".").strip()
    boxed_answer = marked_answer(text)
    if boxed_answer is not None and not boxed_answer[1]:
        text = boxed_answer[0].strip()
    match = _FORMULA.fullmatch(text)
    return next(filter(None, match.groups())).strip().removesuffix(".").strip() if match else text


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
        return _bare(match[0])
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


def _write_signs(formula: str) -> str:
    """Return the two values of a formula with ± as a list of both."""
    match = _BOTH_SIGNS.fullmatch(formula)
    if match is None or r"\pm" in match[3]:
        return formula
    name = f"{match[1]}=" if match[1] else ""
    plus = "+" if match[2].strip() else ""
    return f"{name}{match[2]}{plus}{match[3]}, {name}{match[2]}-{match[3]}"


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
