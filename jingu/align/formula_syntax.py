"""The syntax of a formula in LaTeX, as far as it decides how long a computer algebra system may take to compare it.

An answer such as (x+y+z+w)^{999} stops such a system for minutes. `measure` bounds what expanding a formula may take,
and `differ` evaluates two formulas in floating point to find that they are not equal; both take microseconds to a few
milliseconds, for any text.
"""

from __future__ import annotations

import cmath
import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

# Nested groups and tokens of a formula that is read.
_MAX_DEPTH = 10
_MAX_TOKENS = 250
# Exponents of an equation that is compared with another one.
_MAX_DEGREE = 8
# Relative difference of values in float64 that are not equal, and of values of which one is a decimal: rounded.
_TOLERANCE, _ROUNDED_TOLERANCE = 1e-9, 1e-4
# Offsets of the positive values of variables at which formulas are compared.
_POINTS = (0.0, 0.37)

_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\d+(?:\.\d+)?|\.\d+|\S", re.DOTALL)
# Commands without a value.
_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|quad|qquad|big|Big|bigg|Bigg)[lr]?(?![a-zA-Z])|\\[,;:! ]|~"
)
_OPENING = {"{", "(", "[", r"\{", r"\langle", r"\lfloor", r"\lceil", r"\lvert"}
_CLOSING = {"}", ")", "]", r"\}", r"\rangle", r"\rfloor", r"\rceil", r"\rvert"}
_FRACTIONS = {r"\frac", r"\dfrac", r"\tfrac", r"\cfrac"}
_BINOMIALS = {r"\binom", r"\dbinom", r"\tbinom"}
# Functions without a value here, since math-verify reads some of them in several ways.
_OTHER_CALLS = "cot sec csc arcsin arccos arctan sinh cosh tanh coth log lg exp gcd Gamma arg deg"
_CALLS: dict[str, Callable[[complex], complex] | None] = {
    r"\sin": cmath.sin,
    r"\cos": cmath.cos,
    r"\tan": cmath.tan,
    r"\ln": cmath.log,
    **{f"\\{name}": None for name in _OTHER_CALLS.split()},
}
_TIMES = {"*", r"\cdot", r"\times", r"\ast"}
_DIVIDED = {"/", r"\div"}
# What separates formulas of which none is a term or a factor of another one.
_RELATIONS = "le ge leq geq lt gt ne neq in to land lor wedge vee setminus equiv approx sim cup cap mid"
_SEPARATORS = {*",;:=<>&|≤≥", "\\\\", r"\|", *(f"\\{name}" for name in _RELATIONS.split())}
_SIGNS = {"+", "-", r"\pm", r"\mp", "±"}
# Operations that an answer states instead of carrying them out, and that have no bound.
_UNEVALUATED = re.compile(
    r"\\(?:sum|prod|coprod|i*int|oint|lim|limsup|liminf|max|min|inf|sup|det|partial|bmod|pmod|mod|nabla|bigcup|bigcap)"
    r"(?![a-zA-Z])|\\begin\s*\{[^{}]*\}|\\d?frac\s*\{\s*d\b"
)
_GREEK = re.compile(r"\\(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma"
                    r"|tau|upsilon|phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega)")  # fmt: skip


class Size(NamedTuple):
    """An upper bound on the size of a formula after every power and product has been expanded.

    Attributes:
        terms: terms of the numerator over a common denominator.
        divisor: terms of the denominator.
        bits: bits of the largest number.
        functions: roots and functions, such as sines.
        items: items of sets and lists; sides of equations, inequalities and unions count four times.
    """

    terms: float = 1.0
    divisor: float = 1.0
    bits: float = 1.0
    functions: float = 0.0
    items: float = 0.0

    def fits(self, limit: Size) -> bool:
        """Return whether no part is larger than that of a limit; nor the terms that contain functions."""
        return all(mine <= most for mine, most in zip(self, limit, strict=True)) and (
            self.terms * self.functions <= limit.terms * max(limit.functions / LIMIT.functions, 1.0)
        )

    def union(self, size: Size) -> Size:
        """Return the larger of both sizes, by parts."""
        return Size(*map(max, self, size))


