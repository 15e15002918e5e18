"""Inspect the tree of settings: list its keys, and describe in words the values that each accepts."""

from __future__ import annotations

from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from jingu.config.schema import RunConfig
from jingu.config.sections.base import Description, LateAnnotation, Settings
from jingu.errors import join_words


class AcceptedType(NamedTuple):
    """One alternative that a setting accepts: a type with its limits, or a literal value.

    Attributes:
        type: the type; Literal for a literal value.
        limits: annotations of the type, such as `Ge(1)` or a Description.
        value: the literal value.
    """

    type: Any
    limits: tuple[Any, ...] = ()
    value: Any = None


def parse_annotation(annotation: Any, limits: tuple[Any, ...] = ()) -> list[AcceptedType]:
    """Return the alternatives of an annotation. `Positive | Literal["auto"]` has two: an integer and a literal.

    Args:
        limits: limits that apply to all alternatives, from an annotation around this one.
    """
    late = next((limit for limit in limits if isinstance(limit, LateAnnotation)), None)
    if late is not None:
        return parse_annotation(late.annotation, tuple(limit for limit in limits if limit is not late))
    origin = get_origin(annotation)
    if origin is Annotated:
        base, *extra = get_args(annotation)
        own_limits = [limit for item in extra for limit in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return parse_annotation(base, (*own_limits, *limits))
    if origin in (Union, UnionType):
        return [member_type for part in get_args(annotation) for member_type in parse_annotation(part)]
    if origin is Literal:
        return [AcceptedType(Literal, value=value) for value in get_args(annotation)]
    return [AcceptedType(annotation, limits)]


def accepted_types(field: FieldInfo) -> list[AcceptedType]:
    """Return the alternatives that a field accepts."""
    return parse_annotation(field.annotation, tuple(field.metadata))


def accepted_item_types(field: FieldInfo) -> list[AcceptedType]:
    """Return the alternatives for the items of a list; empty if the field accepts no list."""
    lists = [accepted_type.type for accepted_type in accepted_types(field) if get_origin(accepted_type.type) is list]
    return [item for list_type in lists for item in parse_annotation(get_args(list_type)[0])]


def accepts_text(types: list[AcceptedType]) -> bool:
    """Return whether arbitrary text is accepted, not only literals."""
    return any(accepted_type.type is str for accepted_type in types)


@cache
def fields_by_key(model: type[Settings]) -> dict[str, FieldInfo]:
    """Return the fields of a section by their keys in a file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def field_description(field: FieldInfo) -> str:
    """Return the description of a field."""
    return field.description or ""


def section_types(field: FieldInfo) -> dict[str, type[Settings]]:
    """Return the sections that a field accepts, by their `type:`; an empty dict if the field is not a section.

    A section without variants has the key "".
    """
    return _sections_by_type(accepted_types(field))


def item_section_types(field: FieldInfo) -> dict[str, type[Settings]]:
    """Return the sections that the items of a list accept, in the same form."""
    return _sections_by_type(accepted_item_types(field))


def _sections_by_type(types: list[AcceptedType]) -> dict[str, type[Settings]]:
    plain_types = [accepted_type.type for accepted_type in types if isinstance(accepted_type.type, type)]
    models = [plain_type for plain_type in plain_types if issubclass(plain_type, Settings)]
    if len(models) == 1:
        return {"": models[0]}
    return {tag.value: model for model in models for tag in accepted_types(model.model_fields["type"])}


def find_field(path: tuple[str | int, ...], model: type[Settings] = RunConfig) -> FieldInfo | None:
    """Return the field at a path, from the first variant of a section that has it; None if there is none.

    Args:
        path: keys from the root; an int stands for an item of a list.
    """
    field = fields_by_key(model).get(str(path[0])) if path else None
    if field is None or len(path) == 1:
        return field
    variants, remainder = section_types(field), path[1:]
    if isinstance(path[1], int) and item_section_types(field):
        if len(path) == 2:
            return field
        variants, remainder = item_section_types(field), path[2:]
    candidates = (find_field(remainder, variant) for variant in variants.values())
    return next((candidate for candidate in candidates if candidate), None)


@cache
def all_keys(model: type[Settings] = RunConfig) -> tuple[str, ...]:
    """Return every dotted key of the tree in order, including the keys of sections themselves."""
    keys: dict[str, None] = {}
    for name, field in fields_by_key(model).items():
        keys[name] = None
        for variant in [*section_types(field).values(), *item_section_types(field).values()]:
            keys |= {f"{name}.{key}": None for key in all_keys(variant)}
    return tuple(keys)


def describe_types(types: list[AcceptedType]) -> str:
    """Describe in words what a setting accepts: `a whole number (1 or more) or auto`."""
    has_int = any(accepted_type.type is int for accepted_type in types)
    return join_words([words for accepted_type in types for words in _describe_type(accepted_type, has_int)])


def format_value(value: Any) -> str:
    """Return a plain value as it is written in YAML; an empty list in words."""
    if value is None or value == []:
        return "null" if value is None else "an empty list"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _describe_type(accepted_type: AcceptedType, has_int: bool) -> list[str]:
    """Describe one alternative in words; a boolean has two descriptions.

    Args:
        has_int: whether integers are accepted too, so that a float needs a decimal point to differ from them.
    """
    descriptions = [limit.text for limit in accepted_type.limits if isinstance(limit, Description)]
    if descriptions:
        return descriptions
    if accepted_type.type is Literal:
        return [format_value(accepted_type.value)]
    if accepted_type.type is int:
        return ["a whole number" + _describe_range(accepted_type.limits)]
    if accepted_type.type is float:
        return [("a number with a decimal point" if has_int else "a number") + _describe_range(accepted_type.limits)]
    if get_origin(accepted_type.type) is list:
        items = parse_annotation(get_args(accepted_type.type)[0])
        if items[0].type is Literal:
            return [f"a list of {join_words([format_value(item.value) for item in items])}"]
        (item,) = {item.type if item.type in (str, int, float) else Settings for item in items}
        return ["a list of " + {str: "texts", int: "whole numbers", float: "numbers", Settings: "sections"}[item]]
    plain = {bool: ["true", "false"], NoneType: ["null"], str: ["text"]}
    return plain.get(accepted_type.type, ["a section"])


def _describe_range(limits: tuple[Any, ...]) -> str:
    """Describe the limits of a number: ` (1 or more)`, or an empty text if there are none."""
    words = {"ge": "{:,} or more", "gt": "above {:,}", "le": "{:,} or less", "lt": "below {:,}"}
    bounds = {name: getattr(limit, name) for name in words for limit in limits if hasattr(limit, name)}
    bounds = {name: bound for name, bound in bounds.items() if bound is not None}
    if bounds.keys() == {"ge", "le"}:
        return f" (from {bounds['ge']:,} to {bounds['le']:,})"
    text = ", ".join(words[name].format(bound) for name, bound in bounds.items())
    return f" ({text})" if text else ""
