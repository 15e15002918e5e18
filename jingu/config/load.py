"""From one YAML file and the words after it on the command line to a checked tree of settings, and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType

from pydantic.fields import FieldInfo

from jingu.config.explain import combined, mistakes_in
from jingu.config.schema import RunConfig
from jingu.config.strict_yaml import Document, Origin, dump, parse
from jingu.config.tree import field_kinds, find, item_kinds, sections, takes_text
from jingu.errors import JinguError


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's file, apply dotted overrides such as `optimizer.lr=3e-4` in order, and check the whole.

    Raises JinguError that tells of every mistake found, each with its file and line or its override.
    """
    document = parse(_read(path), str(path))
    if document.value is None and not document.problems:
        raise JinguError("the file is empty.", where=path, fix="A first line could be `name: my-run`.")
    if not isinstance(document.value, dict):
        what = "the file does not hold settings (lines of `key: value`, with a space after the colon)."
        raise JinguError(what, where=path)
    mistakes = list(document.problems)
    for override in overrides:
        try:
            _apply(override, document)
        except JinguError as mistake:
            mistakes.append(mistake)
    if mistakes := mistakes + mistakes_in(document):
        raise combined(mistakes)
    return RunConfig.model_validate(document.value)


def dump_yaml(config: RunConfig) -> str:
    """The whole tree, defaults too, as a file that `load_config` reads back as the same settings."""
    return dump(config.model_dump())


def _read(path: Path) -> str:
    """The text of a file; JinguError says what is there instead, if it is not one."""
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise JinguError("there is no such file.", where=path, fix=_beside(path)) from None
    except IsADirectoryError:
        inside = path / "config.yaml"
        fix = f"Give the file in it: {inside}." if inside.exists() else _beside(path / "config.yaml")
        raise JinguError("this is a folder, and a run is a YAML file.", where=path, fix=fix) from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise JinguError(f"the file cannot be read: {reason}.", where=path) from None
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise JinguError("the file is in UTF-16, not UTF-8.", where=path, fix="Save it again as UTF-8.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        what = f"the file is not UTF-8 text: the byte 0x{raw[error.start]:02x} on this line is not part of a character."
        raise JinguError(what, where=f"{path}:{line}", fix="Save it again as UTF-8.") from None


def _beside(path: Path) -> str:
    """What lies where `path` was looked for."""
    folder = path.parent
    if "=" in path.name:
        return "The run's file comes first, then the settings to change."
    if not folder.is_dir():
        return f"There is no folder {folder} either."
    names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml"))
    here = "this folder" if folder == Path() else str(folder)
    if not names:
        return f"There are no YAML files in {here}."
    if close := get_close_matches(path.name, names, n=1, cutoff=0.7):
        return f"Did you mean {folder / close[0]}?"
    return f"In {here} there {'is' if len(names) == 1 else 'are'} {', '.join(names[:5])}."


def _apply(override: str, document: Document) -> None:
    """Set one `key=value` in the document, in place of what was there."""
    key, sign, text = override.partition("=")
    if not sign:
        fix = f"Write {key if find(tuple(key.split('.'))) else 'key'}=value, without spaces."
        raise JinguError("a setting is changed with an =, which is missing.", where=override, fix=fix)
    path = tuple(key.split("."))
    if not all(re.fullmatch(r"\w[\w-]*", part) for part in path):
        fix = "Write it like optimizer.lr=3e-4: no dashes before it, no spaces around the =."
        raise JinguError(f'"{key}" cannot be the name of a setting.', where=override, fix=fix)
    parent = document.value
    for depth, part in enumerate(path[:-1], start=1):
        if parent.get(part) is None:
            parent[part] = {}
            document.origins[path[:depth]] = Origin(override)
        if not isinstance(parent[part], dict):
            field = find(path[:depth])
            if field and not sections(field):
                what = f"{'.'.join(path[:depth])} is a single value, with no settings under it."
                raise JinguError(what, where=override)
            return  # The file's own mistake, which the check tells.
        parent = parent[part]
    given = _parse_value(text, override, find(path))
    kept = {old: origin for old, origin in document.origins.items() if old[: len(path)] != path}
    document.origins = kept | {(*path, *inner): origin for inner, origin in given.origins.items()}
    parent[path[-1]] = given.value
    if given.problems:
        raise given.problems[0]


def _parse_value(text: str, override: str, field: FieldInfo | None) -> Document:
    """The value of an override. A setting that takes text takes the letters as they are, unless quoted or a list."""
    takes, items = (field_kinds(field), item_kinds(field)) if field else ([], [])
    quoted = text[:1] in ("'", '"') or (text[:1] == "[" and items)
    if quoted or not takes_text(takes) or (text == "null" and any(kind.type is NoneType for kind in takes)):
        return parse(text, override, lines=False)
    return Document(text, {(): Origin(override)})
