"""Exact comparison of formulas in LaTeX that are quotients of polynomials, with roots of whole numbers.

A formula becomes numerator and denominator: sums of monomials with rational coefficients. Two of them are equal if the
products crosswise are the same sum. Square roots of square-free numbers are linearly independent over the rational
numbers, so equal sums have equal coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, isqrt

from jingu.align.formula_syntax import FormulaNode, differ

# A monomial: the number under its root, and its symbols with their exponents.
Monomial = tuple[int, tuple[tuple[str, int], ...]]
Polynomial = dict[Monomial, Fraction]
Quotient = tuple[Polynomial, Polynomial]

_ONE: Polynomial = {(1, ()): Fraction(1)}
# Terms of a polynomial, its exponents, and numbers under roots.
_MAX_TERMS, _MAX_EXPONENT, _MAX_RADICAND = 150, 12, 1_000_000
_MAX_BITS = 4_000
_ROUND, _SET = "()", r"\{\}"


class _OtherFormError(Exception):
    """A formula is no small quotient of polynomials."""


def compare(left: FormulaNode, right: FormulaNode) -> bool | None:
    """Return whether two formulas have the same value, or the same items (tuples, sets); None if it is not decided."""
    items = [_items(node) for node in (left, right)]
    if items[0] is not None and items[1] is not None and items[0][0] == items[1][0]:
        return _compare_items(items[0][0] == _SET, items[0][1], items[1][1])
    if any(node.kind == "list" for node in (left, right)):
        return None
    if differ(left, right):
        return False
    try:
        (top, bottom), (other_top, other_bottom) = (_quotient(node) for node in (left, right))
        is_equal = _multiply(top, other_bottom) == _multiply(other_top, bottom)
    except (_OtherFormError, ZeroDivisionError):
        return None
    return True if is_equal else None


def _items(node: FormulaNode) -> tuple[str, tuple[FormulaNode, ...]] | None:
    """Return the brackets and items of a tuple or a set; None for another formula."""
    if node.kind != "list" or node.text not in (_ROUND, _SET) or len(node.parts) != 1:
        return None
    [inner] = node.parts
    if inner.kind != "list":
        return (node.text, (inner,)) if node.text == _SET else None
    return (node.text, inner.parts) if set(inner.text.split()) == {","} else None


def _compare_items(is_set: bool, left: Sequence[FormulaNode], right: Sequence[FormulaNode]) -> bool | None:
    if not is_set:
        verdicts = [compare(*pair) for pair in zip(left, right, strict=False)]
        if len(left) != len(right) or False in verdicts:
            return False
        return None if None in verdicts else True
    # Each item of one set has to be in the other one.
    table = [[compare(item, candidate) for candidate in right] for item in left]
    for row in (*table, *zip(*table, strict=True)):
        if True not in row:
            return None if None in row else False
    return True


def _quotient(node: FormulaNode) -> Quotient:
    """Return numerator and denominator. Raises _OtherFormError."""
    parts = node.parts
    if node.kind == "number":
        return _without_zeros({(1, ()): Fraction(node.text)}), _ONE
    if node.kind == "symbol":
        if node.text in ("i", "j"):
            raise _OtherFormError
        return {(1, ((r"\pi" if node.text == "π" else node.text, 1),)): Fraction(1)}, _ONE
    if node.kind in ("group", "braces"):
        return _quotient(parts[0])
    if node.kind == "negative":
        top, bottom = _quotient(parts[0])
        return {monomial: -value for monomial, value in top.items()}, bottom
    if node.kind == "sum":
        return _sum([_quotient(part) for part in parts])
    if node.kind == "product":
        return _product([_quotient(part) for part in parts])
    if node.kind == "inverse":
        return _invert(_quotient(parts[0]))
    if node.kind == "fraction":
        return _product([_quotient(parts[0]), _invert(_quotient(parts[1]))])
    if node.kind == "power":
        return _power(_quotient(parts[0]), _constant(_quotient(parts[1])))
    if node.kind == "root" and len(parts) == 1:
        return _root(_constant(_quotient(parts[0])))
    raise _OtherFormError


def _sum(quotients: Sequence[Quotient]) -> Quotient:
    top, bottom = quotients[0]
    for other_top, other_bottom in quotients[1:]:
        if bottom != other_bottom:
            top, other_top = _multiply(top, other_bottom), _multiply(other_top, bottom)
            bottom = _multiply(bottom, other_bottom)
        total = dict(top)
        for monomial, value in other_top.items():
            total[monomial] = total.get(monomial, Fraction(0)) + value
        top = _without_zeros(total)
    return top, bottom


def _product(quotients: Sequence[Quotient]) -> Quotient:
    top, bottom = quotients[0]
    for other_top, other_bottom in quotients[1:]:
        top, bottom = _multiply(top, other_top), _multiply(bottom, other_bottom)
    return top, bottom


def _invert(quotient: Quotient) -> Quotient:
    top, bottom = quotient
    if not top:
        raise ZeroDivisionError
    return bottom, top


def _power(base: Quotient, exponent: Fraction) -> Quotient:
    if exponent.denominator != 1 or abs(exponent) > _MAX_EXPONENT:
        raise _OtherFormError
    if exponent < 0:
        base = _invert(base)
    elif exponent == 0 and not base[0]:
        raise _OtherFormError
    return _product([(_ONE, _ONE), *[base] * abs(int(exponent))])


def _root(radicand: Fraction) -> Quotient:
    """Return the square root of a positive number: √(p/q) = √(p·q) / q."""
    number = radicand.numerator * radicand.denominator
    if not 0 < number <= _MAX_RADICAND:
        raise _OtherFormError
    factor, free = 1, number
    for divisor in range(2, isqrt(number) + 1):
        while free % (divisor * divisor) == 0:
            free //= divisor * divisor
            factor *= divisor
    return {(free, ()): Fraction(factor, radicand.denominator)}, _ONE


def _constant(quotient: Quotient) -> Fraction:
    """Return the value of a rational number. Raises _OtherFormError."""
    values = []
    for polynomial in quotient:
        if not set(polynomial) <= {(1, ())}:
            raise _OtherFormError
        values.append(polynomial.get((1, ()), Fraction(0)))
    return values[0] / values[1]


def _multiply(left: Polynomial, right: Polynomial) -> Polynomial:
    """Return the product of two polynomials. Raises _OtherFormError if it is large."""
    if len(left) * len(right) > _MAX_TERMS * 4:
        raise _OtherFormError
    product: Polynomial = {}
    for (root, symbols), value in left.items():
        for (other_root, other_symbols), other_value in right.items():
            # √a · √b = g · √(a/g · b/g), for the greatest common divisor g.
            common = gcd(root, other_root)
            free = (root // common) * (other_root // common)
            exponents = dict(symbols)
            for name, exponent in other_symbols:
                exponents[name] = exponents.get(name, 0) + exponent
            monomial = (free, tuple(sorted(exponents.items())))
            product[monomial] = product.get(monomial, Fraction(0)) + value * other_value * common
    product = _without_zeros(product)
    if len(product) > _MAX_TERMS or any(value.numerator.bit_length() > _MAX_BITS for value in product.values()):
        raise _OtherFormError
    return product


def _without_zeros(polynomial: Polynomial) -> Polynomial:
    return {monomial: value for monomial, value in polynomial.items() if value}
