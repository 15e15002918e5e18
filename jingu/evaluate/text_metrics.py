"""Metrics of generated texts: overlap with right answers (Chinese by characters or words), and execution of code."""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import cache, lru_cache
from typing import Any

from jingu.errors import JinguError
from jingu.evaluate.task_data import Row
from jingu.evaluate.task_file import Options
from jingu.evaluate.task_templates import render_template
from jingu.plugins import Registry, expect_function
from jingu.runtime.python_tests import parse_tests
from jingu.runtime.sandbox import Limits, Sandbox, SandboxError, passes_statements, passes_tests
from jingu.text.corpus_file import import_optional

Split = Callable[[str], list[str]]

# Pattern of a Chinese or Japanese character, and of a token: such a character, or a word of other letters and digits.
_CHARACTER = r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]"
_TOKEN = re.compile(rf"{_CHARACTER}|(?:(?!{_CHARACTER})\w)+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
# Of CMRC 2018: the characters that are left out, and a token: a Chinese character, a word or number, an English clitic,
# or another sign.
_CMRC_LEFT_OUT = str.maketrans("", "", "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")
_CMRC_LETTER = r"""[^\s\u4e00-\u9fa5;@#$%&?!()\[\]{}<>,."']"""
_CMRC_TOKEN = re.compile(rf"[\u4e00-\u9fa5]|{_CMRC_LETTER}+(?:[.,]{_CMRC_LETTER}+)*|'[a-z]+|\S")
DISTINCT = {"distinct1": 1, "distinct2": 2, "distinct3": 3}
ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def has_chinese(text: str) -> bool:
    """Return whether a text has Chinese or Japanese characters, which are written without spaces between words."""
    return re.search(_CHARACTER, text) is not None


def split_characters(text: str) -> list[str]:
    """Return the words of a text in lower case without punctuation; each Chinese character is a word."""
    return _TOKEN.findall(unicodedata.normalize("NFKC", text).lower())


@cache
def split_function(name: str) -> Split:
    """Return a function that splits texts into words: Chinese by characters (`char`) or by words (`jieba`)."""
    if name == "jieba":
        jieba = import_optional("jieba", "tokenize: jieba", "metric_list")
        return lambda text: [word for word in jieba.lcut(text.lower()) if _TOKEN.search(word)]
    if name != "char":
        raise JinguError(f"there is no tokenize {name}.", where="metric_list", fix="Use char or jieba.")
    return split_characters


# Overlap with a right answer


def normalize_squad(text: str) -> str:
    """Normalize a text like SQuAD (Rajpurkar et al., 2016): lower case, no punctuation, no English articles."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", text).split())


def _f1_of(overlap: int, gold: int, guess: int) -> float:
    return 2 * overlap / (gold + guess) if overlap else 0.0


def squad_f1(gold: str, text: str) -> float:
    """Return the F1 of the words of an answer, as in SQuAD."""
    gold_words = normalize_squad(gold).split()
    words = normalize_squad(text).split()
    if not gold_words or not words:
        return float(gold_words == words)
    return _f1_of((Counter(gold_words) & Counter(words)).total(), len(gold_words), len(words))


def normalize_cmrc(text: str) -> str:
    """Return a text in lower case without the punctuation that CMRC 2018 leaves out; letters around it then join."""
    return text.lower().strip().translate(_CMRC_LEFT_OUT)


def cmrc_f1(gold: str, text: str) -> float:
    """Return the F1 of the longest common run of characters and words, as in CMRC 2018 (Cui et al., 2019)."""
    gold_tokens = _CMRC_TOKEN.findall(normalize_cmrc(gold))
    tokens = _CMRC_TOKEN.findall(normalize_cmrc(text))
    match = SequenceMatcher(None, gold_tokens, tokens, autojunk=False).find_longest_match()
    return _f1_of(match.size, len(gold_tokens), len(tokens))


OVERLAPS: Registry[Callable[[str, str], float]] = Registry(
    "metrics",
    {
        "squad_exact_match": lambda gold, text: float(normalize_squad(gold) == normalize_squad(text)),
        "squad_f1": squad_f1,
        "cmrc_exact_match": lambda gold, text: float(normalize_cmrc(gold) == normalize_cmrc(text)),
        "cmrc_f1": cmrc_f1,
    },
    expect_function,
)
"""Metrics that compare a right answer and a generated text; the best one over all right answers counts."""


@cache
def rouge_scorer(name: str, tokenize: str | None) -> Any:
    """Return a scorer of rouge-score. Its own tokenizer (None) drops all characters but ASCII; `char` is the
    tokenization of LCSTS (Hu et al., 2015)."""
    scorers = import_optional("rouge_score.rouge_scorer", f"the metric {name}", "metric_list")
    return scorers.RougeScorer([name], tokenizer=None if tokenize is None else _Tokenizer(split_function(tokenize)))


def rouge(gold: Sequence[str], text: str, metric: Options) -> float:
    """Return the best ROUGE F1 over the right answers (Lin, 2004)."""
    scorer = rouge_scorer(metric["metric"], metric.get("tokenize"))
    return float(scorer.score_multi(list(gold), text)[metric["metric"]].fmeasure)


class _Tokenizer:
    """Adapts a split function to the interface of rouge-score's tokenizers."""

    def __init__(self, split: Split) -> None:
        self.tokenize = split


def count_labels(gold: Sequence[str], text: str, metric: Options) -> tuple[int, int]:
    """Return twice the number of correctly predicted labels, and the number of right plus predicted labels.

    The ratio of the sums over documents is the micro-averaged F1. Labels in a text are separated by `separator` (by
    default a comma); right labels may also be in several texts.
    """
    separator = metric.get("separator", ",")

    def labels(texts: Sequence[str]) -> set[str]:
        return {label.strip() for part in texts for label in part.split(separator)} - {""}

    right = labels(gold)
    predicted_labels = labels([text])
    return 2 * len(right & predicted_labels), len(right) + len(predicted_labels)


# A number, perhaps with a minus sign of typography, thousands between commas, or an exponent.
_NUMBER = re.compile(r"[-−]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def has_number(text: str) -> bool:
    """Return whether `parse_number` finds a number."""
    return _NUMBER.search(text) is not None


def parse_number(text: str) -> float:
    """Return the first number in a text; 0 if there is none."""
    match = _NUMBER.search(text)
    return float(match[0].replace("−", "-").replace(",", "")) if match else 0.0


def distinct_ratio(texts: Sequence[str], size: int) -> float:
    """Return the number of distinct n-grams divided by the number of all n-grams of some texts (Li et al., 2016)."""
    ngrams: Counter[tuple[str, ...]] = Counter()
    for text in texts:
        tokens = split_characters(text)
        ngrams.update(zip(*(tokens[start:] for start in range(size)), strict=False))
    return len(ngrams) / max(ngrams.total(), 1)


# Code


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k answers is right (Chen et al., 2021)."""
    return 1 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)


# Stands for an answer.
_MARK = "\0answer\0"


def render_program(row: Row, text: str, metric: Options) -> str:
    """Return the program of an answer. Raises an exception of `TEMPLATE_ERRORS` if the template is wrong."""
    return render_template(metric["program"], {**row, "answer": text})


def count_passes(row: Row, texts: Sequence[str], metric: Options) -> int:
    """Run the answers' programs in a sandbox, and return how many pass, that is, end without an error.

    Args:
        metric: `program` is a Jinja template with the document's columns and `answer`; `timeout` is in seconds.
    """
    # What follows the answer in the template are its tests.
    _, _, tests = render_program(row, _MARK, metric).rpartition(_MARK)
    programs = [render_program(row, text, metric) for text in texts]
    limits = Limits(seconds=float(metric.get("timeout", 5)))
    try:
        return sum(_passes(program, tests, limits) for program in programs)
    except SandboxError as error:
        fix = "Allow unprivileged user namespaces, or evaluate elsewhere."
        raise JinguError(f"code cannot be isolated on this machine ({error}).", where="pass@k", fix=fix) from None


@cache
def _sandbox() -> Sandbox:
    return Sandbox()


@lru_cache(1 << 12)
def _passes(program: str, tests: str, limits: Limits) -> bool:
    """Return whether a program passes; apart from its tests if they are the lines at its end.

    The cache runs equal answers, and answers of several metrics, only once.
    """
    code = program.removesuffix(tests)
    if not program.endswith(tests) or not (tests.startswith("\n") or code.endswith("\n")):
        return passes_statements(_sandbox(), program, "", limits)
    try:
        test_cases = parse_tests(tests)
    except ValueError:  # they test nothing, or continue a statement of the answer
        return passes_statements(_sandbox(), program, "", limits)
    return passes_tests(_sandbox(), code, test_cases, limits)


# Metrics of a whole corpus


def corpus_scorer(metric: Options) -> Any:
    """Return a scorer of sacrebleu. For Chinese, BLEU needs `tokenize: zh`."""
    name = metric["metric"]
    sacrebleu = import_optional("sacrebleu", f"the metric {name}", "metric_list")
    if name == "bleu":
        return sacrebleu.BLEU(tokenize=metric.get("tokenize"))
    return sacrebleu.TER() if name == "ter" else sacrebleu.CHRF(word_order=2 if name == "chrf++" else 0)


def score_corpus(metric: Options, pairs: Sequence[tuple[Sequence[str], str]]) -> tuple[float, str]:
    """Return a metric of pairs (right texts, generated text), and its signature: the settings that it depends on."""
    texts = [text for _, text in pairs]
    if metric["metric"] in DISTINCT:
        return distinct_ratio(texts, DISTINCT[metric["metric"]]), "words, Chinese by characters"
    scorer = corpus_scorer(metric)
    # sacrebleu needs equally many references for all documents: repeat the last one where some are missing.
    most = max(len(gold) for gold, _ in pairs)
    references = [[gold[min(number, len(gold) - 1)] for gold, _ in pairs] for number in range(most)]
    score = float(scorer.corpus_score(texts, references).score)
    return score, str(scorer.get_signature())
