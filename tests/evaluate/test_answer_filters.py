"""Filters that read the document, beside those of lm-evaluation-harness."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jingu.errors import JinguError
from jingu.evaluate.answer_filters import apply_steps, check_choices, filters_of, first_of, gives_list
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
    assert [[first_of(apply_steps(steps, [answer], row))] for answer in ANSWERS] == theirs


SPANS = [
    "Person: Ada Lovelace $$ LOCATION : London, none, Paris $$",
    "PER: ada\nORG: none\nDate: 3 May 1815",
    "The country: Kenya and people: Wangari, a company",
    "counties: Kisumu$places: Nairobi $ persons: X $$ persons: Y",
    "time: now, date : then LOC: here",
    "European: no. per: None",
    "Continent:\n\nAfrica",
    "İstanbul loc: İzmir$$$",
    "none",
    "",
]
TAGS = ["[('a', 'NOUN'), ('b', 'VERB')]", "('x', 'PRON') ('y','ADJ') (\"z\", 'X')", "('', '')", "NOUN VERB", ""]


def test_labels_are_those_of_the_harness() -> None:
    from lm_eval.filters.extraction import POSFilter
    from lm_eval.filters.transformation import SPANFilter

    for text in SPANS:
        assert [apply_steps([{"function": "format_span"}], [text, "org: x"], {})] == SPANFilter().apply(
            [[text, "org: x"]], [{}]
        )
    options: list[dict[str, Any]] = [{}, {"fallback": ["none"]}, {"regex_pattern": "x", "group_select": 3}]
    for option in options:
        theirs = list(POSFilter(**option).apply([TAGS], [{}]))
        assert [apply_steps([{"function": "regex_pos", **option}], TAGS, {})] == theirs


def test_a_filter_that_takes_no_answer_gives_a_list() -> None:
    """As the harness: a task's own functions then get the list."""
    task = TaskSettings(task="t", filter_list=[{"name": "all", "filter": [{"function": "lowercase"}]}])
    steps = filters_of(task)["all"]
    assert gives_list(steps) and not gives_list([*steps, {"function": "take_first"}])
    assert apply_steps(steps, ["A", "B"], {}) == ["a", "b"]


def test_a_function_reads_the_document() -> None:
    def complete(answers: list[list[str]], rows: list[dict[str, str]]) -> list[list[str]]:
        return [[row["begin"] + answer for answer in group] for group, row in zip(answers, rows, strict=True)]

    steps = [{"function": "custom", "filter_fn": complete}, {"function": "take_first_k", "k": 2}]
    assert first_of(apply_steps(steps, ["x", "y"], {"begin": "> "})) == "> x"


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
    assert first_of(apply_steps(steps, ["It is choice 25."], {"choices": choices[:26]})) == "(Z)"
    with pytest.raises(JinguError, match="names choices by the letters A to Z, and a document has 27"):
        check_choices(task, [{"choices": choices[:2]}, {"choices": choices}])
    with pytest.raises(re.error):
        MultiChoiceRegexFilter().apply([["A"]], [{"choices": choices}])
