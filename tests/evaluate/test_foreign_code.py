"""What the templates and the code of a task file can do wrong ends in words, if possible before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jingu.errors import JinguError
from jingu.evaluate import answer_filters, statistics, task_file, task_templates
from jingu.evaluate.evaluation import evaluate_task, prepare_task, write_result
from jingu.evaluate.scoring import AnswerCache, Scorer, check_continuations_fit, evaluation_precision, precision_name
from jingu.evaluate.task_file import CATALOGUE, TaskIndex
from jingu.evaluate.task_metrics import METRICS, metrics_of
from jingu.infer.engine import Engine
from jingu.infer.inference_model import InferenceModel
from tests.evaluate.conftest import ROWS, WriteTask, load_task

GENERATION: dict[str, Any] = {
    "output_type": "generate_until",
    "doc_to_target": "text",
    "doc_to_choice": None,
    "generation_kwargs": {"max_gen_toks": 4},
}


def write_with_code(write_task: WriteTask, folder: Path, code: str, **settings: Any) -> Any:
    """A trusted task; `FUNCTION own` in its settings is the function `own` of the code."""
    task_file._import_names.cache_clear()
    (folder / "own.py").write_text(code, encoding="utf-8")
    file = write_task(**settings)
    text = file.read_text(encoding="utf-8").replace("FUNCTION ", "!function own.")
    file.write_text(text, encoding="utf-8")
    return load_task(file, trusted=[folder / "own.py"])


def score(task: Any, tiny: InferenceModel) -> Any:
    return evaluate_task(prepare_task(task), Scorer(Engine(tiny), AnswerCache(None)))


@pytest.mark.parametrize(
    "code",
    [
        "from functools import partial\ndef f(row, mark):\n    return row['text'] + mark\nown = partial(f, mark='?')",
        "class Own:\n    def __call__(self, row):\n        return row['question']\nown = Own()",
        "from operator import itemgetter\nown = itemgetter('question')",
        "own = lambda row: row['question']",
    ],
)
def test_every_callable_is_a_function(code: str, tiny: InferenceModel, write_task: WriteTask, tmp_path: Path) -> None:
    hashes = []
    for folder in ("a", "b"):
        task = write_with_code(write_task, tmp_path, code, doc_to_text="FUNCTION own")
        write_result(score(task, tiny), tmp_path / folder, {})
        hashes.append(json.loads((tmp_path / folder / "sums.json").read_text("utf-8"))["hashes"])
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(
    "failure",
    [
        "raise AssertionError('needs 4.11')",
        "raise SystemExit(3)",
        "1 / 0",
        "raise RuntimeError",
        "import nothing_at_all",
    ],
)
def test_whatever_code_raises_is_said(
    failure: str, tiny: InferenceModel, write_task: WriteTask, tmp_path: Path
) -> None:
    with pytest.raises(
        JinguError, match=r"own\.py: (it fails while it is imported|it needs a package that is missing)"
    ):
        write_with_code(write_task, tmp_path, failure, doc_to_text="FUNCTION own")
    body = f"def own(*_, **__):\n    {failure}\n"
    for key in ("doc_to_text", "doc_to_target", "doc_to_choice", "process_docs"):
        with pytest.raises(JinguError, match=f"the code of its {key} fails: "):
            prepare_task(write_with_code(write_task, tmp_path, body, **{key: "FUNCTION own"}))
    with pytest.raises(JinguError, match="the code of its process_results fails: "):
        score(write_with_code(write_task, tmp_path, body, process_results="FUNCTION own"), tiny)
    metric = {"metric": "acc", "aggregation": "FUNCTION own"}
    with pytest.raises(JinguError, match="the metric acc cannot be aggregated over documents: "):
        score(write_with_code(write_task, tmp_path, body, metric_list=[metric]), tiny)


@pytest.mark.parametrize(
    ("targets", "right", "expected"),
    [
        ("['A', 'B']", "references[0] == 'B'", 1.0),
        ("['A', 'B']", "references[0] == 'C'", 0.0),
        ("['B']", "0.25 * (references[0] == 'B')", 1.0),
        ("B", "0.25 * (references[0] == 'B')", 0.25),
        ("['A', 'B', 'C']", "{'own': references[0] == 'C'}", 1.0),
        ("B", "{'own': 1.0, 'more': 2.0}", 1.0),
    ],
)
def test_each_right_answer_is_scored_by_an_own_metric_as_in_the_harness(
    targets: str, right: str, expected: float, tiny: InferenceModel, write_task: WriteTask, tmp_path: Path
) -> None:
    code = f"def own(references, predictions):\n    return {right}\n"
    metrics = [{"metric": "FUNCTION own", "aggregation": "mean"}]
    settings = {**GENERATION, "doc_to_target": targets, "metric_list": metrics}
    result = score(write_with_code(write_task, tmp_path, code, **settings), tiny)
    assert result.metrics["own,none"].value == pytest.approx(expected)
    assert ("more,none" in result.metrics) == ("more" in right)


# Metrics whose values are no numbers, with an aggregation that reads them.
PAIRED = {
    "f1": "f1",
    "mcc": "matthews_corrcoef",
    "calibration_error": "calibration_error",
    "pearson": "spearman",
    "bits_per_byte": "weighted_perplexity",
    "bleu": "bleu",
    "distinct1": "distinct1",
    "multilabel_f1": "multilabel_f1",
}


@pytest.mark.parametrize("name", [*PAIRED, "acc", "acc_norm", "brier_score", "exact_match", "squad_f1"])
def test_aggregations_that_do_not_fit_are_refused_before(name: str, write_task: WriteTask) -> None:
    kind = next(kind for kind, names in METRICS.items() if name in names)

    def check(aggregation: str) -> None:
        metrics = [{"metric": name, "aggregation": aggregation}]
        metrics_of(load_task(write_task(output_type=kind, metric_list=metrics)))

    for aggregation in (PAIRED[name],) if name in PAIRED else ("mean", "nanmean", "median"):
        check(aggregation)
    wrong = ["mean", "median", "calibration_error"] if name in PAIRED else [*PAIRED.values()]
    for aggregation in (each for each in wrong if each != PAIRED.get(name)):
        with pytest.raises(
            JinguError, match=f"the aggregation {aggregation} does not fit the metric {name}, which gives"
        ):
            check(aggregation)


def test_an_aggregation_of_the_tasks_own_takes_any_values(write_task: WriteTask) -> None:
    task = load_task(write_task(metric_list=[{"metric": "f1"}]))
    options = task.model_copy(update={"metric_list": [{"metric": "f1", "aggregation": len}]})
    prepare_task(options)
    with pytest.raises(JinguError, match="f1 is for tasks with two choices"):
        prepare_task(task)


@pytest.mark.parametrize("digit", ["²", "①", "٣", "𝟑"])
def test_only_ascii_digits_are_numbers(digit: str, write_task: WriteTask) -> None:
    rows = [{"question": digit, "choices": [digit, "b"], "text": "x"}]
    (sample,) = prepare_task(
        load_task(write_task(rows, doc_to_target="{{question ~ ''}}", doc_to_text="q {{question}}"))
    ).samples
    assert sample.gold == (0,)


@pytest.mark.parametrize("text", ["😀", "𠮷野家", "a 🧑‍🚀 in space", "𝒳 and 🇫🇷"])
def test_characters_beyond_the_basic_plane_stay_whole(text: str, tiny: InferenceModel, write_task: WriteTask) -> None:
    rows = [{"question": text, "choices": [text, f"not {text}"], "label": 0}]
    choices = "[{% for choice in choices %}{{choice|tojson}}, {% endfor %}]"
    task = load_task(write_task(rows, doc_to_choice=choices, doc_to_target="label"))
    (sample,) = prepare_task(task).samples
    assert list(sample.choices) == rows[0]["choices"]
    assert score(task, tiny).metrics["acc,none"].size == 1
    with pytest.raises(JinguError, match=r"give document 0 the half character U\+D83D"):
        prepare_task(load_task(write_task(rows, doc_to_text="{{'\\ud83d'}}", doc_to_target="label")))


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!'|regex_replace('(a+)+$', '') }}",
        "{% macro m() %}{% for i in range(90000) %}{{ range(90000)|sum }}{% endfor %}{% endmacro %}{{ m() }}",
        "{% for i in range(99999) %}{{ range(9999)|map('string')|join|length }}{% endfor %}",
    ],
)
def test_templates_end(template: str, write_task: WriteTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_templates, "TEMPLATE_SECONDS", 0.05)
    for key in ("doc_to_text", "description"):
        with pytest.raises(JinguError, match=rf"its {key} cannot be rendered: it runs for more than 0\.05 s"):
            prepare_task(load_task(write_task(**{key: template})))


def test_filters_end(tiny: InferenceModel, write_task: WriteTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_filters, "FILTER_SECONDS", 0.05)
    steps = [{"function": "regex", "regex_pattern": "(a+)+$"}]
    task = load_task(write_task(**GENERATION, filter_list=[{"name": "slow", "filter": steps}]))
    with pytest.raises(JinguError, match=r"its filter slow fails with an answer: it runs for more than 0\.05 s"):
        answer_filters.filter_answers(task, "slow", steps, ["a" * 40 + "!"], {})
    wrong = [{"function": "regex", "regex_pattern": "a", "group_select": 7}]
    with pytest.raises(JinguError, match="its filter far fails with an answer"):
        answer_filters.filter_answers(task, "far", wrong, ["a"], {})


def test_answers_longer_than_the_context_are_found_before(tiny: InferenceModel, write_task: WriteTask) -> None:
    room = tiny.spec.max_position_embeddings
    for rows, settings in (
        ([{**ROWS[0], "choices": ["one", "two " * room]}], {}),
        (
            [{**ROWS[0], "text": " x" * (room + 1)}],
            {"output_type": "loglikelihood", "doc_to_target": "text", "doc_to_choice": None},
        ),
    ):
        prepared = prepare_task(load_task(write_task(rows, **settings)))
        pairs = [pair for sample in prepared.samples for pair in sample.pairs]
        with pytest.raises(JinguError, match=r"it has an answer of .* tokens, and the model's context is 64"):
            check_continuations_fit(prepared.settings, pairs, tiny.tokenizer, tiny.spec)
    fitting = prepare_task(load_task(write_task()))
    pairs = [pair for sample in fitting.samples for pair in sample.pairs]
    check_continuations_fit(fitting.settings, pairs, tiny.tokenizer, tiny.spec)


def test_empty_texts(tiny: InferenceModel, write_task: WriteTask) -> None:
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_target": "text", "doc_to_choice": None}
    with pytest.raises(JinguError, match="all of its texts are empty"):
        prepare_task(load_task(write_task([{"text": "", "question": ""}] * 2, **rolling)))
    rows = [{"text": "", "question": ""}, {"text": "one two", "question": ""}, {"text": "many", "question": ""}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "BOOTSTRAP_DRAWS", 2_000)
        metrics = score(load_task(write_task(rows, **rolling)), tiny).metrics
    assert all(value.value > 0 and value.stderr > 0 for value in metrics.values())


def test_rows_without_a_label_are_left_out_and_counted(tiny: InferenceModel, write_task: WriteTask) -> None:
    rows = [{**row, "label": "-" if row["label"] == 1 else row["label"]} for row in ROWS]
    metadata = {"leave_out": "{{label == '-'}}"}
    result = score(load_task(write_task(rows, metadata=metadata)), tiny)
    assert len(result.records) == 5 and result.counts["left_out"] == 2
    for wrong in ("{{label}}", "{{nothing == 1}}", "{{label"):
        with pytest.raises(JinguError, match=r"its metadata\.leave_out"):
            prepare_task(load_task(write_task(rows, metadata={"leave_out": wrong})))
    for name in ("ocnli", "cmnli"):
        index = TaskIndex()
        index.load(name)
        assert index.tasks[name].metadata["leave_out"] and CATALOGUE.is_dir()


def test_precision_is_that_of_the_stored_weights() -> None:
    types = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp32", torch.float64: "fp32"}
    for dtype, expected in types.items():
        stored: Any = SimpleNamespace(dtype=dtype)
        assert evaluation_precision("auto", stored) == expected
        assert evaluation_precision("int8", stored) == "int8" and evaluation_precision("fp32", stored) == "fp32"
    assert precision_name("int8", torch.bfloat16) == "int8 (bf16)"
    assert precision_name("fp32", torch.float32) == "fp32" and precision_name("auto", torch.bfloat16) == "bf16"
