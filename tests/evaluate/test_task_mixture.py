"""Mixtures of tasks as training data: rates, caps, shots, templates; each sample is a function of its number."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from jingu.api import Dataset
from jingu.data.dataset_manifest import DatasetManifest
from jingu.errors import JinguError
from jingu.evaluate import task_mixture
from jingu.evaluate.task_file import TaskIndex
from jingu.evaluate.task_mixture import TaskMixture, build
from jingu.text.tokenizer import Tokenizer
from jingu.tune.prepare import prepare
from tests.conftest import MakeRun

WriteFiles = Callable[..., Path]
EXAMPLES = Path(__file__).parents[2] / "examples" / "mixtures"
TEMPLATES = {
    "options": {"doc_to_text": "{{question}} {{choices|join(', ')}}?"},
    "inverse": {
        "inverted": True,
        "output_type": "generate_until",
        "doc_to_text": "{{choices[label]}}",
        "doc_to_target": "{{question}}",
        "doc_to_choice": None,
    },
}


def rows_of(name: str, size: int) -> list[dict[str, Any]]:
    return [
        {"question": f"{name} number {number}", "choices": [f"{name}-a{number}", f"{name}-b{number}"], "label": 1}
        for number in range(size)
    ]


def write_one(folder: Path, name: str, size: int, **metadata: Any) -> Path:
    """Write a task with `size` rows for training, and one for the test."""
    for split, rows in (("train", rows_of(name, size)), ("test", rows_of(f"{name} test", 1))):
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"{name}-{split}.jsonl").write_text(text, encoding="utf-8")
    content = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {split: f"{name}-{split}.jsonl" for split in ("train", "test")}},
        "training_split": "train",
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}:",
        "doc_to_target": "label",
        "doc_to_choice": "choices",
        "metadata": {"templates": TEMPLATES, **metadata},
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


@pytest.fixture
def write(tmp_path: Path) -> WriteFiles:
    """Write three tasks of 6, 20 and 90 rows, and a mixture with the given settings."""
    for name, size in (("small", 6), ("middle", 20), ("large", 90)):
        write_one(tmp_path, name, size)

    def write_mixture(name: str = "mixture.yaml", **settings: Any) -> Path:
        file = tmp_path / name
        members = [{"task": f"{task}.yaml"} for task in ("small", "middle", "large")]
        content = {"mixture": Path(name).stem, "members": members, **settings}
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
        return file

    return write_mixture


def test_rates_are_those_of_seqio(write: WriteFiles) -> None:
    """min(n · scale, maximum)^(1 / temperature), as seqio computes it for examples-proportional mixing."""
    mixture = TaskMixture(write(scale=0.5, maximum=12, temperature=2))
    assert mixture.rates == pytest.approx({"small": 3**0.5, "middle": 10**0.5, "large": 12**0.5})
    samples = list(mixture.render(range(2000)))
    counts = Counter(sample["task"] for sample in samples)
    total = sum(mixture.rates.values())
    assert all(abs(counts[name] - 2000 * rate / total) <= 1 for name, rate in mixture.rates.items())
    # As many rows as there are documents, if nothing says otherwise.
    assert len(TaskMixture(write())) == 6 + 20 + 90


def test_nested_mixtures_multiply_rates_and_join_tasks(write: WriteFiles) -> None:
    write("inner.yaml", members=[{"task": "small.yaml", "rate": 1}, {"task": "large.yaml", "rate": 3}])
    members = [{"mixture": "inner.yaml", "rate": 2}, {"task": "large.yaml", "rate": 0.5}, {"mixture": "inner.yaml"}]
    assert TaskMixture(write(members=members)).rates == pytest.approx({"small": 0.5 + 1, "large": 1.5 + 0.5 + 3})
    with pytest.raises(JinguError, match="this mixture contains itself"):
        TaskMixture(write(members=[{"mixture": "mixture.yaml"}]))


def test_a_sample_depends_on_its_number_only(write: WriteFiles) -> None:
    file = write(samples=300, num_fewshot=[0, 2], seed=3)
    everything = list(TaskMixture(file).render(range(300)))
    assert everything == list(TaskMixture(file).render(range(300)))
    assert everything[200:210] == list(TaskMixture(file).render(range(200, 210)))
    # Other members change which number a sample has, and nothing else.
    alone = list(TaskMixture(write(members=[{"task": "small.yaml"}], num_fewshot=[0, 2], seed=3)).render(range(40)))
    of_small = [sample for sample in everything if sample["task"] == "small"]
    assert alone[: len(of_small)] == of_small[:40]
    # Each epoch has every document once, in another order.
    order = [sample["index"] for sample in alone]
    assert sorted(order[:6]) == sorted(order[6:12]) == list(range(6)) and order[:6] != order[6:12]


def test_shots_come_from_training_rows_and_never_from_the_document(write: WriteFiles) -> None:
    samples = list(TaskMixture(write(num_fewshot=[0, 3], samples=400)).render(range(400)))
    assert {sample["shots"] for sample in samples} == {0, 3}
    for sample in samples:
        name = sample["task"]
        question = f"{name} number {sample['index']}:"
        *shots, own = sample["prompt"].split("\n\n")
        assert own == question and sample["completion"] == f" {name}-b{sample['index']}"
        assert len(shots) == sample["shots"] == len(set(shots)) and not any(shot.startswith(question) for shot in shots)
        assert all(shot.startswith(f"{name} number ") for shot in shots)


def test_templates_caps_and_chat(write: WriteFiles) -> None:
    members = [{"task": f"large.yaml@{template}"} for template in ("default", "options", "inverse")]
    mixture = TaskMixture(write(members=members, max_per_template=10, form="messages"))
    assert len(mixture) == 30
    samples = list(mixture.render(range(90)))
    for template in ("default", "options", "inverse"):
        indices = [sample["index"] for sample in samples if sample["task"] == f"large@{template}"]
        assert len(indices) == 30 and len(set(indices)) == 10 and set(indices[:10]) == set(indices[10:20])
    by_task = {sample["task"]: sample for sample in samples}
    index = by_task["large@options"]["index"]
    assert by_task["large@options"]["messages"] == [
        {"role": "user", "content": f"large number {index} large-a{index}, large-b{index}?"},
        {"role": "assistant", "content": f"large-b{index}"},
    ]
    index = by_task["large@inverse"]["index"]
    assert [turn["content"] for turn in by_task["large@inverse"]["messages"]] == [
        f"large-b{index}",
        f"large number {index}",
    ]


def test_templates_by_name(write: WriteFiles, tmp_path: Path) -> None:
    write()
    index = TaskIndex()
    assert index.load(f"{tmp_path}/small.yaml@*:2") == ["small@default:2", "small@options:2"]
    task = index.tasks["small@options:2"]
    assert task.num_fewshot == 2
    assert index.load(f"{tmp_path}/small.yaml@options:2:chat") == ["small@options:2:chat"]
    assert index.tasks["small@options:2:chat"].metadata["chat"] and not task.metadata.get("chat")
    with pytest.raises(JinguError, match=r"no template short\. It has default, inverse, options and \*"):
        index.load(f"{tmp_path}/small.yaml@short")
    with pytest.raises(JinguError, match=r"num_fewshot: Input should be a valid integer"):
        index.load(f"{tmp_path}/small.yaml@options:many")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"members": []}, "this is not a mixture: members: List should have at least 1 item"),
        ({"member": []}, "this is not a mixture: member: Extra inputs"),
        ({"members": [{"rate": 2}]}, "neither task nor mixture"),
        ({"members": [{"task": "no_such_task"}]}, "there is no task no_such_task"),
        ({"members": [{"mixture": "none.yaml"}]}, "none.yaml"),
        ({"members": [{"task": "hellaswag_100"}]}, "it has no training split, and nothing else is trained on"),
        ({"members": [{"task": "small.yaml", "rate": -1}]}, "greater than 0"),
        ({"num_fewshot": [6]}, "6 shots are requested, but small has only 5 other documents"),
    ],
)
def test_what_is_wrong_with_a_mixture_is_said(settings: dict[str, Any], words: str, write: WriteFiles) -> None:
    with pytest.raises(JinguError, match=words):
        TaskMixture(write(**settings))


def test_prepare_tokenizes_a_mixture(
    write: WriteFiles, tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_run(
        {
            "data.input": str(write(samples=120)),
            "data.path": str(tmp_path / "data"),
            "data.objective": {"type": "supervised", "overflow": "drop", "template": "chatml"},
            "batch.sequence_length": 40,
        }
    )
    prepare(config)
    manifest = DatasetManifest.load(tmp_path / "data")
    assert manifest is not None
    receipt = manifest.settings["mixture"]
    assert [entry["task"] for entry in receipt["tasks"]] == ["small", "middle", "large"]
    assert receipt["held_out"] == []
    printed = capsys.readouterr().out
    assert "mixture mixture: 120 rows" in printed and "read: 120 completion" in printed
    assert "  small: 6 rows, 1.00 epochs, 0 of 6 documents unused" in printed
    # A second time nothing is built; another seed is another data set.
    prepare(config)
    assert "already built" in capsys.readouterr().out
    write(samples=120, seed=1)
    with pytest.raises(JinguError, match=r"mixture\.hash was"):
        prepare(config)


def test_data_build_takes_a_mixture_as_texts(
    write: WriteFiles, tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(samples=70, form="messages", num_fewshot=[0, 1])
    changes = {"data.input": str(file), "data.path": str(tmp_path / "data"), "data.validation_fraction": 0}
    config = tiny_run(changes)
    build(config)
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    texts = [tokenizer.decode(ids[ids != tokenizer.eos_token_id].tolist()) for ids in Dataset(tmp_path / "data")]
    rows = TaskMixture(file).render(range(70), "completion")
    assert texts == [row["prompt"] + row["completion"] for row in rows]
    manifest = DatasetManifest.load(tmp_path / "data")
    assert manifest is not None and len(manifest.settings["mixture"]["tasks"]) == 3
    build(config)
    assert "already built" in capsys.readouterr().out
    # Other YAML is a text.
    (tmp_path / "notes.yaml").write_text("members: none", encoding="utf-8")
    build(tiny_run({**changes, "data.input": str(tmp_path / "notes.yaml"), "data.path": str(tmp_path / "notes")}))
    (ids,) = Dataset(tmp_path / "notes")
    assert tokenizer.decode(ids[:-1].tolist()) == "members: none"
    with pytest.raises(JinguError, match=r"is a mixture of tasks, which cannot stand beside other files"):
        build(tiny_run({**changes, "data.input": [str(tmp_path / "notes.yaml"), str(file)], "data.path": "both"}))


@pytest.mark.parametrize("name", ["t5", "flan", "flan-sentence-pairs"])
def test_recipes_name_tasks_of_the_catalogue(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples, with made-up data in place of the hub's."""
    rows = [
        {
            "sentence": f"Sentence {number}.",
            "sentence1": f"First {number}.",
            "sentence2": f"Second {number}.",
            "question1": f"Who {number}?",
            "question2": f"What {number}?",
            "question": f"Which {number}?",
            "premise": f"Because {number}.",
            "hypothesis": f"So {number}.",
            "context": f"In {number}.",
            "label": 1,
            "title": "T",
            "answers": {"text": [str(number)]},
        }
        for number in range(9)
    ]
    monkeypatch.setattr(task_mixture, "read_training_rows", lambda task: rows if task.training_split else [])
    mixture = TaskMixture(EXAMPLES / f"{name}.yaml")
    samples = list(mixture.render(range(60)))
    assert {sample["task"] for sample in samples} == set(mixture.rates) and len(mixture.rates) >= 6
    if name == "flan":
        pairs = sum(rate for task, rate in mixture.rates.items() if task.partition("@")[0] not in ("cola", "squad"))
        assert pairs == pytest.approx(0.5) and sum(mixture.rates.values()) == pytest.approx(1)
        assert mixture.held_out and {sample["shots"] for sample in samples} == {0, 5}
