"""The preview: each token of a row with the trained ones highlighted, and statistics of all rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jingu.tune.preview import preview
from tests.conftest import MakeRun

ROWS = [{"instruction": "<b>春</b>", "output": "眠 is"}, {"instruction": "a", "output": ""}, {"text": "def f"}]


def test_trained_tokens_are_highlighted(tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    objective = {"type": "supervised", "template": "plain"}
    config = tiny_run({"data.input": str(file), "data.objective": objective})
    preview(config)
    output = capsys.readouterr().out
    body, answer = output.splitlines()[1:3]
    assert body.replace("│", "") == "<b>春</b>"
    assert answer.replace("│", "") == "⟦眠 is<|endoftext|>⟧"
    assert "rows.jsonl, row 1 (alpaca)" in output and "rows.jsonl, row 3 (text)" in output
    assert "dropped: 1 bad" in output and "row 2: field output" in output
    preview(config, rows=1, to=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<b>春" not in page and "眠" in page and "row 3" not in page


def test_rows_and_packing_as_json(tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"instruction": letter, "output": letter} for letter in "abcab"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    objective = {"type": "supervised", "template": "plain"}
    changes = {"data.input": str(file), "data.objective": objective, "data.duplicates": "drop"}
    config = tiny_run({**changes, "batch.sequence_length": 64})
    preview(config, rows=1, as_json=True)
    row, corpus = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["file"], row["row"], row["kind"]) == (str(file), 1, "alpaca")
    assert [token["text"] for token in row["tokens"] if token["weight"] == 1] == ["a", "<|endoftext|>"]
    assert row["tokens"][0]["weight"] == 0 and all(isinstance(token["id"], int) for token in row["tokens"])
    # The three different rows have as many tokens each, of which one is not predicted.
    predictions = 3 * (len(row["tokens"]) - 1)
    assert f"packed: 1 sequence of 64 tokens, {1 - predictions / 64:.1%} of them padding" in corpus["totals"]
    assert any("2 duplicates" in line for line in corpus["totals"])


def test_other_weights_are_highlighted(tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [("user", "a", None), ("assistant", "half", 0.5), ("user", "b", None), ("assistant", "whole", 1.0)]
    messages = [
        {"role": role, "content": text} | ({} if weight is None else {"weight": weight}) for role, text, weight in turns
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": messages}), encoding="utf-8")
    objective = {"type": "supervised", "template": "chatml"}
    config = tiny_run({"data.input": str(file), "data.objective": objective, "batch.sequence_length": 128})
    preview(config)
    output = capsys.readouterr().out.replace("│", "")
    assert "⟦0.5:half" in output and "⟦whole" in output
    preview(config, to=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8").partition("</p>")[2]
    assert page.count('<b class="other" title="0.5">') == 1 and page.count("<b>") == 1


def test_warnings(tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Duplicates, answers without an end token, rows without a trained token."""
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
    output = capsys.readouterr().out
    assert (
        "read: 3 alpaca" in output
        and "too long: 0 split, 1 truncated, so the model does not learn where they end" in output
    )
    assert "dropped: 1 without a trained token" in output
    assert "warning: 1 are duplicates" in output and "warning: 2 do not end in a special token" in output
