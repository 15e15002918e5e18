"""Rollouts that are generated beside training, by weights of earlier steps."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jingu.align import policy_learning
from jingu.align.asynchronous import GenerationServer
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.formats.models import open_model
from jingu.formats.stored_model import load_model
from jingu.infer.engine import Engine
from jingu.infer.inference_model import load
from jingu.model.decoder import Decoder
from jingu.text.tokenizer import Tokenizer
from jingu.training.commands import train
from tests.align.policies import rollout, train_here, train_with_kills
from tests.conftest import Done, MakeRun
from tests.rank_pool import RankPool
from tests.serve.conftest import Serve, serve, tiny_model, tokenizer

pytestmark = pytest.mark.usefixtures("peak")
__all__ = ["serve", "tiny_model", "tokenizer"]


def assert_equal_runs(first: Done, second: Done) -> None:
    tensors = second.tensors()
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor, tensors[name]), name


def own_logprobs(model: Decoder, sample: dict[str, Any]) -> Tensor:
    """Log-probabilities of an answer's tokens, by a plain forward pass."""
    ids = torch.tensor([[*sample["prompt_ids"], *sample["ids"]]])
    with torch.no_grad():
        logprobs = (model(ids[:, :-1]) @ model.head_weight().t()).log_softmax(-1)
    start = len(sample["prompt_ids"]) - 1
    return logprobs[0, start:].gather(1, torch.tensor(sample["ids"])[:, None])[:, 0].double()


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
            own = own_logprobs(model, sample)
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


@pytest.fixture
def make_served(make: MakeRun, serve: Serve, done: Callable[[RunConfig], Done]) -> MakeRun:
    """Makes a run with an adapter, whose base model a server has."""
    start = make({"train.steps": 1}, name="start")
    assert train(start) == 0
    folder = done(start).folder
    server = serve(Engine(load(folder, "fp32", "cpu", runtime_adapters=True)), template=None)

    def make_served(changes: dict[str, Any] | None = None, **more: Any) -> RunConfig:
        source = {"type": "server", "url": f"{server.url}/v1", "staleness": 1, "retries": 1}
        base = {"initialize": {"from": str(folder)}, "tune": {"type": "lora"}, "precision": {"type": "fp32"}}
        base |= {**RESUMED, "optimizer.lr": 3e-2, "task.asynchronous": source}
        return make({**base, **(changes or {})}, **more)

    return make_served


def test_a_server_generates_with_the_adapter_of_each_step(
    make_served: MakeRun, done: Callable[[RunConfig], Done]
) -> None:
    config = make_served()
    assert train(config) == 0
    run = done(config)
    own_tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    num_retokenized = 0
    for step in range(1, 5):
        samples = rollout(run, step)
        assert {sample["weights_step"] for sample in samples} == {max(step - 2, 0)}
        assert [sample["choice"] for sample in samples] == [0, 1, 2, 3] * 4
        if step == 4:
            differences = []
            for number in (2, 3):
                stored = open_model(run.folder / "checkpoints" / f"step-{number:08}")
                model = load_model(stored, torch.float32, torch.device("cpu"))
                values = [own_logprobs(model, sample) - torch.tensor(sample["logprobs"]) for sample in samples]
                differences.append(float(torch.cat(values).abs().max()))
            assert differences[0] < 1e-4 < differences[1]
        num_retokenized += sum(own_tokenizer.encode(sample["text"]) != sample["ids"] for sample in samples)
    # What training reads are the ids that were sampled: their text has other ones.
    assert num_retokenized > 0
    assert run.column("staleness") == [0, 1, 1, 1]
    assert run.column("mismatch_max")[0] < 1e-4
    # Nothing stays, neither in the server nor on disk.
    models = json.load(urllib.request.urlopen(f"{config.task.asynchronous.url}/models"))
    assert len(models["data"]) == 1
    assert not any((run.folder / "generation").iterdir())


def test_a_run_whose_server_goes_away_is_saved_and_resumes(
    make_served: MakeRun, done: Callable[[RunConfig], Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_served()
    update = GenerationServer.update

    def go_away(self: GenerationServer, weights: str, step: int) -> None:
        if step == 2:
            self._url = "http://localhost:9/v1"
        update(self, weights, step)

    with monkeypatch.context() as patch, pytest.raises(JinguError) as caught:
        patch.setattr(GenerationServer, "update", go_away)
        train(config)
    words = (
        "the server does not have the weights of step 2, and its answers would be too old: .*in 2 attempts .*refused"
    )
    assert re.search(words, caught.value.what)
    assert done(config).checkpoint().name == "step-00000003"
    assert train(config) == 0
    assert [rollout(done(config), step)[0]["weights_step"] for step in (3, 4)] == [1, 3]


def test_a_server_without_runtime_adapters_is_refused(make_served: MakeRun, serve: Serve) -> None:
    server = serve(template=None)
    config = make_served({"task.asynchronous": {"type": "server", "url": f"{server.url}/v1"}})
    with pytest.raises(JinguError, match="start it with --runtime-adapters") as caught:
        train(config)
    assert "in 1 attempt" in caught.value.what and "--enable-lora" in str(caught.value.fix)


def test_bad_settings_are_refused_before_a_model_is_built(make: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_learning.PolicyLearning, "__init__", lambda *_: pytest.fail("a task was made"))
    server = {"task.asynchronous": {"type": "server"}}
    for changes, words in (
        (
            {**processes(1), "task.importance_cap": None},
            "answers by weights that are 1 step old need importance sampling",
        ),
        ({**processes(1), "task.exact": True}, "do not compute the same log-probabilities"),
        ({**processes(1), "task.max_resampling": 2}, "resampling depends on the rewards"),
        (server, "this run trains other weights"),
        (
            {"task.asynchronous": {"type": "server", "url": "http://localhost:80a/v1"}},
            "'http://localhost:80a/v1' is not",
        ),
        ({"task.asynchronous": {"type": "server", "staleness": 0}, "task.exact": True}, "or another program"),
    ):
        with pytest.raises(JinguError, match=words):
            train(make(changes))


@pytest.mark.slow
def test_a_run_that_is_killed_while_processes_generate_ends_with_the_same_weights(
    make: MakeRun, done: Callable[[RunConfig], Done], tmp_path: Path
) -> None:
    runs = [
        done(train_with_kills(partial(make, {**RESUMED, **processes(1)}), name, tmp_path, kills))
        for name, kills in (("undisturbed", ()), ("killed", (2, 4)))
    ]
    assert_equal_runs(*runs)
    assert rollout(runs[0], 4) == rollout(runs[1], 4)
