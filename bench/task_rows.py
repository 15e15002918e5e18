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
from dataclasses import dataclass
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
_LANGUAGES = ("en", "fr", "swa", "bam", "yor", "hau", "ibo", "de", "zh", "es")
_LABELS = string.ascii_uppercase[:4]
_LOOKUP = re.compile(r"""(?:\w+|\))\[\s*f?["']([\w .:/()?-]+)["']\s*\]|\.get\(\s*["']([\w .-]+)["']""")
_OTHER_TABLES = ("kwargs", "os.environ", "item[", "metric")
_NAME = re.compile(r"[A-Za-z_][\w. -]*")
_CONSTANTS = re.compile(r"""\s*(?:\{\{)?\s*\[(?:\s*(?:'[^']*'|"[^"]*")\s*,?)+\s*\]\s*(?:\}\})?\s*""")
# Tries of other kinds for the rows of a task.
MAX_TRIES = 240


def _text(number: int, column: str) -> str:
    chooser = random.Random(f"{number} {column}")
    return " ".join(chooser.choices(_WORDS, k=6))


def _texts(number: int, column: str, count: int = 4) -> list[str]:
    return [f"{_WORDS[choice]} {_text(number * 10 + choice, column)}" for choice in range(count)]


def _typed_answer(number: int, column: str, is_bool: bool) -> Row:
    words = "" if is_bool else _text(number, column)
    yes = number % 2 == 0 if is_bool else None
    return {"unanswerable": False, "yes_no": yes, "free_form_answer": words, "extractive_spans": []}


# Kinds of values: the value of row `number` in a column.
KINDS: dict[str, Make] = {
    "text": _text,
    "index": lambda number, _: number % 2,
    "texts": _texts,
    "letter": lambda number, _: _LABELS[number % 2],
    "digit": lambda number, _: str(number % 2),
    "number": lambda number, _: str(number % 3 + 1),
    "index from 1": lambda number, _: number % 2 + 1,
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
    "questions": lambda number, column: {
        "question": _texts(number, column),
        "answers": [{"answer": [_typed_answer(number, column, is_bool)]} for is_bool in (True, False)] * 2,
    },
}
# What names of columns usually mean.
_USUAL = {
    "texts": r"choices|options|endings|candidates|distractors|answers_list|option_list|references|paraphrases|turns",
    "index": r"label|gold|(target_)?idx|index|answer_?(index|idx|num|id)|correct_?(index|idx|option|answer_num|choice)",
    "translation": r"translation",
    "letter": r"answerkey|answer_?key|correct_?answer_?letter|answer_letter",
}


@dataclass(frozen=True)
class Usage:
    """How a task reads its columns.

    Attributes:
        names: of the columns.
        looked_up: those of them that its functions look up.
        text: its templates, and the code of its functions.
        choices: the texts of its choices, if they are constants.
    """

    config: Row
    names: tuple[str, ...]
    looked_up: frozenset[str]
    text: str
    choices: tuple[str, ...]

    @property
    def has_letters(self) -> bool:
        """Whether the choices are letters."""
        return self.choices[:2] == ("A", "B")


def usage_of(config: Row) -> Usage:
    """Return how a task reads its columns."""
    shots = config.get("fewshot_config") or {}
    fields = [config, shots if isinstance(shots, dict) else {}]
    keys = ("doc_to_text", "doc_to_target", "doc_to_choice", "description", "gen_prefix")
    templates = [str(each[key]) for each in fields for key in keys if isinstance(each.get(key), str | list | dict)]
    # Words alone are a description or a prefix, not a column.
    words = {str(each.get(key)) for each in fields for key in ("description", "gen_prefix")}
    columns: dict[str, None] = {}
    environment = Environment(autoescape=False)
    for template in templates:
        if _NAME.fullmatch(template) and template not in words:
            columns[template] = None
        try:
            names = meta.find_undeclared_variables(environment.parse(template))
        except TemplateError:
            continue
        columns |= dict.fromkeys(sorted(names))
    code = "\n".join(sorted({_source(function) for function in functions_of(config)}))
    matches = [match for match in _LOOKUP.finditer(code) if not match[0].startswith(_OTHER_TABLES)]
    looked_up = [match[1] or match[2] for match in matches]
    columns |= dict.fromkeys(looked_up)
    choices = config.get("doc_to_choice")
    if isinstance(choices, str) and _CONSTANTS.fullmatch(choices):
        choices = re.findall(r"""['"]([^'"]+)['"]""", choices)
    constants = tuple(map(str, choices)) if isinstance(choices, list) else ()
    return Usage(config, tuple(columns), frozenset(looked_up), "\n".join([*templates, code]), constants)


