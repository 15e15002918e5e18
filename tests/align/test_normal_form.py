"""Exact comparison of formulas, against sympy."""

from __future__ import annotations

import random

import pytest
import sympy

from jingu.align.formula_syntax import read_formula
from jingu.align.normal_form import compare


@pytest.mark.parametrize(
    ("left", "right", "verdict"),
    [
        (r"x^2+2x+1", "(x+1)^2", True),
        (r"\frac{x^2-1}{x-1}", "x+1", True),
        (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt 3}", True),
        (r"3\sqrt{5}", r"\sqrt{45}", True),
        (r"\sqrt{2}\cdot\sqrt{6}", r"2\sqrt{3}", True),
        (r"\sqrt{\frac{1}{2}}", r"\frac{\sqrt 2}{2}", True),
        (r"\frac{1}{1+\sqrt{2}}", r"\sqrt{2}-1", True),
        (r"\pi \cdot 2 + 7", r"2\pi+7", True),
        (r"x^{-2}", r"\frac{1}{x^2}", True),
        (r"0.5", r"\frac12", True),
        (r"(1, x+1)", "(1,1+x)", True),
        (r"\{1,2,3\}", r"\{3,2,1\}", True),
        (r"x^2-2x+1", "(x+1)^2", False),
        (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5}", False),
        ("(1,2)", "(2,1)", False),
        ("(1,2)", "(1,2,3)", False),
        (r"\{1,2\}", r"\{1,3\}", False),
        (r"\frac{1}{3}", "0.34", False),
        # Not decided here: another kind of brackets, functions, complex numbers, products that are too large.
        ("[1,2)", "(1,2)", None),
        ("(1,2)", "[1,2]", None),
        (r"\{1,2\}", "(1,2)", None),
        (r"\sin x+1", r"1+\sin x", None),
        ("i^2", "-1", None),
        ("(a+b+c+d+f+g+h)^{11}", "(b+a+c+d+f+g+h)^{11}", None),
        ("0^0", "1", None),
    ],
)
def test_verdicts(left: str, right: str, verdict: bool | None) -> None:
    assert compare(read_formula(left), read_formula(right)) is verdict
    assert compare(read_formula(right), read_formula(left)) is verdict


def random_formula(draw: random.Random, depth: int) -> tuple[str, sympy.Expr]:
    """Return a random formula in LaTeX, and the same one of sympy."""
    kind = draw.choice(["number", "symbol", "root"] if depth == 0 else ["sum", "product", "fraction", "power"])
    if kind == "number":
        number = draw.randint(1, 12)
        return str(number), sympy.Integer(number)
    if kind == "symbol":
        name = draw.choice("xy")
        return name, sympy.Symbol(name, positive=True)
    if kind == "root":
        number = draw.randint(2, 50)
        return rf"\sqrt{{{number}}}", sympy.sqrt(number)
    first, first_value = random_formula(draw, depth - 1)
    if kind == "power":
        exponent = draw.randint(1, 3)
        return rf"\left({first}\right)^{{{exponent}}}", first_value**exponent
    second, second_value = random_formula(draw, depth - 1)
    if kind == "sum":
        return f"{first}-{{{second}}}", first_value - second_value
    if kind == "product":
        return rf"\left({first}\right)\cdot\left({second}\right)", first_value * second_value
    return rf"\frac{{{first}}}{{{second}}}", first_value / second_value


def test_random_formulas_equal_their_expansions() -> None:
    draw = random.Random(3)
    decided = 0
    for _ in range(60):
        text, value = random_formula(draw, draw.randint(1, 3))
        if value.has(sympy.zoo, sympy.nan):
            continue
        node = read_formula(text)
        verdict = compare(node, read_formula(sympy.latex(sympy.expand(value))))
        assert verdict is not False, text
        decided += verdict is True
        assert compare(node, read_formula(sympy.latex(sympy.expand(value + sympy.Rational(1, 7))))) is not True, text
    assert decided > 30
