"""Rows for task files of lm-evaluation-harness without their data, made from what a task's templates and code read.

The columns of a task are the names in its templates, and the keys that its functions look up. Each column has a kind of
value, chosen by how it is used; if the harness fails on the rows, other kinds are tried, one column at a time.
"""

from __future__ import annotations

import inspect
import random
import re
import string
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from jinja2 import Environment, TemplateError, meta

Row = dict[str, Any]
Make = Callable[[int, str], Any]

_WORDS = (
    *(
        "red",
        "blue",
        "green",
        "small",
        "large",
        "old",
        "young",
        "warm",
        "cold",
        "happy",
        "stone",
        "river",
        "tree",
        "bird",
    ),
    *("house", "road", "cloud", "field"),
)
_LANGUAGES = ("en", "fr", "de", "bam", "yor", "zh", "es", "swa", "hau", "ibo")
_LABELS = string.ascii_uppercase[:4]
_LOOKUP = re.compile(r"""(?:\w+|\))\[\s*f?["']([\w .:/()?-]+)["']\s*\]|\.get\(\s*["']([\w .-]+)["']""")
_NAME = re.compile(r"[A-Za-z_][\w. -]*")
# Tries of other kinds for the rows of a task.
MAX_TRIES = 240


def _text(number: int, column: str) -> str:
    chooser = random.Random(f"{number} {column}")
    return " ".join(chooser.choices(_WORDS, k=6))


def _texts(number: int, column: str, count: int = 4) -> list[str]:
    return [f"{_WORDS[choice]} {_text(number * 10 + choice, column)}" for choice in range(count)]


# Kinds of values: the value of row `number` in a column.
KINDS: dict[str, Make] = {
    "text": _text,
    "index": lambda number, _: number % 2,
    "texts": _texts,
    "letter": lambda number, _: _LABELS[number % 2],
    "digit": lambda number, _: str(number % 2),
    "number": lambda number, _: str(number % 3 + 1),
    "labelled": lambda number, column: {"text": _texts(number, column), "label": [*_LABELS]},
    "list in a text": lambda number, column: str(_texts(number, column)),
    "truth": lambda number, _: number % 2 == 0,
    "float": lambda number, _: number / 4 + 0.25,
    "targets": lambda number, column: {
        "choices": _texts(number, column),
        "labels": [int(choice == number % 4) for choice in range(4)],
    },
    "answers": lambda number, column: {
        "text": [_text(number, column)],
        "answer_start": [0],
        "value": _text(number, column),
        "aliases": [_text(number, column)],
        "normalized_aliases": [_text(number, column)],
        "input_text": _texts(number, column),
    },
    "choice objects": lambda number, column: [
        {"text": text, "label": label, "content": text, "type": "text", "id": label, "role": "user"}
        for text, label in zip(_texts(number, column), _LABELS, strict=True)
    ],
    "letters of choices": lambda number, column: dict(zip(_LABELS, _texts(number, column), strict=True)),
    "translation": lambda number, column: {code: _text(number, column + code) for code in _LANGUAGES},
    "indices": lambda number, _: [number % 2],
    "truths": lambda number, _: [choice == number % 4 for choice in range(4)],
    "empty": lambda number, _: "",
    "null": lambda number, _: None,
    "lists": lambda number, column: [_texts(number, column), _texts(number + 7, column)],
    "json in a text": lambda number, column: '{"text": "red", "label": "A", "answer": 1}',
}
# What names of columns usually mean.
_USUAL = {
    "texts": r"choices|options|endings|candidates|distractors|answers_list|option_list|references|paraphrases|turns",
    "index": r"label|gold|(target_)?idx|index|answer_?(index|idx|num|id)|correct_?(index|idx|option|answer_num|choice)",
    "letter": r"answerkey|answer_?key|correct_?answer_?letter|answer_letter",
}


def columns_of(config: Row) -> dict[str, str]:
    """Return the kind of value of each column that a task reads."""
    shots = config.get("fewshot_config") or {}
    fields = [config, shots if isinstance(shots, dict) else {}]
    keys = ("doc_to_text", "doc_to_target", "doc_to_choice", "description", "gen_prefix")
    templates = [str(each[key]) for each in fields for key in keys if isinstance(each.get(key), str | list | dict)]
    # Words alone are a description or a prefix, not a column.
    words = {str(each.get(key)) for each in fields for key in ("description", "gen_prefix")}
    columns: dict[str, str] = {}
    environment = Environment(autoescape=False)
    for template in templates:
        if _NAME.fullmatch(template) and template not in words:
            columns.setdefault(template, "")
        try:
            names = meta.find_undeclared_variables(environment.parse(template))
        except TemplateError:
            continue
        columns |= {name: "" for name in sorted(names) if name not in columns}
    code = "\n".join(sorted({_source(function) for function in functions_of(config)}))
    for match in _LOOKUP.finditer(code):
        name = match[1] or match[2]
        if not match[0].startswith(("kwargs", "os.environ", "item[", "metric")):
            columns.setdefault(name, "")
    text = "\n".join([*templates, code])
    has_letters = re.search(r"""\[?["']A["'],\s*["']B["']""", str(config.get("doc_to_choice"))) is not None
    for name in columns:
        columns[name] = _guess_kind(name, text, config, has_letters)
    return columns


