"""Task files and their data: what is read, and what is refused before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from jingu.chat.templates import ChatTemplate
from jingu.cli import main
from jingu.errors import JinguError
from jingu.evaluate.evaluation import apply_chat_template, prepare_task
from jingu.evaluate.scoring import check_generation_fits, generation_request
from jingu.evaluate.task_data import read_split
from jingu.evaluate.task_file import GenerationSettings, TaskIndex
from jingu.formats.export import export_hf
from jingu.infer.generate import InferenceOptions
from jingu.infer.inference_model import InferenceModel
from jingu.model.decoder import Decoder
from tests.evaluate.conftest import ROWS, WriteTask, load_task

GENERATION = {"output_type": "generate_until", "doc_to_choice": None, "doc_to_target": "text"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"doc_to_text": "{{query}}"},
            "its doc_to_text uses a column that the data do not have: 'query' is undefined.*question",
        ),
        ({"doc_to_text": "{{question"}, "its doc_to_text cannot be rendered"),
        ({"doc_to_text": "{{''.__class__.__mro__}}"}, "unsafe|undefined"),
        ({"doc_to_choice": "{{text}}"}, "its doc_to_choice gives '0' for a document, which is no list of texts"),
        ({"doc_to_target": "{{label + 9}}"}, r"a document has the label 9, and 3 choices\. Labels count from 0"),
        ({"doc_to_target": "text_of_nothing"}, "label 'text_of_nothing', and 3 choices"),
        ({"doc_to_target": -1}, r"no right answer \(its target is -1\)\. Use a split with labels"),
        ({"metric_list": [{"metric": "bits_per_byte"}]}, "the metric bits_per_byte does not fit tasks of type multi"),
        ({"metric_list": [{"metric": "f1"}]}, "the metric f1 is for tasks with two choices"),
        ({"metric_list": [{"metric": "acc", "aggregation": "sum"}]}, "there is no aggregation sum"),
        ({"filter_list": [{"name": "a", "filter": [{"function": "shorten"}]}]}, "there is no filter shorten. Use take"),
        (
            {"filter_list": [{"name": "a", "filter": [{"function": "regex", "x": 1}]}]},
            "its filter regex is wrong: .*'x'",
        ),
        ({"test_split": "dev"}, r"its split dev has no data\. Set dataset_kwargs\.data_files\.dev"),
        ({"test_split": None}, "neither a test_split nor a validation_split"),
        ({"dataset_path": None}, "it names no data"),
        ({"dataset_kwargs": {"data_files": {"test": "none.jsonl"}}}, "its data are missing: there is no none.jsonl"),
        (
            {"dataset_kwargs": {"data_files": {"test": "package:no_such_package/a"}}},
            "package no_such_package, which is",
        ),
        ({"dataset_path": "parquet"}, r"rows\.jsonl: its data cannot be read .*should be parquet"),
        ({"num_fewshot": 7}, "7 shots are requested, but the 7 documents to draw from are too few"),
        ({"dokument_to_text": "a"}, "this is not a task: dokument_to_text"),
        ({"output_type": "essay"}, "this is not a task: output_type: Input should be 'multiple_choice'"),
        ({"fewshot_config": {"shots": 1}}, "its fewshot_config is wrong"),
        (
            {**GENERATION, "generation_kwargs": {"num_beams": 4}},
            "generation_kwargs have num_beams 4, and tasks are evaluated without beam",
        ),
        (
            {**GENERATION, "doc_to_target": "missing_answers", "rows": [{"question": "a", "missing_answers": None}]},
            "no ri",
        ),
        ({"rows": []}, "its split test has no documents"),
        ({"metadata": {"cluster": "passage"}}, "its metadata.cluster is passage, which the data do not have"),
        ({"metadata": {"templates": ["short"]}}, "this is not a task: metadata: templates should be keys of the task"),
        ({"metadata": {"sources": "glue"}}, "this is not a task: metadata: sources should be a list of texts"),
        ({"metric_list": [{"name": "acc"}]}, "this is not a task: metric_list.0: it has no `metric`"),
        (
            {"filter_list": [{"name": "a", "filter": [{"function": "take_first_k", "k": 0}]}]},
            "its filter take_first_k is wrong: it leaves no answer",
        ),
        ({"filter_list": [{"filter": []}]}, "this is not a task: filter_list.0.name: Field required"),
        (
            {"filter_list": [{"name": "a", "filter": ["regex"]}]},
            r"filter_list\.0\.filter\.0: Input should be a valid dict",
        ),
        ({"filter_list": [{"name": "a", "filter": {"function": "regex"}}]}, "filter_list.0.filter: .* valid list"),
        (
            {"filter_list": [{"name": "a", "filter": [{"function": "map", "mapping_dict": 5}]}]},
            "its filter map is wrong: 'int' object has no",
        ),
        (
            {
                "filter_list": [
                    {"name": "a", "filter": [{"function": "multi_choice_regex", "regexes_to_ignore": ["("]}]}
                ]
            },
            "its filter multi_choice_regex is wrong: missing \\)",
        ),
        (
            {**GENERATION, "metric_list": [{"metric": "exact_match", "regexes_to_ignore": ["("]}]},
            "exact_match is wrong",
        ),
        ({**GENERATION, "metric_list": [{"metric": "multilabel_f1", "separator": 5}]}, "multilabel_f1 is wrong"),
        (
            {**GENERATION, "metric_list": [{"metric": "bleu", "tokenize": "sh"}]},
            "an option of the metric bleu is wrong",
        ),
        ({**GENERATION, "metric_list": [{"metric": "pass@1", "program": "{{answer"}]}, "the metric pass@1 is wrong"),
        (
            {**GENERATION, "generation_kwargs": {"temperature": "warm"}},
            "generation_kwargs.temperature: .* valid number",
        ),
        ({**GENERATION, "generation_kwargs": {"temperature": None}}, "generation_kwargs.temperature: .* valid number"),
        (
            {**GENERATION, "generation_kwargs": {"max_gen_toks": 0}},
            "generation_kwargs.max_gen_toks: .* greater than 0",
        ),
        ({**GENERATION, "generation_kwargs": {"until": 5}}, "generation_kwargs.until"),
        ({"fewshot_config": {"samples": 5}}, "its fewshot_config is wrong"),
        ({"doc_to_text": "{{question|regex_replace('(', '')}}"}, "its doc_to_text cannot be rendered: missing \\)"),
        ({"doc_to_text": "{{'{0}'.format()}}"}, "its doc_to_text cannot be rendered: .*index"),
        ({"doc_to_text": "{{label // 0}}"}, "its doc_to_text cannot be rendered: .*zero"),
        ({"dataset_kwargs": {"data_files": {"test": 5}}}, "dataset_kwargs: data_files should be paths"),
        ({"dataset_kwargs": {"data_files": None}}, "dataset_kwargs: data_files should be paths"),
        (
            {"rows": [], "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}, "field": "data"}},
            "its split test has no documents",
        ),
        ({"dataset_kwargs": {"data_files": {"test": "package:/a"}}}, "package , which is not installed"),
        (
            {"rows": [*ROWS, {**ROWS[0], "choices": ["a", "\ud83d"]}]},
            r"rows\.jsonl: row 8 has the escape \\ud83d, which is half a character",
        ),
    ],
)
def test_what_is_wrong_with_a_task_is_said(settings: dict[str, Any], words: str, write_task: WriteTask) -> None:
    with pytest.raises(JinguError, match=words):
        prepare_task(load_task(write_task(**settings)))


def test_mistakes_are_reported_before_a_model_is_loaded(
    tiny: InferenceModel,
    write_task: WriteTask,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny.tokenizer.save(tmp_path / "tokenizer")
    assert isinstance(tiny.module, Decoder)
    export_hf(tiny.spec, tiny.module.state_dict().__getitem__, tmp_path / "tokenizer", tmp_path / "model")
    monkeypatch.setattr(InferenceOptions, "load", lambda *_: pytest.fail("a model was loaded"))
    for settings, words in (
        ({"doc_to_text": "{{query}}"}, "uses a column that the data do not have"),
        ({"doc_to_target": "{{label + 9}}"}, "a document has the label 9"),
        ({"doc_to_target": -1}, "no right answer"),
        ({"metric_list": [{"metric": "bits_per_byte"}]}, "does not fit tasks of type multi"),
        ({"filter_list": [{"name": "a", "filter": [{"function": "shorten"}]}]}, "there is no filter shorten"),
        ({"test_split": "dev"}, "its split dev has no data"),
        (GENERATION, "leave no room"),
    ):
        file = write_task(**settings)
        assert main(["evaluate", str(tmp_path / "model"), str(file), "--output", str(tmp_path / "out")]) == 2
        assert words in capsys.readouterr().err
    text = write_task().read_text(encoding="utf-8").replace("'{{question}}'", "!function utils.question")
    (tmp_path / "sums.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "utils.py").write_text("def question(row):\n    return row['question']\n", encoding="utf-8")
    assert main(["evaluate", str(tmp_path / "model"), str(tmp_path / "sums.yaml")]) == 2
    assert "--trust" in capsys.readouterr().err


def test_a_context_must_hold_the_generation(tiny: InferenceModel, write_task: WriteTask) -> None:
    task = load_task(write_task(**GENERATION))
    with pytest.raises(
        JinguError, match=r"up to 256 tokens leave no room .*context of 64\. Set generation_kwargs\.max_g"
    ):
        check_generation_fits(task, tiny.spec)
    kwargs = GenerationSettings(max_gen_toks=63)
    check_generation_fits(task.model_copy(update={"generation_kwargs": kwargs}), tiny.spec)


def test_one_beam_is_greedy(write_task: WriteTask) -> None:
    settings = {"max_gen_toks": 5, "num_beams": 1}
    task = load_task(write_task(**GENERATION, generation_kwargs=settings))
    assert generation_request(task).max_tokens == 5 and generation_request(task).num_beams == 1


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, (256, ("\n\n",), 0.0, None, 1.0)),
        ({"until": None, "max_gen_toks": None}, (256, (), 0.0, None, 1.0)),
        ({"until": ["a", ""], "max_gen_toks": None, "max_tokens": "7"}, (7, ("a",), 0.0, None, 1.0)),
        ({"max_tokens": 7, "max_gen_toks": 5}, (5, ("\n\n",), 0.0, None, 1.0)),
        ({"temperature": 0.5, "do_sample": None, "top_k": None, "top_p": None}, (256, ("\n\n",), 0.5, None, 1.0)),
        ({"temperature": 0.5, "do_sample": False}, (256, ("\n\n",), 0.0, None, 1.0)),
        ({"temperature": "0.5", "top_k": 0, "top_p": 0.9}, (256, ("\n\n",), 0.5, None, 0.9)),
        ({"temperature": 0.5, "top_k": 3, "num_beams": None}, (256, ("\n\n",), 0.5, 3, 1.0)),
    ],
)
def test_nulls_of_generation_mean_what_they_mean_in_the_harness(
    kwargs: dict[str, Any], expected: tuple[Any, ...], write_task: WriteTask
) -> None:
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

    request = generation_request(load_task(write_task(**GENERATION, generation_kwargs=kwargs)))
    sampling = request.sampling
    values = (request.max_tokens, request.stop, sampling.temperature, sampling.top_k, sampling.top_p)
    assert values == expected
    theirs = normalize_gen_kwargs(kwargs)
    assert request.max_tokens == theirs["max_gen_toks"]
    assert theirs["do_sample"] == (sampling.temperature > 0)
    until = handle_stop_sequences(kwargs.get("until", ["\n\n"]), eos=None)
    assert request.stop == tuple(text for text in until if text)


def test_code_runs_only_if_it_is_trusted(write_task: WriteTask, tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text(
        "def question(row):\n    return row['question'] + '!'\n\n"
        "def results(row, results):\n    return {'greedy': float(results[row['label']][1])}\n",
        encoding="utf-8",
    )
    file = write_task(metric_list=[{"metric": "greedy"}])
    text = file.read_text(encoding="utf-8").replace("'{{question}}'", "!function utils.question")
    file.write_text(text + "process_results: !function utils.results\n", encoding="utf-8")
    with pytest.raises(
        JinguError, match=r"this task runs code \(question of utils\.py\)\. Read that code.*--trust .*utils"
    ):
        load_task(file)
    prepared = prepare_task(load_task(file, trusted=[tmp_path / "utils.py"]))
    assert prepared.samples[0].pairs[0] == ("What is 0 + 1?!", " one")
    (tmp_path / "other.py").write_text("import no_such_package\n", encoding="utf-8")
    file.write_text(text.replace("utils.question", "other.question"), encoding="utf-8")
    with pytest.raises(JinguError, match=r"other\.py: it needs a package that is missing .*no_such_package"):
        load_task(file, trusted=[tmp_path / "other.py"])


def test_code_of_an_installed_package_runs_only_if_it_is_trusted(
    write_task: WriteTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness's tasks name functions by the path of a package too."""
    code = tmp_path / "packages" / "quiz_tools" / "words" / "own.py"
    code.parent.mkdir(parents=True)
    code.write_text("def question(row):\n    return 'Q: ' + row['question']\n", encoding="utf-8")
    (code.parents[1] / "__init__.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(code.parents[2]))
    file = write_task()
    text = file.read_text(encoding="utf-8").replace("'{{question}}'", "FUNCTION")
    text += "doc_to_decontamination_query: FUNCTION\n"
    file.write_text(text.replace("FUNCTION", "!function quiz_tools.words.own.question"), encoding="utf-8")
    with pytest.raises(JinguError, match=r"runs code \(question of own\.py\).*--trust .*quiz_tools/words/own\.py"):
        load_task(file)
    assert prepare_task(load_task(file, trusted=[code])).samples[0].pairs[0][0] == "Q: What is 0 + 1?"
    for name in ("quiz_tools.other.question", "no_such_package.own.question", "question"):
        file.write_text(text.replace("FUNCTION", f"!function {name}"), encoding="utf-8")
        with pytest.raises(JinguError, match="this task runs code"):
            load_task(file)


def test_unknown_tasks_are_named(write_task: WriteTask) -> None:
    file = write_task()
    with pytest.raises(JinguError, match=r"there is no task sum\. Did you mean sums\?"):
        TaskIndex([file.parent]).load("sum")
    with pytest.raises(JinguError, match="there is no such folder of tasks"):
        TaskIndex([file])
    for text, words in (
        ("task: [", "the task file is not YAML"),
        ("- task", "the task file holds no settings"),
        ("task: sums\non: 5", "a key that YAML reads as True, not as text"),
        ("task: sums\ninclude: 5", "includes 5, which is no file"),
        ("task: sums\ninclude: [5]", r"includes \[5\], which is no file"),
        ("task: sums\ninclude: ['']", r"includes \[''\], which is no file"),
        ("task: sums\ninclude: other.yaml", "the task file includes itself"),
        ("task: sums\ninclude: none.yaml", "none.yaml: the file cannot be read"),
        ("task: sums\nmetadata: {templates: {short: {on: 5}}}", "templates should be keys of the task by the name"),
        ("task: sums\ntag: 5", "this is not a task: tag"),
        ("group: sums\ntask: sums", "the tasks of this group are 'sums'"),
        ("group: sums\ntask: [5]", "a member of the group is 5, which is no task"),
        (f"group: sums\ntask: ['{file}']", "this group is a member of itself"),
        ("group: sums\ntask: []\naggregate_metric_list: [{}]", "an item of its aggregate_metric_list has no `metric`"),
    ):
        file.write_text(text, encoding="utf-8")
        (file.parent / "other.yaml").write_text("include: sums.yaml\n", encoding="utf-8")
        index = TaskIndex()
        with pytest.raises(JinguError, match=words):
            index.load(f"{file}@*")
    # A null is the default, and files that other tasks need are found beside wrong ones.
    file.write_text("task: sums\ninclude: null\ntag: 5\nmetadata: 5\n", encoding="utf-8")
    index = TaskIndex([file.parent])
    assert "sums" not in index.tags and "sums" not in index.task_clusters
    file.write_bytes(b"task: \xff")
    with pytest.raises(JinguError, match="the file is not UTF-8 text"):
        TaskIndex([file.parent]).load("sum")


def test_groups_and_tags(write_task: WriteTask) -> None:
    folder = write_task(tag=["easy", "short"]).parent
    (folder / "more.yaml").write_text("include: sums.yaml\ntask: more\ntag: easy\n", encoding="utf-8")
    (folder / "all.yaml").write_text(
        "group: all\ntask:\n- sums\n- group: part\n  task:\n  - task: more\n    task_alias: renamed\n", encoding="utf-8"
    )
    index = TaskIndex([folder])
    assert index.load("all") == ["sums", "more"]
    assert index.groups["all"].members == ("sums", "more") and index.groups["part"].members == ("more",)
    assert index.tasks["more"].task_alias == "renamed" and index.tasks["more"].doc_to_target == "label"
    assert sorted(index.load("easy")) == ["more", "sums"] and index.load("short") == ["sums"]


def test_formats_of_data_are_read_alike(write_task: WriteTask, tmp_path: Path) -> None:
    rows = [{"number": 1, "share": 0.5, "word": "ä,\n"}, {"number": 20, "share": 2.0, "word": "b"}]
    table = pyarrow.Table.from_pylist(rows)
    (tmp_path / "a.json").write_text(json.dumps({"data": rows}), encoding="utf-8")
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for name, writer in (("a.arrow", pyarrow.ipc.new_stream), ("b.arrow", pyarrow.ipc.new_file)):
        with writer(tmp_path / name, table.schema) as stream:
            stream.write_table(table)
    for kind, name in (("json", "a.json"), ("parquet", "a.parquet"), ("arrow", "a.arrow"), ("arrow", "b.arrow")):
        more = {"field": "data"} if kind == "json" else {}
        kwargs = {"data_files": {"test": name}, **more}
        assert read_split(load_task(write_task(dataset_path=kind, dataset_kwargs=kwargs)), "test") == rows
    kwargs = {"data_files": {"test": ["a.csv", "a.csv"]}}
    task = load_task(write_task(dataset_path="csv", dataset_kwargs=kwargs))
    (tmp_path / "a.csv").write_text("number,share,word\n1,0.5,ä\n20,2.0,b\n", encoding="utf-8")
    assert read_split(task, "test") == [{**rows[0], "word": "ä"}, rows[1]] * 2
    # A data set that was saved to disk.
    saved = tmp_path / "saved" / "test"
    saved.mkdir(parents=True)
    (tmp_path / "a.arrow").rename(saved / "data-00000-of-00001.arrow")
    assert read_split(load_task(write_task(dataset_path="saved", dataset_kwargs=None)), "test") == rows


def test_shots_do_not_depend_on_the_limit_and_never_show_the_answer(write_task: WriteTask) -> None:
    """A validation split without a test split: there the harness shows documents their own answers."""
    files = {"data_files": {"validation": "rows.jsonl"}}
    file = write_task(test_split=None, validation_split="validation", fewshot_split="validation", dataset_kwargs=files)
    samples = prepare_task(load_task(file), num_shots=3).samples
    for sample in samples:
        *shots, question = sample.pairs[0][0].split("\n\n")
        assert len(shots) == len(set(shots)) == 3 and not any(shot.startswith(question) for shot in shots)
    assert prepare_task(load_task(file), num_shots=3, limit=4).samples == samples[:4]
    assert len({sample.pairs[0][0] for sample in samples}) == len(ROWS)


# As in the template of Gemma.
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}<model>"
)


