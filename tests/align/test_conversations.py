"""What is judged: the model's last turn, with the conversation and the model's own tokens beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jingu.align.environment import Environments
from jingu.align.prompt_set import Prompt, describe_messages
from jingu.align.rollout_rewards import add_rewards, describe_answers
from jingu.align.rollouts import Sample, describe_answer, own_turn
from jingu.chat.messages import Message
from jingu.config.sections.policies import EnvironmentSettings
from tests.align.test_environment import TOOLS, call
from tests.align.test_verifiers import build

CALL = call("add", first=20, second=22)
PROMPT = Prompt(
    0,
    (1, 2),
    "20+22?",
    {"answer": "42"},
    messages=[{"role": "system", "content": "Use the tool."}, {"role": "user", "content": "20+22?"}],
)


def converse(last: str, *, tool: str = "42") -> Sample:
    """Return an answer with a tool call, its result, and a last turn."""
    return Sample(
        PROMPT.text,
        0,
        0,
        PROMPT.ids,
        (3, 4, 5, 6, 7),
        (-1.0,) * 3,
        f"{CALL}{tool}{last}",
        "end",
        replies=((2, 4),),
        turns=(own_turn(CALL), {"role": "tool", "content": tool, "name": "add"}, own_turn(last)),
        completion=last,
    )


@pytest.mark.parametrize("last", ["", "I do not know.", "42", "41", "4242"])
def test_verifiers_judge_the_last_turn_alone(last: str) -> None:
    rewards = build({"type": "number"}, {"type": "exact"}, {"type": "math"}, {"type": "regex", "pattern": "42"})
    (scored,) = add_rewards_here([converse(last)], rewards)
    assert set(scored.rewards.values()) == {float(last == "42")}
    rewards.close()


def add_rewards_here(samples: list[Sample], rewards: Any) -> list[Sample]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jingu.align.rollout_rewards.dist.get_world_size", lambda: 1)
        patch.setattr("jingu.align.rollout_rewards.wait_until_all_done", lambda done: done(0.0))
        patch.setattr("jingu.align.rollout_rewards.gather_from_all", lambda value: [value])
        return add_rewards(samples, [PROMPT], rewards)


def test_the_conversation_is_beside_the_completion() -> None:
    answer = describe_answer(converse("42"), PROMPT)
    assert answer["completion"] == "42" and answer["prompt"] == "20+22?" and answer["answer"] == "42"
    assert [message["role"] for message in answer["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert [message.get("own", False) for message in answer["messages"]] == [False, False, True, False, True]
    assert answer["completion_ids"] == (3, 4, 5, 6, 7) and answer["completion_mask"] == [1, 1, 0, 0, 1]
    text = describe_messages(answer["messages"])
    assert text.startswith("system: Use the tool.\n\nuser: 20+22?\n\nassistant: ") and text.endswith("assistant: 42")
    # An answer to a text, in one turn.
    single = Sample("2+2=", 0, 0, (1,), (3, 4), (-1.0, -1.0), "4", "end")
    answer = describe_answer(single, Prompt(0, (1,), "2+2=", {}))
    assert answer["completion"] == "4" and answer["completion_mask"] == [1, 1]
    assert [message["content"] for message in answer["messages"]] == ["2+2=", "4"]


def test_length_counts_the_own_tokens() -> None:
    rewards = build({"type": "length", "max_tokens": 3})
    (scored,) = add_rewards_here([converse("42")], rewards)
    assert scored.rewards == {"length": 1.0}


@pytest.mark.parametrize(
    ("turn", "finish_reason", "text"),
    [
        ("42", "end", "42"),
        (CALL, "end", ""),
        (f"Let me see. {CALL}", "end", "Let me see. "),
        (CALL[:-20], "length", ""),
        (f"So 42.{CALL[:-20]}", "length", "So 42."),
        ('{"name": "add", "arguments": {"first": 42, "second": 0}}', "end", ""),
        ("", "end", ""),
    ],
)
def test_a_call_is_no_answer(turn: str, finish_reason: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    environments = Environments(EnvironmentSettings(tools=[f"{tmp_path}/tools.py:add"]))
    assert environments.without_calls(turn, finish_reason) == text


def test_an_environment_reads_the_messages(tmp_path: Path) -> None:
    (tmp_path / "room.py").write_text(
        "class Room:\n"
        "    def begin(self, row): self.text = ' '.join(message['content'] for message in row['messages'])\n"
        "    def step(self, answer): return self.text\n"
        "    def score(self): return 0.0\n"
    )
    environments = Environments(EnvironmentSettings(path=f"{tmp_path}/room.py:Room"))
    environments.begin({0: PROMPT})
    reply = environments.reply({0: "?"}, {0: PROMPT})[0]
    assert reply is not None and reply[1] == (Message("user", "Use the tool. 20+22?"),)


def test_functions_receive_the_conversation(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(
        "def turns(messages, completion_mask, completions):\n"
        "    return [len(each) + sum(mask) / 10 for each, mask in zip(messages, completion_mask)]\n"
    )
    rewards = build({"type": "python", "function": f"{tmp_path}/functions.py:turns"})
    (scored,) = add_rewards_here([converse("42")], rewards)
    assert scored.rewards == {"turns": 5.3}
    rewards.close()


def test_metrics_name_what_could_not_be_scored() -> None:
    samples = [Sample("p", 0, 0, (1,), (2,), (-1.0,), "a", "end", rewards={"judge": None}) for _ in range(4)]
    metrics = describe_answers(samples, 2)
    assert metrics["unscored"] == 1.0 and metrics["reward"] != metrics["reward"]
    scored = [*samples[:3], Sample("p", 0, 1, (1,), (2,), (-1.0,), "a", "end", {"judge": 2.0}, 2.0, late=("judge",))]
    metrics = describe_answers(scored, 2)
    assert (metrics["unscored"], metrics["timeouts"], metrics["reward"]) == (0.75, 0.25, 2.0)


def test_a_score_of_an_environment_is_added_only_to_what_could_be_scored() -> None:
    rewards = build({"type": "judge"}, {"type": "exact", "audit": True})
    rewards.score = lambda answers: [{"judge": grade, "exact": 0.0} for grade in (None, 2.0)]  # type: ignore[method-assign]
    samples = [Sample("p", 0, 0, (1,), (2,), (-1.0,), "a", "end", rewards={"environment": 1.0}) for _ in range(2)]
    assert [sample.reward for sample in add_rewards_here(samples, rewards)] == [None, 3.0]
    rewards = build({"type": "exact", "audit": True})
    assert [sample.reward for sample in add_rewards_here(samples, rewards)] == [1.0, 1.0]


def test_a_conversation_is_json() -> None:
    assert json.loads(json.dumps(describe_answer(converse("42"), PROMPT)))["messages"][-1]["content"] == "42"
