"""Packaged task files of lm-evaluation-harness on generated rows: every document equals the harness's."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import datasets
import evaluate
import huggingface_hub
import lm_eval
import pytest

from bench.harness_tasks import Comparison, Outcome, format_outcomes, template_of
from bench.task_rows import columns_of, make_rows
from jingu.evaluate import statistics

ROOT = Path(lm_eval.__file__).parent / "tasks"
QUICK = ["belebele/belebele_ars_Arab.yaml", "eus_exams/eus_exams_eu_opebilbaoeu.yaml", "arc/arc_easy.yaml"]
SLOW = [
    *("hellaswag/hellaswag.yaml", "mmlu/default/mmlu_anatomy.yaml", "piqa/piqa.yaml", "winogrande/default.yaml"),
    *("gsm8k/gsm8k.yaml", "boolq/boolq.yaml"),
]


@pytest.fixture(scope="module")
def comparison() -> Iterator[Comparison]:
    draws = statistics.BOOTSTRAP_DRAWS
    settings = [
        (datasets.config, "HF_HUB_OFFLINE"),
        (evaluate.config, "HF_EVALUATE_OFFLINE"),
        (huggingface_hub.constants, "HF_HUB_OFFLINE"),
    ]
    values = [getattr(module, name) for module, name in settings]
    with warnings.catch_warnings():
        yield Comparison()
    # What a benchmark sets for its process.
    statistics.BOOTSTRAP_DRAWS = draws
    for (module, name), value in zip(settings, values, strict=True):
        setattr(module, name, value)
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("path", [*QUICK, *(pytest.param(path, marks=pytest.mark.slow) for path in SLOW)])
def test_packaged_tasks_are_equal(path: str, comparison: Comparison) -> None:
    if not (ROOT / path).is_file():
        pytest.skip("the package has no such file")
    (outcome,) = comparison.compare(ROOT / path)
    assert (outcome.state, outcome.reason) == ("equal", "")


def test_rows_have_what_templates_read() -> None:
    config = {"doc_to_text": "{{q}} {{choices.text[0]}}", "doc_to_target": "{{['no', 'yes'].index(a)}}"}
    rows = make_rows(columns_of(config), range(2))
    assert [row["a"] for row in rows] == ["no", "yes"] and all(row["choices"]["text"] for row in rows)
    table = format_outcomes([Outcome("x", "equal"), Outcome("y", "refused", "why")])
    assert "| equal in every document | 1 (50.0% of the others) |" in table


def test_tasks_that_differ_in_words_have_one_template() -> None:
    config = {"task": "a", "doc_to_text": "Q: {{q}} {{'A' if x else 'B'}}", "doc_to_choice": ["yes", "no"]}
    words = {"task": "b", "doc_to_text": "F: {{q}} {{'C' if x else 'D'}}", "doc_to_choice": ["ja", "nein"]}
    assert template_of(config) == template_of(words)
    for change in ({"doc_to_text": "Q: {{q}}"}, {"doc_to_choice": ["a"]}, {"doc_to_text": "q"}, {"num_fewshot": 1}):
        assert template_of(config) != template_of({**config, **change})
