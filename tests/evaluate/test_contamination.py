"""Contamination: planted copies are all reported and nothing else is, whatever the format of the data."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jingu.cli import main
from jingu.config.sections.data import DataSettings
from jingu.data.build import build_source
from jingu.errors import JinguError
from jingu.evaluate import contamination, ngrams
from jingu.evaluate.ngrams import NgramTable, hash_words
from jingu.text.tokenizer_training import train_tokenizer
from tests.evaluate.conftest import WriteTask

WORDS = [f"{first}{second}" for first in ("ba", "ke", "lo", "mi", "zu") for second in ("n", "rt", "sel", "tam", "vik")]
CHINESE = "天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏闰余成岁律吕调阳"


def random_text(generator: np.random.Generator, words: int) -> str:
    return " ".join(WORDS[number] for number in generator.integers(0, len(WORDS), words))


def reference_words(text: str) -> list[str]:
    """The words of a text by regular expressions: the reference for ASCII and Chinese."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return re.findall("[\u3040-\u30ff\u3400-\u9fff]|[a-z0-9]+", re.sub("[\u0300-\u036f]", "", plain))


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("aAbB1é ,.-\n天地、 "), max_size=80), n=st.integers(1, 5))
def test_ngrams_are_equal_where_words_are(text: str, n: int) -> None:
    words = reference_words(text)
    grams = [tuple(words[first : first + n]) for first in range(len(words) - n + 1)]
    hashes = hash_words(text).ngrams(n).tolist()
    assert len(hash_words(text)) == len(words) and len(hashes) == len(grams)
    assert len(set(hashes)) == len(set(grams)) == len(set(zip(grams, hashes, strict=True)))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(st.sampled_from("ab 天"), max_size=60), max_size=6), st.integers(1, 4))
def test_chunks_change_nothing(texts: list[str], n: int) -> None:
    """Every n-gram of every document is looked up, and none over two documents, however small the chunks are."""
    grams = {
        tuple(words[first : first + n])
        for text in texts
        for words in [reference_words(text)]
        for first in range(len(words) - n + 1)
    }
    table = NgramTable(np.unique(hash_words(" ".join(texts) + " ab b a 天 ba").ngrams(n)), (n,))
    words = reference_words(" ".join(texts) + " ab b a 天 ba")
    expected = {gram for gram in zip(*(words[first:] for first in range(n)), strict=False) if gram in grams}
    with pytest.MonkeyPatch.context() as patch:
        # A chunk must hold the longest n-gram.
        patch.setattr(ngrams, "CHUNK_CHARACTERS", 300)
        chunks = ngrams.chunk_words(texts, n)
        matches = [table.match_chunk(chunk, is_last=is_last).tolist() for chunk, is_last in chunks]
    assert len(set(chain(*matches))) == len(expected)


@pytest.fixture
def planted(write_task: WriteTask, tmp_path: Path) -> Iterator[tuple[Path, dict[int, str]]]:
    """A task of 40 rows in `tmp_path`, a corpus of three files, and the rows that are in it, with how."""
    generator = np.random.default_rng(0)
    rows = [{"question": f"{random_text(generator, 20)}?", "choices": ["a", "b"], "label": 0} for _ in range(38)]
    rows.append({"question": CHINESE, "choices": ["是", "不是"], "label": 0})
    rows.append({"question": "Too short a question", "choices": ["a", "b"], "label": 0})
    short = "nine words are enough for a match as whole"
    rows[10]["question"] = short
    task = write_task(rows, metric_list=[{"metric": "acc"}])
    question = {number: str(row["question"]) for number, row in enumerate(rows)}
    copies = {
        1: question[1].upper(),
        2: question[2].replace(" ", ", "),
        3: "“" + question[3].replace(" ", "\n\t- ") + "”",
        4: question[4].replace("a", "á"),
        10: f"see: {short}!",
        38: "，".join([CHINESE[:9], CHINESE[9:15], CHINESE[15:]]),
        # A part of a question: 13 words of it.
        5: " ".join(question[5].split()[3:16]),
    }
    folder = tmp_path / "corpus"
    folder.mkdir()
    filler = [random_text(generator, 50) for _ in range(200)]
    lines = [json.dumps({"text": text}) for text in filler]
    for place, copy in enumerate(copies.values()):
        lines[20 * place] = json.dumps({"text": f"{filler[place]}. {copy} {filler[place + 1]}"}, ensure_ascii=False)
    # Parts of a question that are too small, or that two documents share, are no copies.
    lines[190] = json.dumps({"text": " ".join(question[6].split()[:12])})
    lines[191] = json.dumps({"text": " ".join(question[6].split()[8:])})
    lines[192] = json.dumps({"text": " ".join(question[7].split()[::2])})
    for number in range(3):
        (folder / f"part-{number}.jsonl").write_text("\n".join(lines[number * 70 : number * 70 + 70]), "utf-8")
    yield task, copies


