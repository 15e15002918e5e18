"""The benchmarks that `python -m bench` lists exist, and return their table."""

from __future__ import annotations

import re

import pytest

from bench.__main__ import PAGE, TITLES


@pytest.mark.parametrize("name", TITLES)
def test_a_benchmark_returns_its_table(name: str) -> None:
    source = (PAGE.parents[1] / "bench" / f"{name}.py").read_text(encoding="utf-8")
    assert re.search(r"^def run\(.*\) -> str:$", source, re.MULTILINE)
