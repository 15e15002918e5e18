"""Learning from rewards, end to end on tiny models."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import jingu
from jingu.align import policy_learning
from jingu.align.prompt_set import ANSWER_NAMES
from jingu.align.reference import RECORD
from jingu.align.rollout_commands import _best_rows, replay, score
from jingu.align.rollouts import Generator
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.formats.models import open_model
from jingu.report.page import render_page
from jingu.report.record import read_run
from jingu.training import loop
from jingu.training.commands import train
from jingu.tune.row_formats import parse_row
from jingu.watch.activity import Activity
from tests.align.policies import CRITICS, LAYOUTS, rollout, train_here, train_with_kills
from tests.conftest import Done, MakeRun
from tests.rank_pool import RankPool

pytestmark = pytest.mark.usefixtures("peak")


def test_a_step_leaves_a_record(make: MakeRun, done: Callable[[RunConfig], Done]) -> None:
    config = make()
    assert train(config) == 0
    run = done(config)
    samples = rollout(run, 2)
    assert [(sample["weights_step"], sample["choice"]) for sample in samples] == [(1, n) for n in range(4)] * 4
    line = run.lines("train")[1]
    rewards = torch.tensor([sample["reward"] for sample in samples]).double()
    assert line["reward"] == pytest.approx(rewards.mean().item())
    assert line["rewards/regex"] == line["reward"]
    assert line["entropy"] == pytest.approx(5.96, abs=0.05)  # log 389, nearly
    assert line["mismatch_max"] < 1e-13
    # Group advantages, by hand.
    groups = rewards.view(4, 4)
    expected = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    first = torch.tensor([sample["advantages"][0] for sample in samples]).double()
    assert torch.allclose(first, expected.flatten())


def test_each_batch_of_a_scored_rollout_is_progress(make: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probabilities of all answers may take longer than many updates, and the watchdog knows only updates."""
    phases: list[str] = []
    enter = Activity.enter

    def record(activity: Activity, phase: str, *arguments: Any, **more: Any) -> None:
        phases.append(phase)
        enter(activity, phase, *arguments, **more)

    monkeypatch.setattr(Activity, "enter", record)
    assert train(make({"task.updates_per_step": 2, "train.steps": 1, "schedule.warmup": 0})) == 0
    # 16 answers in micro-batches of 4.
    assert phases.count("log-probs") == 1 + 4


def test_the_plan_counts_answers_and_other_models(make_ppo: MakeRun, done: Callable[[RunConfig], Done]) -> None:
    config = make_ppo({"train.steps": 5, "train.log_every": 1})
    assert train(config) == 0
    line = done(config).lines("plan")[-1]
    phases = {"generation", "log-probabilities", "reference", "critic"}
    for side in ("planned", "actual"):
        assert min(line[side][term] for term in phases) > 0
        assert line[f"{side}_seconds"] == pytest.approx(sum(line[side].values()))


def test_a_run_that_stops_within_a_rollout_ends_with_the_same_weights(
    make: MakeRun, done: Callable[[RunConfig], Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make(name="whole")
    parts = make({"checkpoint.every": 1, "checkpoint.async_save": False}, name="parts")
    assert train(whole) == 0
    generate = Generator.generate
    calls = []

    def fail_once(self: Generator, *arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            generate(self, *arguments, **options)
            raise KeyboardInterrupt
        return generate(self, *arguments, **options)

    monkeypatch.setattr(Generator, "generate", fail_once)
    with pytest.raises(KeyboardInterrupt):
        train(parts)
    assert train(parts) == 0
    assert len(calls) == 4
    tensors = done(parts).tensors()
    for name, tensor in done(whole).tensors().items():
        assert torch.equal(tensor, tensors[name]), name
    assert rollout(done(whole), 3) == rollout(done(parts), 3)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.05), ("fp8", 0.05)])
def test_rollouts_compute_what_training_computes(
    precision: str, tolerance: float, make: MakeRun, done: Callable[[RunConfig], Done]
) -> None:
    config = make({"precision": {"type": precision}, "model.intermediate_size": 48, "train.steps": 1})
    assert train(config) == 0
    assert done(config).column("mismatch_max")[0] < tolerance


