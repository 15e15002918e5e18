"""Generate configuration.md from the schema: `python docs/guides/configuration.py > docs/guides/configuration.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pydantic.fields import FieldInfo

from jingu.config.introspect import (
    accepted_types,
    describe_types,
    field_description,
    fields_by_key,
    item_section_types,
    section_types,
)
from jingu.config.schema import RunConfig
from jingu.config.sections.base import Settings
from jingu.errors import join_words

OPENING = """\
# All settings

In a configuration file, a setting is a key of its section (`optimizer:` and, indented on the next line, `lr: 3e-4`). On
the command line it is written with a dot (`optimizer.lr=3e-4`). `jingu config show RUN.yaml` prints the values of all
settings for a run. The [glossary](../glossary.md) lists the new names of keys in older files.

`python docs/guides/configuration.py > docs/guides/configuration.md` generates this page from `jingu/config/`; a test
checks that it is up to date.

## Top level
"""


def guide() -> str:
    """Return the whole page."""
    lines = [OPENING, *table(RunConfig, "", list(fields_by_key(RunConfig)))]
    for name, field in fields_by_key(RunConfig).items():
        variants = section_types(field)
        if variants:
            lines += ["", f"## {name}", "", *section(name, field, variants)]
    return "\n".join(lines) + "\n"


def section(name: str, field: FieldInfo, variants: dict[str, type[Settings]]) -> Iterator[str]:
    """Yield the lines of a section. If it has several types, their common settings come first."""
    models = list(variants.values())
    if len(models) == 1:
        yield from [models[0].__doc__ or "", "", *table(models[0], f"{name}.", list(fields_by_key(models[0])))]
        return
    default = field.get_default(call_default_factory=True).type
    common = [key for key in fields_by_key(models[0]) if len({row(model, key, "") for model in models}) == 1]
    yield f"The settings depend on `{name}.type`; the default is `{default}`."
    if common:
        yield from ["", "All types have:", "", *table(models[0], f"{name}.", common)]
    for model in dict.fromkeys(models):
        tags = join_words([tag for tag, one in variants.items() if one is model])
        own = [key for key in fields_by_key(model) if key not in {*common, "type"}]
        yield from ["", f"### {name}, `type: {tags}`", "", model.__doc__ or ""]
        yield from ["", *table(model, f"{name}.", own)] if own else []


def table(model: type[Settings], prefix: str, keys: list[str]) -> Iterator[str]:
    """Yield a table of the settings `keys` of a section, including nested sections (except at the top level)."""
    yield "| setting | default | values | meaning |"
    yield "|---|---|---|---|"
    for key in keys:
        field = fields_by_key(model)[key]
        inner = section_types(field)
        items = item_section_types(field)
        if not inner:
            yield row(model, key, prefix)
        elif prefix and len(inner) > 1:
            default = field.get_default(call_default_factory=True).type
            meaning = " ".join(f"`{tag}`: {part.__doc__}" for tag, part in inner.items())
            yield cells(f"`{prefix}{key}.type`", f"`{default}`", join_words(list(inner)), meaning)
        # Types that have the same setting share a row.
        tags_by_row: dict[tuple[str, ...], list[str]] = {}
        for tag, part in inner.items() if prefix else ():
            for own in fields_by_key(part):
                if own != "type" or len(inner) == 1:
                    tags_by_row.setdefault(values(part, own, f"{prefix}{key}."), []).append(f"`{tag}`")
        for (*columns, meaning), tags in tags_by_row.items():
            yield cells(*columns, f"{join_words(tags, 'and')}: {meaning}" if len(inner) > 1 else meaning)
        common: set[str] = set()
        for tag, part in items.items():
            names = [own for own in fields_by_key(part) if row(part, own, f"{prefix}{key}.") not in common]
            rows = [row(part, own, f"{prefix}{key}.") for own in names if own != "type" or len(items) == 1]
            if tag:
                yield cells(f"`{prefix}{key}.type`", "", f"`{tag}`", part.__doc__ or "")
            yield from rows
            common |= set(rows)


def row(model: type[Settings], key: str, prefix: str) -> str:
    """Return a row of the table, or an empty text for a setting that the section does not have."""
    return cells(*values(model, key, prefix)) if key in fields_by_key(model) else ""


def values(model: type[Settings], key: str, prefix: str) -> tuple[str, ...]:
    """Return the cells of a row."""
    field = fields_by_key(model)[key]
    default = field.get_default(call_default_factory=True)
    default_text = default if isinstance(default, str) else json.dumps(default)
    return f"`{prefix}{key}`", f"`{default_text}`", describe_types(accepted_types(field)), field_description(field)


def cells(*texts: str) -> str:
    """Return a row of the table. Bars and line breaks are replaced, because they would end a cell, also in code."""
    return "| " + " | ".join(" ".join(text.split()).replace("|", "\\|") for text in texts) + " |"


if __name__ == "__main__":
    print(guide(), end="")
