"""Preference learning through the one loop: what it learns, its layouts, its reference, and what it refuses."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.align import reference
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.training.commands import train
from jingu.training.run import ResumeOptions
from tests.align.preferences import preference_run, train_here, train_on_ranks
from tests.conftest import MakeRun, peak_unmeasured
from tests.rank_pool import RankPool


def test_dpo_learns_the_preference(tiny_run: MakeRun, base: str, tmp_path: Path, done: Any) -> None:
    changes = {"task": {"type": "dpo"}, "initialize.from": base, "train.steps": 20, "evaluation.every": 20}
    changes |= {"optimizer.lr": 3e-3}
    config = preference_run(tiny_run, tmp_path, changes, name="dpo")
    train_here(config)
    losses = done(config).column("loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-9)
    assert losses[-1] < 0.4
    assert done(config).column("accuracy", "evaluation")[-1] > 0.8


LAYOUTS = [
    {"parallel.shard": 2, "parallel.zero_stage": 3},
    {"parallel.tensor": 2},
    {"parallel.context": 2},
    {"parallel.context": 2, "parallel.context_method": "ring"},
    {"parallel.pipeline": 2},
]
TASKS = [
    {"type": "dpo", "sft_weight": 0.5},
    {"type": "dpo", "label_smoothing": 0.1},
    {"type": "dpo", "loss": "robust", "label_smoothing": 0.1},
    {"type": "dpo", "loss": "hinge"},
    {"type": "dpo", "loss": "ipo"},
    {"type": "dpo", "divergence": "js"},
    {"type": "dpo", "tail_weight": 0.3},
    {"type": "simpo"},
    {"type": "orpo"},
    {"type": "cpo"},
    {"type": "reward", "centering": 0.1},
]


def name_of(task: dict[str, Any]) -> str:
    return " ".join(map(str, task.values()))


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS, ids=name_of)
def test_layouts_are_equal(
    task: dict[str, Any], tiny_run: MakeRun, base: str, tmp_path: Path, done: Any, ranks: RankPool
) -> None:
    changes = {"task": task, "initialize.from": base, "train.steps": 3, "evaluation.every": 3}
    one = preference_run(tiny_run, tmp_path, changes, name="one")
    train_here(one)
    tensors = done(one).tensors()
    for number, layout in enumerate(LAYOUTS):
        config = preference_run(tiny_run, tmp_path, {**changes, **layout}, name=f"many-{number}")
        assert ranks.run(train_on_ranks, 2, config) == [0, 0]
        for name in ("loss", "grad_norm", "accuracy", "margin"):
            # In the first step all margins are 0 but for rounding.
            own, expected = (done(item).column(name)[name in ("accuracy", "margin") :] for item in (config, one))
            assert own == pytest.approx(expected, rel=1e-9), (layout, name)
        for name in ("loss", "accuracy"):
            assert done(config).column(name, "evaluation") == pytest.approx(
                done(one).column(name, "evaluation"), rel=1e-9
            ), (layout, name)
        for name, tensor in done(config).tensors().items():
            torch.testing.assert_close(tensor, tensors[name], rtol=1e-7, atol=1e-9, msg=f"{layout} {name}")


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS, ids=name_of)
def test_lora_and_experts(
    task: dict[str, Any], tiny_run: MakeRun, tmp_path: Path, done: Any, train_on: Any, ranks: RankPool
) -> None:
    """Adapters of a mixture of experts: the reference is the model below them, also with experts divided."""
    experts = {"model.family": "mixtral", "model.experts": {"num_experts": 4, "num_experts_per_token": 2}}
    base = tiny_run({"train.steps": 3, **experts}, name="base")
    train_on(1, base)
    changes = {
        **experts,
        "task": task,
        "initialize.from": f"{base.runs_dir}/base",
        "tune": {"type": "lora", "rank": 4, "target_modules": ["*attention.*"]},
        "train.steps": 4,
        "optimizer.lr": 1e-2,
    }
    one = preference_run(tiny_run, tmp_path, changes, name="one")
    train_here(one)
    losses = done(one).column("loss")
    assert losses[-1] < losses[0]
    if task in (TASKS[1], {"type": "dpo", "tail_weight": 0.3}, TASKS[-1]):
        assert losses[0] == pytest.approx(math.log(2), abs=1e-9 if task["type"] == "dpo" else 0.05)
    assert all(".lora_" in name or "score" in name for name in done(one).tensors() if name.startswith("model/"))
    layout = {"parallel.shard": 2, "parallel.expert": 2, "parallel.zero_stage": 2}
    many = preference_run(tiny_run, tmp_path, {**changes, **layout}, name="many")
    assert ranks.run(train_on_ranks, 2, many) == [0, 0]
    assert done(many).column("loss") == pytest.approx(losses, rel=1e-9)
    assert done(many).column("balance_loss") == pytest.approx(done(one).column("balance_loss"), rel=1e-9)


def refusal(config: RunConfig) -> str:
    with pytest.raises(JinguError) as error, peak_unmeasured():
        train(config)
    return str(error.value)


def test_what_does_not_fit_is_refused(tiny_run: MakeRun, base: str, tmp_path: Path) -> None:
    dpo = {"task": {"type": "dpo"}, "initialize.from": base}
    lora = {"tune": {"type": "lora", "dropout": 0.1}}
    assert "tune.dropout: the task dpo does not support it, and it is 0.1" in refusal(
        preference_run(tiny_run, tmp_path, {**dpo, **lora}, name="a")
    )
    assert "needs a model to start from" in refusal(
        preference_run(tiny_run, tmp_path, {"task": {"type": "dpo"}}, name="b")
    )
    assert "preference data has rejected answers, which pretraining would imitate" in refusal(
        preference_run(tiny_run, tmp_path, {}, name="c")
    )
    assert "the task kto learns from labels of preference data" in refusal(
        preference_run(tiny_run, tmp_path, {**dpo, "task": {"type": "kto"}}, name="d")
    )
    assert "the task dpo learns from pairs of preference data" in refusal(tiny_run(dpo, name="e"))


def test_a_reference_of_another_vocabulary_is_refused(
    tiny_run: MakeRun, base: str, tmp_path: Path, train_on: Any
) -> None:
    other = tiny_run({"model.vocab_size": 400, "train.steps": 1}, name="other")
    train_on(1, other)
    changes = {"task": {"type": "dpo", "reference": f"{other.runs_dir}/other"}, "initialize.from": base}
    words = refusal(preference_run(tiny_run, tmp_path, changes, name="dpo"))
    assert words.startswith("task.reference: the model has a vocabulary of 400 entries")


def test_another_reference_is_noticed_before_the_first_step(
    tiny_run: MakeRun, base: str, tmp_path: Path, train_on: Any, done: Any
) -> None:
    other = tiny_run({"train.steps": 6, "seed": 9}, name="other")
    train_on(1, other)
    changes = {"task": {"type": "dpo", "reference": f"{other.runs_dir}/other"}, "initialize.from": base}
    config = preference_run(tiny_run, tmp_path, changes, name="dpo")
    assert "the model does not start as its reference" in refusal(config)
    assert not done(config).lines("train")


def test_the_reference_is_computed_once_and_kept(
    tiny_run: MakeRun, base: str, tmp_path: Path, done: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"task": {"type": "dpo"}, "initialize.from": base, "train.steps": 4, "train.on_divergence": "continue"}
    whole = preference_run(tiny_run, tmp_path, changes, name="whole")
    train_here(whole)
    # Another run on the same data and reference computes nothing, nor does a resumed one, whose reference is gone.
    monkeypatch.setattr(reference, "compute_tables", None)
    resumed = preference_run(tiny_run, tmp_path, {**changes, "checkpoint.every": 2}, name="resumed")
    stop = resumed.model_copy(update={"train": resumed.train.model_copy(update={"steps": 2})})
    train_here(stop)
    shutil.rmtree(base)
    with peak_unmeasured():
        assert train(resumed, resume_options=ResumeOptions(["train.steps"])) == 0
    # Resumed, it ends with the very weights.
    expected = done(whole).tensors()
    for name, tensor in done(resumed).tensors().items():
        assert torch.equal(tensor, expected[name]), name