FOUR_RANKS = ("4 of zero3", "tensor and pipeline")
# The model that a run starts from, and what is trained of it.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}),
    "lora": ({}, {"tune": {"type": "lora", "rank": 4}}),
    "mixture": ({"model.family": "mixtral"}, {"model.family": "mixtral"}),
}


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("pipeline", "dense"),
        *(
            pytest.param(layout, model, marks=pytest.mark.slow)
            for model, layouts in (
                ("dense", ("zero3", "tensor", "context", *FOUR_RANKS)),
                ("lora", ("zero3", "tensor", *FOUR_RANKS)),
                ("mixture", ("expert", "4 of zero3")),
            )
            for layout in layouts
        ),
    ],
)
def test_layouts_agree(
    layout: str, model: str, make: MakeRun, ranks: RankPool, done: Callable[[RunConfig], Done]
) -> None:
    # Two updates, so that the step needs log-probabilities by the old weights; and KL from a reference.
    first, trained = MODELS[model]
    start = make({**first, "train.steps": 1}, name="start")
    assert train(start) == 0
    task = {"task.updates_per_step": 2, "task.kl": {"type": "kl", "beta": 0.1}, "train.steps": 2}
    task |= {"initialize": {"from": str(done(start).folder)}, **trained}
    single = make(task, name="single")
    assert train(single) == 0
    world, changes = LAYOUTS[layout]
    config = make({**task, "batch.micro_batch_size": 2, **changes}, name="divided")
    assert ranks.run(train_here, world, [config]) == [[0]] * world
    for step in (1, 2):
        for one, other in zip(rollout(done(single), step), rollout(done(config), step), strict=True):
            assert one["ids"] == other["ids"]
    for name in ("loss", "grad_norm", "reward", "entropy", "kl"):
        expected = done(single).column(name)
        assert done(config).column(name) == pytest.approx(expected, rel=1e-9, abs=1e-12), name
    tensors = done(config).tensors()
    for name, tensor in done(single).tensors().items():
        assert torch.allclose(tensor.double(), tensors[name].double(), rtol=1e-9, atol=1e-9), name