# An answer within these is compared in tens of milliseconds.
LIMIT = Size(terms=130.0, divisor=40.0, bits=4_000.0, functions=10.0, items=32.0)


@dataclass(frozen=True)
class FormulaNode:
    """A part of a formula: a number, a symbol, a sum, a product, a power, and so on (`kind`)."""

    kind: str
    parts: tuple[FormulaNode, ...] = ()
    text: str = ""


class _UndecidedError(Exception):
    """The value of a formula depends on how it is read."""


class FormulaSyntaxError(ValueError):
    """A text is no formula: a group does not end, or it is nested too deeply."""


@lru_cache(maxsize=4_096)
def read_formula(text: str) -> FormulaNode:
    """Return the structure of a formula. Raises FormulaSyntaxError if it is too long, too deep, or a group is open."""
    tokens = _TOKEN.findall(_LAYOUT.sub(" ", text))
    if len(tokens) > _MAX_TOKENS:
        raise FormulaSyntaxError("it is too long")
    reader = _FormulaReader([*reversed(tokens)])
    node = reader.read_list(0)
    if reader.tokens:
        raise FormulaSyntaxError("a group is closed twice")
    return node


def open_operations(text: str) -> set[str]:
    """Return the operations in a formula that an answer should have carried out: sums, integrals, limits, matrices."""
    return {re.sub(r"\s", "", match) for match in _UNEVALUATED.findall(text)}


def measure(node: FormulaNode) -> Size:
    """Return a bound on the size of an expanded formula."""
    return _measure(node)[0]


def differ(left: FormulaNode, right: FormulaNode) -> bool:
    """Return whether two formulas have different values; False if they are equal, or if it cannot be decided.

    Variables get positive values. A difference that rounding may explain decides nothing.
    """
    tolerance = _ROUNDED_TOLERANCE if _has_decimal(left) or _has_decimal(right) else _TOLERANCE
    try:
        for offset in _POINTS:
            values = [_Evaluation(offset) for _ in range(2)]
            first, second = (each.value(node) for each, node in zip(values, (left, right), strict=True))
            scale = 1.0 + max(each.largest for each in values)
            if abs(first - second) > tolerance * scale:
                return True
    except (_UndecidedError, ArithmeticError, ValueError):
        pass
    return False


