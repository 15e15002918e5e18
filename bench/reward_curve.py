"""Reward curves of GRPO compared with TRL's.

Both sides continue the same model that sorts digits, with the same prompts, reward and settings, for several seeds.
Their random numbers differ, so that means over seeds are compared, not steps.

Argument `tiny` is a quick check with one seed and few steps.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from bench.children import ROOT, measure_in_child

SEEDS = (1, 2, 3)
STEPS, WINDOWS = 150, 5
PROMPTS, ANSWERS, NEW_TOKENS = 32, 8, 8
LEARNING_RATE, BETA2, WARMUP, MAX_GRAD_NORM = 1e-3, 0.99, 5, 1.0
END = "<|endoftext|>"


def prepare(folder: Path) -> None:
    """Train the model of examples/sort.yaml in `folder`, and export it for both sides to folder `sort`."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    sys.path.insert(0, str(ROOT / "examples"))
    importlib.import_module("grpo").write_rows(folder / "build" / "sort")
    for words in (
        ["tokenizer", "train", "examples/sort.yaml", "data.text_field=prompt"],
        ["tune", "prepare", "examples/sort.yaml"],
        ["train", "examples/sort.yaml"],
        ["export", "runs/sort", "--to", "sort"],
    ):
        command = [sys.executable, "-m", "jingu", *words]
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)


def measure_jingu(folder: Path, seed: int, steps: int) -> list[float]:
    """Return the mean reward of each step of `jingu train`."""
    settings = {
        "seed": seed,
        "name": f"grpo-{seed}",
        "train.steps": steps,
        "train.log_every": 1,
        "initialize.from": "sort",
        "checkpoint.every": 0,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "jingu", "train", "examples/grpo.yaml", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    lines = (folder / "runs" / f"grpo-{seed}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["reward"] for row in map(json.loads, lines) if "reward" in row]


def measure_trl(folder: Path, seed: int, steps: int) -> list[float]:
    """Return the mean reward of each step of TRL's GRPOTrainer with the settings of examples/grpo.yaml."""
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], answer: list[str], **_columns: Any) -> list[float]:
        return [float(text == expected) for text, expected in zip(completions, answer, strict=True)]

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder / "sort", dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "sort" / "tokenizer.json"), eos_token=END, pad_token=END
    )
    rows = load_dataset("json", data_files=str(folder / "build" / "sort" / "prompts.jsonl"), cache_dir=str(folder))
    config = GRPOConfig(
        output_dir=str(folder / f"trl-{seed}"),
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=seed,
        max_steps=steps,
        logging_steps=1,
        learning_rate=LEARNING_RATE,
        adam_beta2=BETA2,
        weight_decay=0.0,
        max_grad_norm=MAX_GRAD_NORM,
        lr_scheduler_type="cosine",
        warmup_steps=WARMUP,
        per_device_train_batch_size=PROMPTS * ANSWERS,
        num_generations=ANSWERS,
        max_completion_length=NEW_TOKENS,
        scale_rewards="none",
        beta=0.0,
    )
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=config, processing_class=tokenizer, train_dataset=rows["train"]
    )
    trainer.train()
    return [row["reward"] for row in trainer.state.log_history if "reward" in row]


def run(argument: str = "") -> str:
    """Return the table as Markdown."""
    is_tiny = argument.startswith("tiny")
    seeds, steps = (SEEDS[:1], 10) if is_tiny else (SEEDS, STEPS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        curves = {
            (side, seed): measure_in_child("reward_curve", side, folder, seed, steps)
            for seed in seeds
            for side in ("jingu", "trl")
        }
    size = steps // WINDOWS
    heads = [f"steps {start + 1} to {start + size}" for start in range(0, steps, size)]
    lines = [f"| reward, mean of {len(seeds)} seeds ± their standard deviation | {' | '.join(heads)} |"]
    lines.append(f"|{'---|' * (len(heads) + 1)}")
    for side in ("jingu", "trl"):
        cells = []
        for start in range(0, steps, size):
            means = [fmean(curves[side, seed][start : start + size]) for seed in seeds]
            cells.append(f"{fmean(means):.3f} ± {stdev(means):.3f}" if len(means) > 1 else f"{means[0]:.3f}")
        lines.append(f"| {side} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure one side as a child process, or print the table."""
    if len(sys.argv) == 5:
        side, folder, seed, steps = sys.argv[1:]
        measure = measure_jingu if side == "jingu" else measure_trl
        print(json.dumps(measure(Path(folder), int(seed), int(steps))))
        return
    print(run(*sys.argv[1:2]))


if __name__ == "__main__":
    main()