@pytest.mark.parametrize("critic", ["none", *CRITICS])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 6])
def test_prompts_that_answers_share_change_no_number(
    critic: str,
    micro_batch_size: int,
    make: MakeRun,
    make_ppo: MakeRun,
    done: Callable[[RunConfig], Done],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Micro-batches of one answer, of some to one prompt or to two, and of all of an update.
    changes = {"task.answers_per_prompt": 3, "batch.global_batch_size": 6, "batch.micro_batch_size": micro_batch_size}
    changes |= {"task.kl": {"type": "kl", "beta": 0.1}, "train.steps": 2}
    runs = []
    for name in ("shared", "apart"):
        if critic == "none":
            start = str(done(make(name="start")).folder)
            config = make({**changes, "task.updates_per_step": 2, "initialize": {"from": start}}, name=name)
        else:
            config = make_ppo(changes, critic=critic, name=name)
        assert train(config) == 0
        runs.append(done(config))
        monkeypatch.setattr(policy_learning, "can_share_prompts", lambda _: False)
    shared, apart = runs
    for step in (1, 2):
        assert [one["ids"] for one in rollout(shared, step)] == [other["ids"] for other in rollout(apart, step)]
    for name in ("loss", "grad_norm", "kl", "entropy", *(("value_loss",) if critic != "none" else ())):
        assert shared.column(name) == pytest.approx(apart.column(name), rel=1e-9, abs=1e-12), name
    tensors = shared.tensors()
    for name, tensor in apart.tensors().items():
        assert torch.allclose(tensor.double(), tensors[name].double(), rtol=1e-9, atol=1e-9), name


@pytest.mark.parametrize("critic", CRITICS)
def test_ppo_trains_policy_and_critic(critic: str, make_ppo: MakeRun, done: Callable[[RunConfig], Done]) -> None:
    config = make_ppo({"train.steps": 4}, critic=critic)
    assert train(config) == 0
    run = done(config)
    assert all(0 < value < 10 for value in run.column("value_loss"))
    assert all(value > 0 for value in run.column("grad_norm"))
    # Whitened over the tokens of a step.
    values = [value for sample in rollout(run, 1) for value in sample["advantages"]]
    advantages = torch.tensor(values, dtype=torch.float64)
    assert advantages.mean().item() == pytest.approx(0.0, abs=1e-9)
    assert advantages.std().item() == pytest.approx(1.0, abs=1e-6)
    # The trained model opens like any other.
    assert not open_model(run.folder).spec.value_head
    assert jingu.load(run.folder).generate(["def f"], max_tokens=2)


def test_a_run_that_goes_back_lowers_the_rates_of_policy_and_critic(
    make_ppo: MakeRun, done: Callable[[RunConfig], Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of step 2 is infinite while the rate is the full one."""
    step = loop.train_step
    rates: list[tuple[float, float]] = []

    def planted(model: Any, optimizer: Any, task: Any, *arguments: Any, **keywords: Any) -> Any:
        result = step(model, optimizer, task, *arguments, **keywords)
        rates.append((optimizer.param_groups[0]["lr"], task._critic.optimizer.param_groups[0]["lr"]))
        is_high = rates[-1][0] > 0.7 * config.optimizer.lr
        return replace(result, loss=result.loss * (math.inf if is_high and keywords["step"] >= 2 else 1.0))

    monkeypatch.setattr(loop, "train_step", planted)
    changes = {"train.on_divergence": "rollback", "checkpoint.every": 1, "train.steps": 4}
    config = make_ppo({**changes, "schedule": {"type": "constant", "warmup": 0}})
    assert train(config) == 0
    assert [line["lr_scale"] for line in done(config).lines("divergence")] == [0.5]
    scales = [(policy / rates[0][0], critic / rates[0][1]) for policy, critic in rates]
    assert scales[0] == (1.0, 1.0) and scales[-1] == (0.5, 0.5)
    assert all(policy == critic for policy, critic in scales)


def test_a_critic_starts_from_a_reward_model(
    make_ppo: MakeRun, tiny_run: MakeRun, done: Callable[[RunConfig], Done], tmp_path: Path
) -> None:
    config = make_ppo({"task.critic.model": "nowhere"})
    with pytest.raises(JinguError, match="nowhere"):
        train(config)
    with pytest.raises(JinguError, match="fp16 scales the loss of one model"):
        train(make_ppo({"precision": {"type": "fp16"}}, name="half"))
    other = tiny_run({"model.vocab_size": 400, "train.steps": 1, "schedule.warmup": 0}, name="other")
    assert train(other) == 0
    with pytest.raises(JinguError, match=r"^task.critic.model: the model has a vocabulary of 400 entries"):
        train(make_ppo({"task.critic.model": str(done(other).folder)}, name="odd"))


@pytest.mark.parametrize("critic", ["separate", pytest.param("shared", marks=pytest.mark.slow)])
def test_ppo_resumes_with_its_critic(critic: str, make_ppo: MakeRun, done: Callable[[RunConfig], Done]) -> None:
    whole = make_ppo({"train.steps": 3}, critic=critic, name="whole")
    assert train(whole) == 0
    parts = make_ppo({"train.steps": 3, "checkpoint.every": 1}, critic=critic, name="parts")
    assert train(parts) == 0
    # As after a kill: without the last checkpoint.
    shutil.rmtree(max((done(parts).folder / "checkpoints").iterdir()))
    assert train(parts) == 0
    tensors = done(parts).tensors()
    assert any("score.weight" in name for name in tensors)
    for name, tensor in done(whole).tensors().items():
        assert torch.equal(tensor, tensors[name]), name


@pytest.mark.parametrize(
    ("critic", "layout"),
    [
        ("separate", "zero3"),
        ("shared", "tensor"),
        *(
            pytest.param(critic, layout, marks=pytest.mark.slow)
            for critic, layouts in (
                ("separate", ("tensor", "pipeline", "context", *FOUR_RANKS)),
                ("shared", ("zero3", "pipeline", "context", *FOUR_RANKS)),
            )
            for layout in layouts
        ),
    ],
)
def test_layouts_agree_on_ppo(
    critic: str, layout: str, make_ppo: MakeRun, ranks: RankPool, done: Callable[[RunConfig], Done]
) -> None:
    single = make_ppo(critic=critic, name="single")
    assert train(single) == 0
    world, changes = LAYOUTS[layout]
    config = make_ppo(changes, critic=critic, name="divided")
    assert ranks.run(train_here, world, [config]) == [[0]] * world
    for name in ("loss", "grad_norm", "reward", "value_loss", "explained_variance", "kl"):
        assert done(config).column(name) == pytest.approx(done(single).column(name), rel=1e-9, abs=1e-12), name
    tensors = done(config).tensors()
    for name, tensor in done(single).tensors().items():
        assert torch.allclose(tensor.double(), tensors[name].double(), rtol=1e-9, atol=1e-9), name


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_at_learning_rate_0_the_ratio_stays_1(family: str, make: MakeRun, done: Callable[[RunConfig], Done]) -> None:
    model = {"model.family": family}
    config = make({**model, "task.updates_per_step": 2, "task.prompts_per_step": 4, "optimizer.lr": 1e-300})
    assert train(config) == 0
    # With equal weights of the groups, the loss is the mean of -A, and nothing is clipped.
    assert done(config).column("clipped") == [0.0] * 3
    assert max(done(config).column("mismatch_max")) < 1e-13


def test_bad_settings_are_refused_before_a_model_is_built(
    make: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_learning.PolicyLearning, "__init__", lambda *_: pytest.fail("a task was made"))
    (tmp_path / "functions.py").write_text("def reward(completions, gold): ...\n")
    function = f"{tmp_path}/functions.py:reward"
    for changes, words in (
        ({"task.rewards": []}, "there is no reward to train on"),
        ({"task.rewards": [{"type": "number", "column": "gold"}]}, "the rows have no column gold"),
        ({"task.rewards": [{"type": "python", "function": "nowhere:reward"}]}, "nowhere cannot be imported"),
        ({"task.rewards": [{"type": "python", "function": function}]}, "missing a required argument: 'gold'"),
        ({"task.updates_per_step": 3, "batch.global_batch_size": 4}, "a multiple of task.updates_per_step, 3"),
        ({"batch.global_batch_size": 7}, "it is 7, and should be left out, or 16"),
        ({"task.max_new_tokens": 16}, "exceed batch.sequence_length 17"),
        ({"train.neftune_alpha": 5.0}, "with noise"),
    ):
        with pytest.raises(JinguError, match=words):
            train(make(changes))
    task = {"type": "distill", "prompts": make().task.prompts, "beta": 0.5, "loss": "grpo", "max_new_tokens": 6}
    with pytest.raises(JinguError, match="should be dapo: with"):
        train(make({"task": task, "batch.global_batch_size": 128}))


def test_a_step_is_replayed_and_its_answers_are_scored(
    make: MakeRun, done: Callable[[RunConfig], Done], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = make({"checkpoint.every": 1, "checkpoint.async_save": False, "checkpoint.keep_last": 5})
    assert train(config) == 0
    folder = done(config).folder
    assert replay(folder, 3) == 0
    assert "from the checkpoint of step 2: the same bytes" in capsys.readouterr().out
    path = folder / "rollouts" / "step_1.jsonl"
    assert score(config, path, tmp_path / "scored.jsonl") == 0
    scored = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    # The best answer to each prompt, as a row to tune on.
    assert score(config, path, tmp_path / "best.jsonl", best=True) == 0
    best = [json.loads(line) for line in (tmp_path / "best.jsonl").read_text().splitlines()]
    groups = {
        prompt: [row["reward"] for row in scored if row["prompt"] == prompt]
        for prompt in dict.fromkeys(row["prompt"] for row in scored)
    }
    assert [(row["prompt"], row["reward"]) for row in best] == [
        (prompt, max(group)) for prompt, group in groups.items()
    ]
    assert all(parse_row(row) for row in best)
    assert [row["reward"] for row in scored] == [sample["reward"] for sample in rollout(done(config), 1)]
    assert "length (audit)" in capsys.readouterr().out
    # The first difference is named, down to a single bit of a number, and to a space.
    lines = path.read_text().split("\n")
    third = json.loads(lines[2])
    logprob = third["logprobs"][1]
    third["logprobs"][1] *= 1.0 + 2**-52
    changes = {
        f"line 3 differs in logprobs[1]: {third['logprobs'][1]!r} was recorded, and now it is {logprob!r}": json.dumps(
            third, ensure_ascii=False
        ),
        "line 3 has other bytes for the same values": lines[2].replace('"row": ', '"row":  '),
    }
    for words, line in changes.items():
        path.write_text("\n".join([*lines[:2], line, *lines[3:]]))
        assert replay(folder, 1) == 1
        assert f"from the checkpoint of step 0: {words}." in capsys.readouterr().out
    with pytest.raises(JinguError, match="no answers of step 9"):
        replay(folder, 9)
    with pytest.raises(JinguError, match="line 1 is not a JSON object"):
        (tmp_path / "bad.jsonl").write_text("[1]\n")
        score(config, tmp_path / "bad.jsonl")


def test_best_answers_to_messages_are_conversations(make: MakeRun, tmp_path: Path) -> None:
    prompts = [[{"role": "system", "content": system}, {"role": "user", "content": "Q"}] for system in ("one", "two")]
    answers = ((0, "A", 0.5), (0, "B", None), (1, "A", 0.5), (1, "C", 0.7))
    best = _best_rows([{"prompt": prompts[at], "completion": text, "reward": reward} for at, text, reward in answers])
    assert [row["reward"] for row in best] == [0.5, 0.7]
    texts = [[message.content for message in parse_row(row).messages] for row in best]
    assert texts == [["one", "Q", "A"], ["two", "Q", "C"]]
    (tmp_path / "room.py").write_text("class Room:\n    def begin(self, row): ...\n    step = score = begin\n")
    with pytest.raises(JinguError, match="scored by rewards alone"):
        score(make({"task.environment": {"path": f"{tmp_path}/room.py:Room"}}))


@pytest.mark.parametrize("name", sorted(ANSWER_NAMES - {"prompt"}))
def test_a_column_with_a_name_of_the_answer_is_refused(name: str, make: MakeRun, tmp_path: Path) -> None:
    """Rewards would compare the answer with itself, or never see it."""
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "def f"}}\n{{"prompt": "def g", "{name}": ["("]}}\n')
    for reward in ({"type": "http"}, {"type": "judge"}, {"type": "python"}, {"type": "exact"}):
        config = make({"task.prompts": str(path), "task.rewards": [reward]})
        with pytest.raises(JinguError, match=f"line 2: field {name}: rewards receive a value of this name") as caught:
            train(config)
        assert caught.value.where == path
    with pytest.raises(JinguError, match=f"the name {name} is that of the prompt or of the answer itself"):
        train(make({"task.rewards": [{"type": "exact", "column": name}]}))


@pytest.mark.parametrize(
    ("reward", "value", "words"),
    [
        ("exact", "null", "line 3, column answer: expected a text, not null"),
        ("number", '"4 or 5"', "line 3, column answer: expected one number and nothing else"),
        ("regex", '"["', "line 3, column answer: it is not a regular expression"),
    ],
)
def test_expected_values_are_checked_before_a_model_is_built(
    reward: str, value: str, words: str, make: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jingu.align.policy_learning.PolicyLearning.__init__", lambda *_: pytest.fail("it was built"))
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "def f", "answer": "5"}}\n\n{{"prompt": "def g", "answer": {value}}}\n')
    with pytest.raises(JinguError, match=words) as caught:
        train(make({"task.prompts": str(path), "task.rewards": [{"type": reward}]}))
    assert caught.value.where == str(path)


def test_groups_without_a_difference_are_replaced(make: MakeRun, done: Callable[[RunConfig], Done]) -> None:
    config = make({"task.max_resampling": 3, "task.answers_per_prompt": 2, "batch.global_batch_size": 8})
    assert train(config) == 0
    plain = make({"task.answers_per_prompt": 2, "batch.global_batch_size": 8}, name="plain")
    assert train(plain) == 0
    assert done(plain).column("dead_groups")[0] > done(config).column("dead_groups")[0]
    assert done(config).column("resampled_groups")[0] > 0


@pytest.mark.parametrize("advantage", ["rloo", "reinforce++", "remax", "best"])
def test_every_baseline_trains(advantage: str, make: MakeRun, done: Callable[[RunConfig], Done]) -> None:
    start = make({"train.steps": 1}, name="start")
    assert train(start) == 0
    task = {"task.advantage": advantage, "task.kl": {"type": "kl", "estimator": "k1", "beta": 0.1}, "train.steps": 2}
    config = make({**task, "task.overlong_tokens": 2, "initialize": {"from": str(done(start).folder)}})
    assert train(config) == 0
    samples = rollout(done(config), 1)
    # At first the model is its own reference, and only shaping changes a reward.
    assert done(config).column("kl")[0] == pytest.approx(0.0, abs=1e-12)
    for sample in samples:
        penalty = {"length": -1.0}.get(sample["finish_reason"], -min(max((len(sample["ids"]) - 4) / 2, 0), 1))
        assert sample["reward"] == pytest.approx(sample["rewards"]["regex"] + penalty)
    advantages = torch.tensor([sample["advantages"][0] for sample in samples])
    if advantage != "remax":
        assert advantages.abs().max() > 0
    assert all(value > 0 for value in done(config).column("grad_norm"))


def test_the_report_shows_what_was_learned(make: MakeRun, done: Callable[[RunConfig], Done]) -> None:
    config = make()
    assert train(config) == 0
    page = render_page(read_run(done(config).folder))
    for title in ("Rewards", "Length", "Answers and groups", "Entropy and KL", "Mismatch of generation and training"):
        assert f"<b>{title}</b>" in page
    # Its loss is not that of predicted text.
    assert "Bits per byte" not in page and '<b>Loss</b> <span class="unit">of the task</span>' in page
    # Four of five prompts a step: most of them recur.
    assert "Answers over time" in page and page.count('<pre class="prompt">def f') == 5


def test_models_of_another_vocabulary_are_refused(
    make: MakeRun, tiny_run: MakeRun, done: Callable[[RunConfig], Done]
) -> None:
    other = tiny_run({"model.vocab_size": 400, "train.steps": 1, "schedule.warmup": 0}, name="other")
    assert train(other) == 0
    folder = str(done(other).folder)
    teacher = {"type": "distill", "prompts": make().task.prompts, "teacher": folder, "max_new_tokens": 6}
    teacher |= {"prompts_per_step": 4, "answers_per_prompt": 4}
    for changes, where in (
        ({"task.kl": {"type": "kl", "reference": folder}}, "task.kl.reference"),
        ({"task": teacher}, "task.teacher"),
    ):
        with pytest.raises(JinguError, match=f"^{where}: the model has a vocabulary of 400 entries"):
            train(make(changes, name=where))


def test_models_with_other_tokens_are_refused(
    make_ppo: MakeRun, make: MakeRun, done: Callable[[RunConfig], Done]
) -> None:
    """Of the same number, but two of them have changed their places."""
    other = make({"train.steps": 1, "schedule.warmup": 0}, name="other")
    assert train(other) == 0
    folder = done(other).folder
    path = folder / "tokenizer" / "tokenizer.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    vocab = values["model"]["vocab"]
    vocab["x"], vocab["y"] = vocab["y"], vocab["x"]
    path.write_text(json.dumps(values), encoding="utf-8")
    teacher = {"type": "distill", "prompts": make().task.prompts, "teacher": str(folder), "max_new_tokens": 6}
    teacher |= {"prompts_per_step": 4, "answers_per_prompt": 4}
    critic = {"task.critic": {"type": "separate", "model": str(folder)}}
    for config, where in (
        (make({"task.kl": {"type": "kl", "reference": str(folder)}}, name="kl"), "task.kl.reference"),
        (make({"task": teacher}, name="teacher"), "task.teacher"),
        (make_ppo(critic, name="critic"), "task.critic.model"),
    ):
        with pytest.raises(JinguError, match=f"^{where}: 2 of the [0-9]+ tokens of the model have other ids"):
            train(config)


def test_a_resumed_run_refuses_another_reference(make: MakeRun, done: Callable[[RunConfig], Done]) -> None:
    first, second = (make({"train.steps": 1, "schedule.warmup": 0, "seed": seed}, name=f"{seed}") for seed in (1, 2))
    assert train(first) == train(second) == 0
    kl = {"task.kl": {"type": "kl", "reference": str(done(first).folder)}, "schedule.warmup": 0}
    config = make({**kl, "train.steps": 2, "checkpoint.every": 1}, name="kl")
    assert train(config) == 0
    record = done(config).folder / RECORD
    fingerprint = json.loads(record.read_text())["fingerprint"]
    assert fingerprint == rollout(done(config), 1)[0]["reference"]
    # As after a kill: without the last checkpoint.
    shutil.rmtree(max((done(config).folder / "checkpoints").iterdir()))
    shutil.rmtree(done(first).folder)
    shutil.copytree(done(second).folder, done(first).folder)
    with pytest.raises(JinguError, match=r"^task\.kl\.reference: .*/1 is not the model with which the run started"):
        train(config)
    record.unlink()
    assert train(config) == 0
    assert json.loads(record.read_text())["fingerprint"] != fingerprint


@pytest.mark.parametrize("beta", [*(pytest.param(beta, marks=pytest.mark.slow) for beta in (None, 0.0)), 0.5])
def test_a_student_comes_closer_to_its_teacher(
    beta: float | None, make: MakeRun, tiny_run: MakeRun, done: Callable[[RunConfig], Done]
) -> None:
    teacher = tiny_run(name="teacher")
    assert train(teacher) == 0
    task = make().task
    settings = {"type": "distill", "prompts": task.prompts, "teacher": str(done(teacher).folder), "max_new_tokens": 6}
    settings["beta"] = beta
    changes = {"task": {**settings, "prompts_per_step": 4, "answers_per_prompt": 4}, "train.steps": 20}
    config = make({**changes, "batch.global_batch_size": 16, "optimizer.lr": 1e-2}, name="student")
    assert train(config) == 0
    kl = done(config).column("kl")
    assert sum(kl[-3:]) < 0.7 * sum(kl[:3])
    # The advantage is the teacher's log-probability minus the student's; their mean is minus the divergence.
    advantages = [value for sample in rollout(done(config), 1) for value in sample["advantages"]]
    assert sum(advantages) / len(advantages) == pytest.approx(-kl[0])


@pytest.mark.parametrize(
    "layout", [pytest.param("zero3", marks=pytest.mark.slow), "tensor", pytest.param("context", marks=pytest.mark.slow)]
)
def test_layouts_agree_on_divergences(
    layout: str, make: MakeRun, tiny_run: MakeRun, ranks: RankPool, done: Callable[[RunConfig], Done]
) -> None:
    teacher = tiny_run({"train.steps": 2}, name="teacher")
    assert train(teacher) == 0
    task = {"type": "distill", "teacher": str(done(teacher).folder), "beta": 0.3, "temperature": 0.9}
    task |= {"prompts": make().task.prompts, "prompts_per_step": 4, "answers_per_prompt": 4, "max_new_tokens": 6}
    base = {"task": task, "train.steps": 2, "batch.global_batch_size": 16}
    single = make(base, name="single")
    assert train(single) == 0
    world, changes = LAYOUTS[layout]
    config = make({**base, **changes, "batch.micro_batch_size": 2}, name="divided")
    assert ranks.run(train_here, world, [config]) == [[0]] * world
    for name in ("loss", "grad_norm", "kl"):
        assert done(config).column(name) == pytest.approx(done(single).column(name), rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize(
    ("family", "precision"), [("llama", "fp32"), ("llama", "fp64"), ("mixtral", "fp32"), ("qwen3", "fp32")]
)
def test_exact_training_computes_what_was_generated(
    family: str, precision: str, make: MakeRun, done: Callable[[RunConfig], Done]
) -> None:
    changes = {"model.family": family, "precision": {"type": precision}, "task.exact": True}
    config = make(changes)
    assert train(config) == 0
    assert done(config).column("mismatch_max") == [0.0] * 3
    # The same gradients, up to rounding. (The first step's data is the same.)
    plain = make({**changes, "task.exact": False}, name="plain")
    assert train(plain) == 0
    assert done(config).column("grad_norm")[0] == pytest.approx(done(plain).column("grad_norm")[0], rel=1e-4)


@pytest.mark.slow
def test_exact_training_of_long_rows_with_adapters(
    make: MakeRun, done: Callable[[RunConfig], Done], tmp_path: Path
) -> None:
    start = make({"train.steps": 1, "batch.sequence_length": 320}, name="start")
    assert train(start) == 0
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "def f(x, y): return x\n" * 15}) + "\n")
    changes: dict[str, Any] = {
        "task.exact": True,
        "task.prompts": str(tmp_path / "long.jsonl"),
        "task.temperature": 0.7,
    }
    changes |= {"batch.sequence_length": 320, "tune": {"type": "lora"}, "precision": {"type": "fp32"}}
    config = make({**changes, "initialize": {"from": str(done(start).folder)}, "task.updates_per_step": 2})
    assert train(config) == 0
    assert len(rollout(done(config), 1)[0]["prompt_ids"]) > 128  # several spans of keys
    assert done(config).column("mismatch_max") == [0.0] * 3


@pytest.mark.slow
def test_a_run_that_is_killed_within_rollouts_ends_with_the_same_weights(
    make: MakeRun, done: Callable[[RunConfig], Done], tmp_path: Path
) -> None:
    finished = [
        done(train_with_kills(partial(make, {"checkpoint.every": 1}), name, tmp_path, kills))
        for name, kills in (("undisturbed", ()), ("killed", (1, 3, 4)))
    ]
    undisturbed, killed = (run.tensors() for run in finished)
    assert all(torch.equal(tensor, killed[name]) for name, tensor in undisturbed.items())
    assert rollout(finished[0], 3) == rollout(finished[1], 3)
