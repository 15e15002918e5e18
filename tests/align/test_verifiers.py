"""Verifiers: which answers are right, which expected values can be compared with, and answers that are attacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import TypeAdapter, ValidationError

from bench.verifiers import BOMBS
from jingu.align.final_answers import final_number, marked_answer, parse_number
from jingu.align.formulas import check_formula, is_equivalent
from jingu.align.process_pool import ENDED, LATE, map_in_processes
from jingu.align.prompt_set import Prompt
from jingu.align.reward_list import Rewards, check_columns
from jingu.align.verifiers import check_expected, verify
from jingu.config.sections.rewards import Reward, SlowVerifierBase, VerifierBase
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer

# Completion, expected number, whether it is right.
NUMBERS = [
    # One number, in all its forms.
    ("42", "42", True),
    ("42.", "42", True),
    ("007", "7", True),
    ("+5", "5", True),
    ("-5", "-5", True),
    ("−5", "-5", True),
    ("−5", "5", False),
    ("–8", "-8", True),
    ("- 8", "8", False),
    ("-8", "8", False),
    ("negative 8", "8", False),
    ("minus 8", "8", False),
    (".5", "0.5", True),
    ("0.5", "1/2", True),
    ("1/2", "0.5", True),
    ("3/2", "1/2", False),
    ("3/4", "4", False),
    ("7/1", "7", True),
    ("1/0", "0", False),
    ("1 1/2", "3/2", True),
    ("1½", "1.5", True),
    ("½", "0.5", True),
    (r"1\frac{1}{2}", "3/2", True),
    (r"\frac12", "1/2", True),
    (r"\dfrac{3}{4}", "0.75", True),
    (r"-\frac{1}{2}", "-1/2", True),
    (r"\frac{1}{2}", "2", False),
    ("50%", "0.5", True),
    (r"50\%", "0.5", True),
    ("50 percent", "1/2", True),
    ("50 per cent", "0.5", True),
    ("50%", "50", False),
    ("5‰", "0.005", True),
    ("10%", "10", False),
    ("2^3", "3", False),
    ("2^3", "2", False),
    ("2^3", "8", True),
    ("2²", "4", True),
    ("2²", "2", False),
    ("2**3", "8", True),
    ("5^{-1}", "0.2", True),
    ("10^3", "1000", True),
    ("1e3", "1000", True),
    ("1.5e-3", "0.0015", True),
    ("1.5 x 10^3", "1500", True),
    ("1.5×10³", "1500", True),
    (r"1.5\times 10^{3}", "1500", True),
    ("5 million", "5000000", True),
    ("5 million", "5", False),
    ("2.5 billion", "2.5", False),
    ("3 dozen", "3", False),
    ("5k", "5", False),
    ("5M", "5", False),
    ("1,007", "1007", True),
    ("1,007.0", "1007", True),
    ("12,34,567", "1234567", True),
    ("5 000", "5000", True),
    ("5\u2009000", "5000", True),
    ("5\u202f000", "5000", True),
    ("5'000", "5000", True),
    ("1_000", "1000", True),
    ("5{,}000", "5000", True),
    ("5 000", "0", False),
    ("1,2", "12", False),
    ("1,2", "2", False),
    ("1.234,56", "56", False),
    ("1.234,56", "1.234", False),
    ("１２", "12", True),
    ("٤٢", "42", True),
    ("12 34", "34", False),
    # Units and currencies.
    ("5 km", "5", True),
    ("5km", "5", True),
    ("$5", "5", True),
    ("€5", "5", True),
    (r"\$5", "5", True),
    ("-$5", "-5", True),
    ("-$5", "5", False),
    ("$-5", "-5", True),
    ("90°", "90", True),
    (r"$90^\circ$", "90", True),
    (r"8\text{ cm}", "8", True),
    ("7 apples", "7", True),
    # What is part of something else.
    ("3 + 4", "4", False),
    ("10-7", "7", False),
    ("10-7", "-7", False),
    ("2*3", "3", False),
    ("3 x 4", "4", False),
    ("3 × 4", "4", False),
    ("5 times 2", "2", False),
    ("half of 10", "10", False),
    ("1/3 of 10", "10", False),
    ("5!", "5", False),
    ("√9", "9", False),
    (r"\sqrt{9}", "9", False),
    ("log 10", "10", False),
    ("f(5)", "5", False),
    ("x5", "5", False),
    ("x_1", "1", False),
    ("5x", "5", False),
    ("5 x", "5", False),
    ("2π", "2", False),
    (r"2\pi", "2", False),
    ("2i", "2", False),
    ("x^2", "2", False),
    ("abc123", "123", False),
    ("0x1F", "1", False),
    ("3rd", "3", False),
    ("12:30", "30", False),
    ("2:1", "1", False),
    ("3.4.5", "5", False),
    ("2024-01-05", "5", False),
    ("1/2/3", "3", False),
    ("±5", "5", False),
    (">5", "5", False),
    ("≥ 5", "5", False),
    ("5 < x", "5", False),
    ("at least 5", "5", False),
    ("1-2", "2", False),
    ("1–2", "2", False),
    ("1 to 2", "2", False),
    ("1..2", "2", False),
    ("between 1 and 2", "2", False),
    ("[1, 2]", "2", False),
    ("(1, 2)", "1", False),
    ("5 or 6", "6", False),
    ("5 or 6", "5", False),
    ("x = 5 or x = 6", "6", False),
    ("1e999999999", "1", False),
    ("10^10^10", "10", False),
    ("9" * 5000, "9", False),
    ("-(5)", "5", False),
    ("2*(5)", "5", False),
    ("|-5|", "-5", False),
    ("x != 5", "5", False),
    ("x >= 5", "5", False),
    ("x >= 5", "-5", False),
    ("5+", "5", False),
    ("1 out of 2", "2", False),
    # Sentences, marks and equations.
    ("It's -3 °C", "-3", True),
    ("5 & 6", "6", False),
    ("7 (99% sure)", "7", True),
    ("7 (99% sure)", "0.99", False),
    ("-> 42", "42", True),
    ("=> 42", "42", True),
    ("<b>42</b>", "42", True),
    ("none", "7", False),
    ("", "0", False),
    ("So 3 + 4 = 7, thus 1,007.0.", "1007", True),
    ("3+4=7", "7", True),
    ("x = 5", "5", True),
    ("f(5) = 7", "7", True),
    ("**42**", "42", True),
    ("`42`", "42", True),
    ("$42$", "42", True),
    (r"\(42\)", "42", True),
    ("(42)", "42", True),
    ("answer: 42\nConfidence: 10/10", "42", True),
    ("answer: 42\nConfidence: 10/10", "10", False),
    ("answer: 42\nConfidence: 10/10", "1", False),
    ("42\nConfidence: 95%", "42", True),
    ("42\nConfidence: 95%", "0.95", False),
    ("The answer is 42.", "42", True),
    ("The answer is 42 because 6*7=42.", "42", True),
    ("The answer is 6*7 = 42", "42", True),
    ("The answer is 42 with 90% confidence", "0.9", False),
    ("The answer is 42, not 43.", "43", False),
    ("The answer is not 5.", "5", False),
    ("The answer isn't 5.", "5", False),
    ("The answer is not 5 but 6.", "6", True),
    ("The answer is 5 or 6", "6", False),
    ("The answer is approximately 42 meters", "42", True),
    ("The answer is $x=5$.", "5", True),
    ("**Answer:** 42", "42", True),
    ("**Answer: 42**", "42", True),
    ("Answer:\n42", "42", True),
    ("Final answer: 42\nThis took 3 steps.", "42", True),
    ("Final answer: 42\nThis took 3 steps.", "3", False),
    ("答案是 42。", "42", True),
    ("答案：42", "42", True),
    (r"\boxed{42}", "42", True),
    (r"\boxed{42}, as 1 + 41.", "42", True),
    (r"\boxed{41} or \boxed{42}", "41", False),
    (r"\boxed{2x+5}", "5", False),
    (r"\boxed{\frac{x}{5}}", "5", False),
    (r"\boxed{1, 2}", "2", False),
    (r"\boxed{8\text{ cm}}", "8", True),
    (r"\boxed{}", "8", False),
    (r"\boxed{42", "42", False),
    ("#### 42", "42", True),
    ("So 3 + 4.\n#### 7", "7", True),
    ("#### 3. Conclusion\nThe answer is 42.", "42", True),
    ("#### 3. Conclusion\nThe answer is 42.", "3", False),
    ("<answer>42</answer> 7", "42", True),
    ("<answer>42</answer> 7", "7", False),
    ("<think>7</think>42", "42", True),
    ("<think>42", "42", False),
    # Sums and factorials with their value, repeating decimals, several answers.
    ("5! = 120", "120", True),
    ("5! = 120", "5", False),
    ("The answer is 5! = 120", "120", True),
    ("2+3=5", "5", True),
    ("The answer is 2+3=5", "5", True),
    ("The answer is 2+3=5", "3", False),
    ("The answer is -2+7=5.", "5", True),
    (r"0.\overline{3}", "1/3", True),
    (r"0.\overline{3}", "0.3", False),
    (r"0.1\overline{6}", "1/6", True),
    (r"-0.\overline{9}", "-1", True),
    (r"\boxed{0.\overline{142857}}", "1/7", True),
    ("answer: 3 apples and 4 pears", "3", False),
    ("answer: 3 apples and 4 pears", "4", False),
    ("The answer is 3 cats, 4 dogs", "3", False),
    ("The answer is 3, since 1+2=3", "3", True),
    ("The answer is 3 of the 4 boxes", "3", True),
    ("The answer is 42, not 43.", "42", True),
    # Quantities of several numbers, and several answers in one mark.
    (r"\boxed{12 feet 5 inches}", "5", False),
    (r"\boxed{12 feet 5 inches}", "12", False),
    ("It takes 3 hours and 20 minutes", "20", False),
    ("#### 2 lbs 3 oz", "3", False),
    ("<answer>Anna has 3, Ben has 5</answer>", "5", False),
    (r"\boxed{3 \text{ apples}, 5 \text{ pears}}", "5", False),
    ("#### Anna: 3; Ben: 5", "5", False),
    ("It takes 20 minutes", "20", True),
    ("In 3 hours, 20 people came", "20", True),
    ("The answer is 42 apples, which is 6 more than 36.", "42", True),
]


def test_numbers() -> None:
    assert len(NUMBERS) > 150
    wrong = []
    for completion, expected, is_right in NUMBERS:
        number = parse_number(expected)
        assert number is not None
        if (final_number(completion) == number) is not is_right:
            wrong.append((completion[:60], expected, is_right))
    assert not wrong


# Completion, expected formula, whether it is right.
FORMULAS = [
    (r"\boxed{2\pi}", r"2\pi", True),
    (r"\boxed{2}", r"2\pi", False),
    (r"\boxed{\sqrt{2}}", r"\sqrt{2}", True),
    (r"\boxed{5\text{ m}}", r"5\text{ cm}", False),
    ("A", "A", True),
    (r"\boxed{A}", "A", True),
    ("(A)", "A", True),
    ("The answer is (B).", "B", True),
    ("B) Paris", "B", True),
    (r"\boxed{\text{A}}", "A", True),
    ("The answer is A", "B", False),
    ("A or B", "A", False),
    ("A dog", "A", False),
    ("A, B, C, D", "A", False),
    (r"It is $\frac{2}{4}$.", "$0.5$", True),
    (r"It is $\frac{1}{4}$.", "$0.5$", False),
    (r"\boxed{5\text{ cm}}", r"5\text{ cm}", True),
    (r"\boxed{5 cm}", r"5\text{ cm}", True),
    (r"\boxed{5}", r"5\text{ cm}", True),
    (r"\boxed{5}\text{ m}", r"5\text{ cm}", False),
    (r"\boxed{5\text{ cm}^2}", r"5\text{ cm}^3", False),
    ("It is 3 m", "3 cm", False),
    (r"\boxed{50}", r"50\%", False),
    (r"\boxed{0.5}", r"50\%", True),
    (r"\boxed{0.333333}", r"\frac13", False),
    (r"\boxed{0.75}", r"\frac{3}{4}", True),
    (r"\boxed{x=5}", "5", True),
    (r"\boxed{\neq 5}", "5", False),
    (r"\boxed{1010}", "1010_2", False),
    (r"\boxed{1010_2}", "1010_2", True),
    (r"\boxed{(1,2)}", "(1,2)", True),
    (r"\boxed{(2,1)}", "(1,2)", False),
    (r"\boxed{[1,2)}", "[1,2]", False),
    (r"\boxed{\{2,1\}}", r"\{1,2\}", True),
    (r"\boxed{x^2+1}", "1+x^2", True),
    (r"\boxed{y^2+1}", "1+x^2", False),
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", True),
    (r"\boxed{Evelyn}", r"\text{Evelyn}", True),
    (r"\boxed{\text{Bob}}", r"\text{Evelyn}", False),
    ("yes", "yes", True),
    ("yes or no", "yes", False),
    (r"The answer is $2\pi$.", r"2\pi", True),
    (r"The answer is not $2\pi$.", r"2\pi", False),
    (r"\boxed{2\pi} no, \boxed{3\pi}", r"2\pi", False),
    (r"\boxed{5 or 6}", "6", False),
    (r"\boxed{2+2}", "4", True),
    ("3 + 4", "4", False),
    ("f(5)", "5", False),
    ("log 10", "10", False),
    ("−5", "-5", True),
    (r"\boxed{\infty}", r"-\infty", False),
    ("$x>5$", "x<5", False),
    ("$5>x$", "x<5", True),
    ("42\nConfidence: $10$", "10", False),
    (r"\boxed{10^{10^{10}}}", "1", False),
    (r"\boxed{3\sqrt{3}}", r"3\sqrt{2}", False),
    (r"\boxed{1{,}000}", "1000", True),
    ("18", r"\$18", True),
    ("", r"2\pi", False),
    (r"\boxed{}", r"2\pi", False),
    (r"\boxed{0.\overline{3}}", r"\frac{1}{3}", True),
    (r"\boxed{\frac13}", r"0.\overline{3}", True),
    (r"\boxed{1.2\overline{34}}", r"\frac{611}{495}", True),
    (r"\boxed{0.\overline{3}}", "0.3", False),
    (r"\boxed{\sin 30^\circ}", r"\frac12", True),
    (r"\boxed{\frac12}", r"\sin 30^\circ", True),
    (r"\boxed{\tan 45^{\circ}}", "1", True),
    (r"\boxed{\cos\left(60^\circ\right)}", "0.5", True),
    (r"\boxed{\sin 30}", r"\frac12", False),
    (r"\boxed{\cos 30^\circ}", r"\frac12", False),
    (r"\boxed{\cos\frac{\pi}{4}}", r"\frac{\sqrt2}{2}", True),
    (r"\boxed{\sin\frac{\pi}{4}}", r"\frac{\sqrt3}{2}", False),
    (r"\boxed{\pm 5}", r"\pm 5", True),
    (r"\boxed{5}", r"\pm 5", False),
    (r"\boxed{\neq 5}", r"\pm 5", False),
    ("$5! = 120$", "120", True),
    (r"\boxed{\frac{1}{x}+\frac{1}{y}}", r"\frac{x+y}{xy}", True),
    (r"\boxed{\frac{1}{x}-\frac{1}{y}}", r"\frac{x+y}{xy}", False),
    (r"\boxed{e^{2x}}", r"(e^x)^2", True),
    (r"\boxed{2^{10}}", "1024", True),
    (r"\boxed{7+10^{-20}}", "7", False),
    (r"\boxed{(x-1)(x+1)}", "x^2-1", True),
    (r"\boxed{x(x+1)}", "x^2+x", True),
    (r"\boxed{\sqrt[3]{8}}", "2", True),
    (r"\boxed{\sqrt[3]{8}}", "8", False),
    (r"\boxed{-\sqrt{2}}", r"\sqrt{2}", False),
    (r"\boxed{\frac{\sqrt{6}}{3}}", r"\sqrt{\frac23}", True),
    (r"\boxed{(0,\infty)}", r"(0,\infty)", True),
    (r"\boxed{[0,\infty)}", r"(0,\infty)", False),
    (r"\boxed{(-\infty,1)\cup(2,\infty)}", r"(-\infty,1)\cup(2,\infty)", True),
    (r"\boxed{\{1,2,3\}}", r"\{1,2\}", False),
    (r"\boxed{y=2x+1}", "y=2x+1", True),
    (r"\boxed{y=2x+3}", "y=2x+1", False),
    (r"\boxed{\frac{14}{2}}", "7", True),
    (r"\boxed{\ln 4}", r"2\ln 2", True),
    (r"\boxed{\ln 5}", r"2\ln 2", False),
    (r"\boxed{\binom{5}{2}}", "10", True),
    (r"\boxed{x_1+x_2}", "x_2+x_1", True),
    (r"\boxed{x_1-x_2}", "x_2-x_1", False),
    (r"\boxed{\sqrt{16}=4}", "4", True),
    # Both values of ±, and matrices in other brackets.
    (r"\boxed{2, -2}", r"\pm 2", True),
    (r"\boxed{\pm 2}", "2,-2", True),
    (r"\boxed{x = 3 \text{ or } x = -3}", r"x=\pm 3", True),
    (r"\boxed{1+\sqrt{2}, 1-\sqrt{2}}", r"1 \pm \sqrt{2}", True),
    (r"\boxed{2}", r"\pm 2", False),
    (r"\boxed{1+\sqrt{2}, 1-\sqrt{3}}", r"1 \pm \sqrt{2}", False),
    (r"$\begin{bmatrix} 1 \\ 2 \end{bmatrix}$", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
    (r"\boxed{\begin{bmatrix} 1 \\ 3 \end{bmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", False),
    (r"\boxed{\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", False),
]


def test_formulas() -> None:
    wrong = []
    for completion, expected, is_right in FORMULAS:
        check_formula(expected)
        if is_equivalent(expected, completion) is not is_right:
            wrong.append((completion, expected, is_right))
    assert not wrong


def settings(**values: Any) -> Any:
    return TypeAdapter(Reward).validate_python(values)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("number", [None, True, "", "12 or 13", "3 apples", "x = 5", "1,2", "42.", [1], "nan", float("inf"), "five"]),
        ("exact", [None, 1.5, True, "", "  ", [], ["yes", None], {"a": 1}]),
        ("math", [None, "", r"\frac{", r"\foo", "x +", "1/0", ["1"], True]),
        ("regex", [None, "(", "*", "", 5, ["a"]]),
        ("json_schema", [None, "{", "5", {"type": "strin"}, {"pattern": "("}, '{"a": NaN}', "[" * 5000]),
        ("json_schema", [{"$ref": "http://localhost:9/schema"}]),
        ("python_tests", [None, "", "assert f(", 5]),
    ],
)
def test_expected_values_that_cannot_be_compared_are_refused(kind: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError):
            check_expected(settings(type=kind), value)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("number", [5, -0.5, "3/4", "1 1/2", "50%", "1,000", "2e-3", " 7 ", "$18", 10**40]),
        ("exact", ["yes", 7, ["yes", "Yes."], ["a", 1]]),
        ("math", [5, 0.5, r"2\pi", r"$2\pi$", "A", "(B)", r"\text{yes}", r"5\text{ cm}", r"\boxed{7}", "Paris"]),
        ("regex", ["[ab]+", "^$"]),
        ("json_schema", [{"type": "object"}, '{"type": "object"}', True]),
    ],
)
def test_expected_values_that_can_be_compared(kind: str, values: list[Any]) -> None:
    for value in values:
        check_expected(settings(type=kind), value)


def build(*values: dict[str, Any], columns: tuple[str, ...] = ("answer",)) -> Rewards:
    return Rewards([settings(**each) for each in values], columns, cast(Tokenizer, None))


@pytest.mark.parametrize(
    ("reward", "value", "words"),
    [
        ({"type": "number"}, "12 or 13", "line 4, column answer: expected one number"),
        ({"type": "exact"}, None, "line 4, column answer: expected a text, not null"),
        ({"type": "regex"}, "(", "line 4, column answer: it is not a regular expression"),
        ({"type": "math", "name": "proofs"}, r"\frac{", r"line 4, column answer.* the reward proofs \(math\)"),
        ({"type": "json_schema", "column": "answer"}, {"type": "x"}, "line 4, column answer: it is not a JSON schema"),
    ],
)
def test_rows_are_checked_before_a_run(reward: dict[str, Any], value: Any, words: str) -> None:
    rewards = build(reward)
    good: Any = {} if reward["type"] == "json_schema" else "5"
    rows = [Prompt(0, (1,), "a", {"answer": good}, line=2), Prompt(1, (1,), "b", {"answer": value}, line=4)]
    with pytest.raises(JinguError, match=words) as caught:
        rewards.check_rows(rows, "prompts.jsonl")
    assert caught.value.where == "prompts.jsonl"
    rewards.check_rows(rows[:1], "prompts.jsonl")
    rewards.close()
    lacking = [rows[0], Prompt(1, (1,), "b", {}, line=4)]
    with pytest.raises(JinguError, match="line 4 has no column answer"):
        check_columns([settings(**reward)], lacking, "prompts.jsonl")


@pytest.mark.parametrize(
    ("kind", "expected", "completion"),
    [
        ("json_schema", {}, "[" * 5000),
        ("json_schema", {}, "[" * 100_000 + "]" * 100_000),
        ("json_schema", {}, "NaN"),
        ("json_schema", {}, "[1, -Infinity]"),
        ("json_schema", {}, "1e999"),
        ("json_schema", {}, '{"a": 1, "a": 2}'),
        ("json_schema", {"type": "string"}, '"\\ud800"'),
        ("json_schema", {}, "1" * 5000),
        ("number", 1, "9" * 100_000),
        ("number", 1, "1e99999999999999999999"),
        ("number", 1, "2^" * 5000),
        ("number", 1, "\ud800"),
        ("exact", "a", "\ud800"),
        ("math", "1", r"\boxed{" + "(" * 3000 + "}"),
        ("math", "1", r"\boxed{" * 1000),
        ("math", "1", "\ud800$\ud800$"),
        ("regex", "a", "\ud800"),
    ],
)
def test_answers_that_break_a_verifier_are_wrong(kind: str, expected: Any, completion: str) -> None:
    assert verify(settings(type=kind, column="answer"), {"completion": completion, "answer": expected}) == 0.0


def test_lists_of_accepted_answers() -> None:
    answers = [{"completion": text, "answer": ["yes", "Yes.", 1]} for text in ("yes", " Yes.\n", "1", "no")]
    assert [verify(settings(type="exact"), answer) for answer in answers] == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "expected", "completion", "right"),
    [
        ("exact", "yes", "<think>no or yes?</think>\n\nyes", 1.0),
        # Templates that begin the reasoning leave its begin out of the answer.
        ("exact", "yes", "no or yes?</think>yes", 1.0),
        ("exact", "yes", "<think>yes</think>no", 0.0),
        ("exact", "yes", "<think>yes", 0.0),
        ("exact", "a</think>b", "a</think>b", 1.0),
        ("json_schema", {"type": "object"}, '<think>{"a": 1}?</think>\n{"a": 2}', 1.0),
        ("json_schema", {"type": "object"}, '<think>{"a": 1}</think>', 0.0),
        ("json_schema", {"type": "object"}, '{"a": "</think>"}', 1.0),
        ("regex", "<think>.+</think>yes", "<think>no?</think>yes", 1.0),
        ("regex", "yes", "<think>no?</think>yes", 0.0),
    ],
)
def test_reasoning_is_no_answer(kind: str, expected: Any, completion: str, right: float) -> None:
    assert verify(settings(type=kind, column="answer"), {"completion": completion, "answer": expected}) == right


def test_limits_that_contradict_each_other_are_refused() -> None:
    for values in (
        {"type": "length", "min_tokens": 10, "max_tokens": 5},
        {"type": "judge", "min_grade": 5, "max_grade": 5},
    ):
        with pytest.raises(ValidationError):
            settings(**values)


def test_answers_beside_one_that_hangs_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr("jingu.align.reward_list.log_warning", warnings.append)
    rewards = build({"type": "regex"}, {"type": "exact"})
    bomb = "a" * 60
    texts = [f"{bomb}{index}" if index % 10 == 3 else "aab" for index in range(60)]
    answers = [{"prompt": "", "completion": text, "answer": "(a+)+b"} for text in texts]
    scores = rewards.score(answers)
    assert [values["regex"] for values in scores] == [1.0 if text == "aab" else 0.0 for text in texts]
    late = [index for index, names in enumerate(rewards.late(60)) if names == ["regex"]]
    assert late == [index for index, text in enumerate(texts) if text != "aab"]
    assert warnings == ["The reward regex: scoring 6 answers took longer than 1 seconds; the value is 0."]
    rewards.close()


@pytest.mark.parametrize("expected", ["7", "x+1", r"\{1,2\}", "x=5"])
def test_bombs_are_refused_before_they_are_compared(expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jingu.align.formulas._parse", lambda formula: pytest.fail(formula))
    for name, bomb in BOMBS.items():
        assert not is_equivalent(expected, f"So it is \\boxed{{{bomb}}}."), name


def test_large_formulas_are_right_if_they_are_expected() -> None:
    for formula in ("(x+y+z+w)^{999}", r"\sum_{i=1}^{n} i^2", "(-1)^{2024}", r"\binom{99999}{50}", r"\int_0^1 f(x) dx"):
        assert is_equivalent(formula, f"\\boxed{{{formula}}}")
    assert is_equivalent("1", r"\boxed{(-1)^{2024}}")
    assert is_equivalent("x^{2024}", r"\boxed{x^{2000} \cdot x^{24}}")
    assert not is_equivalent("5050", r"\boxed{\sum_{k=1}^{100} k}")


BODY = """
import json, os, sys
from jingu.align.process_pool import map_in_processes

