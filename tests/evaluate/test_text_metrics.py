"""Metrics of generated texts and of labels against other libraries, enumeration, and published examples."""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from jingu.errors import JinguError
from jingu.evaluate import statistics, text_metrics
from jingu.evaluate.answer_filters import apply_steps, first_of
from jingu.evaluate.evaluation import evaluate_task, prepare_task
from jingu.evaluate.prompts import EvaluationSample
from jingu.evaluate.scoring import AnswerCache, Scorer
from jingu.evaluate.task_file import TaskSettings
from jingu.evaluate.task_metrics import Answer, aggregate, measure
from jingu.infer.engine import Engine
from jingu.infer.inference_model import InferenceModel
from tests.evaluate.conftest import WriteTask, load_task

CHINESE = "国家主席昨天访问了上海的一所大学"
PAIRS = np.random.default_rng(5).integers(0, 4, (6, 31, 2)).astype(float)
GENERATION = {"output_type": "generate_until", "doc_to_choice": None, "doc_to_target": "text"}


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "BOOTSTRAP_DRAWS", 1_000)


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_f1_of_many_classes_is_scikit_learns(average: str) -> None:
    for pairs in PAIRS:
        expected = sklearn.metrics.f1_score(*pairs.T, average=average)
        result = aggregate({"metric": "f1", "average": average}, pairs.tolist())
        assert result.value == pytest.approx(expected) and 0 < result.stderr < 0.2


def test_correlations_are_scipys() -> None:
    for pairs in PAIRS:
        for name, function in (("pearson", scipy.stats.pearsonr), ("spearman", scipy.stats.spearmanr)):
            result = aggregate({"metric": name}, pairs.tolist())
            assert result.value == pytest.approx(function(*pairs.T).statistic)
    # Without variation a correlation is unknown, and not zero.
    for name in ("pearson", "spearman"):
        result = aggregate({"metric": name}, [(1.0, 2.0), (2.0, 2.0), (3.0, 2.0)])
        assert math.isnan(result.value) and math.isnan(result.stderr)


@pytest.mark.parametrize(
    ("text", "number"),
    [("about -3.5 points", -3.5), ("none", 0), ("−5", -5), ("1,234.5", 1234.5), (".5", 0.5), ("1e3", 1000), ("4.", 4)],
)
def test_the_first_number_of_an_answer_is_read(text: str, number: float) -> None:
    assert text_metrics.parse_number(text) == number


def test_multilabel_f1_is_scikit_learns() -> None:
    right = [["a", "b"], ["c"], ["a", "c"], []]
    predicted = ["b,a", " c , d", "b", "a"]
    binarizer = sklearn.preprocessing.MultiLabelBinarizer(classes=list("abcd"))
    rows = [[part.strip() for part in text.split(",")] for text in predicted]
    expected = sklearn.metrics.f1_score(binarizer.fit_transform(right), binarizer.transform(rows), average="micro")
    counts = [text_metrics.count_labels(gold, text, {}) for gold, text in zip(right, predicted, strict=True)]
    assert aggregate({"metric": "multilabel_f1"}, counts).value == pytest.approx(expected)


def test_calibration_error_by_hand() -> None:
    pairs = [(0.95, 1.0), (0.93, 0.0), (0.31, 0.0), (0.38, 1.0), (1.0, 1.0)]
    # The last bin has three documents, the fourth two.
    expected = (abs(0.95 + 0.93 + 1.0 - 2) + abs(0.31 + 0.38 - 1)) / 5
    assert aggregate({"metric": "calibration_error"}, pairs).value == pytest.approx(expected)


@pytest.mark.parametrize(("answers", "right", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (6, 6, 4), (7, 1, 7), (4, 3, 2)])
def test_pass_at_k_is_enumeration(answers: int, right: int, k: int) -> None:
    subsets = list(itertools.combinations([1] * right + [0] * (answers - right), k))
    assert text_metrics.pass_at_k(answers, right, k) == pytest.approx(sum(map(max, subsets)) / len(subsets))


def test_squad_ignores_case_articles_and_punctuation() -> None:
    assert text_metrics.normalize_squad("The  Cat, an owl!") == "cat owl"
    assert text_metrics.OVERLAPS["squad_exact_match"]("the cat", "Cat.") == 1
    assert text_metrics.squad_f1("a black cat", "the cat sat") == pytest.approx(0.5)
    assert text_metrics.squad_f1("", "") == 1 and text_metrics.squad_f1("cat", "") == 0


