"""What is stable changes only with an entry in the changelog."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from jingu.plugins import INTERFACE
from jingu.version import __version__
from tests.stable_surface import ROOT, SNAPSHOT, Surface, surface

CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
RELEASED = json.loads(SNAPSHOT.read_text(encoding="utf-8"))


def unreleased(changelog: str) -> str:
    """The entries since the last release."""
    return re.split(r"^## ", changelog, flags=re.MULTILINE)[1].partition("\n")[2]


def unannounced(before: Surface, now: Surface, entries: str) -> list[str]:
    """Names that have gone or changed, and are not in the entries: neither themselves nor their beginning with a *."""
    named = re.findall(r"`([^`\n]+)`", entries)
    starts = tuple(name.removesuffix("*") for name in named if name.endswith("*"))
    changed = [
        f"{part}: {name}"
        for part, names in before.items()
        for name, description in names.items()
        if now.get(part, {}).get(name) != description
    ]
    names = {change: change.partition(": ")[2] for change in changed}
    return [change for change, name in names.items() if name not in named and not (starts and name.startswith(starts))]


def test_the_stable_surface_changes_only_with_an_entry(tmp_path: Path) -> None:
    before = {part: names for part, names in RELEASED.items() if part != "version"}
    changes = unannounced(before, surface(tmp_path), unreleased(CHANGELOG))
    assert not changes, (
        f"These were stable in version {RELEASED['version']}, and have gone or changed: {changes}. Keep them; or name "
        "each in backticks under Unreleased in CHANGELOG.md, with what users have to do (docs/stability.md)."
    )


@pytest.mark.parametrize(
    ("now", "entries", "expected"),
    [
        ({"a.b": "1", "a.c": "2"}, "", []),
        ({"a.b": "1", "a.c": "2", "new": "3"}, "", []),
        ({"a.b": "1"}, "", ["settings: a.c"]),
        ({"a.b": "1", "a.c": "4"}, "a.c takes more", ["settings: a.c"]),
        ({"a.b": "1", "a.c": "4"}, "`a.c` takes more", []),
        ({}, "`a.*` are gone", []),
        ({}, "`a.b` is gone", ["settings: a.c"]),
    ],
)
def test_what_has_gone_or_changed_must_be_named(now: dict[str, str], entries: str, expected: list[str]) -> None:
    assert unannounced({"settings": {"a.b": "1", "a.c": "2"}}, {"settings": now}, entries) == expected


def test_every_part_has_a_surface() -> None:
    assert all(len(names) >= 10 for part, names in RELEASED.items() if part != "version")
    text = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^\| ", text, re.MULTILINE)) == len(RELEASED)  # a header instead of the version
    assert f"`jingu.v{INTERFACE}.KIND`" in text


def test_papers_agree_on_the_version() -> None:
    releases = re.findall(r"^## (\S+)(?: · (\d{4}-\d\d-\d\d))?$", CHANGELOG, re.MULTILINE)
    assert releases[0] == ("Unreleased", "") and releases[1][0] == __version__ == RELEASED["version"]
    assert all(date for _, date in releases[1:])
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], str(citation["date-released"])) == releases[1]
    assert citation["cff-version"] == "1.2.0" and citation["license"] == "Apache-2.0"
    assert citation.keys() >= {"title", "message", "authors", "abstract"}


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")), ids=lambda path: path.stem)
def test_issue_forms_are_valid(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert {"name", "description", "body"} <= form.keys()
    ids = [item["id"] for item in form["body"] if item["type"] != "markdown"]
    assert len(ids) == len({*ids}) > 2
    for item in form["body"]:
        assert item["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert item["attributes"].keys() >= ({"value"} if item["type"] == "markdown" else {"label"})


def test_there_are_issue_forms() -> None:
    assert {path.stem for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")} == {"bug", "config", "feature", "model"}
