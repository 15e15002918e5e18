"""Strict YAML: scalars as in YAML 1.2; no duplicate keys, references, merge keys or tags.

`parse_yaml` returns plain Python values, and for each value its line and its original text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from yaml.composer import Composer

from jingu.errors import JinguError
from jingu.tables import read_table

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the root to a value."""

_SCALARS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    # By type: the possible first characters of a plain scalar, its pattern, and the conversion from text.
    "null": ("~nN", r"~|null|", lambda _: None),
    "bool": ("tf", r"true|false", lambda text: text == "true"),
    "int": (
        "-+0123456789",
        r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
        lambda text: int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)),
    ),
    "float": (
        "-+.0123456789",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
        lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan")),
    ),
}
_TAG = "tag:yaml.org,2002:"
# Plain explanations by parts of PyYAML's messages.
_EXPLANATIONS: dict[str, str] = read_table(__file__, "yaml_errors.toml")


@dataclass(frozen=True)
class Origin:
    """Where a value comes from.

    Attributes:
        where: `run.yaml:3`, or the text of an override.
        text: original text of a number, boolean or null; None for other values.
    """

    where: str
    text: str | None = None


@dataclass
class Document:
    """A parsed document.

    Attributes:
        value: plain values; None for an empty document.
        origins: origin of each value, by path.
        problems: violations of strict YAML, which the caller raises.
    """

    value: Any = None
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    problems: list[JinguError] = field(default_factory=list)

    def origin(self, path: KeyPath) -> Origin:
        """Return the origin of the value at a path, or of the innermost section around it."""
        while path not in self.origins and path:
            path = path[:-1]
        return self.origins.get(path, Origin("the settings"))


class _Loader(yaml.SafeLoader):
    """PyYAML's loader with the scalars above in place of those of YAML 1.1."""

    yaml_implicit_resolvers: dict[Any, Any] = {}


class _FastLoader(Composer, yaml.CSafeLoader):
    """libyaml's parser, ten times as fast as PyYAML's.

    Nodes are composed in Python: there, deep nesting raises RecursionError, while libyaml would crash with a
    segmentation fault.
    """

    yaml_implicit_resolvers: dict[Any, Any] = {}

    def __init__(self, text: str) -> None:
        yaml.CSafeLoader.__init__(self, text)
        Composer.__init__(self)


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which YAML 1.1 or this module would read as another type."""


for _kind, (_first, _form, _) in _SCALARS.items():
    for _class in (_Loader, _FastLoader, _Dumper):
        _letters = [*_first, ""] if _kind == "null" else list(_first)
        _class.add_implicit_resolver(_TAG + _kind, re.compile(rf"^(?:{_form})$"), _letters)


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Represent text; line breaks and control characters as escapes, because PyYAML would lose some of them."""
    return dumper.represent_scalar(_TAG + "str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)


def parse_yaml(text: str, name: str, *, lines: bool = True) -> Document:
    """Parse one YAML document.

    Duplicate keys, references and tags do not raise; they are listed in `problems` of the result.

    Args:
        name: name of the source for messages: a file, or an override.
        lines: whether to add line numbers to the name.

    Raises:
        JinguError: the text is not YAML.
    """
    reader = _Reader(name, lines)
    try:
        node = _compose(text)
        if node is not None:
            value = reader.value(node, ())
            reader.document.value = None if value is reader.nothing else value
    except yaml.MarkedYAMLError as error:
        # Report an unclosed quote or key at its start, not at its end far below.
        is_unclosed = error.context in ("while scanning a simple key", "while scanning a quoted scalar")
        mark = error.context_mark if is_unclosed else error.problem_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark and lines else name
        raise JinguError(_explain(error), where=where) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        where = f"{name}:{line}" if lines else name
        what = f"this line contains a control character (code {error.character}); remove it."
        raise JinguError(what, where=where) from None
    except RecursionError:
        raise JinguError("the settings are nested too deeply to be read.", where=name) from None
    return reader.document


def _compose(text: str) -> yaml.Node | None:
    """Return the root node of a document. After an error, parse again with PyYAML, which has better messages."""
    try:
        return _FastLoader(text).get_single_node()
    except (yaml.YAMLError, UnicodeEncodeError):
        return _Loader(text).get_single_node()


def dump(value: Any) -> str:
    """Return plain values as YAML, which `parse_yaml` and YAML 1.1 parsers read back as the same values."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31)


def _explain(error: yaml.MarkedYAMLError) -> str:
    message = f"{error.context or ''} {error.problem or ''}".strip()
    if "expected a single document" in message:
        return "a second document begins here (---). One file is one run."
    matches = (explanation for part, explanation in _EXPLANATIONS.items() if part in message)
    return f"this is not YAML: {next(matches, f'{message}.')}"


class _Reader:
    """Converts YAML nodes to values, and records origins and problems.

    Attributes:
        node_ids: ids of the nodes so far, to find references.
        nothing: stands for a node with a problem, which has no value.
    """

    def __init__(self, name: str, lines: bool) -> None:
        self.name = name
        self.lines = lines
        self.document = Document()
        self.node_ids: set[int] = set()
        self.nothing = object()

    def where(self, node: yaml.Node) -> str:
        """Return the position of a node, for messages."""
        return f"{self.name}:{node.start_mark.line + 1}" if self.lines else self.name

    def problem(self, node: yaml.Node, what: str, fix: str) -> Any:
        """Record a problem, and return `nothing` as the value of the node."""
        self.document.problems.append(JinguError(what, where=self.where(node), fix=fix))
        return self.nothing

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        """Return the value of a node. A node that occurs a second time is a reference (`*name`), which is a problem."""
        if id(node) in self.node_ids:
            what = "a value marked with & is used again with *."
            return self.problem(node, what, "Write the value out in both places.")
        self.node_ids.add(id(node))
        self.document.origins.setdefault(path, Origin(self.where(node)))
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            items = [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
            return [item for item in items if item is not self.nothing]
        return self.scalar(node, path)

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        """Return the keys and values of a section, without those that have problems."""
        result: dict[str, Any] = {}
        first: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key, str):
                self.problem(key_node, "a key is a list or a section.", "Write keys as plain words.")
            elif key == "<<":
                self.problem(key_node, "merge keys (<<) are not read.", "Write the settings out.")
            elif key in first:
                dotted_key = ".".join([*map(str, path), key])
                earlier = f", first on line {first[key].start_mark.line + 1}" if self.lines else ""
                self.problem(key_node, f"{dotted_key} is set twice{earlier}.", "Keep one of them.")
            else:
                first[key] = key_node
                self.document.origins[(*path, key)] = Origin(self.where(key_node))
                value = self.value(value_node, (*path, key))
                if value is not self.nothing:
                    result[key] = value
        return result

    def scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        """Return the value of a text, number, boolean or null."""
        text = str(node.value)
        kind = node.tag.removeprefix(_TAG)
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            what = "a text contains half of a surrogate pair (\\ud800 to \\udfff)."
            return self.problem(node, what, "Write the character itself.")
        if kind == "str":
            return text
        if kind not in _SCALARS:
            tag = node.tag.replace(_TAG, "!!")
            return self.problem(node, f"the tag {tag} is not read.", "Write a plain value.")
        try:
            value = _SCALARS[kind][2](text)
        except ValueError:
            what = f"{text[:40]} cannot be read as a number."
            return self.problem(node, what, "Write plain digits, and at most 4,000.")
        self.document.origins[path] = replace(self.document.origins[path], text=text)
        return value