def test_cmrc_counts_characters_of_the_longest_common_run() -> None:
    # 上海的 is common: 3 of 6 and of 4 characters; Latin words are whole.
    assert text_metrics.cmrc_f1("访问上海的大", "去上海的") == pytest.approx(2 * 3 / 10)
    assert text_metrics.cmrc_f1("用 Python 3", "Python 3。") == pytest.approx(2 * 2 / 5)
    assert text_metrics.OVERLAPS["cmrc_exact_match"]("“上海”", "上海。") == 1
    assert text_metrics.cmrc_f1("上海", "") == 0
    # Letters join where a sign is left out; other signs are tokens of their own, and so are full-width letters.
    assert text_metrics.cmrc_f1("A，c中", "ac") == pytest.approx(2 * 1 / 3)
    assert text_metrics.cmrc_f1("2008-09年", "200809年") == 1 and text_metrics.cmrc_f1("Ａ", "a") == 0
    assert text_metrics.cmrc_f1("约 3.5%", "3.5 %！") == pytest.approx(2 * 2 / 5)
    assert text_metrics.OVERLAPS["cmrc_exact_match"]("A，c中", "ac 中") == 0


def test_words_of_cmrc_are_those_of_its_tokenizer() -> None:
    tokenizer = pytest.importorskip("nltk.tokenize").NLTKWordTokenizer()
    texts = ["约 3.5%", "(v2.0), 1,000 km; X&Y!", "a？b #c @d", "q… r's", "GPT-4 Turbo"]
    for text in map(text_metrics.normalize_cmrc, texts):
        words = [word for part in re.split("([\u4e00-\u9fa5])", text) for word in tokenizer.tokenize(part)]
        assert text_metrics._CMRC_TOKEN.findall(text) == words


def test_rouge_of_chinese_needs_a_tokenizer(write_task: WriteTask) -> None:
    rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")
    for name in text_metrics.ROUGE:
        metric = {"metric": name}
        text = "the cat sat on the mat"
        expected = rouge_scorer.RougeScorer([name]).score("a cat on a mat", text)[name].fmeasure
        assert text_metrics.rouge(["dogs", "a cat on a mat"], text, metric) == pytest.approx(expected)
        assert text_metrics.rouge([CHINESE], CHINESE, {**metric, "tokenize": "char"}) == 1
    half = text_metrics.rouge([CHINESE], CHINESE[: len(CHINESE) // 2], {"metric": "rouge1", "tokenize": "char"})
    assert half == pytest.approx(2 / 3)
    for name, fix in (("rougeL", "char"), ("bleu", "zh")):
        file = write_task([{"question": "?", "text": CHINESE}], **GENERATION, metric_list=[{"metric": name}])
        with pytest.raises(JinguError, match=f"splits words at spaces, and there are Chinese.*tokenize: {fix}"):
            prepare_task(load_task(file))


@pytest.mark.skipif(importlib.util.find_spec("jieba") is None, reason="jieba is not installed")
def test_jieba_splits_chinese_into_words() -> None:
    assert text_metrics.split_function("jieba")("我来到北京清华大学。") == ["我", "来到", "北京", "清华大学"]


def test_bleu_of_chinese_has_a_signature() -> None:
    pairs = [((CHINESE,), CHINESE), (("上海的大学很多", CHINESE), CHINESE)]
    result = aggregate({"metric": "bleu", "tokenize": "zh"}, pairs)
    assert result.value == pytest.approx(100) and "tok:zh" in result.signature and "version:" in result.signature
    assert "nw:2" in aggregate({"metric": "chrf++"}, pairs).signature


def test_distinct_counts_different_ngrams() -> None:
    pairs = [((), "a b a b"), ((), "a b 上海")]
    assert aggregate({"metric": "distinct1"}, pairs).value == pytest.approx(4 / 8)
    assert aggregate({"metric": "distinct2"}, pairs).value == pytest.approx(4 / 6)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ({"metric": "pass@2", "program": ""}, r"needs at least as many answers, and repeats is 1\. Name it pass@1"),
        ({"metric": "pass@1"}, "the metric pass@1 has no program"),
        ({"metric": "rougeL", "tokenize": "words"}, "there is no tokenize words. Use char or jieba"),
        ({"metric": "f1", "average": "mean"}, "metric f1 does not fit tasks of type generate_until"),
    ],
)
def test_wrong_options_are_reported(metric: dict[str, Any], words: str, write_task: WriteTask) -> None:
    with pytest.raises(JinguError, match=words):
        prepare_task(load_task(write_task(**GENERATION, metric_list=[metric])))


