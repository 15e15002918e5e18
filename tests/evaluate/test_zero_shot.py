"""From a mixture of tasks to a task that it holds out: a tiny decoder, before and after, with the proof."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from jingu.cli import main
from jingu.data.build import build
from jingu.text.tokenizer_commands import train as train_tokenizer
from jingu.training.commands import train
from jingu.tune.prepare import prepare
from tests.conftest import MakeRun

GOOD = ["good", "great", "fine", "lovely"]
BAD = ["bad", "awful", "poor", "dull"]
# Reviews of three kinds of things; their words of praise and blame are the same.
KINDS = {
    "films": ("Film: {{text}} Verdict:", ["film", "actor", "scene", "plot"]),
    "books": ("About a book: {{text}} Liked it:", ["book", "chapter", "writer", "page"]),
    "meals": ("{{text}} The guest says:", ["soup", "cook", "bread", "dish"]),
}


def write_task(folder: Path, kind: str) -> None:
    """Write a task of one kind of reviews, a cluster of its own."""
    template, things = KINDS[kind]
    rows = [
        json.dumps({"text": f"the {thing} was {word} and the {other} was {word}.", "label": int(word in GOOD)})
        for thing, other, word in product(things, things, GOOD + BAD)
        if thing != other
    ]
    (folder / f"{kind}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    content = {
        "task": kind,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"all": f"{kind}.jsonl"}},
        "training_split": "all",
        "test_split": "all",
        "output_type": "multiple_choice",
        "doc_to_text": template,
        "doc_to_target": "label",
        "doc_to_choice": ["no", "yes"],
        "metadata": {"task_cluster": f"reviews of {kind}"},
    }
    (folder / f"{kind}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")


# Rows of nine words may be copies of each other with changed words, so that only the base model is proved.
EVIDENCE = {
    "start": "held out",
    "tuned": r"not proved: \d+ of its rows are too short to compare with the mixture reviews",
}
SPANS = {"type": "span_corruption", "noise_density": 0.15, "mean_span_length": 3.0, "num_sentinels": 8}
MODELS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "t5": {"model.family": "t5", "model.num_kv_heads": None, "data.objective": SPANS, "tokenizer.vocab_size": 397},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder", "t5"])
def test_a_mixture_teaches_a_cluster_that_it_holds_out(
    kind: str, tiny_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for reviews in KINDS:
        write_task(tmp_path, reviews)
    members = [{"task": "films"}, {"task": "books"}]
    mixture = {"mixture": "reviews", "members": members, "include": ["."], "held_out": ["meals"]}
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(mixture), encoding="utf-8")
    common = {"batch.sequence_length": 64, "precision": {"type": "fp32"}, "optimizer.lr": 3e-3}
    if kind == "t5":
        # Its tokenizer has sentinels.
        common |= {"tokenizer.path": str(tmp_path / "tokenizer"), "data.path": str(tmp_path / "text")}
    start = tiny_run({**common, **MODELS[kind], "name": "start", "train.steps": 20})
    if kind == "t5":
        train_tokenizer(start)
        build(start)
    train(start)
    runs = Path(start.runs_dir)
    tuned = tiny_run(
        {
            **common,
            **MODELS[kind],
            "name": "tuned",
            "data.input": str(tmp_path / "mixture.yaml"),
            "data.path": str(tmp_path / "data"),
            "data.objective": {"type": "supervised", "template": "chatml"},
            "train.steps": 400,
            "train.log_every": 50,
            "initialize.from": str(runs / "start"),
        }
    )
    tuned = tuned.model_copy(update={"model": type(tuned.model)()})
    prepare(tuned)
    train(tuned)
    # What the start was trained on is text, which a search has to prove clean.
    search = ["--data", start.data.path, "--tokenizer", start.tokenizer.path, "--include", str(tmp_path)]
    search += ["--processes", "1", "--output", str(tmp_path / "search")]
    assert main(["evaluate", "contamination", "meals", *search]) == 0
    for name in ("start", "tuned"):
        output = ["--include", str(tmp_path), "--output", str(tmp_path / name)]
        assert main(["evaluate", str(runs / name), "meals", *output]) == 0
        assert re.search(f"^meals: {EVIDENCE[name]}$", capsys.readouterr().out, re.MULTILINE)
    accuracy = {
        name: json.loads((tmp_path / name / "meals.json").read_text(encoding="utf-8"))["results"]["acc,none"]
        for name in ("start", "tuned")
    }
    assert accuracy["start"]["size"] == 96
    assert accuracy["tuned"]["interval"][0] > accuracy["start"]["interval"][1]
    assert main(["evaluate", "compare", str(tmp_path / "start"), str(tmp_path / "tuned")]) == 0
    assert re.search(r"^tuned +meals +acc +96 +fp32 +\+0\.", capsys.readouterr().out, re.MULTILINE)
