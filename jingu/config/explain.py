"""Find the mistakes in a configuration, and describe each: what is wrong, where, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from jingu.config.introspect import (
    AcceptedType,
    accepted_item_types,
    accepted_types,
    accepts_text,
    all_keys,
    describe_types,
    field_description,
    fields_by_key,
    find_field,
    format_value,
    item_section_types,
    section_types,
)
from jingu.config.schema import RunConfig
from jingu.config.sections.base import Settings
from jingu.config.strict_yaml import Document, KeyPath
from jingu.errors import JinguError, join_words
from jingu.tables import read_table

Message = tuple[str, str | None]
"""What is wrong, and how to fix it (None: unknown)."""
Mistake = tuple[KeyPath, Message]
"""Where a mistake is, and its message."""

_ALIASES = read_table(__file__, "aliases.toml")
KEY_ALIASES: dict[str, str] = _ALIASES["keys"]
VALUE_ALIASES: dict[str, str] = _ALIASES["values"]
"""Values by the names that other tools use for them."""
# Maximum number of mistakes to report. A file with more is probably not a configuration at all.
_MAX_REPORTED = 12


def find_mistakes(document: Document) -> list[JinguError]:
    """Return every mistake in a configuration, in the order of the file.

    The document is normalized in place. An empty section is removed, so its defaults apply. Where text is expected, an
    unquoted number becomes its text in the file (`name: 007`).
    """
    order = {path: index for index, path in enumerate(document.origins)}
    mistakes = sorted(
        _check_section(document.value, RunConfig, (), document), key=lambda mistake: order.get(mistake[0], len(order))
    )
    return [JinguError(what, where=document.origin(path).where, fix=fix) for path, (what, fix) in mistakes]


def combine_mistakes(mistakes: list[JinguError]) -> JinguError:
    """Combine mistakes into one error: a single mistake as it is, several as a list."""
    if len(mistakes) == 1:
        return mistakes[0]
    lines = [f"- {mistake}" for mistake in mistakes[:_MAX_REPORTED]]
    if len(mistakes) > _MAX_REPORTED:
        lines.append(f"- and {len(mistakes) - _MAX_REPORTED} more")
    return JinguError("\n".join([f"there are {len(mistakes)} mistakes in the settings:", *lines]))


def closest_match(word: str, choices: list[str], cutoff: float = 0.6) -> str | None:
    """Return the choice most similar to a misspelled word; None if there is a tie, or none is similar enough.

    Args:
        cutoff: minimum similarity, from 0 to 1 (difflib's ratio).
    """
    plain = word.lower().replace("-", "_")
    ratios = [SequenceMatcher(None, plain, choice.lower().replace("-", "_")).ratio() for choice in choices]
    best = max(ratios, default=0.0)
    return choices[ratios.index(best)] if best >= cutoff and ratios.count(best) == 1 else None


def _guess_value(value: Any, choices: list[str]) -> str | None:
    """Return the choice that a wrong value most likely stands for; None if there is none."""
    if not isinstance(value, str):
        return None
    plain = value.lower().replace("-", "_")
    # Names from other tools have precedence over similar spellings.
    for alias, choice in VALUE_ALIASES.items():
        if alias.replace("-", "_") == plain and choice in choices:
            return choice
    return closest_match(value, choices, cutoff=0.7)


def _check_section(
    section: dict[str, Any], model: type[Settings], path: KeyPath, document: Document
) -> Iterator[Mistake]:
    """Yield the mistakes in a section, with their paths."""
    for key, value in list(section.items()):
        key_path = (*path, key)
        field = fields_by_key(model).get(key)
        if field is None:
            yield key_path, _unknown_key(key_path, model, section, document)
        elif variants := section_types(field):
            yield from _check_subsection(section, key_path, field, variants, document)
        elif (item_types := item_section_types(field)) and isinstance(value, list):
            for index, item in enumerate(value):
                yield from _check_item(item, item_types, (*key_path, index), document)
        else:
            section[key] = _restore_text(value, field, key_path, document)
            yield from _check_value(section[key], field, model, key_path, document)


def _check_item(item: Any, variants: dict[str, type[Settings]], path: KeyPath, document: Document) -> Iterator[Mistake]:
    """Yield the mistakes in a section that is an item of a list.

    Args:
        variants: the accepted sections by `type:`; "" stands for the only one.
    """
    if not isinstance(item, dict):
        what = f"{_join_keys(path)} is a section of settings, not {_describe_value(item)}."
        keys = ", ".join(fields_by_key(next(iter(variants.values()))))
        yield path, (what, f"Its settings are: {keys}.")
    elif variant := variants.get("") or variants.get(str(item.get("type"))):
        yield from _check_section(item, variant, path, document)
    else:
        yield path, _wrong_type_tag(_join_keys(path), item.get("type"), list(variants))


def _check_subsection(
    section: dict[str, Any],
    path: KeyPath,
    field: FieldInfo,
    variants: dict[str, type[Settings]],
    document: Document,
) -> Iterator[Mistake]:
    """Yield the mistakes in a nested section.

    Args:
        section: the section around it; an empty nested section is removed from it.
        variants: the accepted sections by `type:`; "" stands for the only one.
    """
    key = str(path[-1])
    value = section[key]
    if value is None:
        del section[key]
    elif not isinstance(value, dict):
        yield path, _not_a_section(_join_keys(path), field, value)
    elif variant := variants.get("") or variants.get(str(value.get("type", _default_type(field)))):
        yield from _check_section(value, variant, path, document)
    else:
        yield (*path, "type"), _wrong_type_tag(_join_keys(path), value["type"], list(variants))


def _restore_text(value: Any, field: FieldInfo, path: KeyPath, document: Document) -> Any:
    """Return a value; where text is expected, a number or boolean becomes the text that was written."""

    def restore(item: Any, item_path: KeyPath) -> Any:
        text = document.origin(item_path).text
        return item if text is None or not isinstance(item, bool | int | float) else text

    if isinstance(value, list) and accepts_text(accepted_item_types(field)):
        return [restore(item, (*path, index)) for index, item in enumerate(value)]
    return restore(value, path) if accepts_text(accepted_types(field)) else value


def _check_value(
    value: Any, field: FieldInfo, model: type[Settings], path: KeyPath, document: Document
) -> Iterator[Mistake]:
    """Yield a mistake if the value, or an item of it, is of the wrong type or out of range."""
    try:
        model.model_validate({path[-1]: value})
    except ValidationError as error:
        # If an item of a list is wrong, pydantic also reports the list; report only the item.
        items = sorted({part for detail in error.errors() for part in detail["loc"][1:] if isinstance(part, int)})
        if not items:
            text = document.origin(path).text
            yield path, _wrong_value(_join_keys(path), value, accepted_types(field), text, field)
        for index in items:
            name = f"item {index + 1} of {_join_keys(path)}"
            text = document.origin((*path, index)).text
            yield (*path, index), _wrong_value(name, value[index], accepted_item_types(field), text, field)


def _default_type(field: FieldInfo) -> str:
    return str(field.get_default(call_default_factory=True).type)


def _unknown_key(path: KeyPath, model: type[Settings], section: dict[str, Any], document: Document) -> Message:
    """Describe a key that does not exist, and suggest one that does.

    Args:
        section: the section with the key.
    """
    parent = path[:-1]
    key = str(path[-1])
    # 1. A key of another `type:` of this section.
    field = find_field(parent)
    owners = [tag for tag, variant in section_types(field).items() if key in fields_by_key(variant)] if field else []
    if field and owners:
        return _key_of_another_type(path, section.get("type", _default_type(field)), owners, document)
    # 2. A dotted key, which only the command line accepts.
    if "." in key and find_field(tuple(key.split("."))):
        first, remainder = key.split(".", 1)
        fix = f"In a file, write `{first}:` and, indented on the next line, `{remainder}:`."
        return f"{key} is written with a dot, which is for the command line.", fix
    # 3. A misspelled key, or one of another tool.
    if guess := _guess_key(key, [_join_keys((*parent, name)) for name in fields_by_key(model)]):
        fix = f"Did you mean {guess}?"
    else:
        owner = f"{_join_keys(parent)} has" if parent else "The top level has"
        fix = f"{owner}: {', '.join(fields_by_key(model))}."
    return f"{_join_keys(path)} is not a setting.", fix


def _guess_key(key: str, siblings: list[str]) -> str | None:
    """Return the dotted key (or several, joined with "or") that an unknown key most likely stands for; None: no idea.

    Args:
        siblings: dotted keys of the same section.
    """
    leaf = key.lower().replace("-", "_")
    if leaf in KEY_ALIASES:
        return KEY_ALIASES[leaf]
    # Search the same section first, then the whole tree.
    names = [name.rsplit(".", 1)[-1] for name in siblings]
    if match := closest_match(leaf, names):
        return siblings[names.index(match)]
    keys_by_leaf: dict[str, list[str]] = {}
    for dotted_key in all_keys():
        keys_by_leaf.setdefault(dotted_key.rsplit(".", 1)[-1], []).append(dotted_key)
    keys_by_leaf.pop("type", None)
    match = closest_match(leaf, list(keys_by_leaf), cutoff=0.75)
    return join_words(keys_by_leaf[match]) if match else None


def _key_of_another_type(path: KeyPath, chosen_type: str, owners: list[str], document: Document) -> Message:
    """Describe a key that exists only for other types of the section."""
    section, key = _join_keys(path[:-1]), path[-1]
    tag = document.origins.get((*path[:-1], "type"))
    fix = f"Remove {key}, or choose {section}.type {join_words(owners)}."
    type_note = f"the type here is {chosen_type} ({tag.where if tag else 'the default'})"
    return f"{section}.{key} is a setting of {section}.type {join_words(owners)}, and {type_note}.", fix


def _wrong_type_tag(name: str, tag: Any, tags: list[str]) -> Message:
    """Describe a `type:` that does not exist."""
    guess = _guess_value(tag, tags)
    what = f"{name}.type takes {join_words(tags)}, {_contrast(_describe_value(tag, bare=True))}."
    return what, f"Did you mean {guess}?" if guess else None


def _not_a_section(name: str, field: FieldInfo, value: Any) -> Message:
    """Describe a single value where a section is expected: perhaps a `type:`, or a colon without a space after it."""
    variants = section_types(field)
    keys = fields_by_key(next(iter(variants.values())))
    if "" not in variants:
        tags = list(variants)
    elif "type" in keys:
        tags = [accepted_type.value for accepted_type in accepted_types(keys["type"])]
    else:
        tags = []
    if guess := _guess_value(value, tags):
        fix = f"Did you mean {name}.type: {guess}?"
    elif isinstance(value, str) and value.partition(":")[0] in keys:
        fix = f"Put a space after the colon: {value.replace(':', ': ', 1)}."
    else:
        fix = f"Its settings are: {', '.join(keys)}."
    return f"{name} is a section of settings, not {_describe_value(value)}.", fix


def _wrong_value(name: str, value: Any, types: list[AcceptedType], text: str | None, field: FieldInfo) -> Message:
    """Describe a value of the wrong type, or out of range.

    Args:
        text: text of the value in the file; None if it is not a plain scalar.
    """
    choices = [format_value(accepted_type.value) for accepted_type in types if accepted_type.value is not None]
    description = _describe_value(value, bare=bool(choices) and len(choices) == len(types))
    if text is not None and value is not None:
        description = text
    meaning = field_description(field).split(". ")[0].rstrip(".")
    guess = _guess_value(value, choices)
    hints = [f"Did you mean {guess}?" if guess else None, f"Meaning: {meaning}." if meaning else None]
    return f"{name} takes {describe_types(types)}, {_contrast(description)}.", " ".join(filter(None, hints)) or None


def _describe_value(value: Any, *, bare: bool = False) -> str:
    """Return a value in words: `the text "many"`, `a list`, `3.5`; empty for null.

    Args:
        bare: return text without the words around it.
    """
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    if value == "":
        return "an empty text"
    if isinstance(value, str):
        text = _shorten(value)
        return text if bare and text.strip() else f'the text "{text}"'
    return "" if value is None else format_value(value)


def _contrast(description: str) -> str:
    return f"not {description}" if description else "and here it is empty (null)"


def _join_keys(path: KeyPath) -> str:
    return ".".join(_shorten(str(part)) for part in path)


def _shorten(text: str) -> str:
    """Return text for use in a message: on one line, without control characters, and not too long."""
    printable_text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return printable_text if len(printable_text) <= 60 else printable_text[:57] + "..."
