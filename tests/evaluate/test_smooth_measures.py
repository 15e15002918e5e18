"""Tasks during training: measures by hand, the same as those of the finished model, early stopping, the report."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jingu.errors import JinguError
from jingu.evaluate.evaluation import prepare_task
from jingu.evaluate.scoring import AnswerCache, Scorer
from jingu.evaluate.smooth_measures import compare_with_chance, compute_smooth_measures, describe
from jingu.infer.engine import Engine
from jingu.infer.inference_model import InferenceModel, load
from jingu.report.page import render_page
from jingu.report.record import read_run
from jingu.training.commands import train
from tests.conftest import MakeRun
from tests.evaluate.conftest import ROWS, WriteTask, load_task


def test_measures_of_choices_by_hand(tiny: InferenceModel, write_task: WriteTask) -> None:
    measures = compute_smooth_measures(prepare_task(load_task(write_task())), Scorer(Engine(tiny), AnswerCache(None)))
    scorer = Scorer(Engine(tiny), AnswerCache(None))
    bits = []
    margins = []
    probabilities = []
    for row in ROWS:
        choices: Any = row["choices"]
        label: Any = row["label"]
        logprobs = [scorer.score([(str(row["question"]), f" {choice}")])[0].logprob for choice in choices]
        per_byte = [
            -logprob / math.log(2) / len(f" {choice}") for logprob, choice in zip(logprobs, choices, strict=True)
        ]
        bits.append((-logprobs[label] / math.log(2), len(f" {choices[label]}")))
        margins.append(min(per_byte[:label] + per_byte[label + 1 :]) - per_byte[label])
        probabilities.append(math.exp(logprobs[label]) / sum(map(math.exp, logprobs)))
    assert measures["bits_per_byte"] == pytest.approx(sum(bit for bit, _ in bits) / sum(size for _, size in bits))
    assert measures["margin"] == pytest.approx(np.mean(margins))
    assert measures["p_gold"] == pytest.approx(np.mean(probabilities))
    assert measures["p_gold_stderr"] == pytest.approx(np.std(probabilities, ddof=1) / math.sqrt(7))
    assert measures["chance"] == pytest.approx(1 / 3)


def test_right_texts_of_tasks_without_choices_are_scored(tiny: InferenceModel, write_task: WriteTask) -> None:
    scorer = Scorer(Engine(tiny), AnswerCache(None))
    expected = scorer.score([(str(row["question"]), f" {row['text']}") for row in ROWS])
    size = sum(len(f" {row['text']}") for row in ROWS)
    for output_type, target in (("generate_until", "text"), ("loglikelihood", "{{' ' ~ text}}")):
        file = write_task(output_type=output_type, doc_to_choice=None, doc_to_target=target)
        measures = compute_smooth_measures(prepare_task(load_task(file)), scorer)
        assert measures.keys() == {"bits_per_byte", "bits_per_byte_stderr"}
        total = sum(answer.logprob for answer in expected)
        assert measures["bits_per_byte"] == pytest.approx(-total / math.log(2) / size)
    file = write_task(output_type="loglikelihood_rolling", doc_to_choice=None, doc_to_target="{{question * 9}}")
    measures = compute_smooth_measures(prepare_task(load_task(file)), scorer)
    total = sum(answer.logprob for answer in scorer.score_texts([str(row["question"]) * 9 for row in ROWS]))
    assert measures["bits_per_byte"] == pytest.approx(-total / math.log(2) / (9 * 7 * len("What is 0 + 1?")))


def test_chance_is_said_in_words() -> None:
    measures = {"acc": 0.3, "acc_stderr": 0.04, "chance": 0.25}
    assert compare_with_chance(measures) == "at chance, 0.250"
    assert compare_with_chance({**measures, "acc": 0.4}) == "above chance, 0.250"
    assert compare_with_chance({**measures, "acc": 0.0, "acc_stderr": 0.0}) == "below chance, 0.250"
    words = {"bits_per_byte": 1.2, "bits_per_byte_stderr": 0.1, "margin": -0.2, "p_gold": 0.3, **measures}
    expected = "1.200 ± 0.100 bits per byte, margin -0.200, p(gold) 0.300, accuracy 0.300 (at chance, 0.250)"
    assert describe(words) == expected


def test_a_run_measures_its_tasks(tiny_run: MakeRun, write_task: WriteTask, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_task()
    changes = {"train.steps": 4, "evaluation.every": 2, "evaluation.tasks": [str(file)], "evaluation.task_documents": 5}
    config = tiny_run(changes)
    train(config)
    run = Path(config.runs_dir) / config.name
    record = read_run(run)
    assert record.tasks == ["sums"] and list(record.evaluations) == [2, 4]
    # The finished model, loaded from its checkpoint.
    scorer = Scorer(Engine(load(run, "fp64", "cpu")), AnswerCache(None))
    expected = compute_smooth_measures(prepare_task(load_task(file), limit=5), scorer)
    row = record.evaluations[4]
    assert {key: row[f"tasks/sums/{key}"] for key in expected} == pytest.approx(expected, rel=1e-9)
    assert row["tasks/sums/p_gold"] != record.evaluations[2]["tasks/sums/p_gold"]
    assert f"step 4: sums {expected['bits_per_byte']:.3f} ± " in capsys.readouterr().err
    page = render_page(record)
    assert '<h2 id="tasks">Tasks</h2>' in page and '<th scope="row">sums</th>' in page


def test_training_ends_when_a_task_stops_improving(
    tiny_run: MakeRun, write_task: WriteTask, capsys: pytest.CaptureFixture[str]
) -> None:
    # At this rate accuracy does not change.
    changes = {"optimizer.lr": 1e-12, "train.steps": 9, "evaluation.every": 1, "evaluation.patience": 2}
    changes |= {"checkpoint.best_metric": "tasks/sums/acc", "evaluation.tasks": [str(write_task())]}
    changes |= {"evaluation.num_sequences": 1, "evaluation.num_sequences_at_end": 2}
    config = tiny_run(changes)
    assert train(config) == 0
    run = Path(config.runs_dir) / config.name
    # The evaluation that ends the run is the last one, and has as many sequences as that.
    tokens = [row["tokens"] for row in read_run(run).evaluations.values()]
    assert tokens == [tokens[0], tokens[0], 2 * tokens[0]]
    assert max(read_run(run).train) == 3 and [path.name for path in (run / "checkpoints").iterdir()] == [
        "step-00000003"
    ]
    assert "Complete: 3 steps, no better tasks/sums/acc in 2 evaluations" in capsys.readouterr().err
    # The same command again changes nothing; with more patience training goes on.
    assert train(config) == 0
    assert "complete already, with 3 steps" in capsys.readouterr().err
    assert train(tiny_run({**changes, "evaluation.patience": 4})) == 0
    assert max(read_run(run).train) == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"evaluation.tasks": ["hellaswag_10"]}, "there is no task hellaswag_10"),
        ({"checkpoint.best_metric": "tasks/sums/acc"}, "best_metric: tasks/sums/acc is a measure of a task that"),
        ({"evaluation.tasks": ["truthfulqa_100"]}, r"it has an answer of \d+ tokens, and the model's context is 33"),
    ],
)
def test_wrong_tasks_are_reported_before_training(changes: dict[str, Any], words: str, tiny_run: MakeRun) -> None:
    with pytest.raises(JinguError, match=words):
        train(tiny_run({"evaluation.every": 1, **changes}))