def dirty_rows(output: Path) -> dict[int, int]:
    """The longest match of each dirty row."""
    lines = (output / contamination.DIRTY_NAME).read_text(encoding="utf-8").splitlines()
    return {record["index"]: record["longest"] for record in map(json.loads, lines)}


def test_planted_copies_are_reported(
    planted: tuple[Path, dict[int, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, copies = planted
    arguments = ["evaluate", "contamination", str(task), "--data", str(tmp_path / "corpus")]
    assert main([*arguments, "--output", str(tmp_path / "out"), "--processes", "1"]) == 0
    matches = dirty_rows(tmp_path / "out")
    assert matches == {1: 20, 2: 20, 3: 20, 4: 20, 5: 13, 10: 9, 38: len(CHINESE)}
    assert matches.keys() == copies.keys()
    assert re.search(r"^sums +40 +7 +1 +1 +32$", capsys.readouterr().out, re.MULTILINE)
    records = [json.loads(line) for line in (tmp_path / "out" / "dirty.jsonl").read_text("utf-8").splitlines()]
    assert reference_words(records[4]["match"]) == reference_words(copies[5])
    # Only the question counts if the task says so, and fewer words are a match with shorter n-grams.
    content = task.read_text(encoding="utf-8")
    task.write_text(f"{content}\ndoc_to_decontamination_query: '{{{{choices[0]}}}}'", encoding="utf-8")
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 2
    assert "no document of these tasks has a text of 8 words" in capsys.readouterr().err
    task.write_text(content, encoding="utf-8")
    assert main([*arguments, "--output", str(tmp_path / "twelve"), "--ngram", "12", "--processes", "2"]) == 0
    assert dirty_rows(tmp_path / "twelve") == {**matches, 6: 12}


def test_data_sets_of_token_ids_are_decoded(planted: tuple[Path, dict[int, str]], tmp_path: Path) -> None:
    task, copies = planted
    tokenizer = train_tokenizer(iter([" ".join(WORDS[:9])]), 300, ["<|endoftext|>"])
    tokenizer.save(tmp_path / "tokenizer")
    data = DataSettings(input=str(tmp_path / "corpus"), path=str(tmp_path / "data"), shard_tokens=9_000, num_workers=1)
    data = data.model_copy(update={"validation_fraction": 0.0})
    build_source(data, tmp_path / "tokenizer", None)
    assert len(list((tmp_path / "data").glob("train-0*.bin"))) > 2
    with pytest.raises(JinguError, match=r"data set of token ids.* --tokenizer FOLDER"):
        contamination.contamination([str(task)], [data.path])
    output = tmp_path / "out"
    contamination.contamination([str(task)], [data.path], tmp_path / "tokenizer", processes=1, output=output)
    assert dirty_rows(output).keys() == copies.keys()
    assert (tmp_path / "data" / contamination.SUMMARY_NAME).is_file()
    # A shard by itself is what other tools write: files of Megatron's format.
    shards = sorted(str(path.with_suffix("")) for path in (tmp_path / "data").glob("train-0*.idx"))
    contamination.contamination([str(task)], shards, tmp_path / "tokenizer", processes=1, output=output)
    assert dirty_rows(output).keys() == copies.keys()


def test_a_killed_search_goes_on(
    planted: tuple[Path, dict[int, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    task, copies = planted
    monkeypatch.setattr("jingu.text.corpus.UNIT_BYTES", 2_000)
    arguments = ([str(task)], [str(tmp_path / "corpus")])
    output = tmp_path / "out"
    scanned: list[object] = []
    scan_unit = contamination._scan_unit

    def stop_after_three(*unit: object) -> tuple[list[int], int]:
        scanned.append(unit[-1])
        if len(scanned) == 4:
            raise KeyboardInterrupt
        return scan_unit(*unit)  # type: ignore[arg-type]

    monkeypatch.setattr(contamination, "_scan_unit", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        contamination.contamination(*arguments, processes=1, output=output)
    # A process that is killed can leave half a line.
    with (output / contamination.PROGRESS_NAME).open("a") as stream:
        stream.write('{"unit": 3, "mat')
    contamination.contamination(*arguments, processes=1, output=output)
    assert "resuming after 3 of 2" in capsys.readouterr().err
    units = {str(unit) for unit in scanned}
    assert len(scanned) == len(units) + 1 and len(units) > 20
    assert dirty_rows(output).keys() == copies.keys()
    # Nothing is left that another search would take for its own.
    assert {path.name for path in output.iterdir()} == {"contamination.json", "dirty.jsonl"}


def test_scores_on_clean_and_dirty_rows(
    planted: tuple[Path, dict[int, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, copies = planted
    output = tmp_path / "out"
    contamination.contamination([str(task)], [str(tmp_path / "corpus")], processes=1, output=output)
    hashes = {record["index"]: record["hash"] for record in map(json.loads, (output / "dirty.jsonl").open())}
    results = tmp_path / "results"
    results.mkdir()
    # A model that knows the copies, and every fourth other row.
    values = [float(index in copies or index % 4 == 0) for index in range(40)]
    records = [
        {"index": index, "hash": hashes.get(index, str(index)), "cluster": None, "metrics": {"acc,none": value}}
        for index, value in enumerate(values)
    ]
    lines = "\n".join(map(json.dumps, records))
    (results / "sums.samples.jsonl").write_text(lines, encoding="utf-8")
    content = {"task": "sums", "settings": {}, "results": {"acc,none": {}}}
    (results / "sums.json").write_text(json.dumps(content), encoding="utf-8")
    capsys.readouterr()
    assert main(["evaluate", "clean", str(results), str(output)]) == 0
    printed = capsys.readouterr().out
    clean = [value for index, value in enumerate(values) if index not in copies]
    assert re.search(rf"^sums +acc +all +40 +{sum(values) / 40:.4f} ", printed, re.MULTILINE)
    stderr = np.std(clean, ddof=1) / len(clean) ** 0.5
    assert re.search(rf"^sums +acc +clean +33 +{np.mean(clean):.4f} +{stderr:.4f} ", printed, re.MULTILINE)
    assert re.search(r"^sums +acc +dirty +7 +1\.0000 +0\.0000 ", printed, re.MULTILINE)
    (results / "sums.json").write_text(json.dumps({**content, "task": "others"}), encoding="utf-8")
    assert main(["evaluate", "clean", str(results), str(output)]) == 2
    assert "no tasks in common" in capsys.readouterr().err
    # A match may contain a character at which `str.splitlines` splits.
    dirty = output / "dirty.jsonl"
    record = json.dumps({"hash": "x", "match": "a\u2028b"}, ensure_ascii=False)
    dirty.write_text(f"{record}\n", encoding="utf-8")
    (results / "sums.json").write_text(json.dumps(content), encoding="utf-8")
    assert main(["evaluate", "clean", str(results), str(output)]) == 0
    assert re.search(r"^sums +acc +clean +40 ", capsys.readouterr().out, re.MULTILINE)
    for file in (dirty, output / "contamination.json"):
        file.write_text("{", encoding="utf-8")
        assert main(["evaluate", "clean", str(results), str(output)]) == 2
        assert f"{file.name}" in (error := capsys.readouterr().err) and "the file is damaged" in error
