"""The documents are true: what they name exists, and what is made from the code is up to date."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from jingu.config.schema import RunConfig
from jingu.config.tree import all_keys

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def spans(text: str) -> list[str]:
    """Code within sentences."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


@cache
def defined(file: Path) -> frozenset[str]:
    """Functions, classes, methods (Class.method) and constants of a file."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = ast.FunctionDef | ast.AsyncFunctionDef
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, methods)}
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(names)


def test_architecture_names_what_exists() -> None:
    places = [span.split(":") for span in spans(ARCHITECTURE) if re.fullmatch(r"[\w/]+\.py:[\w.]+", span)]
    assert len(places) > 40
    for file, name in places:
        assert (ROOT / file).is_file(), file
        assert name in defined(ROOT / file), f"{file}:{name}"


def test_architecture_names_functions_without_their_file_only_if_they_exist() -> None:
    everything = frozenset().union(*(defined(file) for file in (ROOT / "jingu").rglob("*.py")))
    keys = {key.split(".")[-1] for key in all_keys()}
    for span in spans(ARCHITECTURE):
        if re.fullmatch(r"[a-z]+_[a-z_]+|[A-Z]\w+(\.\w+)?", span):
            assert span in everything | keys, span


def test_map_has_every_room_in_the_order_that_is_enforced() -> None:
    rooms = re.findall(r"^\| `jingu/(\w+)(?:/|\.py)` \|", ARCHITECTURE, re.MULTILINE)
    there = {path.name for path in (ROOT / "jingu").iterdir() if (path / "__init__.py").is_file()}
    assert set(rooms) == there | {"cli", "errors", "words"}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    assert rooms == [room.removeprefix("jingu.") for layer in contract["layers"] for room in layer.split(" | ")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_settings_named_in_documents_exist(document: Path) -> None:
    for span in spans(document.read_text(encoding="utf-8")):
        key = span.split("=")[0]
        if re.fullmatch(rf"({'|'.join(RunConfig.model_fields)})\.[a-z_]+", key):
            assert key in all_keys(), key


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert ":" in link or (document.parent / link.split("#")[0]).exists(), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_keep_their_columns(document: Path) -> None:
    """A bar in a cell, also in code, begins another unless a backslash stands before it."""
    for table in re.findall(r"(?:^\|.*\n)+", document.read_text(encoding="utf-8"), re.MULTILINE):
        head, *rows = [len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()]
        assert set(rows) == {head}, table
    text = re.sub(r"^```.*?^```|`[^`]*`", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"<[a-z][^>]*>", text) == [], "a reader would take it for markup"


def test_list_of_settings_is_up_to_date() -> None:
    guides = ROOT / "docs" / "guides"
    spec = importlib.util.spec_from_file_location("configuration_guide", guides / "configuration.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (guides / "configuration.md").read_text(encoding="utf-8")
    assert page == module.guide(), "run: python docs/guides/configuration.py > docs/guides/configuration.md"
    sections = set(RunConfig.model_fields)
    for key in all_keys():
        assert f"`{key}" in page or key in sections, key
