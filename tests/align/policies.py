"""Runs of policy learning that several tests train: layouts, critics, kills within a rollout."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jingu.align.policy_learning import POLICY_LEARNING
from jingu.config.load import dump_yaml
from jingu.config.schema import RunConfig
from jingu.runtime.signals import StopRequest
from jingu.training.commands import train_on_rank
from tests.conftest import Done, peak_unmeasured, this_rank
from tests.limits import PATIENCE


def rollout(run: Done, step: int) -> list[dict[str, Any]]:
    lines = (run.folder / "rollouts" / f"step_{step}.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def train_here(rank: int, world: int, configs: list[RunConfig]) -> list[int]:
    with peak_unmeasured():
        options: dict[str, Any] = {"task_factory": POLICY_LEARNING}
        return [train_on_rank(config, this_rank(rank, world), StopRequest(), **options) for config in configs]


LAYOUTS = {
    "zero3": (2, {"parallel.zero_stage": 3}),
    "tensor": (2, {"parallel.tensor": 2}),
    "pipeline": (2, {"parallel.pipeline": 2}),
    "context": (2, {"parallel.context": 2}),
    "expert": (2, {"parallel.shard": 2, "parallel.expert": 2, "parallel.zero_stage": 2}),
    "4 of zero3": (4, {"parallel.zero_stage": 3, "batch.micro_batch_size": 1}),
    "tensor and pipeline": (4, {"parallel.tensor": 2, "parallel.pipeline": 2}),
}
CRITICS = {"separate": {"type": "separate", "lr_multiplier": 0.3}, "shared": {"type": "shared", "weight": 0.5}}
FATAL_REWARD = """
import os, signal
from pathlib import Path

def reward(completions):
    calls = Path(__file__).with_suffix(".calls")
    number = int(calls.read_text()) + 1 if calls.exists() else 1
    calls.write_text(str(number))
    if number in KILLS:
        os.kill(os.getppid(), signal.SIGKILL)
    return [float(len(set(text))) for text in completions]
"""


def train_with_kills(make: Callable[..., RunConfig], name: str, folder: Path, kills: tuple[int, ...]) -> RunConfig:
    """Train a run to its end by starting it again after each kill: its reward kills it in these calls."""
    (folder / f"{name}.py").write_text(f"KILLS = {kills}\n{FATAL_REWARD}")
    rewards = [{"type": "python", "function": f"{folder}/{name}.py:reward"}]
    config = make(**{"task.rewards": rewards, "name": name})
    (folder / f"{name}.yaml").write_bytes(dump_yaml(config).encode())
    command = [sys.executable, "-m", "jingu", "train", str(folder / f"{name}.yaml")]
    codes = []
    while 0 not in codes and len(codes) <= len(kills) + 1:
        codes.append(subprocess.run(command, capture_output=True, timeout=PATIENCE).returncode)
    assert codes == [-signal.SIGKILL] * len(kills) + [0]
    return config
