"""Rows of held-out tasks that were trained on with changes are found, or there is no proof."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from jingu.cli import main
from jingu.errors import JinguError
from jingu.evaluate.held_out import describe_evidence
from jingu.evaluate.near_copies import NearCopyTable
from jingu.evaluate.task_data import load_data
from jingu.evaluate.task_file import TaskIndex
from jingu.evaluate.task_mixture import TaskMixture

Row = dict[str, Any]
SUBJECTS = ["violin makers", "river pilots", "salt miners", "glass blowers", "night guards", "bridge painters"]
PLACES = [
    "near Lake Vattern",
    "below Mount Ararat",
    "in old Lisbon",
    "around Cape Horn",
    "beyond the Urals",
    "at Kyoto",
]
TOOLS = ["a cedar mould", "two brass sextants", "iron wedges", "hollow rods", "oil lanterns", "rope ladders"]
ROWS: list[Row] = [
    {
        "question": f"Which tool did the {subject} {place} carry when autumn storms began: {tool} or something else?",
        "choices": [f"{tool} of their fathers", "a borrowed wooden cart", "nothing", f"maps {place}"],
        "answer": 0,
    }
    for subject, place, tool in zip(SUBJECTS, PLACES, TOOLS, strict=True)
]
SHORT: list[Row] = [{"question": f"Capital of {place}?", "choices": ["yes", "no"], "answer": 0} for place in PLACES]


def replace_words(text: str, numbers: tuple[int, ...]) -> str:
    words = text.split()
    for number in numbers:
        words[number] = f"changed{number}"
    return " ".join(words)


# What became of an evaluated row in the training data.
CHANGES: dict[str, Callable[[Row, int], Row]] = {
    "another id": lambda row, number: {"id": f"x{number}", **row},
    "an explanation": lambda row, number: {
        **row,
        "explanation": f"It was the custom of year {number}, as all knew well.",
    },
    "shuffled choices": lambda row, number: {**row, "choices": row["choices"][::-1], "answer": 3, "id": number},
    "only the question": lambda row, number: {
        "question": row["question"],
        "choices": ["aye", "nay"],
        "answer": number % 2,
    },
    "the eighth word": lambda row, number: {**row, "id": number, "question": replace_words(row["question"], (7,))},
    "two words": lambda row, number: {**row, "id": number, "question": replace_words(row["question"], (4, 11))},
    "in a passage": lambda row, number: {
        "question": f"Read this. {replace_words(row['question'], (5,))} Then answer {number} times, please.",
        "choices": ["aye", "nay"],
        "answer": 0,
    },
    "case and marks": lambda row, number: {**row, "id": number, "question": row["question"].upper().replace(" ", ", ")},
}


def write_task(folder: Path, name: str, rows: list[Row], split: str) -> None:
    (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    content = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {split: f"{name}.jsonl"}},
        f"{split}_split" if split == "test" else "training_split": split,
        "output_type": "multiple_choice",
        "doc_to_text": f"{name}: {{{{question}}}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")


def evidence_of_mixture(folder: Path, evaluated: list[Row], trained: list[Row]) -> str:
    """The evidence for a model that was trained on a mixture which holds a task out, or the refusal of that mixture."""
    write_task(folder, "secret", evaluated, "test")
    write_task(folder, "known", trained, "train")
    settings = {"mixture": "m", "members": [{"task": "known"}], "held_out": ["secret"], "include": ["."]}
    (folder / "mixture.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    try:
        mixture = TaskMixture(folder / "mixture.yaml").write(folder / "rows.jsonl")
    except JinguError as error:
        return str(error)
    index = TaskIndex([folder])
    index.load("secret")
    task = index.tasks["secret"]
    record: Any = {"data": [{"path": "d", "checksums": [], "mixture": mixture}], "initial": None}
    return describe_evidence(record, task, load_data(task, needs_shots=False).rows)


OTHERS: list[Row] = [
    {"question": f"How many {noun} fit into a crate of {size} inches at most?", "choices": ["few", "many"], "answer": 1}
    for noun in ("apples", "kettles", "lamps")
    for size in (3, 9)
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("number", [0, 4])
def test_a_changed_copy_is_no_proof_in_a_mixture(change: str, number: int, tmp_path: Path) -> None:
    copy = CHANGES[change](ROWS[number], number)
    words = evidence_of_mixture(tmp_path, ROWS, [*OTHERS, copy])
    assert re.search("they share rows|not proved: 1 of its rows resemble rows of the mixture m", words)


def test_what_is_proved_and_what_cannot_be_compared(tmp_path: Path) -> None:
    assert evidence_of_mixture(tmp_path, ROWS, OTHERS) == "held out"
    words = evidence_of_mixture(tmp_path, SHORT, OTHERS)
    assert words == "not proved: 6 of its rows are too short to compare with the mixture m"
    words = evidence_of_mixture(tmp_path, [*ROWS, SHORT[0]], OTHERS)
    assert words == "not proved: 1 of its rows are too short to compare with the mixture m"
    # A record of an older version, which compared less, proves nothing.
    mixture = {"name": "m", "tasks": [], "held_out": [{"task": "secret", "data": "", "templates": []}]}
    index = TaskIndex([tmp_path])
    index.load("secret")
    task = index.tasks["secret"]
    rows = load_data(task, needs_shots=False).rows
    from jingu.evaluate.held_out import profile_task

    mixture["held_out"][0]["data"] = profile_task(task, rows).data  # type: ignore[index]
    mixture["held_out"][0]["templates"] = [list(words) for words in profile_task(task, rows).templates]  # type: ignore[index]
    record: Any = {"data": [{"path": "d", "checksums": [], "mixture": mixture}], "initial": None}
    assert describe_evidence(record, task, rows).startswith("not proved: an older version compared the rows")


@pytest.mark.parametrize("change", ["the eighth word", "two words", "in a passage", "case and marks"])
def test_a_changed_copy_in_texts_is_counted(
    change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(tmp_path, "secret", ROWS, "test")
    texts = [row["question"] for row in OTHERS] + [CHANGES[change](ROWS[2], 2)["question"]]
    (tmp_path / "corpus.txt").write_text("\n\n".join(["Some text about other things."] * 9 + texts), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for processes in ("1", "2"):
        command = ["evaluate", "contamination", "secret", "--data", "corpus.txt", "--include", "."]
        assert main([*command, "--output", f"out{processes}", "--processes", processes]) == 0
        summary = json.loads((tmp_path / f"out{processes}" / "contamination.json").read_text("utf-8"))["tasks"][
            "secret"
        ]
        assert (summary["dirty"], summary["similar"]) in ((0, 1), (1, 0))
    assert "similar" in capsys.readouterr().out


def test_templates_are_no_copies_and_chinese_counts_by_characters() -> None:
    rows = [[f"What is the name of the person who found element number {number}?"] for number in range(40)]
    table = NearCopyTable.build(rows)
    assert table.find(["What is the name of the person who found the island?"]) == set()
    chinese = NearCopyTable.build([["我们今天去公园散步的时候看到了一只很大的鸟"], ["短句"]])
    assert chinese.searched_rows == {0}
    assert chinese.find(["他说：我们昨天去公园散步的时候，看到了一只很大的鸟。"]) == {0}
    assert chinese.find(["我们今天开会"]) == set() and NearCopyTable.build([]).find(["a b c d"]) == set()


def test_a_long_text_is_found_across_chunks() -> None:
    text = " ".join(f"word{number}" for number in range(900))
    table = NearCopyTable.build([[text]])
    filler = " ".join(["filler"] * 30_000)
    assert table.find([f"{filler} {text.replace('word450', 'other')} {filler}"]) == {0}
