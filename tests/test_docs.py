"""Tests of the documents: what they name exists, and generated pages are up to date."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from jingu.command_table import COMMANDS
from jingu.config.introspect import all_keys
from jingu.config.schema import RunConfig
from jingu.model.families import FAMILIES

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "tests" / "PROMISES.md"])
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


def missing(text: str) -> list[str]:
    """Places `folder/file.py:name`, or `folder/file.py`, in a document that do not exist."""
    places = [span.partition(":") for span in spans(text) if re.fullmatch(r"[\w/]+/\w+\.py(:[\w.]+)?", span)]
    return [
        f"{file}{colon}{name}"
        for file, colon, name in places
        if not (ROOT / file).is_file() or (name and name not in defined(ROOT / file))
    ]


def test_architecture_names_what_exists() -> None:
    assert len([span for span in spans(ARCHITECTURE) if ".py:" in span]) > 40


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_places_named_in_documents_exist(document: Path) -> None:
    assert missing(document.read_text(encoding="utf-8")) == []


def test_architecture_names_functions_without_their_file_only_if_they_exist() -> None:
    everything = frozenset().union(*(defined(file) for file in (ROOT / "jingu").rglob("*.py")))
    keys = {key.split(".")[-1] for key in all_keys()}
    for span in spans(ARCHITECTURE):
        if re.fullmatch(r"[a-z]+_[a-z_]+|[A-Z]\w+(\.\w+)?", span):
            assert span in everything | keys, span


def test_map_has_every_room_in_the_order_that_is_enforced() -> None:
    rooms = re.findall(r"^\| `jingu/(\w+)(?:/|\.py)` \|", ARCHITECTURE, re.MULTILINE)
    packages = {path.name for path in (ROOT / "jingu").iterdir() if (path / "__init__.py").is_file()}
    assert set(rooms) == packages | {
        "api",
        "cli",
        "completion",
        "errors",
        "example_files",
        "formatting",
        "plugins",
        "tables",
        "version",
    }
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    assert rooms == [room.removeprefix("jingu.") for layer in contract["layers"] for room in layer.split(" | ")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_settings_named_in_documents_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for span in spans(text):
        key = span.split("=")[0]
        if re.fullmatch(rf"({'|'.join(RunConfig.model_fields)})\.[a-z_]+", key):
            assert key in all_keys(), key


def test_options_named_in_documents_exist() -> None:
    """Options of commands in the guides and READMEs; those of other programs are listed here."""
    other_programs = {"--nnodes", "--nproc-per-node", "--max-restarts", "--no-deps"}
    options = {name for command in COMMANDS.values() for name, _ in command.arguments} | {"--processes", "--help"}
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/guides/*.md"), ROOT / "docs" / "architecture.md"]:
        text = document.read_text(encoding="utf-8")
        code = [*spans(text), *re.findall(r"^(?:jingu|torchrun|\$ jingu) .*", text, re.MULTILINE)]
        for option in re.findall(r"(?<=[\s`])--[a-z][a-z-]*", " ".join(f"`{span}" for span in code)):
            assert option in options | other_programs, f"{document.name}: {option}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_keep_their_columns(document: Path) -> None:
    """A bar starts a new cell, also in code, unless a backslash precedes it."""
    for table in re.findall(r"(?:^\|.*\n)+", document.read_text(encoding="utf-8"), re.MULTILINE):
        head, *rows = [len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()]
        assert set(rows) == {head}, table
    text = re.sub(r"^```.*?^```|`[^`]*`", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"<[a-z][^>]*>", text) == [], "Markdown would treat it as markup"


def test_no_text_has_marks_of_a_merge_conflict() -> None:
    """Files of code and tables would not be parsed with them; documents, examples and scripts would be published."""
    files = [*DOCUMENTS, *(path for folder in ("docker", "examples") for path in (ROOT / folder).rglob("*"))]
    texts = {path: path.read_bytes() for path in files if path.is_file()}
    assert [path for path, text in texts.items() if re.search(rb"^(<{7}|>{7}) ", text, re.MULTILINE)] == []
    assert len(texts) > 50


@pytest.mark.parametrize("name", ["configuration", "families", "protocols"])
def test_generated_pages_are_up_to_date(name: str) -> None:
    guides = ROOT / "docs" / "guides"
    spec = importlib.util.spec_from_file_location(f"{name}_guide", guides / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (guides / f"{name}.md").read_text(encoding="utf-8")
    assert page == module.guide(), f"run: python docs/guides/{name}.py > docs/guides/{name}.md"


def test_list_of_settings_has_all_of_them() -> None:
    page = (ROOT / "docs" / "guides" / "configuration.md").read_text(encoding="utf-8")
    sections = set(RunConfig.model_fields)
    for key in all_keys():
        assert f"`{key}" in page or key in sections, key


def anchors(text: str) -> set[str]:
    """The anchors of the headings of a document, as the site and the usual viewers of repositories make them."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", plain, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken_links(text: str, folder: Path) -> list[str]:
    """The relative links of a document to files or headings that do not exist."""
    plain = re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)", plain):
        name, _, anchor = target.partition("#")
        path = folder / name
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        if name and not path.exists():
            broken.append(target)
        elif anchor and (not name or path.suffix == ".md"):
            other = path.read_text(encoding="utf-8") if name else text
            broken += [target] if anchor not in anchors(other) else []
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    assert broken_links(document.read_text(encoding="utf-8"), document.parent) == []


def test_broken_links_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One thing, and another\n")
    text = "# Here\n[1](a.md) [2](a.md#one-thing-and-another) [3](#here) [4](b.md) [5](a.md#two) [6](#there) `[7](c)`"
    assert broken_links(text, tmp_path) == ["b.md", "a.md#two", "#there"]


def test_every_document_has_a_place_on_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for document in DOCUMENTS:
        assert document.relative_to(ROOT).as_posix() in site, document


def test_every_family_has_a_row_of_what_is_proved() -> None:
    page = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert rows == sorted(FAMILIES.built_in), "run: python docs/coverage.py > docs/coverage.md"
