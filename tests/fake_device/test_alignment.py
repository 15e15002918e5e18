"""Steps of alignment on a fake device: the host waits once for each token of all answers, and never in an update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.config.schema import RunConfig
from jingu.infer.engine import Engine
from jingu.infer.request import Event
from jingu.runtime.ranks import RankInfo
from jingu.runtime.signals import StopRequest
from jingu.training import loop
from jingu.training.commands import train_on_rank
from jingu.training.task import find_task_factory
from tests.align.preferences import preference_run
from tests.conftest import Done, MakeRun, peak_unmeasured
from tests.fake_device import fake_device
from tests.rank_pool import RankPool

Waits = list[tuple[str, str]]


def train(rank: int, world: int, config: RunConfig, device: str) -> tuple[list[Waits], list[Waits]]:
    """Train a run to its end. Return what let the host wait in each decoding step, and in the rest of each update."""
    fake_device.install()
    decoding, updates = [], []
    engine_step, train_step = Engine.step, loop.train_step

    def watched_engine_step(engine: Engine) -> list[Event]:
        start = len(fake_device.WAITS.lines)
        events = engine_step(engine)
        decoding.append(fake_device.WAITS.lines[start:])
        del fake_device.WAITS.lines[start:]
        return events

    def watched_train_step(*args: Any, **kwargs: Any) -> Any:
        with fake_device.watch() as lines:
            result = train_step(*args, **kwargs)
        updates.append(lines)
        return result

    with peak_unmeasured(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", watched_engine_step)
        patch.setattr(loop, "train_step", watched_train_step)
        ranks = RankInfo(rank, world, torch.device(device), "here")
        assert train_on_rank(config, ranks, StopRequest(), task_factory=find_task_factory(config.task)) == 0
    return decoding, updates


@pytest.fixture
def policy_run(tiny_run: MakeRun, tmp_path: Path) -> MakeRun:
    """Makes a run of 2 steps with 4 answers to each of 4 prompts."""

    def make(changes: dict[str, Any], **more: Any) -> RunConfig:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"def f{number}"}) + "\n" for number in range(5)))
        task = {"type": "grpo", "prompts": str(prompts), "prompts_per_step": 4, "answers_per_prompt": 4}
        rewards = [{"type": "regex", "pattern": ".*[aeiou].*"}]
        batch = {"sequence_length": 17, "micro_batch_size": 4}
        settings = {"task": {**task, "max_new_tokens": 6, "rewards": rewards}, "batch": batch, "train.steps": 2}
        settings["batch.global_batch_size"] = 16 // changes.get("task.updates_per_step", 1)
        return tiny_run({**settings, **changes}, **more)

    return make


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"task.updates_per_step": 2}, id="two updates and a reference"),
        pytest.param({}, id="one update", marks=pytest.mark.slow),
        pytest.param({"task.exact": True}, id="exact", marks=pytest.mark.slow),
    ],
)
def test_grpo(changes: dict[str, Any], policy_run: MakeRun, done: Any, device_ranks: RankPool) -> None:
    # At so low a temperature, rounding does not change which tokens are drawn.
    changes = {"task.temperature": 1e-6, "task.advantage": "reinforce++", **changes}
    if "task.updates_per_step" in changes:
        start = policy_run({"train.steps": 1}, name="start")
        device_ranks.run(train, 1, start, "cpu")
        changes |= {"task.kl": {"type": "kl", "beta": 0.1}, "initialize.from": str(done(start).folder)}
    results: list[Done] = []
    for device in ("cpu", fake_device.NAME):
        config = policy_run(changes, name=device)
        [(decoding, updates)] = device_ranks.run(train, 1, config, device)
        results.append(done(config))
    expected, result = results
    for name in ("loss", "reward", "entropy", "grad_norm"):
        assert result.column(name) == pytest.approx(expected.column(name), rel=1e-6, abs=1e-9), name
    # 1. The host waits once for each token of all answers. The first step creates what later ones use.
    assert len(decoding) > 1 and [waits for waits in decoding[1:] if len(waits) > 1] == []
    # 2. An update waits for nothing, except that the first of each rollout reads the largest mismatch, and that scores
    #    of the answers before the updates are read once for each model.
    others = [[line for _, line in waits] for waits in updates]
    num_updates = config.task.updates_per_step
    for update, lines in enumerate(others):
        expected_lines = ["torch.stack([mismatch"] if update % num_updates == 0 else []
        if "task.updates_per_step" in changes and update % num_updates == 0:
            expected_lines = ["torch.cat(values).cpu()"] * 2 + expected_lines
        assert len(lines) == len(expected_lines), lines
        assert all(part in line for part, line in zip(expected_lines, lines, strict=True)), lines


def compare(
    make: MakeRun, changes: dict[str, Any], done: Any, device_ranks: RankPool
) -> tuple[list[Waits], list[Waits]]:
    """Compare losses and gradients of a run on the device with those on the CPU; return what let the host wait."""
    results: list[Done] = []
    for device in ("cpu", fake_device.NAME):
        config = make(changes, name=device)
        [waits] = device_ranks.run(train, 1, config, device)
        results.append(done(config))
    expected, result = results
    for name in ("loss", "grad_norm"):
        assert result.column(name) == pytest.approx(expected.column(name), rel=1e-6, abs=1e-9), name
    return waits


PREFERENCES = {
    "reward": {"type": "reward", "centering": 0.01},
    "dpo": {"type": "dpo"},
    "kto": {"type": "kto"},
    "simpo": {"type": "simpo"},
    "orpo": {"type": "orpo"},
    "cpo": {"type": "cpo"},
}


@pytest.mark.parametrize("kind", PREFERENCES)
def test_preferences(kind: str, tiny_run: MakeRun, tmp_path: Path, done: Any, device_ranks: RankPool) -> None:
    changes: dict[str, Any] = {"task": PREFERENCES[kind], "train.steps": 3, "evaluation.every": 3}
    if kind == "kto":
        changes["data.objective"] = {"type": "preference", "template": "plain", "rows": "labels"}
        changes["batch.sequence_length"] = 32
    if kind in ("dpo", "kto"):
        base = tiny_run({"train.steps": 1}, name="base")
        device_ranks.run(train, 1, base, "cpu")
        changes["initialize.from"] = str(done(base).folder)

    def make(changes: dict[str, Any], name: str) -> RunConfig:
        return preference_run(tiny_run, tmp_path, changes, name=name)

    _, updates = compare(make, changes, done, device_ranks)
    # The first step creates what later ones use.
    assert len(updates) == 3 and updates[1:] == [[], []]


@pytest.mark.parametrize("kind", ["separate", "shared", "distill", "divergence"])
def test_other_policies(kind: str, policy_run: MakeRun, done: Any, device_ranks: RankPool) -> None:
    """PPO with both critics, and distillation of tokens and of distributions."""
    start = policy_run({"train.steps": 1}, name="start")
    device_ranks.run(train, 1, start, "cpu")
    model = str(done(start).folder)
    settings = start.model_dump()["task"]
    names = ("prompts", "prompts_per_step", "answers_per_prompt", "max_new_tokens")
    task = {**{name: settings[name] for name in names}, "temperature": 1e-6}
    if kind in ("separate", "shared"):
        task |= {"type": "ppo", "critic": {"type": kind}, "rewards": settings["rewards"]}
    else:
        task |= {"type": "distill", "teacher": model, "beta": 0.3 if kind == "divergence" else None}
        # At so low a temperature, a divergence means nothing.
        task["temperature"] = 1.0 if kind == "divergence" else 1e-6
    changes = {"task": task, "initialize.from": model, "batch.global_batch_size": 16}
    decoding, updates = compare(policy_run, changes, done, device_ranks)
    assert [waits for waits in decoding[1:] if len(waits) > 1] == []
    lines = [line for _, line in updates[-1]]
    assert all("torch.cat(values).cpu()" in line or "torch.stack([mismatch" in line for line in lines), lines
