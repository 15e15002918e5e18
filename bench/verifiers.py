"""CPU time of the `math` reward for the answers of a step, of which a tenth are bombs: formulas that keep a computer
algebra system busy for minutes.

Each kind of bomb is measured alone. The time is that of all processes, and the worker that starts them has started.
Argument `tiny` is a quick check with few answers.
"""

from __future__ import annotations

import re
import resource
import time

from jingu.align.reward_worker import RewardFunctions

ANSWERS = 512
# One answer in this number is a bomb.
EVERY = 10
# Answers that are no bombs, and expected ones: right and wrong, numbers and formulas.
ORDINARY = [
    (r"\frac{14}{2}", "7"),
    ("@", "13"),
    (r"\pi\cdot 2+@", r"2\pi+@"),
    (r"3\pi+@", r"2\pi+@"),
    (r"x^2+2x+1+@", "(x+1)^2+@"),
    (r"x^2-2x+1+@", "(x+1)^2+@"),
    (r"\frac{\sqrt{3}}{3}+@", r"\frac{1}{\sqrt{3}}+@"),
    (r"\frac{\sqrt{3}}{2}+@", r"\frac{1}{\sqrt{3}}+@"),
    ("(@,2)", "(@,2)"),
    ("(2,@)", "(@,2)"),
    (r"3\sqrt{5}+@", r"\sqrt{45}+@"),
    (r"\{@,2\}", r"\{2,@\}"),
]
LETTERS = "abcdfghklmnpqrstuvwxyz"


def _nest(text: str, depth: int, core: str = "x") -> str:
    """Return a text that contains itself, in place of @, to a depth."""
    for _ in range(depth):
        core = text.replace("@", core)
    return core


def _join(text: str, count: int, separator: str = "+") -> str:
    """Return copies of a text, with their numbers in place of @ and letters in place of &."""
    return separator.join(text.replace("@", str(n + 2)).replace("?", LETTERS[n % len(LETTERS)]) for n in range(count))


BOMBS: dict[str, str] = {
    "power of a sum": "(x+y+z+w)^{999}",
    "power of a sum of six": "(a+b+c+d+f+g)^{60}",
    "nested powers": _nest("(@+1)^{99}", 4),
    "nested fractions": _nest(r"\frac{1}{1+\frac{@}{y+1}}", 20),
    "fractions of several variables": _join(r"\frac{?}{?+@}", 30),
    "tower": "9^{9^{9^{9}}}",
    "huge power": "12345678^{87654321}",
    "factorial": "99999999!",
    "factorial of factorials": "((9!)!)!",
    "binomial": r"\binom{99999999}{44444444}",
    "sum": r"\sum_{i=1}^{99999999} \frac{1}{i^{3}+1}",
    "product": r"\prod_{k=1}^{9999}(x+k)",
    "integrals": _nest(r"\int_0^1 \sin(x^x) e^{-x^2} @ dx", 4),
    "limit": r"\lim_{x\to 0}\frac{\sin(\tan x)-\tan(\sin x)}{\arcsin(\arctan x)-\arctan(\arcsin x)}",
    "derivative": r"\frac{d^{50}}{dx^{50}} \tan(x^2)",
    "matrix": r"\begin{pmatrix}" + r"\\".join(_join("x_@", 9, "&") for _ in range(9)) + r"\end{pmatrix}^{99}",
    "nested roots": _nest(r"\sqrt{2+@}", 40),
    "sum of roots": _join(r"\sqrt{@}", 40),
    "product of roots": _join(r"(1+\sqrt[3]{@})", 25, ""),
    "roots in denominators": _join(r"\frac{1}{1+\sqrt{@}+\sqrt{?}}", 12),
    "nested sines": _nest(r"\sin(\cos(@))", 5),
    "powers of sines": r"(\sin x+\cos y)^{40}(\sin y-\cos x)^{40}",
    "sines of sums": _join(r"\sin(@x+@y+?)", 30),
    "greatest common divisor": r"\gcd(2^{999999}-1, 3^{888888}-1)",
    "long sum": _join("?^{@}", 300),
    "long product": _join("(x+@)", 150, ""),
    "product of sums": _join("(?+x+y+z)", 20, ""),
    "polynomial equation": "x^{97}+3x^{89}+5x^{7}+x+1=0",
    "large set": r"\{" + _join(r"\frac{@}{7}", 200, ",") + r"\}",
    "long decimal": "0." + "1234567890" * 150,
    "power of a complex number": "(1+i)^{999999}",
    "power of a golden ratio": r"(\frac{1+\sqrt{5}}{2})^{9999}",
    "power with fractions": r"(x+y+z)^{\frac{999}{2}}",
    "exponential of a power": r"e^{(x+y+z+w)^{99}}",
    "logarithms": _nest(r"\ln(1+@)", 30),
    "open braces": "{" * 900,
    "open brackets": "(" * 900,
    "bars": "|" + "x|" * 150,
    "functions without brackets": r"\sin " * 200 + "x",
    "functions of functions": "f(" * 12 + "x" + ")" * 12,
    "letters": _join("?", 390, " "),
    "superscripts": "x" + "^x" * 150,
    "intervals": _join("(@,@)", 60, r"\cup "),
    "inequalities": _join("x_@", 40, "<"),
    "mixed numbers": _join(r"@\frac{1}{@}", 60, ""),
    "units": _join(r"\text{m}^{@}", 60, r"\cdot "),
    "subscripts": "x" + "_{x" * 30 + "}" * 30,
    "absolute values": _nest(r"\left|@-1\right|", 12),
}


def _vary(bomb: str, index: int) -> str:
    """Return a bomb with another first number, since equal answers are compared only once."""
    return (
        re.sub(r"\d+", lambda match: str(int(match[0]) + index), bomb, count=1)
        if re.search(r"\d", bomb)
        else (bomb.replace("x", f"x_{{{index}}}", 1))
    )


def measure(bomb: str | None, count: int, functions: RewardFunctions) -> tuple[float, float, int]:
    """Return CPU seconds, wall seconds, and the number of answers that exceeded the time limit."""
    answers = []
    for index in range(count):
        # Eight answers to a prompt have one expected answer; four of them differ.
        answer, expected = ORDINARY[index // 8 % len(ORDINARY)]
        answer, expected = answer.replace("@", str(index // 2)), expected.replace("@", str(index // 8 * 4))
        if bomb is not None and index % EVERY == 3:
            answer = _vary(bomb, index)
        answers.append({"completion": f"So number {index} is \\boxed{{{answer}}}.", "answer": expected})
    request = {"settings": {"type": "math"}, "columns": [], "answers": answers}
    before, started = _cpu_seconds(), time.monotonic()
    reply = functions.answer(request)
    return _cpu_seconds() - before, time.monotonic() - started, len(reply["late"])


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of the children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def run(argument: str = "") -> str:
    """Return the table as Markdown."""
    count = 20 if argument.startswith("tiny") else ANSWERS
    functions = RewardFunctions()
    functions.answer({"settings": {"type": "math"}, "columns": [], "answers": []})
    lines = [
        f"| {count} answers for `math`, a tenth of a kind of bomb | CPU, s | seconds | too late |",
        "|---|---|---|---|",
    ]
    kinds: dict[str, str | None] = {"(no bombs)": None, **BOMBS}
    for name, bomb in kinds.items():
        cpu, seconds, late = measure(bomb, count, functions)
        lines.append(f"| {name} | {cpu:.2f} | {seconds:.2f} | {late} |")
    return "\n".join(lines)
