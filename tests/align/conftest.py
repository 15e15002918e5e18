"""What tests of alignment share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jingu.config.schema import RunConfig
from jingu.training.commands import train
from tests.align.policies import CRITICS
from tests.conftest import Done, MakeRun
from tests.limits import PATIENCE


@pytest.fixture
def base(tiny_run: MakeRun, train_on: Callable[..., None]) -> str:
    """A tiny model after a few steps of pretraining."""
    config = tiny_run({"train.steps": 4}, name="base")
    train_on(1, config)
    return f"{config.runs_dir}/base"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = ({"prompt": f"def f{number}", "answer": "("} for number in range(5))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def make(tiny_run: MakeRun, prompts: Path) -> MakeRun:
    """Makes a run of 3 steps with 4 answers to each of 4 prompts; changes go by dotted keys."""

    def make(changes: dict[str, Any] | None = None, **more: Any) -> RunConfig:
        # On a busy machine an answer may wait for longer than the default, and would score 0.
        vowels = {"type": "regex", "pattern": ".*[aeiou].*", "timeout": PATIENCE}
        rewards = [vowels, {"type": "length", "max_tokens": 3, "audit": True}]
        settings = {
            "task": {
                "type": "grpo",
                "prompts": str(prompts),
                "prompts_per_step": 4,
                "answers_per_prompt": 4,
                "max_new_tokens": 6,
                "rewards": rewards,
            },
            "batch": {"sequence_length": 17, "micro_batch_size": 4},
            "train.steps": 3,
        }
        settings |= changes or {}
        settings.setdefault("batch.global_batch_size", 16 // settings.get("task.updates_per_step", 1))
        return tiny_run(settings, **more)

    return make


@pytest.fixture
def make_ppo(make: MakeRun, done: Callable[[RunConfig], Done]) -> MakeRun:
    """Makes a run of 2 steps of PPO with two updates each."""
    start = make({"train.steps": 1}, name="start")
    assert train(start) == 0

    def make_ppo(changes: dict[str, Any] | None = None, *, critic: str = "separate", **more: Any) -> RunConfig:
        settings = make().model_dump()["task"]
        kept = ("prompts", "prompts_per_step", "max_new_tokens", "rewards")
        task = {"type": "ppo", "critic": CRITICS[critic], **{key: settings[key] for key in kept}}
        task |= {"answers_per_prompt": 2, "updates_per_step": 2}
        base = {"task": task, "train.steps": 2, "batch.global_batch_size": 4, "batch.micro_batch_size": 2}
        base["initialize"] = {"from": str(done(start).folder)}
        return make({**base, **(changes or {})}, **more)

    return make_ppo