@dataclass
class _FormulaReader:
    """Reads tokens by recursive descent; the next token is the last of the list."""

    tokens: list[str]

    def peek(self) -> str:
        return self.tokens[-1] if self.tokens else ""

    def read_list(self, depth: int) -> FormulaNode:
        """Read up to the end of a group: formulas with separators between them."""
        if depth > _MAX_DEPTH:
            raise FormulaSyntaxError("it is nested too deeply")
        items, separators = [self._read_sum(depth)], []
        while self.peek() in _SEPARATORS:
            separators.append(self.tokens.pop())
            items.append(self._read_sum(depth))
        return items[0] if not separators else FormulaNode("list", tuple(items), " ".join(separators))

    def _read_sum(self, depth: int) -> FormulaNode:
        terms: list[FormulaNode] = []
        while True:
            sign = ""
            while self.peek() in _SIGNS:
                sign = self.tokens.pop()
                if sign not in ("+", "-"):
                    terms.append(FormulaNode("unknown"))
            factors = self._read_product(depth)
            if factors:
                term = factors[0] if len(factors) == 1 else FormulaNode("product", tuple(factors))
                terms.append(FormulaNode("negative", (term,)) if sign == "-" else term)
            elif sign:
                terms.append(FormulaNode("unknown"))
            if self.peek() not in _SIGNS:
                break
        if not terms:
            return FormulaNode("unknown")
        return terms[0] if len(terms) == 1 else FormulaNode("sum", tuple(terms))

    def _read_product(self, depth: int) -> list[FormulaNode]:
        """Read factors; a divisor is a factor of the kind `inverse`."""
        factors: list[FormulaNode] = []
        is_inverse = False
        has_sign = False
        while (token := self.peek()) and token not in _SEPARATORS | _SIGNS | _CLOSING:
            if token in _TIMES | _DIVIDED:
                self.tokens.pop()
                is_inverse = token in _DIVIDED
                has_sign = True
                continue
            factor = self._read_power(depth)
            if is_inverse:
                factor = FormulaNode("inverse", (factor,))
            elif factors and not has_sign and self._is_ambiguous(factors[-1], factor):
                factors.append(FormulaNode("unknown"))
            is_inverse = False
            has_sign = False
            factors.append(factor)
        return factors

    @staticmethod
    def _is_ambiguous(before: FormulaNode, factor: FormulaNode) -> bool:
        """Return whether what follows a factor may be something else than another factor: a part of a mixed number, an
        argument of a function, a factor of a divisor."""
        is_mixed = before.kind == "number" and factor.kind in ("number", "fraction")
        is_argument = before.kind == "symbol" and factor.kind == "group"
        return is_mixed or is_argument or factor.kind == "number" or before.kind in ("inverse", "call")

    def _read_power(self, depth: int) -> FormulaNode:
        node = self._read_atom(depth)
        while (token := self.peek()) in ("^", "_", "!", "'"):
            self.tokens.pop()
            if token == "^":
                exponent = self._read_argument(depth)
                is_power = node.kind not in ("call", "power")
                node = FormulaNode("power", (node, exponent))
                node = node if is_power else FormulaNode("list", (node, FormulaNode("unknown")))
            elif token == "!":
                node = FormulaNode("factorial", (node,))
            elif token == "_" and node.kind == "symbol":
                index = self._read_argument(depth)
                is_name = index.kind in ("symbol", "number")
                node = (
                    FormulaNode("symbol", text=f"{node.text}_{index.text}")
                    if is_name
                    else FormulaNode("list", (node, index))
                )
            else:
                node = FormulaNode(
                    "list", (node, self._read_argument(depth) if token == "_" else FormulaNode("unknown"))
                )
        return node

    def _read_atom(self, depth: int) -> FormulaNode:
        token = self.tokens.pop() if self.tokens else ""
        if token in _OPENING:
            node = self.read_list(depth + 1)
            if self.peek() not in _CLOSING:
                raise FormulaSyntaxError("a group is not closed")
            closing = self.tokens.pop()
            if (token, closing) in (("(", ")"), ("[", "]"), ("{", "}")) and node.kind != "list":
                return FormulaNode("group" if token != "{" else "braces", (node,))
            return FormulaNode("list", (node,), token + closing)
        if token in _FRACTIONS | _BINOMIALS:
            first, second = self._read_argument(depth), self._read_argument(depth)
            return FormulaNode("fraction" if token in _FRACTIONS else "binomial", (first, second))
        if token == r"\sqrt":
            index: tuple[FormulaNode, ...] = ()
            if self.peek() == "[":
                index = (self._read_atom(depth),)
            return FormulaNode("root", (self._read_argument(depth), *index))
        if token in _CALLS:
            return self._read_call(token, depth)
        if token[:1].isdigit() or token[:1] == ".":
            return FormulaNode("number", text=token)
        if (len(token) == 1 and token.isalpha()) or token == r"\pi" or _GREEK.fullmatch(token):
            return FormulaNode("symbol", text=token)
        return FormulaNode("unknown", text=token)

    def _read_call(self, name: str, depth: int) -> FormulaNode:
        """Read the argument of a function, which without brackets is one atom."""
        modifiers: list[FormulaNode] = []
        while self.peek() in ("^", "_"):
            self.tokens.pop()
            modifiers.append(self._read_argument(depth))
        has_group = self.peek() in ("(", "{") or self.peek() in _FRACTIONS
        node = FormulaNode("call", (self._read_atom(depth),), name) if self.tokens else FormulaNode("unknown")
        # Whether \sin x y is sin(x) y is open, and so is \sin^{-1}.
        is_plain = not modifiers and (has_group or self.peek() in _SEPARATORS | _SIGNS | _CLOSING | {""})
        return node if is_plain else FormulaNode("list", (node, *modifiers, FormulaNode("unknown")))

    def _read_argument(self, depth: int) -> FormulaNode:
        """Read the argument of a command: a group, or else one digit, letter or command."""
        token = self.peek()
        if len(token) > 1 and token.isdigit():
            self.tokens[-1] = token[1:]
            return FormulaNode("number", text=token[0])
        if not token or token in _CLOSING:
            raise FormulaSyntaxError("an argument is missing")
        return self._read_atom(depth + 1)


