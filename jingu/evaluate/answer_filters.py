"""Filters: what is extracted from the generated answers of a document before it is measured."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from jingu.errors import join_words
from jingu.evaluate.task_file import Options, TaskSettings


def _regex(
    answers: list[Any], regex_pattern: str = r"#### (\-?[0-9\.\,]+)", group_select: int = 0, fallback: str = "[invalid]"
) -> list[Any]:
    """The match of a pattern; of several groups, the first one that is not empty."""
    results = []
    for answer in answers:
        matches = re.findall(regex_pattern, answer)
        match = matches[group_select] if matches else fallback
        if isinstance(match, tuple):
            match = next(filter(None, match), fallback)
        results.append(match.strip() if matches else match)
    return results


FILTERS: dict[str, Callable[..., list[Any]]] = {
    "take_first": lambda answers: answers[:1],
    "take_first_k": lambda answers, k: answers[:k],
    "majority_vote": lambda answers: [Counter(answers).most_common(1)[0][0]],
    "regex": _regex,
    "remove_whitespace": lambda answers: [answer.strip() for answer in answers],
    "lowercase": lambda answers: [answer.lower() for answer in answers],
    "uppercase": lambda answers: [answer.upper() for answer in answers],
    "map": lambda answers, mapping_dict, default_value=None: [mapping_dict.get(key, default_value) for key in answers],
}


def filters_of(task: TaskSettings) -> dict[str, list[Options]]:
    """Return the steps of a task's filters by name; without any, those of one that takes the first answer.

    Raises:
        JinguError: a filter does not exist, or has other options.
    """
    filters: dict[str, list[Options]] = {item["name"]: item["filter"] for item in task.filter_list}
    for step in (step for steps in filters.values() for step in steps):
        name = step.get("function")
        if name not in FILTERS:
            raise task.error(f"there is no filter {name}.", f"Use {join_words([*FILTERS])}.")
        try:
            signature(FILTERS[name]).bind([], **_options(step))
            re.compile(str(step.get("regex_pattern", "")))
        except (TypeError, re.error) as error:
            raise task.error(f"its filter {name} is wrong: {error}.", "Correct it.") from None
    return filters or {"none": [{"function": "take_first"}]}


def apply_filter(steps: Sequence[Options], answers: list[str]) -> Any:
    """Return the answer that a filter makes of the repeated answers of a document."""
    results: list[Any] = answers
    for step in steps:
        results = FILTERS[step["function"]](results, **_options(step))
    return results[0] if results else ""


def _options(step: Options) -> Options:
    return {key: value for key, value in step.items() if key != "function"}
