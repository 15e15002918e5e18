"""Held-out tasks: planted leaks are refused by name, and only a record of all ancestors proves anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from jingu.cli import main
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.evaluate import contamination
from jingu.evaluate.evaluation import prepare_task
from jingu.evaluate.held_out import describe_evidence
from jingu.evaluate.task_mixture import TaskMixture
from jingu.formats.provenance import read_provenance
from jingu.training.commands import train
from jingu.tune.prepare import prepare
from tests.conftest import Library, MakeRun
from tests.evaluate.conftest import load_task

PLAIN = "{{question}}:"
LONG = "Read this question about {{question}} with care and write the right answer:"
PASSAGE = " ".join(f"passage{number}" for number in range(40))


def write_task(folder: Path, name: str, template: str = PLAIN, rows: list[str] | None = None, **metadata: Any) -> None:
    """Write a task with three rows for training and three for the test; `rows` replaces those for training."""
    questions = {"train": rows or [f"{name} train question {n} of three" for n in range(3)]}
    questions["test"] = [f"{name} test question {n} with many more words, namely {name}{n}, in it" for n in range(3)]
    for split, texts in questions.items():
        lines = [json.dumps({"question": text, "choices": ["a", "b"], "label": 0}) for text in texts]
        (folder / f"{name}-{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    content = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {split: f"{name}-{split}.jsonl" for split in questions}},
        "training_split": "train",
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": template,
        "doc_to_target": "label",
        "doc_to_choice": "choices",
        "metadata": metadata,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")


def write_mixture(folder: Path, *tasks: str, held_out: tuple[str, ...] = ("secret",)) -> Path:
    members = [{"task": task} for task in tasks]
    content = {"mixture": "mixed", "members": members, "include": ["."], "held_out": [*held_out]}
    file = folder / "mixture.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("leak", "words"),
    [
        ({"task_cluster": "made_up"}, "leak with secret (both are in the task cluster made_up)"),
        ({"task_cluster": "paraphrase"}, "leak with secret (the task clusters made_up and paraphrase are related)"),
        ({"sources": ["wiki", "books"]}, "leak with secret (both come from books)"),
        (
            {"rows": ["SECRET test, question 1 - with many more words: namely secret1 in it!"]},
            "they share rows, or 13 words of rows, ",
        ),
        ({"rows": [f"{PASSAGE} and more"]}, "leak with secret (they share rows, or 13 words of rows, 28 in all)"),
        ({"template": LONG.replace("with care", "with great care")}, "both have the template “read this question"),
        ({"template": LONG.replace("right", "best")}, "up to one word"),
    ],
)
def test_planted_leaks_are_refused_by_name(leak: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_task(tmp_path, "secret", LONG, task_cluster="made_up", related_clusters=["paraphrase"], sources=["books"])
    with (tmp_path / "secret-test.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"question": PASSAGE, "choices": ["a", "b"], "label": 1}))
    write_task(tmp_path, "clean", template=LONG.replace("right answer", "good story"), task_cluster="stories")
    write_task(tmp_path, "leak", **leak)
    assert [lock["task"] for lock in TaskMixture(write_mixture(tmp_path, "clean")).held_out] == ["secret"]
    with pytest.raises(JinguError, match="tasks that are related to held-out ones") as error:
        TaskMixture(write_mixture(tmp_path, "clean", "leak"))
    assert words in str(error.value) and "clean with" not in str(error.value)


def test_a_task_under_another_name_is_refused(tmp_path: Path) -> None:
    write_task(tmp_path, "secret", LONG, task_cluster="made_up")
    content = (tmp_path / "secret.yaml").read_text(encoding="utf-8")
    # Its name, cluster and template tell nothing; its training rows are those of the secret task.
    for old, new in (("task: secret", "task: innocent"), ("made_up", "stories"), (LONG, "{{question}} =")):
        content = content.replace(old, new)
    (tmp_path / "innocent.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(JinguError, match=r"innocent with secret \(they share rows, or 13 words of rows, 3 in all\)"):
        TaskMixture(write_mixture(tmp_path, "innocent"))


def test_the_split_is_closed(tmp_path: Path) -> None:
    """A task leaks through another one, and a cluster stands for its tasks."""
    write_task(tmp_path, "secret", task_cluster="made_up")
    write_task(tmp_path, "near", sources=["web"], task_cluster="made_up")
    write_task(tmp_path, "far", sources=["web"])
    assert TaskMixture(write_mixture(tmp_path, "far")).held_out
    with pytest.raises(JinguError, match=r"near with secret .*; far with near \(both come from web\)"):
        TaskMixture(write_mixture(tmp_path, "near", "far"))
    with pytest.raises(JinguError, match=r"far with near"):
        TaskMixture(write_mixture(tmp_path, "far", held_out=("made_up",)))
    with pytest.raises(JinguError, match=r"secret@default with secret \(they are the same task"):
        TaskMixture(write_mixture(tmp_path, "secret@default"))
    # A mixture within another one holds out what its file says.
    inner = write_mixture(tmp_path, "far", held_out=("near",)).rename(tmp_path / "inner.yaml")
    outer = {"mixture": "outer", "members": [{"mixture": inner.name}], "include": ["."]}
    (tmp_path / "outer.yaml").write_text(yaml.safe_dump(outer), encoding="utf-8")
    with pytest.raises(JinguError, match=r"far with near"):
        TaskMixture(tmp_path / "outer.yaml")
    with pytest.raises(JinguError, match="there is no task nothing"):
        TaskMixture(write_mixture(tmp_path, "far", held_out=("nothing",)))


def run_on(make_run: MakeRun, mixture: Path, name: str, initial: Path | None = None, **changes: Any) -> RunConfig:
    """Train on a mixture for one step. Changes have two underscores in the place of a dot."""
    config = make_run(
        {
            "name": name,
            "data.input": str(mixture),
            "data.path": str(mixture.parent / f"data-{name}"),
            "data.objective": {"type": "supervised", "template": "chatml"},
            "data.validation_fraction": 0,
            "model.max_position_embeddings": 64,
            "train.steps": 1,
            "initialize.from": None if initial is None else str(initial),
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
    )
    if initial is not None:
        config = config.model_copy(update={"model": type(config.model)()})
    prepare(config)
    train(config)
    return config


def test_only_records_of_all_ancestors_prove_it(
    tiny_run: MakeRun, library: Library, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path, "secret", LONG, task_cluster="made_up")
    write_task(tmp_path, "other", task_cluster="made_up")
    write_task(tmp_path, "stories")
    clean = write_mixture(tmp_path, "stories")
    runs = tmp_path / "runs"

    def evaluate(model: Path, task: str = "secret") -> str:
        capsys.readouterr()
        output = ["--output", str(tmp_path / "evaluations")]
        assert main(["evaluate", str(model), task, "--include", str(tmp_path), "--limit", "1", *output]) == 0
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{task}: "))

    run_on(tiny_run, clean, "first")
    assert evaluate(runs / "first") == "secret: held out"
    assert evaluate(runs / "first" / "checkpoints" / "step-00000001") == "secret: held out"
    assert evaluate(runs / "first", "stories") == "stories: not held out: the model was trained on stories"
    assert "does not hold it out" in evaluate(runs / "first", "other")
    # Training goes on from an export, whose record is that of the run.
    assert main(["export", str(runs / "first"), "--to", str(tmp_path / "exported")]) == 0
    run_on(tiny_run, clean, "second", tmp_path / "exported")
    assert evaluate(runs / "second") == "secret: held out"
    # The same rows under another name are still held out; other rows and other templates are not.
    content = (tmp_path / "secret.yaml").read_text(encoding="utf-8")
    (tmp_path / "renamed.yaml").write_text(content.replace("task: secret", "task: renamed"), encoding="utf-8")
    assert evaluate(runs / "second", "renamed") == "renamed: held out"
    (tmp_path / "renamed.yaml").write_text(
        content.replace("task: secret", "task: renamed").replace("with care", "without any care at all"), "utf-8"
    )
    assert "was not compared with this template" in evaluate(runs / "second", "renamed")
    # An ancestor that was trained on the cluster.
    leaky = write_mixture(tmp_path, "other", held_out=())
    run_on(tiny_run, leaky, "leaky")
    run_on(tiny_run, write_mixture(tmp_path, "stories"), "descendant", runs / "leaky")
    assert evaluate(runs / "descendant") == (
        f"secret: not held out: {runs / 'leaky'} was trained on other, of the same task cluster"
    )
    # A damaged record is an error, and not the same as no record.
    (tmp_path / "exported" / "provenance.json").write_text("{")
    with pytest.raises(JinguError, match=r"provenance\.json: the file is damaged"):
        read_provenance(tmp_path / "exported")
    # Models from elsewhere have no record.
    (tmp_path / "exported" / "provenance.json").unlink()
    assert "there is no record of what the model was trained on" in evaluate(tmp_path / "exported")


def test_records_go_with_merged_exported_and_grown_models(
    tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path, "secret", LONG, task_cluster="made_up")
    write_task(tmp_path, "other", task_cluster="made_up")
    write_task(tmp_path, "stories")
    # The same rows as the secret task's, under a name and in a cluster that tell nothing.
    write_task(tmp_path, "copy")
    (tmp_path / "copy-train.jsonl").write_bytes((tmp_path / "secret-test.jsonl").read_bytes())
    runs = tmp_path / "runs"
    lora = {"type": "lora", "rank": 2}

    def train_on(name: str, task: str, initial: str | None = None, **changes: Any) -> Path:
        held_out = ("secret",) if task == "stories" else ()
        mixture = write_mixture(tmp_path, task, held_out=held_out)
        run_on(tiny_run, mixture, name, None if initial is None else runs / initial, **changes)
        return runs / name

    def evidence(model: Path) -> str:
        task = prepare_task(load_task(tmp_path / "secret.yaml"))
        return describe_evidence(read_provenance(model), task.settings, task.data.rows)

    def make(*words: object) -> Path:
        folder = tmp_path / "made" / str(len([*tmp_path.glob("made/*")]))
        folder.parent.mkdir(exist_ok=True)
        assert main([*map(str, words), "--to", str(folder)]) == 0
        return folder

    clean = train_on("clean", "stories")
    leaky = train_on("leaky", "other")
    assert (
        evidence(train_on("copied", "copy", batch__sequence_length=64))
        == "not held out: the model was trained on the same rows as copy"
    )
    by_leaky = f"not held out: {leaky} was trained on other, of the same task cluster"
    # Growing, on whatever model it begins from.
    assert evidence(make("model", "grow", clean, "--num-layers", 4)) == "held out"
    assert evidence(make("model", "grow", make("export", leaky), "--num-layers", 4)).endswith(
        f"{tmp_path / 'made' / '1'} was trained on other, of the same task cluster"
    )
    # Merging the adapters of a run, whose record has that of its base model.
    adapter = train_on("adapter", "stories", "clean", tune=lora)
    assert (
        evidence(make("tune", "merge", adapter))
        == evidence(make("model", "grow", make("tune", "merge", adapter), "--num-layers", 4))
        == "held out"
    )
    assert evidence(make("tune", "merge", train_on("on-leaky", "stories", "leaky", tune=lora))) == by_leaky
    # A folder of peft, and its adapters on another model than their own.
    peft = make("tune", "export", adapter)
    assert evidence(peft) == evidence(make("tune", "merge", peft)) == "held out"
    assert evidence(make("tune", "merge", peft, "--base", clean)) == "held out"
    assert evidence(make("tune", "merge", peft, "--base", leaky)) == by_leaky
    # Adapters that began as others, which were trained on the cluster.
    source = train_on("source", "other", "clean", tune=lora)
    target = train_on("target", "stories", "clean", tune={**lora, "initial_adapter": str(source)})
    assert evidence(target) == f"not held out: {source} was trained on other, of the same task cluster"
    (peft / "provenance.json").unlink()
    assert "no record of what the model was trained on" in evidence(make("tune", "merge", peft, "--base", clean))


def test_text_is_proved_by_a_search(
    tiny_run: MakeRun, library: Library, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path, "secret")
    config = tiny_run({"train.steps": 1, "model.max_position_embeddings": 64})
    train(config)
    arguments = ["evaluate", f"{config.runs_dir}/{config.name}", "secret", "--include", str(tmp_path), "--limit", "1"]
    assert main(arguments) == 0
    assert "was not searched for it (jingu evaluate contamination)" in capsys.readouterr().out
    search = {"tokenizer": library.tokenizer, "processes": 1, "output": tmp_path / "out", "include": [str(tmp_path)]}
    contamination.contamination(["secret"], [config.data.path], **search)
    assert main(arguments) == 0
    assert "secret: held out" in capsys.readouterr().out
    # What the search says of another version of the data set does not count.
    file = Path(config.data.path) / contamination.SUMMARY_NAME
    content = json.loads(file.read_text(encoding="utf-8"))
    (entry,) = content["tasks"].values()
    for key, words in (
        ("dirty", "not held out: 2 of its rows occur in "),
        ("too_short", "2 of its rows are too short"),
    ):
        file.write_text(json.dumps({**content, "tasks": {entry["data"]: {**entry, key: 2}}}), encoding="utf-8")
        assert main(arguments) == 0
        assert words in capsys.readouterr().out
    file.write_text(json.dumps({**content, "checksums": ["another"]}), encoding="utf-8")
    assert main(arguments) == 0
    assert "was not searched for it" in capsys.readouterr().out
    file.unlink()
