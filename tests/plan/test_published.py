"""The planner against published runs, and against formulas of papers."""

from __future__ import annotations

from statistics import fmean, median

import pytest

from bench import planning
from bench.planning import FOLDER, SETS, held_out, measurement, time_errors
from jingu.plan.memory import fullest_stage


def test_memory_is_that_of_pipelines_that_were_measured() -> None:
    """Qi et al., 2023: GPipe-like 1F1B pipelines of 8 to 32 A100s."""
    errors = [
        fullest_stage(case.work)[1].total / 2**30 / case.gib - 1 for case in SETS["zero bubble"](FOLDER) if case.gib
    ]
    assert len(errors) == 6
    assert fmean(map(abs, errors)) < 0.05
    assert max(map(abs, errors)) < 0.12


@pytest.mark.slow
def test_the_library_alone_predicts_published_steps() -> None:
    errors = [error for load in SETS.values() for error in time_errors([measurement(case) for case in load(FOLDER)])]
    assert len(errors) > 250
    assert median(map(abs, errors)) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("vTrain, several nodes", 0.09),
        ("vTrain, one node", 0.08),
        ("llm-foundry, A100", 0.07),
        ("llm-foundry, H100", 0.07),
        ("torchtitan", 0.12),
    ],
)
def test_constants_of_few_rows_predict_the_others(name: str, limit: float) -> None:
    errors, number = held_out(SETS[name](FOLDER))
    assert number <= planning.MAX_FIT
    assert fmean(map(abs, errors)) < limit
