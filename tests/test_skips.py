"""A skip that nobody has allowed is a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import ALLOWED_SKIPS, is_allowed_skip

ROOT = Path(__file__).parents[1]


def test_entries_name_tests_that_exist() -> None:
    missing = [part for part, _, _ in ALLOWED_SKIPS if not (ROOT / part).exists()]
    assert not missing, f"Delete from ALLOWED_SKIPS: {missing}"


@pytest.mark.parametrize(
    ("test", "reason", "allowed"),
    [
        ("tests/card/test_card.py::test_x", "there is no card", True),
        ("tests/training/test_trackers.py::test_x", "could not import 'mlflow': No module named 'mlflow'", True),
        ("tests/launch/test_sweep.py::test_x", "could not import 'optuna': No module named 'optuna'", False),
        ("tests/align/test_policy_loss.py::test_x", "could not import 'trl': No module named 'trl'", False),
        ("tests/serve/test_page.py::test_x", "not today", False),
    ],
)
def test_who_may_skip(test: str, reason: str, allowed: bool) -> None:
    assert is_allowed_skip(test, reason) is allowed


def test_other_skips_fail(tmp_path: Path) -> None:
    """Of tests, of modules, and of fixtures; an expected failure is no skip."""
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_make_collect_report, pytest_runtest_makereport\n"
    )
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    (tmp_path / "test_functions.py").write_text(
        "import pytest\n"
        "@pytest.fixture\n"
        "def machine(): pytest.skip('no machine')\n"
        "def test_fixture(machine): pass\n"
        "@pytest.mark.skipif(True, reason='not today')\n"
        "def test_mark(): pass\n"
        "@pytest.mark.xfail\n"
        "def test_expected(): assert False\n"
        "def test_passes(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    command += ["--continue-on-collection-errors", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    assert (
        "1 passed, 1 xfailed, 3 errors" in result.stdout or "1 failed, 1 passed, 1 xfailed, 2 errors" in result.stdout
    )
    assert "no_such_package" in result.stdout and "no machine" in result.stdout and "not today" in result.stdout
