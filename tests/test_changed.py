"""Which tests a change reaches."""

from __future__ import annotations

import pytest

from tests.changed import ALWAYS, ROOT, reached_tests


@pytest.mark.parametrize(
    ("file", "reached", "unreached"),
    [
        ("jingu/report/charts.py", "tests/report/test_report.py", "tests/data/test_permutation.py"),
        ("jingu/errors.py", "tests/text", "tests/test_no_such_file.py"),
        ("bench/machine.py", "tests/test_bench.py", "tests/data/test_permutation.py"),
        ("tests/hub_server.py", "tests/runtime/test_hub.py", "tests/data/test_permutation.py"),
    ],
)
def test_a_change_reaches_what_imports_it(file: str, reached: str, unreached: str) -> None:
    tests = reached_tests([file])
    assert set(ALWAYS) <= set(tests)
    assert any(test.startswith(reached) for test in tests), tests
    assert unreached not in tests


def test_some_files_reach_everything() -> None:
    assert reached_tests(["tests/conftest.py", "docs/log.md"]) == ["tests"]


def test_a_page_reaches_few_tests() -> None:
    tests = reached_tests(["docs/glossary.md"])
    assert len(tests) < 60 and all((ROOT / test).exists() for test in tests)