def work(item):
    if item == "hang":
        while True: pass
    if item == "exit":
        os._exit(0)
    if item == "memory":
        return len(bytearray(2**40))
    return item + 1
"""


def test_a_pool_of_processes(tmp_path: Path) -> None:
    import subprocess
    import sys

    (tmp_path / "work.py").write_text(
        BODY + "print(json.dumps(map_in_processes(work, json.loads(sys.argv[1]), 0.5)))\n", encoding="utf-8"
    )
    items = [1, "hang", 2, "exit", 3, "hang", "memory", *range(50)]
    command = [sys.executable, str(tmp_path / "work.py"), json.dumps(items)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    values = json.loads(result.stdout.splitlines()[-1])
    assert values == [2, LATE, 3, ENDED, 4, LATE, ENDED, *range(1, 51)]
    assert map_in_processes(len, [], 1.0) == []


def test_marks_of_answers() -> None:
    assert marked_answer(r"so \boxed{\frac{1}{2}} holds") == (r"\frac{1}{2}", False)
    assert marked_answer("<answer>a</answer> <answer>b</answer>") == ("b", False)
    assert marked_answer("nothing") is None


def test_every_verifier_with_a_column_checks_it() -> None:
    kinds = [*VerifierBase.__subclasses__(), *SlowVerifierBase.__subclasses__()]
    assert len(kinds) == 7
    for cls in kinds:
        if cls is SlowVerifierBase:
            continue
        with pytest.raises(ValueError):
            check_expected(cls(), None)
