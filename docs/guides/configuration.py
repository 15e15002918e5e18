"""Prints configuration.md from the schema: `python docs/guides/configuration.py > docs/guides/configuration.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pydantic.fields import FieldInfo

from jingu.config.schema import RunConfig
from jingu.config.sections.base import Settings
from jingu.config.tree import describe, field_kinds, fields, item_sections, meaning_of, sections
from jingu.errors import either

OPENING = """\
# Every setting

A setting stands in a run's file under its section (`optimizer:` and, indented on the next line, `lr: 3e-4`), and on the
command line with a dot (`optimizer.lr=3e-4`). `jingu config show RUN.yaml` prints all of them as your run has them.

This page is made from `jingu/config/` by `python docs/guides/configuration.py > docs/guides/configuration.md`;
a test checks that the two agree.

## The top level
"""


def guide() -> str:
    """The whole page."""
    lines = [OPENING, *table(RunConfig, "", list(fields(RunConfig)))]
    for name, field in fields(RunConfig).items():
        variants = sections(field)
        if variants:
            lines += ["", f"## {name}", "", *section(name, field, variants)]
    return "\n".join(lines) + "\n"


def section(name: str, field: FieldInfo, variants: dict[str, type[Settings]]) -> Iterator[str]:
    """One section; where it has several types, what they have in common comes first."""
    models = list(variants.values())
    if len(models) == 1:
        yield from [models[0].__doc__ or "", "", *table(models[0], f"{name}.", list(fields(models[0])))]
        return
    default = field.get_default(call_default_factory=True).type
    common = [key for key in fields(models[0]) if len({row(model, key, "") for model in models}) == 1]
    yield f"What else it has depends on `{name}.type`; without one, it is `{default}`."
    if common:
        yield from ["", "Every type has:", "", *table(models[0], f"{name}.", common)]
    for model in dict.fromkeys(models):
        tags = either([tag for tag, one in variants.items() if one is model])
        own = [key for key in fields(model) if key not in {*common, "type"}]
        yield from ["", f"### {name}, `type: {tags}`", "", model.__doc__ or ""]
        yield from ["", *table(model, f"{name}.", own)] if own else []


def table(model: type[Settings], prefix: str, keys: list[str]) -> Iterator[str]:
    """The settings `keys` of one section with those of the sections in it; at the top level, without."""
    yield "| setting | default | takes | what it is |"
    yield "|---|---|---|---|"
    for key in keys:
        field = fields(model)[key]
        inner, items = sections(field), item_sections(field)
        if not inner:
            yield row(model, key, prefix)
        elif prefix and len(inner) > 1:
            default = field.get_default(call_default_factory=True).type
            meaning = " ".join(f"`{tag}`: {part.__doc__}" for tag, part in inner.items())
            yield cells(f"`{prefix}{key}.type`", f"`{default}`", either(list(inner)), meaning)
        alike: dict[tuple[str, ...], list[str]] = {}
        for tag, part in inner.items() if prefix else ():
            for own in fields(part):
                if own != "type" or len(inner) == 1:
                    alike.setdefault(values(part, own, f"{prefix}{key}."), []).append(f"`{tag}`")
        for (*left, meaning), tags in alike.items():
            yield cells(*left, f"{either(tags, 'and')}: {meaning}" if len(inner) > 1 else meaning)
        if items:
            yield from (row(items, own, f"{prefix}{key}.") for own in fields(items))


def row(model: type[Settings], key: str, prefix: str) -> str:
    """A line of the table; nothing for a setting that the section does not have."""
    return cells(*values(model, key, prefix)) if key in fields(model) else ""


def values(model: type[Settings], key: str, prefix: str) -> tuple[str, ...]:
    """What a line of the table says."""
    field = fields(model)[key]
    default = field.get_default(call_default_factory=True)
    shown = default if isinstance(default, str) else json.dumps(default)
    return f"`{prefix}{key}`", f"`{shown}`", describe(field_kinds(field)), meaning_of(field)


def cells(*texts: str) -> str:
    """A line of the table: Markdown would take a bar, also in code, or a line break for its end."""
    return "| " + " | ".join(" ".join(text.split()).replace("|", "\\|") for text in texts) + " |"


if __name__ == "__main__":
    print(guide(), end="")
