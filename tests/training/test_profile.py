"""Profiles of steps: a trace for each rank, a table in the log, and the same numbers as without."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jingu.formatting import format_number
from jingu.report.page import render_page
from jingu.report.record import read_run
from jingu.training.commands import train
from tests.conftest import train_all


def losses(run: Path) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["type"] == "train"]


def profiled_steps(trace: Path) -> set[str]:
    """The steps in a trace, which must contain matrix products."""
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::mm" in names
    return {name for name in names if name.startswith("ProfilerStep#")}


def test_the_steps_after_the_first_one_are_profiled(tiny_run, tmp_path, capfd):
    runs = tmp_path / "runs"
    assert train(tiny_run({"train.steps": 5, "train.profile.steps": 2}, name="profiled")) == 0
    assert profiled_steps(runs / "profiled" / "profile" / "step-1-rank-0.json") == {"ProfilerStep#1", "ProfilerStep#2"}
    table = capfd.readouterr().err
    assert "self time (ms)  share   calls  operator" in table and "aten::mm" in table
    summary = json.loads((runs / "profiled" / "profile" / "step-1-rank-0.summary.json").read_text())
    assert summary["steps"] == 2
    page = render_page(read_run(runs / "profiled"))
    assert "means of 2 steps after step 1" in page and "<title>matmuls: " in page
    # The report has the same operators as the log, by the step.
    product = next(row for row in summary["operators"] if row["name"] == "aten::mm")
    milliseconds = product["seconds"] * 1000
    assert f"{milliseconds:,.2f}" in table and f"<td>{format_number(milliseconds / 2)}</td>" in page
    assert train(tiny_run({"train.steps": 5}, name="plain")) == 0
    assert not (runs / "plain" / "profile").exists()
    assert losses(runs / "profiled") == losses(runs / "plain")


def test_a_run_that_ends_early_has_a_shorter_profile(tiny_run, tmp_path):
    assert train(tiny_run({"train.steps": 3, "train.profile.steps": 9}, name="short")) == 0
    trace = tmp_path / "runs" / "short" / "profile" / "step-1-rank-0.json"
    assert {"ProfilerStep#1", "ProfilerStep#2"} <= profiled_steps(trace)


@pytest.mark.slow
def test_each_rank_writes_a_trace(tiny_run, tmp_path, ranks):
    ranks.run(train_all, 2, [tiny_run({"train.steps": 3, "train.profile.steps": 1}, name="two")])
    traces = sorted((tmp_path / "runs" / "two" / "profile").iterdir())
    names = [f"step-1-rank-{rank}.{kind}" for rank in (0, 1) for kind in ("json", "summary.json")]
    assert [trace.name for trace in traces] == names
    assert [profiled_steps(trace) for trace in traces[::2]] == [{"ProfilerStep#1"}] * 2
    page = render_page(read_run(tmp_path / "runs" / "two"))
    assert re.findall(">(rank [01])</text>", page) == ["rank 0", "rank 1"] and "communication" in page
