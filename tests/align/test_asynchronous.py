"""Rollouts that are generated beside training, by weights of earlier steps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from jingu.align.commands import train
from jingu.config.schema import RunConfig
from jingu.formats.models import open_model
from jingu.formats.stored_model import load_model
from tests.align.test_policy_learning import make, prompts, rollout, train_here
from tests.conftest import Done, MakeRun
from tests.rank_pool import RankPool

pytestmark = pytest.mark.usefixtures("peak")
__all__ = ["make", "prompts"]


def assert_equal_runs(first: Done, second: Done) -> None:
    tensors = second.tensors()
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor, tensors[name]), name


def processes(staleness: int, **settings: Any) -> dict[str, Any]:
    return {"task.asynchronous": {"type": "processes", "staleness": staleness, **settings}}


def test_without_staleness_the_run_equals_a_synchronous_one(make: MakeRun, done: Callable[[RunConfig], Done]) -> None:
    ordinary = make({"task.importance_cap": 2.0}, name="synchronous")
    assert train(ordinary) == 0
    beside = make(processes(0), name="beside")
    assert beside.task.importance_cap == 2.0
    assert train(beside) == 0
    assert_equal_runs(done(ordinary), done(beside))
    assert rollout(done(ordinary), 3) == rollout(done(beside), 3)
    assert done(beside).column("staleness") == [0, 0, 0]
    assert done(beside).column("importance_max") == pytest.approx([1.0] * 3, abs=1e-9)


RESUMED = {"checkpoint.every": 1, "checkpoint.keep_last": 9, "train.steps": 4}


def resume_from_step_2(config: RunConfig, run: Callable[[], None], done: Callable[[RunConfig], Done]) -> Done:
    """Run, copy the folder, go back to step 2, as after a kill while old weights generate, and run again."""
    run()
    folder, whole = done(config).folder, done(config.model_copy(update={"name": "copy"}))
    shutil.copytree(folder, whole.folder)
    for step in range(3, config.train.steps + 1):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:08}")
        (folder / "rollouts" / f"step_{step}.jsonl").unlink()
    run()
    assert_equal_runs(whole, done(config))
    for step in range(1, config.train.steps + 1):
        assert rollout(whole, step) == rollout(done(config), step)
        assert rollout(whole, step)[0]["weights_step"] == max(step - 1 - config.task.staleness, 0)
    return whole


def test_a_resumed_run_equals_an_undisturbed_one(make: MakeRun, done: Callable[[RunConfig], Done]) -> None:
    config = make({**RESUMED, **processes(1), "task.importance_cap": 1.05, "optimizer.lr": 3e-2}, name="whole")

    def run() -> None:
        assert train(config) == 0

    whole = resume_from_step_2(config, run, done)
    assert whole.column("staleness") == [0, 1, 1, 1]
    # Truncated importance sampling, by hand.
    for step in (2, 3):
        # The weights at the beginning of the step, in a plain forward pass.
        stored = open_model(whole.folder / "checkpoints" / f"step-{step - 1:08}")
        model = load_model(stored, torch.float64, torch.device("cpu"))
        weights, loss = [], 0.0
        for sample in rollout(whole, step):
            ids = torch.tensor([[*sample["prompt_ids"], *sample["ids"]]])
            with torch.no_grad():
                logprobs = (model(ids[:, :-1]) @ model.head_weight().t()).log_softmax(-1)
            own = logprobs[0, len(sample["prompt_ids"]) - 1 :].gather(1, torch.tensor(sample["ids"])[:, None])[:, 0]
            ratio = (own - torch.tensor(sample["logprobs"], dtype=torch.float64)).exp()
            advantages = torch.tensor(sample["advantages"], dtype=torch.float64)
            loss -= float((ratio.clamp_max(1.05) * advantages).sum())
            weights += ratio.tolist()
        line = whole.lines("train")[step - 1]
        assert max(weights) > 1.05
        assert line["importance_max"] == pytest.approx(max(weights))
        assert line["importance_mean"] == pytest.approx(sum(min(weight, 1.05) for weight in weights) / len(weights))
        assert line["loss"] == pytest.approx(loss / len(weights))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "staleness"), [(1, 2), (2, 1)])
def test_runs_of_several_ranks_and_processes_resume(
    world: int, staleness: int, make: MakeRun, ranks: RankPool, done: Callable[[RunConfig], Done]
) -> None:
    start = make({"train.steps": 1}, name="start")
    assert train(start) == 0
    changes = {**RESUMED, **processes(staleness, processes=2), "task.kl": {"type": "kl", "estimator": "k1"}}
    changes |= {"parallel.zero_stage": 3, "task.updates_per_step": 2, "train.steps": 5, "optimizer.lr": 1e-2}
    config = make({**changes, "initialize": {"from": str(done(start).folder)}}, name="whole")

    def run() -> None:
        assert ranks.run(train_here, world, [config]) == [[0]] * world

    resume_from_step_2(config, run, done)
