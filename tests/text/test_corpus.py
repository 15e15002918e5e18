"""Readers: what is found, in what order, what a document is, and the words for what is wrong."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jingu.text.corpus as corpus_module
from jingu.config.sections.data import DataSettings
from jingu.errors import JinguError
from jingu.text.corpus import describe_records, find_files, plan_units, record_files, sample_texts
from jingu.text.corpus_file import CorpusFile
from jingu.text.document_reader import ReadCounts, format_location, read_documents
from tests.mistakes import explain_mistake


def corpus_settings(*inputs: object, **others: Any) -> DataSettings:
    return DataSettings(input=[str(item) for item in inputs], **others)


def read_all(settings: DataSettings, unit_bytes: int = 1 << 20) -> tuple[list[str], ReadCounts]:
    tally = ReadCounts()
    units = plan_units(find_files(settings), unit_bytes)
    return [d.text for unit in units for d in read_documents(unit, settings, tally)], tally


def lines_file(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_files_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.TXT", "sub/d.md", "sub/deep/e.txt", "z.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "sub" / "loop").symlink_to(tmp_path, target_is_directory=True)

    def names(*inputs: str) -> list[str]:
        files = find_files(corpus_settings(*(tmp_path / item for item in inputs)))
        return [str(Path(file.path).relative_to(tmp_path)) for file in files]

    assert names("z.py", "sub") == ["z.py", "sub/c.TXT", "sub/deep/e.txt", "sub/loop/a.txt", "sub/loop/b.txt"]
    assert names("*.txt", "b.txt") == ["a.txt", "b.txt"]
    assert names("sub/?.*", "su*/deep") == ["sub/c.TXT", "sub/d.md", "sub/deep/e.txt"]


def test_documents_of_files_and_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeff春\r\nline\n".encode())
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.jsonl").write_bytes(
        b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"text": ""}\n{"id": 3, "text": "\\u6625\\n"}'
    )
    texts, tally = read_all(corpus_settings(tmp_path))
    assert texts == ["春\r\nline\n", "one", "春\n"]
    assert tally == ReadCounts(documents=3, empty=2)
    documents = list(
        read_documents(plan_units(find_files(corpus_settings(tmp_path)))[0], corpus_settings(), ReadCounts())
    )
    assert [d.bytes for d in documents] == [10, 3, 4]
    named = [format_location(document.file.path, document.position) for document in documents]
    assert named[0] == str(tmp_path / "a.txt")
    assert named[2] == f"{tmp_path / 'c.jsonl'}:byte 37"


@given(st.lists(st.text(st.sampled_from('ab春\n"')), max_size=12), st.integers(1, 60), st.booleans())
def test_units_change_nothing(tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int, end: bool) -> None:
    path = tmp_path_factory.mktemp("units") / "x.jsonl"
    body = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts) + ("\n" if end else "")
    path.write_text(body, encoding="utf-8")
    settings = corpus_settings(path)
    assert read_all(settings, size)[0] == [text for text in texts if text]
    spans = [span for unit in plan_units(find_files(settings), size) for span in unit]
    assert [span.start for span in spans[1:]] == [span.end for span in spans[:-1]]
    assert all(0 < span.end - span.start <= size for span in spans) or not body


def test_small_files_share_a_unit_and_text_files_stay_whole(tmp_path: Path) -> None:
    for index in range(5):
        (tmp_path / f"{index}.txt").write_text("x" * 40)
    units = plan_units(find_files(corpus_settings(tmp_path)), 100)
    assert [len(unit) for unit in units] == [3, 2]
    assert [len(unit) for unit in plan_units(find_files(corpus_settings(tmp_path)), 10)] == [1] * 5


def test_a_large_corpus_has_larger_units() -> None:
    files = [CorpusFile("a.jsonl", 1 << 40, splits=True), CorpusFile("b.jsonl", 1 << 20, splits=True)]
    assert [sum(span.end - span.start for span in unit) for unit in plan_units(files[1:])] == [1 << 20]
    units = plan_units(files)
    assert len(units) == 4096 and units[0][0].end == sum(file.size for file in files) // 4096


def test_names_and_contents_tell_corpora_apart(tmp_path: Path) -> None:
    def describe() -> dict[str, Any]:
        return describe_records(record_files(find_files(corpus_settings(tmp_path))))

    (tmp_path / "a.txt").write_text("one")
    first = describe()
    assert first["files"] == 1 and first["bytes"] == 3
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    second = describe()
    (tmp_path / "b.txt").write_text("two")
    assert len({first["content"], second["content"], describe()["content"]}) == 3


INVALID = 'Convert the file to UTF-8, or set data.invalid_utf8 to "replace" (U+FFFD for the bad bytes) or "skip" (leave'


def test_invalid_utf8_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"good \xff bad")
    with pytest.raises(JinguError) as caught:
        read_all(corpus_settings(path))
    assert str(caught.value) == f"{path}: byte 5 (0xff) is not UTF-8. {INVALID} the document out)."
    assert read_all(corpus_settings(path, invalid_utf8="replace")) == (
        ["good \ufffd bad"],
        ReadCounts(documents=1, replaced=1),
    )
    assert read_all(corpus_settings(path, invalid_utf8="skip")) == ([], ReadCounts(invalid=1))


def test_invalid_utf8_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": "t\xc3("}\n{"text": "\\ud83dx"}\n{"text": "\\ud83d\\ude42"}\n')
    with pytest.raises(JinguError) as caught:
        read_all(corpus_settings(path), 8)
    assert str(caught.value) == f"{path}:2: byte 27 (0xc3) is not UTF-8. {INVALID} the document out)."
    texts, tally = read_all(corpus_settings(path, invalid_utf8="replace"))
    assert texts == ["one", "t\ufffd(", "\ufffdx", "🙂"]
    assert tally == ReadCounts(documents=4, replaced=2)
    texts, tally = read_all(corpus_settings(path, invalid_utf8="skip"))
    assert texts == ["one", "🙂"]
    assert tally == ReadCounts(documents=2, invalid=2)
    lines_file(path, {"text": "x"})
    path.write_bytes(path.read_bytes() + b'{"text": "\\udc00"}\n')
    with pytest.raises(JinguError) as caught:
        read_all(corpus_settings(path))
    assert str(caught.value) == (
        f"{path}:2: the escape \\udc00 is half a character, which is not UTF-8. "
        'Set data.invalid_utf8 to "replace" or "skip", or correct the line.'
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": 1', "this line is not JSON (Expecting ',' delimiter at column 11). A .jsonl file holds one JSON "),
        ('["a"]', 'this line is JSON but not an object: it is a list. Each line must look like {"text": "…"}.'),
        ('"a"', 'this line is JSON but not an object: it is a string. Each line must look like {"text": "…"}.'),
        ('{"body": "x", "id": 4}', 'this line has no field "text"; its fields: "body", "id". Set data.text_field to '),
        ("{}", 'this line has no field "text"; its fields: none. Set data.text_field to the field that holds the '),
        ('{"text": 7}', 'the field "text" is a number, not a string. Set data.text_field to the field that holds '),
        ('{"text": null}', 'the field "text" is null, not a string. Set data.text_field to the field that holds the '),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "a.jsonl"
    text = '{"text": "fine"}\n\n' + line + "\n"
    for unit_bytes in (5, 1000):
        error = explain_mistake(lambda file, size=unit_bytes: read_all(corpus_settings(file), size), path, text)
        assert error.startswith(f"{path}:3: {words}")


def test_another_field(tmp_path: Path) -> None:
    path = lines_file(tmp_path / "a.jsonl", {"content": "x", "text": 1})
    assert read_all(corpus_settings(path, text_field="content"))[0] == ["x"]


def test_nothing_to_read_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    look = "The path is {}; check the spelling and the current folder."
    with pytest.raises(JinguError) as caught:
        find_files(DataSettings())
    assert str(caught.value) == ("data.input: there is no corpus. Name text files, .jsonl files, folders or patterns.")
    with pytest.raises(JinguError) as caught:
        find_files(DataSettings(input="corpus"))
    assert str(caught.value) == f'data.input: there is no file or folder "corpus". {look.format(tmp_path / "corpus")}'
    with pytest.raises(JinguError) as caught:
        find_files(DataSettings(input="corpus/*.txt"))
    where = look.format(tmp_path / "corpus/*.txt")
    assert str(caught.value) == f'data.input: no file matches the pattern "corpus/*.txt". {where}'
    (tmp_path / "corpus").mkdir()
    with pytest.raises(JinguError) as caught:
        find_files(DataSettings(input="corpus"))
    assert str(caught.value) == (
        "corpus: no file in this folder ends in .txt or .jsonl; it contains no files at all. "
        "Set data.input to the folder of your texts."
    )
    for name in ("a.py", "b.py", "README"):
        (tmp_path / "corpus" / name).write_text("x")
    with pytest.raises(JinguError, match=r"ends in \.txt or \.jsonl; it contains 2 \.py, 1 \(no suffix\)\. Set data"):
        find_files(DataSettings(input="corpus"))


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")
    units = plan_units(find_files(corpus_settings(path)))
    path.unlink()
    with pytest.raises(JinguError, match=r"a\.txt: the file cannot be read \(No such file or directory\)"):
        list(read_documents(units[0], corpus_settings(path), ReadCounts()))


def test_a_sample_is_even(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "SAMPLE_CHUNK_BYTES", 100)
    for index in range(50):
        (tmp_path / f"{index:02}.txt").write_text(chr(65 + index) * 40)
    settings = corpus_settings(tmp_path)
    files = find_files(settings)
    assert [text[0] for text, _ in sample_texts(files, settings, 400)] == [chr(65 + i) for i in range(0, 50, 5)]
    everything = list(sample_texts(files, settings, 10**9))
    assert [len(text) for text, _ in everything] == [40] * 50
    assert everything[-1][1] == 2000


def test_a_sample_of_one_long_file_is_pieces_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "SAMPLE_CHUNK_BYTES", 100)
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{number:04}春" for number in range(500)))
    settings = corpus_settings(path)
    files = find_files(settings)
    texts = [text for text, _ in sample_texts(files, settings, 700)]
    assert sum(len(text.encode()) for text in texts) == pytest.approx(700, abs=110)
    firsts = [int(text.split("春")[1]) for text in texts]
    gaps = [after - before for before, after in pairwise(firsts)]
    assert min(gaps) >= 57 and max(gaps) <= 86  # pieces of about 14 numbers, one in five of them
    whole = "".join(text for text, _ in sample_texts(files, settings, 10**9))
    assert whole.replace("春", "") == path.read_text().replace("春", "")
    # The same file at a URL.
    remote = find_files(corpus_settings(f"file://{path}"))
    assert [text for text, _ in sample_texts(remote, settings, 700)] == texts
    path.unlink()
    with pytest.raises(JinguError, match=r"a\.txt: the file cannot be read \(No such file or directory\)"):
        list(sample_texts(remote, settings, 700))
