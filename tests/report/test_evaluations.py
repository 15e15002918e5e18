"""The page of evaluation results: values, calibration, the worst and the changed answers, and hostile text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jingu.cli import main
from jingu.evaluate.evaluation import write_spread
from jingu.evaluate.result_files import Spread
from jingu.report.evaluations import render_evaluations


def write(folder: Path, logprobs: list[list[float]], text: str = "Q") -> Path:
    """Results of a task with two choices, of which the first is right."""
    folder.mkdir()
    records = []
    for index, (right, wrong) in enumerate(logprobs):
        answers = [{"logprob": value, "is_greedy": False, "num_tokens": 1, "text": ""} for value in (right, wrong)]
        record: dict[str, Any] = {"index": index, "hash": str(index), "cluster": None, "gold": [0], "answers": answers}
        pairs = [[f"{text} {index}:", " yes"], [f"{text} {index}:", " no"]]
        records.append(json.dumps({**record, "pairs": pairs, "metrics": {"acc,none": float(right > wrong)}}))
    metric = {"value": 0.75, "stderr": 0.2, "method": "mean", "interval": [0.4, 0.9], "size": 4}
    settings = {"output_type": "multiple_choice", "metadata": {"description": "Yes or no"}}
    result = {"task": "yes", "num_fewshot": 0, "results": {"acc,none": metric}, "counts": {"truncated": 2}}
    (folder / "yes.json").write_text(json.dumps({**result, "settings": settings}), encoding="utf-8")
    (folder / "yes.samples.jsonl").write_text("\n".join(records), encoding="utf-8")
    return folder


def test_the_worst_answers_come_first_and_changed_ones_are_marked(tmp_path: Path) -> None:
    folder = write(tmp_path / "new", [[-1, -2], [-3, -1], [-1, -3], [-1, -9]])
    other = write(tmp_path / "old", [[-2, -1], [-3, -1], [-1, -3], [-1, -9]])
    page = render_evaluations(folder, other)
    assert page is not None and "truncated: 2." in page
    documents = re.findall(r'<details class="(\w+) (\w*)"><summary><span>(\d)</span>', page)
    assert documents == [("wrong", "", "1"), ("right", "better", "0"), ("right", "", "2"), ("right", "", "3")]
    # Document 1 takes the wrong choice with a probability of 1 / (1 + e^-2).
    assert re.search(r"<td> yes \(right\)</td><td>-3</td><td>0\.119", page)
    # Calibration: two documents in [0.8, 0.9), one of them right.
    assert 'cx="88.1" cy="50.0"' in page


def test_the_page_names_other_settings_and_counts_right_choices(tmp_path: Path) -> None:
    folder = write(tmp_path / "new", [[-1, -2], [-3, -1]])
    # The first metric tells neither right nor wrong; the calibration does not depend on it.
    samples = folder / "yes.samples.jsonl"
    samples.write_text(samples.read_text(encoding="utf-8").replace('"acc,none": 1.0', '"brier,none": 0.2'), "utf-8")
    other = write(tmp_path / "old", [[-2, -1], [-3, -1]], "Question")
    file = other / "yes.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), "num_fewshot": 3}), encoding="utf-8")
    page = str(render_evaluations(folder, other))
    assert "Not the same question: shots differs (3 and 0)." in page
    assert "Not the same question: the prompts of 2 documents differ." in page
    assert "Not the same question" not in str(render_evaluations(folder))
    # Confidences 0.73 (right) and 0.88 (wrong).
    assert 'cx="73.1" cy="0.0"' in page and 'cx="88.1" cy="100.0"' in page


def test_the_page_shows_the_spread_over_templates_and_shots(tmp_path: Path) -> None:
    folder = write(tmp_path / "new", [[-1, -2]])
    assert 'id="spread"' not in str(render_evaluations(folder))
    values = {"yes@default:0": 0.5, "yes@options:0": 0.25, "yes@options:5": 0.75}
    write_spread({"yes": {"acc,none": Spread(0.5, 0.1875, 0.25, 0.75, values)}}, folder)
    cells = ["acc", "3", "0.5", "0.1875", "0.25", "0.75"]
    row = '<th scope="row">yes</th>' + "".join(f"<td>{cell}</td>" for cell in cells)
    assert row in str(render_evaluations(folder))


def test_text_of_models_is_escaped(tmp_path: Path) -> None:
    page = render_evaluations(write(tmp_path / "new", [[-1, -2]], "<script>alert(1)</script>"))
    assert page is not None and "<script>alert" not in page and "&lt;script&gt;alert" in page


def test_report_of_a_folder_of_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "new", [[-1, -2]])
    assert main(["report", str(tmp_path / "new")]) == 0
    assert '<h2 id="task1">yes</h2>' in (tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    assert render_evaluations(tmp_path) is None
    assert main(["report", str(tmp_path / "new"), "--against", str(tmp_path)]) == 2
    assert "it has no evaluation results to compare with" in capsys.readouterr().err
