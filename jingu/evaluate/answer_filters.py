"""Filters: they extract an answer from the generated texts of a document before metrics are computed."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any

from jingu.errors import join_words
from jingu.evaluate.task_file import Options, TaskSettings
from jingu.plugins import Registry, expect_function
from jingu.runtime.time_limit import TimeLimitError, time_limit

_GSM8K_ANSWER = r"#### (\-?[0-9\.\,]+)"
_INVALID = "[invalid]"
# CPU seconds of a filter for the answers to one document.
FILTER_SECONDS = 10.0


def _regex(
    answers: list[Any], regex_pattern: str = _GSM8K_ANSWER, group_select: int = 0, fallback: str = _INVALID
) -> list[Any]:
    """The match of a pattern; of several groups, the first one that is not empty."""
    # The filter `map` gives None for unknown texts.
    texts = (answer if isinstance(answer, str) else "" for answer in answers)
    matches = (_find(regex_pattern, text, group_select, fallback) for text in texts)
    return [fallback if match is None else match for match in matches]


def _find(pattern: str, text: str, index: int, empty: str) -> str | None:
    """Return match number `index` of a pattern, None without any match; `empty` where all of its groups are empty."""
    matches = re.findall(pattern, text)
    if not matches:
        return None
    match = matches[index]
    if isinstance(match, tuple):
        match = next(filter(None, match), empty)
    return str(match).strip()


def _for_texts(change: Callable[[str], str]) -> Callable[[list[Any]], list[Any]]:
    """Return a filter that changes texts, and keeps the None that the filter `map` gives for unknown texts."""
    return lambda answers: [change(answer) if isinstance(answer, str) else answer for answer in answers]


# Labels of entities by the words that models write for them.
_ENTITY_LABELS = {
    **dict.fromkeys(("person", "people", "persons", "per"), "PER"),
    **dict.fromkeys(("location", "counties", "places", "country", "continent", "loc"), "LOC"),
    **dict.fromkeys(("organization", "company", "org"), "ORG"),
    **dict.fromkeys(("time", "date"), "DATE"),
}
_ENTITY_LABEL = re.compile(rf"\b({'|'.join(_ENTITY_LABELS)})\s*:")
_ENTITIES = re.compile(rf"\b({'|'.join(dict.fromkeys(_ENTITY_LABELS.values()))}):\s*([^$]+)")


def _format_span(text: str) -> str:
    """Return the named entities of a text, such as `per: ada $ loc: london`, from lines such as `Person: Ada`."""
    text = _ENTITY_LABEL.sub(lambda match: f"{_ENTITY_LABELS[match[1]]}:", text.lower())
    text = text.replace("$$", "$").rstrip("$").replace("\n", "$").strip()
    entities = ((label.lower(), part.strip()) for label, parts in _ENTITIES.findall(text) for part in parts.split(","))
    return " $ ".join(f"{label}: {entity}" for label, entity in entities if entity.lower() != "none")


def _regex_pos(answers: list[Any], regex_pattern: str = "", group_select: int = 0, fallback: Any = None) -> list[Any]:
    """The tags of a list of words and tags in Python's notation. As in the harness, the pattern has no effect."""
    tags = (re.findall(r"\('[^']*', '([^']*)'\)", answer) if isinstance(answer, str) else [] for answer in answers)
    return [each or (["invalid"] if fallback is None else fallback) for each in tags]


def _multi_choice_regex(
    answers: list[Any],
    row: Mapping[str, Any],
    regex_pattern: str = _GSM8K_ANSWER,
    group_select: int = 0,
    fallback: str = _INVALID,
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    regexes_to_ignore: Sequence[str] = (),
) -> list[Any]:
    """The match of a pattern; otherwise the letter, as `(A)`, of a choice in the answer, or of a letter after a colon.

    Args:
        ignore_case, ignore_punctuation, regexes_to_ignore: what to ignore when searching for the texts of choices.
    """

    def clean(text: str) -> str:
        for pattern in regexes_to_ignore:
            text = re.sub(pattern, "", text)
        text = text.lower() if ignore_case else text
        if ignore_punctuation:
            text = "".join(letter for letter in text if not unicodedata.category(letter).startswith("P"))
        return text

    letters = string.ascii_uppercase[: len(row[CHOICES])]
    by_text = {clean(choice.strip()): f"({letter})" for choice, letter in zip(row[CHOICES], letters, strict=True)}
    # Longest first: a choice may be a prefix of another one.
    texts = "|".join(sorted(map(re.escape, by_text), key=len, reverse=True))
    results = []
    for answer in (answer if isinstance(answer, str) else "" for answer in answers):
        match = _find(regex_pattern, answer, group_select, "")
        if not match:
            match = _find(texts, clean(answer), group_select, "")
            match = by_text.get(match or "", match)
        if not match:
            letter = _find(rf":[\s]*({'|'.join(letters)})", answer, group_select, "")
            match = f"({letter})" if letter else fallback
        results.append(match)
    return results