def test_a_description_is_left_out_if_the_template_refuses_it(
    tiny: InferenceModel, write_task: WriteTask, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    prepared = prepare_task(load_task(write_task(description="Add numbers.\n\n")))
    pairs = apply_chat_template(prepared, ChatTemplate(NO_SYSTEM, tiny.tokenizer, "gemma")).samples[1].pairs
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=NO_SYSTEM)
    messages = [{"role": "system", "content": "Add numbers.\n\n"}, {"role": "user", "content": ROWS[1]["question"]}]
    harness: Any = SimpleNamespace(tokenizer=fast, chat_template_args={})
    assert pairs[0] == (HFLM.apply_chat_template(harness, messages), "one")
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1 and "sums: the description is left out of the prompts" in warnings[0]
    assert "System role not supported" in warnings[0]


def test_a_template_that_refuses_all_prompts_is_reported(tiny: InferenceModel, write_task: WriteTask) -> None:
    template = ChatTemplate("{{ raise_exception('No questions') }}", tiny.tokenizer, "strict")
    for description in ("", "Add numbers."):
        prepared = prepare_task(load_task(write_task(description=description)))
        with pytest.raises(JinguError, match=r"sums .*its prompts cannot be messages: .*strict.*No questions"):
            apply_chat_template(prepared, template)
