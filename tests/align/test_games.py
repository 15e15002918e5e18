"""Environments and tools, end to end on tiny models: their replies are read and not trained."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.align import policy_learning
from jingu.align.environment import Environments
from jingu.align.policy_learning import POLICY_LEARNING
from jingu.chat.tool_calls import ToolCall, ToolCallParser
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.runtime.signals import StopRequest
from jingu.text.tokenizer import Tokenizer
from jingu.training.commands import train, train_on_rank
from tests.align.policies import LAYOUTS, rollout, train_here
from tests.conftest import Done, MakeRun, peak_unmeasured, this_rank
from tests.rank_pool import RankPool

pytestmark = pytest.mark.usefixtures("peak")


ENVIRONMENT = """
class Game:
    def begin(self, row):
        self.row, self.answers = row, []

    def step(self, answer):
        self.answers.append(answer)
        return None if len(self.answers) == 3 else "def g"

    def score(self):
        return float(sum(map(len, self.answers))) + len(self.answers)
"""


def test_an_environment_replies_and_only_own_tokens_are_trained(
    make: MakeRun, done: Callable[[RunConfig], Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "game.py").write_text(ENVIRONMENT)
    # Turns are short if many tokens end them.
    shorten_turns(monkeypatch)
    environment = {"path": f"{tmp_path}/game.py:Game", "max_turns": 3}
    changes = {"task.environment": environment, "task.rewards": [], "task.max_new_tokens": 20}
    config = make({**changes, "batch.sequence_length": 33, "task.updates_per_step": 2, "batch.global_batch_size": 8})
    assert train(config) == 0
    for sample in rollouts_with_replies(done(config), config, "def g"):
        assert sample["reward"] == sample["rewards"]["environment"] > 0
    (tmp_path / "bad.py").write_text("class Game:\n    def begin(self, row): ...\n")
    with pytest.raises(JinguError, match="remax compares with a greedy one"):
        train(make({**changes, "task.advantage": "remax", "batch.sequence_length": 33}, name="greedy"))
    for path, words in ((f"{tmp_path}/bad.py:Game", "has no method step"), ("nowhere:Game", "cannot be imported")):
        with pytest.raises(JinguError, match=words):
            train(make({**changes, "task.environment.path": path, "batch.sequence_length": 33}, name="bad"))


def rollouts_with_replies(run: Done, config: RunConfig, reply: str) -> list[dict[str, Any]]:
    """Return the samples of the first step, after checks: replies match an expression, and no token of them is trained.

    What training computes of the appended ids is what generation computed.
    """
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    samples = rollout(run, 1)
    assert max(len(sample["replies"]) for sample in samples) == 2
    for sample in samples:
        for start, end in sample["replies"]:
            assert re.fullmatch(reply, tokenizer.decode(sample["ids"][start:end]))
        own = len(sample["ids"]) - sum(end - start for start, end in sample["replies"])
        assert len(sample["logprobs"]) == len(sample["advantages"]) == own
    assert max(run.column("mismatch_max")) < 1e-13
    return samples


def shorten_turns(patch: pytest.MonkeyPatch) -> None:
    """Let many tokens end a turn."""
    load = policy_learning.load_run_prompts
    ends = tuple(range(0, 389, 3))
    patch.setattr(policy_learning, "load_run_prompts", lambda *values: replace(load(*values), eos_token_ids=ends))


def train_with_short_turns(rank: int, world: int, configs: list[RunConfig]) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        shorten_turns(patch)
        return train_here(rank, world, configs)


def make_game(make: MakeRun, tmp_path: Path, name: str, **changes: Any) -> RunConfig:
    (tmp_path / "game.py").write_text(ENVIRONMENT)
    task = {"task.environment": {"path": f"{tmp_path}/game.py:Game", "max_turns": 3}, "task.rewards": []}
    return make({**task, "task.max_new_tokens": 20, "batch.sequence_length": 33, **changes}, name=name)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero3", "tensor"])
def test_layouts_agree_on_games(
    layout: str, make: MakeRun, ranks: RankPool, done: Callable[[RunConfig], Done], tmp_path: Path
) -> None:
    single = make_game(make, tmp_path, "single")
    world, changes = LAYOUTS[layout]
    divided = make_game(make, tmp_path, "divided", **changes, **{"batch.micro_batch_size": 2})
    assert ranks.run(train_with_short_turns, 1, [single]) == [[0]]
    assert ranks.run(train_with_short_turns, world, [divided]) == [[0]] * world
    runs = done(single), done(divided)
    assert max(len(sample["replies"]) for sample in rollout(runs[0], 3)) == 2
    for one, other in zip(*(rollout(run, 3) for run in runs), strict=True):
        assert (one["ids"], one["replies"], one["rewards"]) == (other["ids"], other["replies"], other["rewards"])
    for name in ("loss", "grad_norm", "reward"):
        assert runs[1].column(name) == pytest.approx(runs[0].column(name), rel=1e-9, abs=1e-12), name
    tensors = runs[1].tensors()
    for name, tensor in runs[0].tensors().items():
        assert torch.allclose(tensor.double(), tensors[name].double(), rtol=1e-9, atol=1e-9), name


def test_a_run_that_stops_within_a_game_ends_with_the_same_weights(
    make: MakeRun, done: Callable[[RunConfig], Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_turns(monkeypatch)
    whole = make_game(make, tmp_path, "whole")
    parts = make_game(make, tmp_path, "parts", **{"checkpoint.every": 1, "checkpoint.async_save": False})
    assert train(whole) == 0
    reply = Environments.reply
    calls: list[int] = []

    def stop_once(self: Environments, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:  # the second turn of the second step
            raise KeyboardInterrupt
        return reply(self, *arguments)

    monkeypatch.setattr(Environments, "reply", stop_once)
    with pytest.raises(KeyboardInterrupt):
        train(parts)
    assert train(parts) == 0
    tensors = done(parts).tensors()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in done(whole).tensors().items())
    assert rollout(done(whole), 3) == rollout(done(parts), 3)


def test_an_environment_that_fails_on_one_rank_ends_all(make: MakeRun, ranks: RankPool, tmp_path: Path) -> None:
    # The prompt that fails is that of one rank.
    start = "def step(self, answer):\n"
    text = ENVIRONMENT.replace(start, f"{start}        assert self.row['prompt'] != 'def f1'\n")
    config = make_game(make, tmp_path, "failing", **{"parallel.zero_stage": 3})
    (tmp_path / "game.py").write_text(text)
    assert sorted(ranks.run(fail_here, 2, config)) == ["AssertionError: .", "exit 2"]


def fail_here(rank: int, world: int, config: RunConfig) -> str:
    """Return how a rank ends: the first one that fails reports the error, the others exit."""
    try:
        with peak_unmeasured():
            train_on_rank(config, this_rank(rank, world), StopRequest(), task_factory=POLICY_LEARNING)
    except JinguError as error:
        return error.what
    except SystemExit as end:
        return f"exit {end.code}"
    return "trained"


TOOLS_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    "{% if message.role == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_results_of_tools_are_read_and_not_trained(
    make: MakeRun, done: Callable[[RunConfig], Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tools.py").write_text('def size(text: str) -> int:\n    """Count."""\n    return len(text)\n')
    (tmp_path / "template.jinja").write_text(TOOLS_TEMPLATE)
    rows = ({"prompt": [{"role": "user", "content": f"def f{number}"}], "answer": "("} for number in range(5))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Turns are short if many tokens end them; a model that learned nothing calls nothing.
    shorten_turns(monkeypatch)
    monkeypatch.setattr(
        ToolCallParser, "finish", lambda self: ("", [ToolCall("size", json.dumps({"text": self._buffer}))])
    )
    task = {
        "task.environment": {"tools": [f"{tmp_path}/tools.py:size"], "max_turns": 3},
        "task.template": str(tmp_path / "template.jinja"),
        "task.max_new_tokens": 60,
        "batch.sequence_length": 112,
    }
    config = make(task)
    assert train(config) == 0
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    for sample in rollouts_with_replies(done(config), config, r"tool:\d+assistant:"):
        assert tokenizer.decode(sample["prompt_ids"]).startswith("size user:def f")
