"""Tiny models learn from rewards."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from statistics import fmean

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_ppo_learns_to_sort(critic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of sort.yaml improves by PPO as it does by GRPO in grpo.yaml."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "examples")
    example = importlib.import_module("grpo")
    questions = example.write_rows(example.PLACE)
    example.run_jingu("tokenizer", "train", "examples/sort.yaml", "data.text_field=prompt")
    example.run_jingu("tune", "prepare", "examples/sort.yaml")
    example.run_jingu("train", "examples/sort.yaml")
    ppo = {"type": "ppo", "prompts": "build/sort/prompts.jsonl", "prompts_per_step": 64, "answers_per_prompt": 4}
    ppo |= {"max_new_tokens": 8, "rewards": [{"type": "exact"}], "kl": {"type": "none"}}
    ppo["critic"] = {"type": "separate", "lr_multiplier": 6.0} if critic == "separate" else {"type": "shared"}
    example.run_jingu("train", "examples/grpo.yaml", f"task={json.dumps(ppo)}", "name=ppo", "train.steps=100")
    lines = [json.loads(line) for line in Path("runs/ppo/metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if line["type"] == "train"]
    assert fmean(rewards[-4:]) > fmean(rewards[:4]) + 0.12
    accuracies = [example.accuracy(Path("runs") / name, questions) for name in ("sort", "ppo")]
    assert accuracies[1] > accuracies[0]