def _source(function: Callable[..., Any]) -> str:
    """Return the source of the module of a function."""
    inner = getattr(function, "func", function)
    try:
        return inspect.getsource(inspect.getmodule(inner) or inner)
    except (OSError, TypeError):
        return ""


def functions_of(value: Any) -> Iterator[Callable[..., Any]]:
    """Yield the functions in the settings of a task."""
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from functions_of(item)
    elif callable(value):
        yield value


def argument_texts(function: Callable[..., Any]) -> list[str]:
    """Return the texts among the arguments of a partial function."""
    values = [*getattr(function, "args", ()), *getattr(function, "keywords", {}).values()]
    return [value for value in values if isinstance(value, str)]


def _guess_kind(name: str, text: str, config: Row, has_letters: bool) -> str:
    """Return the kind of a column, by its use in templates and code, and by its name."""
    word = re.escape(name)
    reads = rf"""(?:\b{word}|\[["']{word}["']\])"""
    if re.search(rf"\b{word}\.(text|label)\b|{reads}\[['\"](text|label)['\"]\]", text) and "choice" in name:
        return "labelled"
    if found := re.search(rf"\[([^\[\]]+)\]\.index\(\s*{word}", text):
        return f"one of {found[1]}"
    if found := re.search(rf"\{{([^{{}}]+)\}}\[\s*{word}\s*\]", text):
        values = re.findall(r"""['"]([^'"]+)['"]\s*:""", found[1])
        return f"one of {values}"
    if found := re.findall(rf"{reads}(?:\s*|\.lower\(\)|\.strip\(\))==\s*['\"]([^'\"]+)['\"]", text):
        return f"one of {found}"
    if re.search(rf"{reads}\[\s*\d+\s*\]|{reads}\s*\|\s*(join|length)|in\s+{reads}|join\(\s*\w*{reads}", text):
        return "texts"
    selections = [value for each in functions_of(config) for value in argument_texts(each)]
    if selections and re.fullmatch("category|subject|subtask(_name)?|domain|topic|subset|task", name):
        # `f"prefix.{subject}"` in the code that selects rows.
        prefix = re.search(r"""==\s*f["']([^{"']*)\{\w+\}["']""", text)
        return f"one of {[(prefix[1] if prefix else '') + value for value in selections]}"
    for kind, pattern in _USUAL.items():
        if re.fullmatch(pattern, name, re.IGNORECASE):
            return kind
    if name == config.get("doc_to_choice"):
        return "texts"
    if name == config.get("doc_to_target") and config.get("doc_to_choice") is not None:
        return "letter" if has_letters and "answer" in name else "index"
    if name == "answer" and has_letters:
        return "letter"
    return "text"


def maker_of(kind: str) -> Make:
    """Return the function that makes the values of a kind; `one of [...]` has values of its own."""
    if kind in KINDS:
        return KINDS[kind]
    values = re.findall(r"""['"]([^'"]*)['"]""", kind) or ["A", "B"]
    return partial(_choose, values)


def _choose(values: list[str], number: int, _column: str) -> str:
    return values[number % len(values)]


def make_rows(columns: dict[str, str], numbers: range) -> list[Row]:
    """Return rows with a value in each column."""
    makers = {name: maker_of(kind) for name, kind in columns.items()}
    return [{name: make(number, name) for name, make in makers.items()} for number in numbers]


def search_columns(config: Row, check: Callable[[dict[str, str]], tuple[int, str]]) -> tuple[dict[str, str], str]:
    """Return the kinds of columns with which the harness evaluates a task, and the last error; empty if there is none.

    Args:
        check: returns how far the harness comes with some kinds, and its error.
    """
    columns = columns_of(config)
    # A function that selects rows, such as those of a subject, has what it selects among its arguments.
    own_kinds = [f"one of ['{text}']" for each in functions_of(config) for text in argument_texts(each)]
    stage, error = check(columns)
    seen = {error}
    tries = 0
    improved = True
    while error and improved and tries < MAX_TRIES:
        improved = False
        if (missing := _missing_column(error)) and missing not in columns:
            columns = {**columns, missing: _guess_kind(missing, "", config, has_letters=False)}
            stage, error = check(columns)
            seen.add(error)
            improved = True
            continue
        # Columns that the error names come first, then those that a target is likely made of.
        order = sorted(columns, key=lambda name: (name not in error, not re.search("answer|label|gold|choice", name)))
        kinds = [*own_kinds, *KINDS]
        for name, kind in ((name, kind) for name in order for kind in kinds if kind != columns[name]):
            tries += 1
            trial = {**columns, name: kind}
            new_stage, new_error = check(trial)
            if not new_error or new_stage > stage or (new_stage == stage and new_error not in seen and name in error):
                columns, stage, error, improved = trial, new_stage, new_error, True
                seen.add(error)
                break
            if tries >= MAX_TRIES:
                break
    return columns, error


def _missing_column(error: str) -> str | None:
    """Return the column that an error says is missing."""
    match = re.search(r"KeyError: ['\"](.+?)['\"]$|UndefinedError: '(\w+)' is undefined", error)
    return None if match is None else match[1] or match[2]