def _custom(answers: list[Any], row: Mapping[str, Any], filter_fn: Callable[..., Iterable[list[Any]]]) -> list[Any]:
    """The result of a function of a trusted file, which takes the answers of several documents but gets one here."""
    return list(next(iter(filter_fn([answers], [row]))))


FILTERS: Registry[Callable[..., list[Any]]] = Registry(
    "filters",
    {
        "take_first": lambda answers: answers[:1],
        "take_first_k": lambda answers, k: answers[:k],
        "majority_vote": lambda answers: [Counter(answers).most_common(1)[0][0]],
        "regex": _regex,
        "remove_whitespace": _for_texts(str.strip),
        "lowercase": _for_texts(str.lower),
        "uppercase": _for_texts(str.upper),
        "format_span": _for_texts(_format_span),
        "regex_pos": _regex_pos,
        "map": lambda answers, mapping_dict, default_value=None: [
            mapping_dict.get(key, default_value) for key in answers
        ],
    },
    expect_function,
)

# Filters that also read the document.
DOCUMENT_FILTERS: dict[str, Callable[..., list[Any]]] = {"multi_choice_regex": _multi_choice_regex, "custom": _custom}
# The column of the choices, by the harness's convention.
CHOICES = "choices"


def filters_of(task: TaskSettings) -> dict[str, list[Options]]:
    """Return the steps of a task's filters by name; by default one filter that takes the first answer.

    Raises:
        JinguError: a filter does not exist, or its options are invalid.
    """
    filters = {item.name: item.filter for item in task.filter_list}
    for step in (step for steps in filters.values() for step in steps):
        name = str(step.get("function"))
        if name not in FILTERS and name not in DOCUMENT_FILTERS:
            raise task.error(f"there is no filter {name}.", f"Use {join_words([*FILTERS, *DOCUMENT_FILTERS])}.")
        try:
            if name in FILTERS:
                signature(FILTERS[name]).bind([], **_options(step))
            else:
                signature(DOCUMENT_FILTERS[name]).bind([], {}, **_options(step))
            re.compile(step.get("regex_pattern", ""))
            # Wrong values of options fail with any text.
            if name != "custom":
                with time_limit(FILTER_SECONDS):
                    results = apply_steps([step], [""], {CHOICES: [""]})
                if not results:
                    raise ValueError("it leaves no answer")
        except (TimeLimitError, TypeError, ValueError, AttributeError, LookupError, re.error) as error:
            raise task.error(f"its filter {name} is wrong: {error}.", "Correct it.") from None
    return filters or {"none": [{"function": "take_first"}]}


def check_choices(task: TaskSettings, rows: Iterable[Mapping[str, Any]]) -> None:
    """Raise JinguError if the filter multi_choice_regex is used and documents lack choices that letters can name."""
    steps = (step["function"] for steps in filters_of(task).values() for step in steps)
    if "multi_choice_regex" not in steps:
        return
    choices = [row.get(CHOICES) for row in rows]
    if not all(isinstance(each, list) for each in choices):
        what = f"its filter multi_choice_regex reads the list {CHOICES} of a document, and one has none."
        raise task.error(what, f"Add a column {CHOICES} with the texts of the choices.")
    longest = max((len(each or ()) for each in choices), default=0)
    if longest > len(string.ascii_uppercase):
        what = f"its filter multi_choice_regex names choices by the letters A to Z, and a document has {longest}."
        raise task.error(what, "Leave out such documents, or use the filter regex.")


def gives_list(steps: Sequence[Options]) -> bool:
    """Return whether a filter gives a list of answers, because no step takes the first one."""
    return all(step["function"] != "take_first" for step in steps)


def apply_steps(steps: Sequence[Options], answers: Sequence[Any], row: Mapping[str, Any]) -> list[Any]:
    """Apply the steps of a filter to the repeated answers of a document; return the resulting answers."""
    results = [*answers]
    for step in steps:
        name = step["function"]
        if name in DOCUMENT_FILTERS:
            results = DOCUMENT_FILTERS[name](results, row, **_options(step))
        else:
            results = FILTERS[name](results, **_options(step))
    return results


def first_of(results: Sequence[Any]) -> Any:
    """Return the first answer of a filter; an empty text if it gives none."""
    return results[0] if results else ""


def filter_answers(
    task: TaskSettings, name: str, steps: Sequence[Options], answers: Sequence[str], row: Mapping[str, Any]
) -> list[Any]:
    """Apply a filter as `apply_steps` does. Raise JinguError if it fails, or a pattern does not end."""
    if any(step["function"] == "custom" for step in steps):
        results: list[Any] = task.call(f"filter {name}", apply_steps, steps, answers, row)
        return results
    try:
        with time_limit(FILTER_SECONDS):
            return apply_steps(steps, answers, row)
    except (TimeLimitError, TypeError, ValueError, AttributeError, LookupError, re.error, MemoryError) as error:
        raise task.error(f"its filter {name} fails with an answer: {error}.", "Correct its options.") from None


def _options(step: Options) -> Options:
    return {key: value for key, value in step.items() if key != "function"}
