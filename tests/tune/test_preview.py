"""The preview: every token of a row, the trained ones marked, and what becomes of all rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jingu.tune.preview import preview
from tests.conftest import MakeRun

ROWS = [{"instruction": "<b>春</b>", "output": "眠 is"}, {"instruction": "a", "output": ""}, {"text": "def f"}]


def test_rows_are_shown_with_what_is_trained(
    tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    objective = {"type": "supervised", "template": "plain"}
    config = tiny_run({"data.input": str(file), "data.objective": objective})
    preview(config)
    told = capsys.readouterr().out
    asked, answer = told.splitlines()[1:3]
    assert asked.replace("│", "") == "<b>春</b>"
    assert answer.replace("│", "") == "⟦眠 is<|endoftext|>⟧"
    assert "rows.jsonl, row 1 (alpaca)" in told and "rows.jsonl, row 3 (text)" in told
    assert "left out: 1 bad" in told and "row 2: field output" in told
    preview(config, rows=1, to=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<b>春" not in page and "眠" in page and "row 3" not in page


def test_other_weights_are_seen(tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [("user", "a", None), ("assistant", "half", 0.5), ("user", "b", None), ("assistant", "whole", 1.0)]
    messages = [
        {"role": role, "content": text} | ({} if weight is None else {"weight": weight}) for role, text, weight in turns
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": messages}), encoding="utf-8")
    objective = {"type": "supervised", "template": "chatml"}
    config = tiny_run({"data.input": str(file), "data.objective": objective, "batch.sequence_length": 128})
    preview(config)
    told = capsys.readouterr().out.replace("│", "")
    assert "⟦0.5:half" in told and "⟦whole" in told
    preview(config, to=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8").partition("</p>")[2]
    assert page.count('<b class="other" title="0.5">') == 1 and page.count("<b>") == 1


def test_what_one_should_know_before(tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Copies, answers without an end, rows of which no trained token is left."""
    endless = tmp_path / "endless.jinja"
    endless.write_text(
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
        encoding="utf-8",
    )
    rows = [{"instruction": "a", "output": "b"}] * 2 + [{"instruction": "x" * 200, "output": "never seen"}]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    preview(
        tiny_run({"data.input": str(file), "data.objective": {"type": "supervised", "template": str(endless)}}), rows=0
    )
    told = capsys.readouterr().out
    assert "rows: 3 alpaca" in told and "too long: 0 divided, 1 cut, which teach no end" in told
    assert "left out: 1 without a trained token" in told
    assert "warning: 1 are copies" in told and "warning: in 2 the last trained token is no special one" in told