def columns_of(config: Row) -> dict[str, str]:
    """Return the kind of value of each column that a task reads."""
    usage = usage_of(config)
    return {name: _guess_kind(name, usage) for name in usage.names}


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
    """Return the texts among the arguments of a partial function, and among the values that a function encloses."""
    values = [*getattr(function, "args", ()), *getattr(function, "keywords", {}).values()]
    values += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return [value for value in values if isinstance(value, str)]


def _guess_kind(name: str, usage: Usage) -> str:
    """Return the kind of a column, by its use in templates and code, and by its name."""
    word = re.escape(name)
    # Names with a number, such as f"option_{number}", are written once for all of them.
    patterns = (each for each in re.findall(r"""f["'](\w*\{\w+\}\w*)["']""", usage.text))
    same = [re.escape(each) for each in patterns if re.fullmatch(re.sub(r"\{\w+\}", r"\\d+", each), name)]
    reads = rf"""(?:\b{word}|\[f?["'](?:{"|".join([word, *same])})["']\])"""
    return _guess_by_use(name, reads, usage) or _guess_by_name(name, usage)


def _guess_by_use(name: str, reads: str, usage: Usage) -> str | None:
    """Return the kind of a column that expressions of templates and code tell.

    Args:
        reads: pattern of an expression that reads the column.
    """
    text = usage.text
    if "process_docs" in usage.config and name not in usage.looked_up and f'"{name}":' in text:
        # The task makes the column itself, from all others.
        return "text"
    if re.search(rf"{reads}(\.(text|label)\b|\[['\"](text|label)['\"]\])", text) and "choice" in name:
        return "labelled"
    if re.search(rf"json\.loads\(\s*\w*{reads}", text):
        return "json in a text"
    if found := re.search(rf"\[([^\[\]]+)\]\.index\(\s*{reads}", text):
        return f"one of {found[1]}"
    if found := re.search(rf"(\w+)\.index\(\s*{reads}\s*(\[0\])?", text):
        return f"{'list with a text' if found[2] else 'text'} of {found[1]}" if found[1] in usage.names else None
    if found := re.search(rf"\{{([^{{}}]+)\}}\[\s*{reads}\s*\]", text):
        values = re.findall(r"""['"]([^'"]+)['"]\s*:""", found[1])
        return f"one of {values}"
    if (found := re.search(rf"(\w+)\[\s*\w*{reads}\s*\]", text)) and (
        table := re.search(rf"\b{found[1]}\s*=\s*\{{([^{{}}]+)\}}", text)
    ):
        values = re.findall(r"""['"]([^'"]+)['"]\s*:""", table[1])
        return f"one of {values}"
    if found := re.search(rf"{reads}\.index\(\s*['\"]([^'\"]+)['\"]", text):
        return f"one of {[f'red stone {found[1]} tree', f'old bird {found[1]} road']}"
    if found := re.findall(rf"{reads}(?:\s*|\.lower\(\)|\.strip\(\))==\s*['\"]([^'\"]+)['\"]", text):
        return f"one of {found}"
    if found := re.findall(rf"['\"](\w+)['\"] in \w+{reads}", text):
        # A row is selected by a part of its text, so that it has all of them.
        return f"one of {[' '.join(found)]}"
    if re.search(rf"{reads}(\s*\|\s*int)?\s*-\s*1\b", text):
        return "index from 1"
    if re.search(
        rf"{reads}\[\s*\d+\s*\]|{reads}\s*\|\s*(join|length)|in\s+{reads}|join\(\s*\w*{reads}|{reads}\.index\(", text
    ):
        return "texts"
    return None