def test_code_runs_in_a_sandbox(tiny: InferenceModel, write_task: WriteTask, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": "x = 1 #", "text": "x == 1"}, {"question": "x = 2 #", "text": "x == 1"}]
    metrics = [{"metric": f"pass@{k}", "program": "{{question}}{{answer}}\nassert {{text}}"} for k in (1, 3)]
    kwargs = {"max_gen_toks": 4, "until": ["\n"], "do_sample": True, "temperature": 1.0}
    file = write_task(rows, **GENERATION, metric_list=metrics, repeats=3, generation_kwargs=kwargs)
    programs: list[tuple[str, str]] = []

    def passes(sandbox: Any, code: str, tests: Any, limits: Any) -> bool:
        programs.append((code, tests.code))
        return tests.code.strip() == "assert x == 1" and code.startswith("x = 1")

    monkeypatch.setattr(text_metrics, "passes_tests", passes)
    result = evaluate_task(prepare_task(load_task(file)), Scorer(Engine(tiny), AnswerCache(None)))
    assert {key: metric.value for key, metric in result.metrics.items()} == {"pass@1,none": 0.5, "pass@3,none": 0.5}
    assert len(set(programs)) == len(programs) > 2


@pytest.mark.parametrize(
    ("program", "texts", "passes"),
    [
        (
            "def f(x):\n{{answer}}\nassert f({{x}}) == 2",
            ["    return x + 1", "    return x", "    import os\n    os._exit(0)"],
            1,
        ),
        (
            "{{answer}}\n{{tests}}\ncheck(f)",
            ["def f(x): return x + 1", "class f:\n    __eq__ = lambda *_: True", ""],
            1,
        ),
        # Tests within a statement, or none: the whole program runs.
        ("assert {{answer}} == 2", ["2", "3", "1 + 1"], 2),
        ("{{answer}}", ["x = 1", "assert False", "import sys\nsys.exit(0)", "x ="], 1),
    ],
)
def test_programs_are_judged_by_the_tests_after_the_answer(program: str, texts: list[str], passes: int) -> None:
    row = {"x": 1, "tests": "def check(g):\n    assert g(1) == 2"}
    assert text_metrics.count_passes(row, texts, {"metric": "pass@1", "program": program}) == passes


@pytest.mark.parametrize("then", ["take_first", "remove_whitespace", "lowercase", "uppercase"])
def test_answers_that_no_mapping_knows_match_nothing(then: str) -> None:
    """Not even an empty right answer."""
    steps = [{"function": "map", "mapping_dict": {"one": 1}}, {"function": then}]
    names = ["exact_match", "squad_exact_match", "cmrc_f1", "bleu", "distinct1", "multilabel_f1", "pearson"]
    names += ["rougeL"] if importlib.util.find_spec("rouge_score") else []
    task = TaskSettings(task="t", metric_list=[{"metric": name} for name in names])
    values = []
    for text in ("one", "two"):
        answer = Answer(text=first_of(apply_steps(steps, [text], {})))
        values.append(measure(task, EvaluationSample(0, {}, (("", ""),), gold=("", "1")), [answer]))
    assert values[0]["exact_match"] == values[0]["squad_exact_match"] == values[0]["cmrc_f1"] == 1
    assert values[1]["exact_match"] == values[1]["squad_exact_match"] == values[1]["cmrc_f1"] == 0
    assert values[1]["bleu"] == (("", "1"), "") and values[1]["pearson"] == (0.0, 0.0)
    # The harness's filter regex takes them as empty texts.
    steps[1] = {"function": "regex"}
    assert first_of(apply_steps(steps, ["two"], {})) == "[invalid]"


def test_a_program_that_no_mapping_knows_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_metrics, "passes_statements", lambda *_: True)
    task = TaskSettings(task="t", metric_list=[{"metric": "pass@1", "program": "{{answer}}"}])
    answers = [Answer(text=first_of(apply_steps([{"function": "map", "mapping_dict": {}}], ["x"], {})))] * 2
    assert measure(task, EvaluationSample(0, {}, (("", ""),)), answers) == {"pass@1": 0.0}
