"""The package carries the notices of what others wrote."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_every_notice_is_in_the_wheel() -> None:
    """Files named by `license-files` go into the wheel's metadata, those below `jingu/` into the package as well."""
    notices = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jingu").rglob("NOTICE*")}
    assert notices | {"LICENSE"} == set(PROJECT["license-files"])


def test_the_expression_names_every_license() -> None:
    """A notice may name further licences of samples of data, but not of code or templates."""
    texts = "".join((ROOT / file).read_text(encoding="utf-8") for file in PROJECT["license-files"])
    titles = {"Apache-2.0": "Apache License", "MIT": "MIT License"}
    assert {name for name, title in titles.items() if title in texts} == set(PROJECT["license"].split(" AND "))


def test_the_catalogue_names_its_source() -> None:
    notice = (ROOT / "jingu/evaluate/catalogue/NOTICE").read_text(encoding="utf-8")
    assert "lm-evaluation-harness" in notice and "MIT License" in notice and "EleutherAI" in notice


def test_every_sample_has_a_source_and_a_license() -> None:
    folder = ROOT / "jingu/evaluate/catalogue/data"
    notice = (folder / "NOTICE").read_text(encoding="utf-8")
    samples = sorted(path.name for path in folder.glob("*.jsonl"))
    assert samples and all(name in notice for name in samples)
