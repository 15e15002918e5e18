"""Load a configuration from a YAML file and overrides, and write it back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from jingu.config.explain import combine_mistakes, find_mistakes
from jingu.config.introspect import accepted_item_types, accepted_types, accepts_text, find_field, section_types
from jingu.config.schema import RunConfig
from jingu.config.strict_yaml import Document, Origin, dump, parse_yaml
from jingu.errors import JinguError


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a YAML file, apply dotted overrides such as `optimizer.lr=3e-4` in order, and validate the result.

    Raises:
        JinguError: there are one or more mistakes; the message has the line or the override of each.
    """
    document = parse_yaml(_read(path), str(path))
    if document.value is None and not document.problems:
        raise JinguError("the file is empty.", where=path, fix="A first line could be `name: my-run`.")
    if not isinstance(document.value, dict):
        what = "the file contains no settings (lines of `key: value`, with a space after the colon)."
        raise JinguError(what, where=path)
    return _validate(document, overrides)


# Settings that accept the name of an earlier stage in place of a path.
_MODEL_KEYS = frozenset({"from", "reference", "initial_adapter", "model", "teacher"})


def load_stages(path: Path) -> list[RunConfig]:
    """Load a file of stages: a list of runs. A stage may use the name of an earlier stage in place of a model's path.

    Settings beside `stages` apply to all stages. Settings of a stage have precedence over them. If both have a section
    with different types, the stage's section replaces the other as a whole.

    Raises:
        JinguError: there are one or more mistakes; the message has the line of each.
    """
    document = parse_yaml(_read(path), str(path))
    tree = document.value
    stages = tree.get("stages") if isinstance(tree, dict) else None
    if not isinstance(stages, list) or not all(isinstance(stage, dict) and "name" in stage for stage in stages):
        raise JinguError(
            "the file has no list of stages, each with a name.",
            where=path,
            fix="Write stages: and below it a list of runs. `jingu train` takes the file of a single run.",
        )
    # `stages` is no setting of a run; everything beside it is shared by all stages.
    common_tree = {key: value for key, value in tree.items() if key != "stages"}
    shared_origins = {key: origin for key, origin in document.origins.items() if key[:1] != ("stages",)}
    folders: dict[str, str] = {}
    configs = []
    for number, stage in enumerate(stages):
        # Origins of the stage's own settings, with paths relative to the stage.
        stage_origins = {key[2:]: origin for key, origin in document.origins.items() if key[:2] == ("stages", number)}
        stage_tree = _name_folders(_merge(common_tree, stage), folders)
        config = _validate(Document(stage_tree, shared_origins | stage_origins, document.problems))
        if config.name in folders:
            raise JinguError(f"two stages have the name {config.name}.", where=path, fix="Rename one of them.")
        folders[config.name] = str(Path(config.runs_dir) / config.name)
        configs.append(config)
    return configs


def _merge(common: Any, stage: Any) -> Any:
    """Return the settings of a stage merged over the shared settings."""
    if not isinstance(common, dict) or not isinstance(stage, dict):
        return stage
    if "type" in stage and stage["type"] != common.get("type", stage["type"]):
        return stage
    return {**common, **{key: _merge(common.get(key), value) for key, value in stage.items()}}


def _name_folders(tree: Any, folders: Mapping[str, str]) -> Any:
    """Return a tree in which the folders of runs replace the names of earlier stages.

    Args:
        folders: folder of each earlier stage's run, by the name of the stage.
    """
    if isinstance(tree, list):
        return [_name_folders(item, folders) for item in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key: folders.get(value, value)
        if key in _MODEL_KEYS and isinstance(value, str)
        else _name_folders(value, folders)
        for key, value in tree.items()
    }


