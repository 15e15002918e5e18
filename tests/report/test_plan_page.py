"""The page of a plan: its figures, its pictures, and what it cannot show."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jingu.cli import main
from tests.report.test_report import checked


def test_a_plan_is_drawn(plan_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["run.yaml", "--on", "h100", "--gpus", "8", "--price", "2", "parallel.pipeline=4", "parallel.tensor=2"]
    assert main(["plan", *layout, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert main(["plan", *layout, "--html", "pages/plan.html"]) == 0
    assert "pages/plan.html" in capsys.readouterr().out
    source = (plan_folder / "pages" / "plan.html").read_text(encoding="utf-8")
    text = "".join(checked(source).text)
    assert figures["layout"] in text and f"{figures['mfu']:.1%}" in text
    # A bar for each rank, of all its parts; the widths are those of the sizes.
    memory = source[source.index('id="memory"') : source.index('id="pipeline"')]
    assert re.findall(r">(rank \d)<", memory) == [f"rank {rank}" for rank in range(4)]
    found = re.findall(r'y="(\d+)" width="([\d.]+)" height="20"><title>([a-z ]+):', memory)
    rows = [[(width, name) for y, width, name in found if y == row] for row in dict.fromkeys(y for y, *_ in found)]
    # The figures are those of the fullest rank.
    bars = max(rows, key=lambda row: sum(float(width) for width, _ in row))
    parts = figures["memory"]
    assert [name for _, name in bars] == list(parts)
    scale = sum(float(width) for width, _ in bars) / figures["memory_total"]
    assert [float(width) for width, _ in bars] == pytest.approx([size * scale for size in parts.values()], abs=0.1)
    # Four ranks, 128 micro-batches there and back, of which eight are drawn.
    pipeline = source[source.index('id="pipeline"') : source.index('id="time"')]
    assert pipeline.count("H") == 4 * 2 * 8 * 2 and "The first 8 of 128 micro-batches are drawn" in text
    assert len(re.findall(r">\d+\.\d%</text>", pipeline)) == 4
    # Terms, the roofline's matrices, and the cost on other numbers of cards.
    assert "matmuls" in text and "128 × 256: " in text
    cost = source[source.index('id="cost"') :]
    assert re.findall(r'<th scope="row">(\d+)</th>', cost) == ["8", "16", "32"] and "price" in cost


def test_a_plan_without_a_pipeline_or_price_that_does_not_fit(plan_folder: Path) -> None:
    (plan_folder / "small.yaml").write_text("like: h100\nmemory_gib: 1.6\ngpus_per_node: 2\n")
    assert main(["plan", "run.yaml", "--on", "small.yaml", "--html", "plan.html"]) == 1
    text = "".join(checked((plan_folder / "plan.html").read_text(encoding="utf-8")).text)
    assert "It does not fit: short by" in text and "All ranks hold the same." in text and "The pipeline" not in text


def test_a_page_shows_one_plan_of_training(plan_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "--on", "h100", "--serve", "--html", "plan.html"]) == 2
    assert "--html: the page shows one plan of training" in capsys.readouterr().err
    (plan_folder / "small.yaml").write_text("like: h100\nmemory_gib: 1.6\n")
    assert main(["plan", "llama-3.2-1b", "--on", "small.yaml", "--html", "plan.html"]) == 2
    assert "no layout fits on 8 × small" in capsys.readouterr().err
    assert main(["plan", "run.yaml", "--on", "h100", "--html", str(plan_folder)]) == 2
    assert "cannot be written" in capsys.readouterr().err
