"""What the tree of settings holds: its keys, and what each of them takes, in words for people."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from jingu.config.schema import RunConfig, Settings, Words

Sections = dict[str, type[Settings]]
"""The models that a section can be, by their `type:` (which is empty where there is only one)."""


class Kind(NamedTuple):
    """One of the things a setting takes: a type with its limits, or a literal value (`type` is then Literal)."""

    type: Any
    limits: tuple[Any, ...] = ()
    value: Any = None


def kinds(annotation: Any, limits: tuple[Any, ...] = ()) -> list[Kind]:
    """What an annotation takes, one by one: `Positive | Literal["auto"]` is a whole number and a literal."""
    origin = get_origin(annotation)
    if origin is Annotated:
        base, *extra = get_args(annotation)
        flat = [item for part in extra for item in (part.metadata if isinstance(part, FieldInfo) else [part])]
        return kinds(base, (*flat, *limits))
    if origin in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in kinds(part)]
    if origin is Literal:
        return [Kind(Literal, value=value) for value in get_args(annotation)]
    return [Kind(annotation, limits)]


def field_kinds(field: FieldInfo) -> list[Kind]:
    """What a field takes."""
    return kinds(field.annotation, tuple(field.metadata))


def item_kinds(field: FieldInfo) -> list[Kind]:
    """What an item takes, of a field that takes a list; else nothing."""
    lists = [kind.type for kind in field_kinds(field) if get_origin(kind.type) is list]
    return [kind for each in lists for kind in kinds(get_args(each)[0])]


def sections(field: FieldInfo) -> Sections:
    """The sections that a field takes, by their tag; empty for a single value."""
    found = [kind.type for kind in field_kinds(field) if isinstance(kind.type, type)]
    models = [model for model in found if issubclass(model, Settings)]
    return {model.model_fields["type"].default if len(models) > 1 else "": model for model in models}


def find(path: tuple[str | int, ...], model: type[Settings] = RunConfig) -> FieldInfo | None:
    """The field at a path, in whichever variant of a section has it first."""
    field = model.model_fields.get(str(path[0])) if path else None
    if field is None or len(path) == 1:
        return field
    inner = (find(path[1:], variant) for variant in sections(field).values())
    return next((found for found in inner if found), None)


@cache
def all_keys() -> tuple[str, ...]:
    """Every dotted key of the tree, sections too, in order."""
    return tuple(dict.fromkeys(_keys(RunConfig, "")))


def keys_of(model: type[Settings]) -> list[str]:
    """The keys of one section, in order."""
    return list(model.model_fields)


def _keys(model: type[Settings], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for variant in sections(field).values():
            yield from _keys(variant, f"{prefix}{name}.")


def either(words: list[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""


def describe(takes: list[Kind]) -> str:
    """What a setting takes, in words: `a whole number (1 or more) or auto`."""
    whole_too = any(kind.type is int for kind in takes)
    return either([words for kind in takes for words in _words(kind, whole_too)])


def written(value: Any) -> str:
    """A plain value as a YAML file has it."""
    if value is None or value == []:
        return "null" if value is None else "an empty list"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _words(kind: Kind, whole_too: bool) -> list[str]:
    named = [limit.text for limit in kind.limits if isinstance(limit, Words)]
    if named:
        return named
    if kind.type is Literal:
        return [written(kind.value)]
    if kind.type is bool:
        return ["true", "false"]
    if kind.type is NoneType:
        return ["null"]
    if kind.type is int:
        return ["a whole number" + _range(kind.limits)]
    if kind.type is float:
        return [("a number with a decimal point" if whole_too else "a number") + _range(kind.limits)]
    if kind.type is str:
        return ["text"]
    return ["a list of texts"] if get_origin(kind.type) is list else ["a section"]


def _range(limits: tuple[Any, ...]) -> str:
    bounds = {
        name: f"{getattr(limit, name):,}" if isinstance(getattr(limit, name), int) else f"{getattr(limit, name)}"
        for limit in limits
        for name in ("ge", "gt", "le", "lt")
        if getattr(limit, name, None) is not None
    }
    low = f"{bounds['ge']} or more" if "ge" in bounds else f"above {bounds['gt']}" if "gt" in bounds else ""
    high = f"{bounds['le']} or less" if "le" in bounds else f"below {bounds['lt']}" if "lt" in bounds else ""
    if "ge" in bounds and "le" in bounds:
        return f" (from {bounds['ge']} to {bounds['le']})"
    both = ", ".join(filter(None, [low, high]))
    return f" ({both})" if both else ""
