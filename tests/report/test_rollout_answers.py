"""Answers over the steps of a run: those to prompts that recur, whatever the files hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jingu.report.page import render_page
from jingu.report.record import read_run
from jingu.report.rollout_answers import MAX_PROMPTS, MAX_STEPS, read_answers
from tests.report.conftest import write_run
from tests.report.test_report import checked


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 200 steps with 2 answers to each of 3 prompts a step, of 9 in all."""
    folder = write_run(tmp_path / "run", [{"type": "train", "step": 200, "loss": 0.5}])
    (folder / "rollouts").mkdir()
    for step in range(1, 201):
        write_step(folder, step, [line(row, step, choice) for row in range(step % 3, 9, 3) for choice in (0, 1)])
    return folder


def line(row: int, step: int, choice: int) -> dict[str, Any]:
    text = f"answer {choice} of step {step}"
    return {"prompt": f"prompt {row}", "row": row, "text": text, "reward": step + choice, "finish_reason": "end"}


def write_step(run: Path, step: int, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "rollouts" / f"step_{step}.jsonl").write_text(text, encoding="utf-8")


def test_the_first_answers_to_recurring_prompts_are_beside_each_other(run: Path) -> None:
    answers = read_answers(run)
    assert len(answers) == MAX_PROMPTS
    for prompt, shown in answers:
        steps = [answer.step for answer in shown]
        assert len(shown) == MAX_STEPS and steps == sorted(set(steps)) and steps[-1] - steps[0] > 150
        for answer in shown:
            assert answer.step % 3 == int(prompt.removeprefix("prompt ")) % 3
            assert answer.text == f"answer 0 of step {answer.step}"
            assert (answer.reward, answer.mean, answer.is_cut) == (answer.step, answer.step + 0.5, False)
    text = "".join(checked(render_page(read_run(run))).text)
    assert "Answers over time" in text and "step 1 · reward 1, mean 1.5" in text


def test_damaged_and_hostile_rollouts_are_shown_as_text(run: Path) -> None:
    for file in (run / "rollouts").iterdir():
        file.unlink()
    hostile = {"row": 0, "prompt": "<script>", "text": "</pre><b>\x1b[2J", "reward": None, "finish_reason": "length"}
    for step in (1, 2):
        write_step(run, step, [hostile, {"row": 1, "prompt": "once", "text": "x"}][: 3 - step])
        with (run / "rollouts" / f"step_{step}.jsonl").open("ab") as file:
            file.write(b'[1]\n{"row": "x"}\n\xff\xfe\n{"row": 0, "te')
    (run / "rollouts" / "step_final.jsonl").write_text("{}")
    text = "".join(checked(render_page(read_run(run))).text)
    assert "</pre><b>␛[2J" in text and "reward –, mean – · cut off" in text and "once" not in text


def test_a_run_without_recurring_prompts_shows_none(run: Path) -> None:
    for file in (run / "rollouts").iterdir():
        if file.name != "step_1.jsonl":
            file.unlink()
    assert read_answers(run) == []
    assert "Answers over time" not in render_page(read_run(run))