def config_from_tree(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Return a validated configuration from plain values and overrides.

    Raises:
        JinguError: there are one or more mistakes.
    """
    return _validate(Document(deepcopy(dict(tree))), overrides)


def load_stored_config(path: Path) -> RunConfig:
    """Load the `config.yaml` of a run.

    Raises:
        JinguError: the file cannot be read, or does not hold the settings of a run.
    """
    document = parse_yaml(_read(path), str(path))
    if not isinstance(document.value, dict):
        what = "the file should hold the settings of the run, but it is empty or has none."
        fix = "Restore it from a copy, or from the file that the run was started with."
        raise JinguError(what, where=path, fix=fix)
    return _validate(document)


def _validate(document: Document, overrides: Sequence[str] = ()) -> RunConfig:
    """Apply overrides and return the configuration. Raises JinguError with all mistakes."""
    mistakes = list(document.problems)
    for override in overrides:
        try:
            _apply(override, document)
        except JinguError as mistake:
            mistakes.append(mistake)
    if mistakes := mistakes + find_mistakes(document):
        raise combine_mistakes(mistakes)
    try:
        return RunConfig.model_validate(document.value)
    except ValidationError as error:
        # Each value is valid, but those of a section contradict each other.
        raise combine_mistakes([_contradiction(detail, document.value) for detail in error.errors()]) from None


def _contradiction(detail: Any, tree: Any) -> JinguError:
    """Return the error of a section's validator.

    Args:
        detail: pydantic's description. Its location also has the types of sections, which are no keys.
    """
    where = ""
    for part in detail["loc"]:
        if isinstance(tree, dict) and part in tree:
            where, tree = f"{where}.{part}".lstrip("."), tree[part]
        elif isinstance(tree, list) and isinstance(part, int):
            where, tree = f"{where}[{part}]", tree[part]
    return JinguError(f"{detail['msg'].removeprefix('Value error, ')}.", where=where)


def dump_yaml(config: RunConfig) -> str:
    """Return a configuration with all defaults as YAML, which `load_config` reads back as the same settings."""
    return dump(config.model_dump())


def _read(path: Path) -> str:
    """Return the text of a file. Raises JinguError if it cannot be read, or is not UTF-8."""
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise JinguError("there is no such file.", where=path, fix=_suggest_file(path)) from None
    except IsADirectoryError:
        fix = f"Give the file in it: {path / 'config.yaml'}."
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


def _suggest_file(path: Path) -> str:
    """Return a suggestion for a missing file: a similar name in its folder."""
    if "=" in path.name:
        return "The run's file comes first, then the settings to change."
    close = get_close_matches(path.name, [entry.name for entry in path.parent.glob("*.y*ml")], n=1, cutoff=0.7)
    return f"Did you mean {path.parent / close[0]}?" if close else f"The path is {path.absolute()}."


def _apply(override: str, document: Document) -> None:
    """Set one `key=value` in the document, replacing any old value. Raises JinguError if it is malformed."""
    key, sign, text = override.partition("=")
    if not sign:
        fix = f"Write {key if find_field(tuple(key.split('.'))) else 'key'}=value, without spaces."
        raise JinguError("a setting is changed with an =, which is missing.", where=override, fix=fix)
    path = tuple(key.split("."))
    if not all(re.fullmatch(r"\w[\w-]*", part) for part in path):
        fix = "Write it like optimizer.lr=3e-4: no dashes before it, no spaces around the =."
        raise JinguError(f'"{key}" cannot be the name of a setting.', where=override, fix=fix)
    # Find the section of the key, and create it if it is missing or empty.
    parent = document.value
    for depth, part in enumerate(path[:-1], start=1):
        if parent.get(part) is None:
            parent[part] = {}
            document.origins[path[:depth]] = Origin(override)
        if not isinstance(parent[part], dict):
            field = find_field(path[:depth])
            if field and not section_types(field):
                what = f"{'.'.join(path[:depth])} is a single value, with no settings under it."
                raise JinguError(what, where=override)
            return  # The file has a value where a section belongs; validation reports this.
        parent = parent[part]
    value = _parse_value(text, override, find_field(path))
    # The override replaces the whole subtree, including the origins in it.
    other_origins = {old: origin for old, origin in document.origins.items() if old[: len(path)] != path}
    document.origins = other_origins | {(*path, *inner): origin for inner, origin in value.origins.items()}
    parent[path[-1]] = value.value
    if value.problems:
        raise value.problems[0]


def _parse_value(text: str, override: str, field: FieldInfo | None) -> Document:
    """Parse the value of an override. Where text is expected, it is taken literally, unless it is quoted or a list."""
    types = accepted_types(field) if field else []
    items = accepted_item_types(field) if field else []
    is_quoted = text[:1] in ("'", '"') or (text[:1] == "[" and items)
    if (
        is_quoted
        or not accepts_text(types)
        or (text == "null" and any(accepted_type.type is NoneType for accepted_type in types))
    ):
        return parse_yaml(text, override, lines=False)
    return Document(text, {(): Origin(override)})
