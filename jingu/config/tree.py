"""What the tree of settings holds: its keys, and what each of them takes, in words for people."""

from __future__ import annotations

from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from jingu.config.schema import RunConfig
from jingu.config.sections.base import Settings, Words
from jingu.errors import either

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


def takes_text(takes: list[Kind]) -> bool:
    """Whether any text is among what a setting takes."""
    return any(kind.type is str for kind in takes)


def fields(model: type[Settings]) -> dict[str, FieldInfo]:
    """The fields of a section by the keys that a file has for them."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def meaning_of(field: FieldInfo) -> str:
    """The docstring under a field, as one line."""
    return " ".join((field.description or "").split())


def sections(field: FieldInfo) -> Sections:
    """The sections that a field takes, by their tag; empty for a single value."""
    found = [kind.type for kind in field_kinds(field) if isinstance(kind.type, type)]
    models = [model for model in found if issubclass(model, Settings)]
    if len(models) == 1:
        return {"": models[0]}
    return {kind.value: model for model in models for kind in field_kinds(model.model_fields["type"])}


def item_sections(field: FieldInfo) -> type[Settings] | None:
    """The model of the items, of a field that takes a list of sections."""
    models = (kind.type for kind in item_kinds(field) if isinstance(kind.type, type))
    return next((model for model in models if issubclass(model, Settings)), None)


def find(path: tuple[str | int, ...], model: type[Settings] = RunConfig) -> FieldInfo | None:
    """The field at a path, in whichever variant of a section has it first."""
    field = fields(model).get(str(path[0])) if path else None
    if field is None or len(path) == 1:
        return field
    items = item_sections(field)
    if items and isinstance(path[1], int):
        return find(path[2:], items) if len(path) > 2 else field
    inner = (find(path[1:], variant) for variant in sections(field).values())
    return next((found for found in inner if found), None)


@cache
def all_keys(model: type[Settings] = RunConfig) -> tuple[str, ...]:
    """Every dotted key of the tree, sections too, in order."""
    keys: dict[str, None] = {}
    for name, field in fields(model).items():
        keys[name] = None
        for variant in [*sections(field).values(), *filter(None, [item_sections(field)])]:
            keys |= {f"{name}.{key}": None for key in all_keys(variant)}
    return tuple(keys)


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
    if kind.type is int:
        return ["a whole number" + _range(kind.limits)]
    if kind.type is float:
        return [("a number with a decimal point" if whole_too else "a number") + _range(kind.limits)]
    if get_origin(kind.type) is list:
        (item,) = {kind.type if kind.type in (str, int, float) else Settings for kind in kinds(get_args(kind.type)[0])}
        return ["a list of " + {str: "texts", int: "whole numbers", float: "numbers", Settings: "sections"}[item]]
    plain = {bool: ["true", "false"], NoneType: ["null"], str: ["text"]}
    return plain.get(kind.type, ["a section"])


def _range(limits: tuple[Any, ...]) -> str:
    """` (1 or more)`, for the limits of a number."""
    words = {"ge": "{:,} or more", "gt": "above {:,}", "le": "{:,} or less", "lt": "below {:,}"}
    bounds = {name: getattr(limit, name) for name in words for limit in limits if hasattr(limit, name)}
    bounds = {name: bound for name, bound in bounds.items() if bound is not None}
    if bounds.keys() == {"ge", "le"}:
        return f" (from {bounds['ge']:,} to {bounds['le']:,})"
    said = ", ".join(words[name].format(bound) for name, bound in bounds.items())
    return f" ({said})" if said else ""
