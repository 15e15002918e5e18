"""Filters that read the document, beside those of lm-evaluation-harness."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jingu.errors import JinguError
from jingu.evaluate.answer_filters import apply_filter, check_choices
from jingu.evaluate.task_file import TaskSettings

CHOICES = ["Guilty", "Guilty of Romance", "guilty, or not?"]
ANSWERS = [
    "The answer is (B).",
    "Surely guilty of Romance.",
    "I think: C",
    "answer:  A, because",
    "nothing of these",
    "GUILTY OR NOT",
    "It is the film Guilty of Romance",
    "()",
    "",
]


@pytest.mark.parametrize(
    "options",
    [
        {"regex_pattern": r"\(([A-Z])\)"},
        {"regex_pattern": r"(\([A-Z]\))", "fallback": "none"},
        {"regex_pattern": r"(\([B-Z]\))|(\(\))", "ignore_case": True},
        {"ignore_case": True, "ignore_punctuation": True},
        {"ignore_case": True, "regexes_to_ignore": [r",", r"\bthe "]},
        {"group_select": -1},
    ],
)
def test_letters_are_those_of_the_harness(options: dict[str, Any]) -> None:
    from lm_eval.filters.extraction import MultiChoiceRegexFilter

    row = {"choices": CHOICES}
    theirs = MultiChoiceRegexFilter(**options).apply([[answer] for answer in ANSWERS], [row] * len(ANSWERS))
    steps = [{"function": "multi_choice_regex", **options}, {"function": "take_first"}]
    assert [[apply_filter(steps, [answer], row)] for answer in ANSWERS] == theirs


def test_a_function_reads_the_document() -> None:
    def complete(answers: list[list[str]], rows: list[dict[str, str]]) -> list[list[str]]:
        return [[row["begin"] + answer for answer in group] for group, row in zip(answers, rows, strict=True)]

    steps = [{"function": "custom", "filter_fn": complete}, {"function": "take_first_k", "k": 2}]
    assert apply_filter(steps, ["x", "y"], {"begin": "> "}) == "> x"


def test_documents_without_choices() -> None:
    task = TaskSettings(task="t", filter_list=[{"name": "a", "filter": [{"function": "multi_choice_regex"}]}])
    check_choices(task, [{"choices": ["yes", "no"]}])
    with pytest.raises(JinguError, match="reads the list choices of a document, and one has none"):
        check_choices(task, [{"choices": ["yes"]}, {"question": "?"}])


def test_documents_with_more_choices_than_letters() -> None:
    """The harness ends there with an invalid pattern."""
    from lm_eval.filters.extraction import MultiChoiceRegexFilter

    task = TaskSettings(task="t", filter_list=[{"name": "a", "filter": [{"function": "multi_choice_regex"}]}])
    choices = [f"choice {number}" for number in range(27)]
    check_choices(task, [{"choices": choices[:26]}])
    steps = [{"function": "multi_choice_regex"}, {"function": "take_first"}]
    assert apply_filter(steps, ["It is choice 25."], {"choices": choices[:26]}) == "(Z)"
    with pytest.raises(JinguError, match="names choices by the letters A to Z, and a document has 27"):
        check_choices(task, [{"choices": choices[:2]}, {"choices": choices}])
    with pytest.raises(re.error):
        MultiChoiceRegexFilter().apply([["A"]], [{"choices": choices}])
