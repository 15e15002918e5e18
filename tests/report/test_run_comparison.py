"""The page of two runs: both curves in each chart, results and settings side by side."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jingu.cli import main
from tests.report.conftest import CONFIG, realistic_rows, write_run
from tests.report.test_report import MakeRun, Rows, checked


@pytest.fixture
def pair(make_run: MakeRun, realistic: Rows) -> tuple[Path, Path]:
    """A run, and a shorter one with twice the learning rate and a hostile name."""
    first = make_run(realistic)
    rows = [row | {"lr": row["lr"] * 2} if "lr" in row else row for row in realistic_rows(300)]
    second = make_run(rows, name="<b>wide")
    config = CONFIG.replace("lr: 0.003", "lr: 0.006").replace("steps: 1200", "steps: 300")
    (second / "config.yaml").write_text(config.replace("  decay: 0.3\n", ""))
    return first, second


def test_two_runs_are_compared_in_one_page(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = pair
    assert main(["report", str(first), "--against", str(second)]) == 0
    assert "comparison.html" in capsys.readouterr().out
    source = (first / "comparison.html").read_text(encoding="utf-8")
    text = "".join(checked(source).text)
    # Every chart has the curves of both runs, which have different lengths.
    charts = [json.loads(data.replace("&#34;", '"')) for data in re.findall(r'data-chart="([^"]*)"', source)]
    assert len(charts) == 7
    for chart in charts:
        one, other = chart["series"]
        assert one[-1][0] == 1200 and other[-1][0] == 300 and chart["last"] == 1200
    assert "Loss, training" in text and "Loss, validation" in text
    # Settings that differ, and none of the others.
    settings = dict(re.findall(r'<th scope="row">([\w.]+)</th><td>(.*?)</td></tr>', source))
    assert settings["optimizer.lr"] == "0.003</td><td>0.006" and settings["train.steps"] == "1200</td><td>300"
    assert settings["schedule.decay"] == "0.3</td><td>–"
    assert not {"name", "optimizer.type", "hidden_size"} & settings.keys()
    assert settings["steps"] == "1,200</td><td>300</td><td>-75.0%" and "The same in both runs." in text


def test_runs_without_values_or_settings_are_compared(make_run: MakeRun, realistic: Rows) -> None:
    empty = make_run([], name="empty")
    (empty / "config.yaml").write_text("{: [")
    (empty / "model.json").unlink()
    other = write_run(empty.parent / "more" / "empty", realistic)
    for run, against in ((empty, other), (other, empty), (empty, empty)):
        assert main(["report", str(run), "--against", str(against), "--to", str(empty.parent / "both.html")]) == 0
        text = "".join(checked((empty.parent / "both.html").read_text(encoding="utf-8")).text)
        assert "empty (1)" in text and "empty (2)" in text and "model.json is missing" in text


def test_a_run_is_not_compared_with_a_folder_that_is_none(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(pair[0]), "--against", str(pair[0].parent)]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err