def _guess_by_name(name: str, usage: Usage) -> str:
    """Return the kind of a column that its name and the task's settings tell."""
    config = usage.config
    selections = [value for each in functions_of(config) for value in argument_texts(each)]
    if selections and re.fullmatch("category|subject|subtask(_name)?|domain|topic|subset|task", name):
        # `f"prefix.{subject}"` in the code that selects rows.
        prefix = re.search(r"""==\s*f["']([^{"']*)\{\w+\}["']""", usage.text)
        return f"one of {[(prefix[1] if prefix else '') + value for value in selections]}"
    target = config.get("doc_to_target")
    if usage.choices and isinstance(target, str) and re.fullmatch(rf"\{{\{{\s*{re.escape(name)}\s*\}}\}}", target):
        return f"one of {[*usage.choices]}"
    for kind, pattern in _USUAL.items():
        if re.fullmatch(pattern, name, re.IGNORECASE):
            return kind
    if name == config.get("doc_to_choice"):
        return "texts"
    if name == target and config.get("doc_to_choice") is not None:
        return "letter" if usage.has_letters and "answer" in name else "index"
    if name == "answer" and usage.has_letters:
        return "letter"
    return "text"


def maker_of(kind: str) -> Make:
    """Return the function that makes the values of a kind; `one of [...]` has values of its own, and `text of COLUMN`
    those of a list in another column."""
    if kind in KINDS:
        return KINDS[kind]
    if found := re.fullmatch(r"(list with a text|text) of (.+)", kind):
        return partial(_choose_element, found[2], found[1] != "text")
    values = re.findall(r"""['"]([^'"]*)['"]""", kind) or ["A", "B"]
    return partial(_choose, values)


def _choose(values: list[str], number: int, _column: str) -> str:
    return values[number % len(values)]


def _choose_element(other: str, in_list: bool, number: int, _column: str) -> Any:
    """Return a text of the list that another column of the row has."""
    text = _texts(number, other)[number % 4]
    return [text] if in_list else text


def make_rows(columns: dict[str, str], numbers: range) -> list[Row]:
    """Return rows with a value in each column."""
    makers = {name: maker_of(kind) for name, kind in columns.items()}
    return [{name: make(number, name) for name, make in makers.items()} for number in numbers]


def search_columns(
    config: Row, check: Callable[[dict[str, str]], tuple[int, str]], is_final: Callable[[str], bool]
) -> tuple[dict[str, str], str]:
    """Return the kinds of columns with which the harness evaluates a task, and the last error; empty if there is none.

    Args:
        check: returns how far the harness comes with some kinds, and its error.
        is_final: whether no other rows can help against an error.
    """
    usage = usage_of(config)
    columns = {name: _guess_kind(name, usage) for name in usage.names}
    # A function that selects rows, such as those of a subject, has what it selects among its arguments.
    own_kinds = [f"one of ['{text}']" for each in functions_of(config) for text in argument_texts(each)]
    own_kinds += [f"one of {[*usage.choices]}"] if usage.choices else []
    stage, error = check(columns)
    seen = {error}
    tries = 0
    improved = True
    while error and improved and tries < MAX_TRIES and not is_final(error):
        improved = False
        if (missing := _missing_column(error)) and missing not in columns:
            columns = {**columns, missing: _guess_kind(missing, usage)}
            stage, error = check(columns)
            seen.add(error)
            improved = True
            continue
        # Columns that the error names come first, then those that a target is likely made of.
        order = sorted(
            columns, key=lambda name: (name not in error, not re.search("answer|label|gold|choice|target", name))
        )
        kinds = [*own_kinds, *(f"text of {name}" for name, kind in columns.items() if kind == "texts"), *KINDS]
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
