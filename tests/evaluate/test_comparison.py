"""Why two evaluations differ, and the comparison of several models."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import scipy.stats

from jingu.errors import JinguError
from jingu.evaluate import evaluation
from jingu.evaluate.comparison import compare, explain, read_evaluations
from jingu.evaluate.evaluation import evaluate_task, prepare_task, write_result
from jingu.evaluate.result_files import read_results
from jingu.evaluate.scoring import AnswerCache, Scorer
from jingu.evaluate.statistics import holm
from jingu.infer.engine import Engine
from jingu.infer.inference_model import InferenceModel
from tests.evaluate.conftest import ROWS, WriteTask, load_task

# Characters at which `str.splitlines` splits, beside the newline.
SEPARATORS = "\u2028\u2029\u0085\x0c"

RECORD: dict[str, Any] = {
    "index": 4,
    "hash": "a",
    "cluster": None,
    "pairs": [["Q: a\nA:", " b"], ["Q: a\nA:", " c"]],
    "answers": [{"logprob": -1.0}, {"logprob": -2.0}],
    "metrics": {"acc,none": 1.0},
}


def change(**changes: Any) -> dict[str, Any]:
    return {**deepcopy(RECORD), **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, r"prompts, scores and metrics are equal\."),
        (
            {"pairs": [["Q: a\nB:", " b"], ["Q: a\nB:", " c"]]},
            "the prompts differ, first in document 4: .*A:.* and ",
        ),
        ({"answers": [{"logprob": -1.5}, {"logprob": -2.0}]}, r"differ by up to 0\.5: the token ids .BOS, another"),
        ({"answers": [{"logprob": -1.01}, {"logprob": -2.0}]}, r"differ by up to 0\.01: rounding, as of another dtype"),
        ({"metrics": {"acc,none": 0.0}}, r"scores are equal, and acc,none differ: the metric or its filter"),
    ],
)
def test_where_two_evaluations_begin_to_differ(changes: dict[str, Any], words: str) -> None:
    assert re.search(words, explain([(change(), change(**changes))]), re.DOTALL)


def test_several_models_are_compared_with_the_first(
    tiny: InferenceModel, write_task: WriteTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = [{"metric": "acc"}, {"metric": "brier_score"}]
    prepared = prepare_task(load_task(write_task(metric_list=metrics)))
    result = evaluate_task(prepared, Scorer(Engine(tiny), AnswerCache(None)))
    write_result(result, tmp_path / "a", {})
    values = [record["metrics"]["brier_score,none"] for record in result.records]
    p_values = []
    for name, shift in (("b", 0.01), ("c", 0.3)):
        shifts = [shift * (index % 3) for index in range(len(values))]
        for record, value, more in zip(result.records, values, shifts, strict=True):
            record["metrics"]["brier_score,none"] = value + more
        write_result(result, tmp_path / name, {})
        p_values.append(scipy.stats.ttest_1samp(shifts, 0).pvalue)
    compare(tmp_path / "a", [tmp_path / "b", tmp_path / "c"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    adjusted = holm([1.0, p_values[0], 1.0, p_values[1]])
    rows = [line for line in lines if line[1:3] == ["sums", "brier_score"]]
    assert [row[0] for row in rows] == ["b", "c"]
    assert [row[-2] for row in rows] == [f"{p:.3g}" for p in p_values]
    assert [row[-1] for row in rows] == [f"{p:.3g}" for p in (adjusted[1], adjusted[3])]


def test_results_of_the_harness_are_explained(
    tiny: InferenceModel, write_task: WriteTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = evaluate_task(prepare_task(load_task(write_task())), Scorer(Engine(tiny), AnswerCache(None)))
    write_result(result, tmp_path / "own", {})
    lines = []
    for record in result.records:
        # As the harness writes samples, here of a model that begins prompts with BOS.
        arguments = {f"gen_args_{n}": {"arg_0": pair[0], "arg_1": pair[1]} for n, pair in enumerate(record["pairs"])}
        resps = [[[str(answer["logprob"] - 0.2), "False"]] for answer in record["answers"]]
        values = {"acc": record["metrics"]["acc,none"], "metrics": ["acc"], "filter": "none"}
        lines.append(json.dumps({"doc_id": record["index"], "arguments": arguments, "resps": resps, **values}))
    folder = tmp_path / "harness" / "model"
    folder.mkdir(parents=True)
    (folder / "samples_sums_2026-01-02T03-04-05.678.jsonl").write_text("\n".join(lines), encoding="utf-8")
    compare(tmp_path / "own", [tmp_path / "harness"])
    output = capsys.readouterr().out
    assert "harness, sums: the prompts are equal, and log-probabilities differ by up to 0.2: the token ids" in output
    assert "harness  sums  acc " in output and " McNemar " in output


def test_texts_with_line_separators_are_read_back(
    tiny: InferenceModel, write_task: WriteTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**row, "question": f"one{SEPARATORS}{row['question']}"} for row in ROWS]
    result = evaluate_task(prepare_task(load_task(write_task(rows))), Scorer(Engine(tiny), AnswerCache(None)))
    write_result(result, tmp_path / "a", {})
    _, records = read_results(tmp_path / "a")["sums"]
    assert [record["pairs"][0][0] for record in records] == [row["question"] for row in rows]
    compare(tmp_path / "a", [tmp_path / "a"])
    assert "a        sums  acc " in capsys.readouterr().out
    # The harness does not escape these characters either.
    sample = {"doc_id": 0, "arguments": {"gen_args_0": {"arg_0": SEPARATORS, "arg_1": " b"}}, "resps": [[["-1", "x"]]]}
    line = json.dumps({**sample, "metrics": [], "filter": "none"}, ensure_ascii=False)
    (tmp_path / "samples_sums_2026-01-02T03-04-05.678.jsonl").write_text(line, encoding="utf-8")
    assert read_evaluations(tmp_path)["sums"].records[0]["pairs"] == [[SEPARATORS, " b"]]


def test_damaged_results_are_reported(tiny: InferenceModel, write_task: WriteTask, tmp_path: Path) -> None:
    result = evaluate_task(prepare_task(load_task(write_task())), Scorer(Engine(tiny), AnswerCache(None)))
    folder = tmp_path / "a"
    samples = folder / "sums.samples.jsonl"
    write_result(result, folder, {})
    text = samples.read_text(encoding="utf-8")
    for damaged in (text + "{", text + "[]\n"):
        samples.write_text(damaged, encoding="utf-8")
        with pytest.raises(JinguError, match=r"sums\.samples\.jsonl:8: the file is damaged .*Evaluate the task again"):
            read_results(folder)
    write_result(result, folder, {})
    (folder / "sums.json").write_text("{", encoding="utf-8")
    with pytest.raises(JinguError, match=r"sums\.json: the file is damaged .*Evaluate the task again"):
        read_results(folder)


def test_an_interrupted_evaluation_is_reported(
    tiny: InferenceModel, write_task: WriteTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of an earlier evaluation must not stand beside the samples of a later one that was killed."""
    result = evaluate_task(prepare_task(load_task(write_task())), Scorer(Engine(tiny), AnswerCache(None)))
    folder = tmp_path / "a"
    write_result(result, folder, {})

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "write_json", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_result(result, folder, {})
    with pytest.raises(JinguError, match=r"sums\.json: the file is missing: an evaluation was interrupted"):
        read_results(folder)