@dataclass
class _Evaluation:
    """Values of formulas at one point; raises _UndecidedError for what has several readings.

    Attributes:
        largest: the largest absolute value of any part, which bounds the error of rounding.
    """

    offset: float
    largest: float = field(default=0.0)

    def value(self, node: FormulaNode) -> complex:
        value = self._compute(node)
        self.largest = max(self.largest, abs(value))
        if not cmath.isfinite(value):
            raise _UndecidedError
        return value

    def _compute(self, node: FormulaNode) -> complex:
        if node.kind == "number":
            return complex(node.text)
        if node.kind == "symbol":
            return self._symbol(node.text)
        if node.kind not in _COMPUTE:
            raise _UndecidedError
        if node.kind == "call" and _CALLS[node.text] is None:
            raise _UndecidedError
        values = [self.value(part) for part in node.parts]
        if node.kind == "call":
            function = _CALLS[node.text]
            assert function is not None
            return function(values[0])
        return _COMPUTE[node.kind](values)

    def _symbol(self, name: str) -> complex:
        if name in ("i", "j"):
            raise _UndecidedError
        constants = {r"\pi": math.pi, "π": math.pi, "e": math.e}
        return constants.get(name) or 0.3 + self.offset + (zlib.crc32(name.encode()) % 997) / 997


def _root(values: Sequence[complex]) -> complex:
    # The root of a negative number with an odd index is read as the real or as the principal one.
    if len(values) > 1 and (values[0].imag or values[0].real < 0):
        raise _UndecidedError
    return cmath.sqrt(values[0]) if len(values) == 1 else values[0] ** (1 / values[1])


def _power(values: Sequence[complex]) -> complex:
    base, exponent = values
    if (base.imag or base.real < 0) and exponent != round(exponent.real):
        raise _UndecidedError
    return base**exponent


def _factorial(values: Sequence[complex]) -> complex:
    number = values[0].real
    if values[0].imag or number != round(number) or not 0 <= number <= 170:
        raise _UndecidedError
    return complex(math.factorial(round(number)))


_COMPUTE: dict[str, Callable[[Sequence[complex]], complex]] = {
    "group": lambda values: values[0],
    "braces": lambda values: values[0],
    "negative": lambda values: -values[0],
    "inverse": lambda values: 1 / values[0],
    "sum": sum,
    "product": math.prod,
    "fraction": lambda values: values[0] / values[1],
    "power": _power,
    "root": _root,
    "factorial": _factorial,
    "call": lambda values: values[0],
}


def _has_decimal(node: FormulaNode) -> bool:
    return "." in node.text or any(map(_has_decimal, node.parts))


# A constant has a value, whose bits are those of its exact form; the values of symbols are unknown (None).
_Measured = tuple[Size, float | None]


def _measure(node: FormulaNode) -> _Measured:
    """Return the size of a formula, and its value if it is a rational number."""
    parts = [_measure(part) for part in node.parts]
    if node.kind == "number":
        return Size(bits=4.0 * len(node.text)), float(node.text)
    if node.kind in ("group", "braces"):
        return parts[0]
    if node.kind == "negative":
        return parts[0][0], None if parts[0][1] is None else -parts[0][1]
    if node.kind == "list":
        size, _ = _measure_sum(parts, False)
        weights = [1.0 if separator in (",", ";", "&") else 4.0 for separator in node.text.split()]
        items = sum(weights)
        # An equation is solved.
        if max(weights, default=0.0) > 1.0 and _largest_exponent(node) > _MAX_DEGREE:
            items += LIMIT.items
        return size._replace(items=size.items + items), None
    if node.kind == "sum":
        return _measure_sum(parts, True)
    if node.kind == "product":
        size, value = _measure_product(parts)
        # f(x) is read as a function or as a product.
        calls = sum(
            (left.kind, right.kind) == ("symbol", "unknown")
            for left, right in zip(node.parts, node.parts[1:], strict=False)
        )
        return size._replace(functions=size.functions + calls), value
    if node.kind == "inverse":
        return _invert(parts[0])
    if node.kind == "fraction":
        return _measure_product([parts[0], _invert(parts[1])])
    if node.kind == "power":
        return _measure_power(*parts)
    if node.kind in ("factorial", "binomial"):
        return _measure_factorial(parts)
    if node.kind in ("root", "call"):
        size = _measure_sum(parts, False)[0]
        functions = size.functions + 1
        if node.kind == "call":
            # sin(a + b) and sin(100 x) are expanded, and functions within functions are tried in many ways.
            functions += size.functions + size.terms - 1 + 8 * (size.bits > 12)
        return size._replace(functions=functions), None
    return Size(), None


