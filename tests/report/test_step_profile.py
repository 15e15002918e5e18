"""The section of a profile: kinds of operators on each rank, and the slowest rank's operators."""

from __future__ import annotations

import json
import re
from pathlib import Path

from jingu.report.page import read_profile, render_page
from jingu.report.record import read_run
from tests.report.conftest import write_run
from tests.report.test_report import checked

OPERATORS = {
    "aten::mm": 0.4,
    "aten::_scaled_dot_product_flash_attention": 0.1,
    "gloo:all_reduce": 0.06,
    "aten::copy_": 0.02,
    "Optimizer.step#AdamW.step": 0.04,
    "<b>mine": 0.01,
}


def test_the_last_profile_is_shown_by_rank(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"type": "train", "step": 9, "loss": 0.5}])
    assert read_profile(run) is None
    folder = run / "profile"
    folder.mkdir()
    for step, rank, factor in ((1, 0, 9.0), (5, 0, 1.0), (5, 1, 2.0)):
        operators = [{"name": name, "seconds": factor * s, "calls": 8} for name, s in OPERATORS.items()]
        text = json.dumps({"steps": 4, "operators": operators})
        (folder / f"step-{step}-rank-{rank}.summary.json").write_text(text)
    # Neither what is damaged nor a trace is read.
    (folder / "step-5-rank-2.summary.json").write_text('{"steps": ')
    (folder / "step-5-rank-0.json").write_text("{}")
    source = render_page(read_run(run))
    text = "".join(checked(source).text)
    assert "means of 4 steps after step 5" in text
    section = source[source.index('id="profile"') :]
    assert re.findall(r">(rank \d)</text>", section) == ["rank 0", "rank 1"]
    bars = re.findall(r"<title>(\w+): ([\d.]+) ms per step</title>", section)
    expected = {"matmuls": 100, "attention": 25, "communication": 15, "copies": 5, "optimizer": 10, "other": 2.5}
    assert {name: float(value) for name, value in bars[:6]} == expected
    assert [float(value) for _, value in bars[6:]] == [2 * float(value) for _, value in bars[:6]]
    # The slowest rank's operators, by the step.
    assert '<th scope="col">rank 1</th>' in section
    assert '<th scope="row">aten::mm</th><td>200</td><td>63.5%</td><td>2</td>' in section
    assert "<b>mine" in text
