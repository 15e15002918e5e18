"""Filters: what is extracted from the generated answers of a document before it is measured."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from jingu.errors import JinguError, join_words
from jingu.evaluate.task_file import FilterSettings, FilterStep, TaskSettings

Step = Callable[[list[Any]], list[Any]]


def _regex(
    answers: list[Any],
    regex_pattern: str = r"#### (\-?[0-9\.\,]+)",
    group_select: int = 0,
    fallback: str = "[invalid]",
) -> list[Any]:
    """The match of a pattern; of several groups, the first one that is not empty."""
    results = []
    for answer in answers:
        matches = re.findall(regex_pattern, answer)
        if not matches:
            results.append(fallback)
            continue
        match = matches[group_select]
        if isinstance(match, tuple):
            match = next(filter(None, match), fallback)
        results.append(match.strip())
    return results


def _map(answers: list[Any], mapping_dict: dict[str, Any] | None = None, default_value: Any = None) -> list[Any]:
    return [(mapping_dict or {}).get(answer, default_value) for answer in answers]


def _take_first_k(answers: list[Any], k: int) -> list[Any]:
    return answers[:k]


def _vote(answers: list[Any]) -> list[Any]:
    """The most frequent answer; the first of equally frequent ones."""
    return [Counter(answers).most_common(1)[0][0]]


FILTERS: dict[str, Callable[..., list[Any]]] = {
    "take_first": lambda answers: answers[:1],
    "take_first_k": _take_first_k,
    "majority_vote": _vote,
    "regex": _regex,
    "remove_whitespace": lambda answers: [answer.strip() for answer in answers],
    "lowercase": lambda answers: [answer.lower() for answer in answers],
    "uppercase": lambda answers: [answer.upper() for answer in answers],
    "map": _map,
}


def build_filters(task: TaskSettings) -> dict[str, list[Step]]:
    """Return the filters of a task by name; without any, one that takes the first answer.

    Raises:
        JinguError: a filter does not exist, or has other options.
    """
    default = FilterSettings(name="none", filter=[FilterStep(function="take_first")])
    return {item.name: [_build_step(task, step) for step in item.filter] for item in task.filter_list or [default]}


def _build_step(task: TaskSettings, step: FilterStep) -> Step:
    where = f"{task.task} ({task.file})"
    function = FILTERS.get(step.function)
    if function is None:
        raise JinguError(f"there is no filter {step.function}.", where=where, fix=f"Use {join_words([*FILTERS])}.")
    try:
        signature(function).bind([], **step.options)
        re.compile(str(step.options.get("regex_pattern", "")))
    except (TypeError, re.error) as error:
        raise JinguError(f"its filter {step.function} is wrong: {error}.", where=where, fix="Correct it.") from None
    return partial(function, **step.options)


def apply_filter(steps: list[Step], answers: list[str]) -> Any:
    """Return the answer that a filter makes of the repeated answers of a document."""
    results: list[Any] = answers
    for step in steps:
        results = step(results)
    return results[0] if results else ""
