"""`jingu align score`: saved answers are scored as in a run, and joined with the prompts that they answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.align.commands import train
from jingu.align.rollout_commands import _tuning_row, score
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer
from jingu.tune.row_formats import parse_row
from tests.align.policies import rollout
from tests.align.test_environment import MARKS
from tests.align.test_reward_models import load_decoder, reward_run
from tests.conftest import Done, MakeRun

pytestmark = pytest.mark.usefixtures("peak")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_a_reward_model_scores_saved_answers_as_in_a_run(
    tiny_run: MakeRun, make: MakeRun, done: Callable[[RunConfig], Done], tmp_path: Path
) -> None:
    reward = reward_run(tiny_run, tmp_path, **{"train.steps": 2, "evaluation.every": 0})
    assert train(reward) == 0
    rewards = [{"type": "model", "model": str(done(reward).folder)}]
    config = make({"task.rewards": rewards, "train.steps": 1, "schedule.warmup": 0})
    assert train(config) == 0
    # The answers of a run, once more.
    recorded = rollout(done(config), 1)
    assert score(config, to=tmp_path / "again.jsonl") == 0
    assert [row["reward"] for row in read(tmp_path / "again.jsonl")] == [row["reward"] for row in recorded]
    # Saved texts end with the token that ends an answer, unless they were cut off.
    rows = [
        {"prompt": "def f1", "completion": "(x)"},
        {"prompt": "def f1", "completion": "(x)", "finish_reason": "length"},
    ]
    assert score(config, write(tmp_path / "rows.jsonl", rows), tmp_path / "scored.jsonl") == 0
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    model = load_decoder(done(reward).folder)
    for row, end in zip(read(tmp_path / "scored.jsonl"), ([tokenizer.eos_token_id], []), strict=True):
        ids = [*tokenizer.prompt_prefix_ids, *tokenizer.encode("def f1"), *tokenizer.encode("(x)"), *end]
        with torch.no_grad():
            expected = float((model(torch.tensor([ids])) @ model.head_weight().t())[0, -1, 0])
        assert row["reward"] == pytest.approx(expected, abs=1e-5)
    # What was written can be scored again.
    assert score(config, tmp_path / "scored.jsonl", tmp_path / "third.jsonl") == 0
    assert [row["reward"] for row in read(tmp_path / "third.jsonl")] == [
        row["reward"] for row in read(tmp_path / "scored.jsonl")
    ]


def test_prompts_of_messages_are_rendered(make: MakeRun, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(iter(["the user asks, the assistant answers. " * 3]), 300, MARKS)
    tokenizer.save(tmp_path / "chat")
    (tmp_path / "ids.py").write_text("def length(completion_ids): return [len(ids) for ids in completion_ids]\n")
    rewards = [{"type": "python", "function": f"{tmp_path}/ids.py:length"}]
    config = make(
        {
            "task.rewards": rewards,
            "task.template": "chatml",
            "tokenizer": {"path": str(tmp_path / "chat"), "vocab_size": 300},
        }
    )
    prompt = [{"role": "system", "content": "rules"}, {"role": "user", "content": "asks"}]
    completion = [{"role": "assistant", "content": "answers"}]
    path = write(tmp_path / "rows.jsonl", [{"prompt": prompt, "completion": completion}])
    assert score(config, path, tmp_path / "scored.jsonl") == 0
    (row,) = read(tmp_path / "scored.jsonl")
    assert row["prompt"] == prompt and row["completion"] == "answers"
    assert row["completion_ids"] == [
        *tokenizer.encode("answers"),
        *tokenizer.encode("<|im_end|>", parse_special_tokens=True),
    ]
    assert score(config, path, tmp_path / "best.jsonl", best=True) == 0
    assert read(tmp_path / "best.jsonl")[0]["completion"] == completion


def test_answers_are_joined_with_the_prompts_that_they_answer(
    make: MakeRun, done: Callable[[RunConfig], Done], prompts: Path, tmp_path: Path
) -> None:
    config = make({"task.rewards": [{"type": "length", "max_tokens": 3}], "train.steps": 1, "schedule.warmup": 0})
    assert train(config) == 0
    recorded = rollout(done(config), 1)
    rows = read(prompts)
    # Another order changes nothing.
    write(prompts, rows[::-1])
    assert score(config, to=tmp_path / "scored.jsonl") == 0
    scored = read(tmp_path / "scored.jsonl")
    assert [(row["prompt"], row["reward"]) for row in scored] == [(row["prompt"], row["reward"]) for row in recorded]
    # Other prompts are refused, and so is a prompt with two expected answers.
    number = 1 + next(index for index, row in enumerate(recorded) if row["prompt"] == recorded[0]["prompt"])
    changed = [
        {**row, "prompt": row["prompt"] + "x"} if row["prompt"] == recorded[0]["prompt"] else row for row in rows
    ]
    write(prompts, changed)
    with pytest.raises(JinguError, match=rf"line {number}: .*prompts\.jsonl no longer has its prompt 'def f"):
        score(config, to=tmp_path / "other.jsonl")
    moved = [{"prompt": "def g", "answer": "("}, *rows, *({**row, "answer": ")"} for row in rows)]
    write(prompts, moved)
    with pytest.raises(JinguError, match="has several rows for its prompt"):
        score(config, to=tmp_path / "other.jsonl")
    write(prompts, rows[:1])
    with pytest.raises(JinguError, match="no longer has its prompt"):
        score(config, to=tmp_path / "other.jsonl")
    assert not (tmp_path / "other.jsonl").exists()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a"}, "line 1: field completion: expected a text"),
        ({"prompt": "a", "completion": None}, "line 1: field completion"),
        ({"prompt": "a", "completion": [{"role": "user", "content": "b"}, {}]}, "line 1: field completion"),
        ({"completion": "b"}, "line 1: expected an object with the field prompt"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}, "line 1: the prompt has messages"),
        ({"prompt": "a", "completion": "b", "messages": []}, "line 1: field messages: rewards receive"),
        ({"prompt": "a", "completion": "b", "answer": None}, "line 1, column answer: expected a text, not null"),
    ],
)
def test_rows_that_are_no_saved_answers_are_refused(
    row: dict[str, Any], words: str, make: MakeRun, tmp_path: Path
) -> None:
    config = make({"task.rewards": [{"type": "exact"}]})
    path = write(tmp_path / "rows.jsonl", [{"answer": "x", **row}])
    with pytest.raises(JinguError, match=words):
        score(config, path)


def test_texts_that_utf8_lacks_are_written_as_json(make: MakeRun, tmp_path: Path) -> None:
    config = make({"task.rewards": [{"type": "exact"}]})
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b", "answer": "\ud800"}])
    assert score(config, path, tmp_path / "scored.jsonl") == 0
    assert read(tmp_path / "scored.jsonl")[0]["answer"] == "\ud800"


def test_a_best_answer_continues_its_prompt_in_tuning() -> None:
    """A saved answer to a prompt that ends with a message of the assistant is trained without that message."""
    prompt = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer"}]
    row = parse_row(_tuning_row({"prompt": prompt, "completion": " is 4", "reward": 1.0}))
    assert [(turn.content, turn.prefill_length) for turn in row.messages] == [("q", 0), ("The answer is 4", 10)]