def _largest_exponent(node: FormulaNode) -> float:
    """Return the largest number that is an exponent in a formula."""
    exponent = (_measure(node.parts[1])[1] or 0.0) if node.kind == "power" else 0.0
    return max([abs(exponent), *map(_largest_exponent, node.parts)])


def _measure_sum(parts: Sequence[_Measured], is_sum: bool) -> _Measured:
    divisor = math.prod(size.divisor for size, _ in parts)
    terms = sum(size.terms * divisor / size.divisor for size, value in parts if value is None or not is_sum)
    constants = [value for _, value in parts if value is not None]
    if is_sum and constants:
        terms += 1
    bits = max(size.bits for size, _ in parts) + math.log2(len(parts))
    functions, items = (sum(each) for each in zip(*((size.functions, size.items) for size, _ in parts), strict=True))
    size = Size(terms, divisor, bits, functions, items)
    return size, sum(constants) if is_sum and len(constants) == len(parts) else None


def _measure_product(parts: Sequence[_Measured]) -> _Measured:
    sizes = [size for size, _ in parts]
    values = [value for _, value in parts]
    size = Size(
        math.prod(size.terms for size in sizes),
        math.prod(size.divisor for size in sizes),
        sum(size.bits for size in sizes),
        sum(size.functions for size in sizes),
        sum(size.items for size in sizes),
    )
    factors = [value for value in values if value is not None]
    return size, math.prod(factors) if len(factors) == len(values) else None


def _invert(size_and_value: _Measured) -> _Measured:
    size, value = size_and_value
    size = size._replace(terms=size.divisor, divisor=size.terms)
    return size, None if value is None else 1 / value if value else math.inf


def _measure_power(base: _Measured, exponent: _Measured) -> _Measured:
    (size, value), (exponent_size, power) = base, exponent
    functions, items = size.functions + exponent_size.functions, size.items + exponent_size.items
    if power is None:
        bits = size.bits + exponent_size.bits
        terms = size.terms * exponent_size.terms * exponent_size.divisor
        return Size(terms, size.divisor, bits, functions + 1, items), None
    count = math.ceil(min(abs(power), 1e300))
    if value is not None and abs(value) in (0.0, 1.0):
        return size, abs(value) if value == 0 or count % 2 == 0 else value
    bits = size.bits * count if value is not None else max(size.bits * count, 1) * (size.terms > 1) + 1
    bits = max(bits, exponent_size.bits)
    terms, divisor = _choose(size.terms, count), _choose(size.divisor, count)
    if power < 0:
        terms, divisor = divisor, terms
    is_root = power != round(power) if math.isfinite(power) else False
    constant = None
    if value is not None and not is_root:
        try:
            constant = float(value**power)
        except (ArithmeticError, ValueError):
            constant = math.inf
    return Size(terms, divisor, bits, functions + is_root, items), constant


def _choose(terms: float, power: float) -> float:
    """Return the number of terms of a power of a sum."""
    if terms <= 1:
        return terms
    if power * terms > 1e6:
        return math.inf
    try:
        return math.exp(math.lgamma(terms + power) - math.lgamma(power + 1) - math.lgamma(terms))
    except OverflowError:
        return math.inf


def _measure_factorial(parts: Sequence[_Measured]) -> _Measured:
    size = _measure_sum(parts, False)[0]
    value = parts[0][1]
    if value is None:
        return size._replace(functions=size.functions + 1), None
    number = max(abs(value), 2.0)
    bits = math.inf if number > 1e6 else number * math.log2(number)
    exact = math.inf
    if len(parts) == 1 and 0 <= value <= 170 and value == round(value):
        exact = float(math.factorial(round(value)))
    return Size(bits=max(bits, size.bits), functions=size.functions, items=size.items), exact
