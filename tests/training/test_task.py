"""A task of another room, injected into the loop: its own denominator, groups of rows and evaluation."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from jingu.data.batch import Batch
from jingu.errors import JinguError
from jingu.parallel.pipeline import ParallelModel
from jingu.runtime.ranks import join_process_group
from jingu.runtime.signals import StopRequest
from jingu.training.commands import train_on_rank
from jingu.training.pretraining import Pretraining
from jingu.training.run import Run
from jingu.training.task import Evaluation, TaskFactory


class PerSequence(Pretraining):
    """Averages the loss over sequences, and evaluates by a number of its own."""

    def denominator(self, batch: Batch) -> float:
        assert len(batch.tokens) % 2 == 0
        return float(len(batch.tokens))

    def evaluate(self, model: Any, micro_batch_size: int, *, final: bool) -> Evaluation:
        return Evaluation({"loss": 1.5, "accuracy": 0.75, "pairs": 4}, [("prompt", "answer")])


def create(run: Run, mesh: DeviceMesh, compile: bool) -> PerSequence:
    return PerSequence.from_run(run, mesh, compile)


FACTORY = TaskFactory(create, rows_per_group=lambda config: 2)


def test_an_injected_task_decides_denominator_groups_and_evaluation(tiny_run, train_on, done, peak, capsys):
    changes = {"train.steps": 1, "train.max_grad_norm": None}
    tokens = tiny_run(changes, name="tokens")
    train_on(1, tokens)
    sequences = tiny_run({**changes, "batch.micro_batch_size": "auto", "evaluation.every": 1}, name="sequences")
    with join_process_group("cpu", 1) as ranks:
        assert train_on_rank(sequences, ranks, StopRequest(), task_factory=FACTORY) == 0
    length = sequences.batch.sequence_length
    for name in ("loss", "grad_norm"):
        expected = [length * value for value in done(tokens).column(name)]
        assert done(sequences).column(name) == pytest.approx(expected, rel=1e-12)
    (evaluation,) = done(sequences).lines("evaluation")
    assert {name: evaluation[name] for name in ("loss", "accuracy", "pairs")} == {
        "loss": 1.5, "accuracy": 0.75, "pairs": 4,
    }  # fmt: skip
    assert [(line["prompt"], line["text"]) for line in done(sequences).lines("sample")] == [("prompt", "answer")]
    assert "step 1: validation loss 1.5000, accuracy 0.7500\n" in capsys.readouterr().err


def test_the_loss_scale_follows_the_denominator_of_the_task(tiny_run, monkeypatch):
    """The loss of fp16 is scaled for the mean over the task's units, and not over tokens."""
    factors, honest = [], ParallelModel.train_micro_batches

    def noting(self: ParallelModel, batches: Any, loss: Any, weight_n: Any) -> Any:
        factors.append(float(weight_n[0]))
        return honest(self, batches, loss, weight_n)

    monkeypatch.setattr(ParallelModel, "train_micro_batches", noting)
    precision = {"type": "fp16", "initial_loss_scale": 1024.0}
    config = tiny_run({"train.steps": 1, "precision": precision, "batch.micro_batch_size": "auto"})
    with join_process_group("cpu", 1) as ranks:
        assert train_on_rank(config, ranks, StopRequest(), task_factory=FACTORY) == 0
    # The mean of 8 sequences: their sum is scaled by an eighth.
    assert factors == [1024.0 / 8]


def test_rows_of_a_group_must_fit_into_one_micro_batch(tiny_run):
    config = tiny_run({"batch.micro_batch_size": 1})
    with join_process_group("cpu", 1) as ranks, pytest.raises(JinguError) as error:
        train_on_rank(config, ranks, StopRequest(), task_factory=FACTORY)
    assert str(error.value) == (
        "batch.micro_batch_size 1 does not divide batch.global_batch_size 8 in groups of 2: take 2, or auto."
    )
