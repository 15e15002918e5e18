"""The promises of the READMEs: each is listed with tests that exist, and those without another test are held here."""

from __future__ import annotations

import ast
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jingu
from jingu.config.schema import RunConfig
from jingu.training.commands import train
from tests.conftest import Done, MakeRun

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTIONS = {
    section.partition("\n")[0]: section
    for section in (ROOT / "tests" / "PROMISES.md").read_text(encoding="utf-8").split("\n## ")[1:]
}


def promises() -> list[str]:
    """The words of every promise of the README: the bold ones of its list, and the links of its table to the page."""
    bold = re.findall(r"^- \*\*([^*]+)\*\*", README.partition("## What you can rely on")[2], re.MULTILINE)
    names = [name for name in bold if not re.match(r"\d{4}-", name)]
    return names + re.findall(r"\[([^\]]+)\]\(tests/PROMISES\.md#", README.partition("## Two commands")[2])


def test_every_promise_is_listed() -> None:
    quotes = [quote for section in SECTIONS.values() for quote in re.findall(r"^> (.+)$", section, re.MULTILINE)]
    assert len(quotes) == len(SECTIONS) and sorted(quotes) == sorted(promises())


def test_every_row_and_column_of_the_comparison_has_a_proof() -> None:
    """Each cell but the names of tools has a link."""
    (table,) = re.findall(r"^\| you use .*\n\|[-|]+\n((?:\|.*\n)+)", README, re.MULTILINE)
    for row in table.splitlines():
        _, *cells = row.strip("| ").split(" | ")
        assert len(cells) == 2 and all("](" in cell for cell in cells), row


@pytest.mark.parametrize("title", SECTIONS)
def test_the_tests_of_a_promise_exist(title: str) -> None:
    ids = re.findall(r"^- `(\S+)`$", SECTIONS[title], re.MULTILINE)
    assert ids
    for file, _, name in (test.partition("::") for test in ids):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def test_a_run_connects_to_nothing(
    tiny_run: MakeRun, done: Callable[[RunConfig], Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training, evaluation, generation and export open no connection and look up no name."""

    def refuse(*arguments: Any, **_: Any) -> None:
        raise AssertionError(f"a connection to {arguments[1:]}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    config = tiny_run({"train.steps": 2, "evaluation": {"every": 1, "sample_prompts": ["def"], "max_new_tokens": 2}})
    assert train(config) == 0
    folder = done(config).folder
    assert jingu.load(folder, device="cpu").generate("def ", max_tokens=2) is not None
    jingu.export(folder, tmp_path / "exported")
    with pytest.raises(AssertionError):
        socket.create_connection(("localhost", 9))
