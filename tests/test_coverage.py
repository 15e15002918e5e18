"""The page of what is proved for each family names tests that exist, and is up to date."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
COMMAND = "run: python docs/coverage.py > docs/coverage.md"


@pytest.fixture
def coverage() -> ModuleType:
    spec = importlib.util.spec_from_file_location("coverage_page", ROOT / "docs" / "coverage.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_functions_that_prove_exist(coverage: ModuleType) -> None:
    for function in (function for proofs in coverage.PROOFS.values() for function in proofs):
        file, _, name = function.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, function


@pytest.mark.slow
def test_the_page_is_up_to_date(coverage: ModuleType) -> None:
    assert coverage.guide(coverage.collect_ids()) == PAGE, COMMAND


def test_an_id_names_the_family_as_a_whole_part(coverage: ModuleType) -> None:
    ids = ["gemma2-fp32", "gemma-tied-fp64", "gemma"]
    assert coverage.find_id("gemma", ids, None) == "gemma"
    assert coverage.find_id("gemma", ids, "fp64") == "gemma-tied-fp64"
    assert coverage.find_id("gem", ids, None) is None
