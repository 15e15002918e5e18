"""Readers: every format and packing gives the documents that other libraries wrote, and says what is wrong where."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from jingu.config.sections.data import DataSettings
from jingu.errors import JinguError
from jingu.text.corpus import find_files, plan_units, sample_texts
from jingu.text.document_reader import ReadCounts, read_documents

TEXTS = ["one", "春眠不觉晓\nline two", "x" * 3000, "last 🙂"]
PACKED = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    # Two frames, as a file has that was appended to.
    ".zst": lambda data: b"".join(zstandard.compress(part) for part in (data[:50], data[50:])),
}


def read(*inputs: object, unit_bytes: int = 1 << 20, **others: Any) -> tuple[list[str], ReadCounts]:
    data, tally = DataSettings(input=[str(item) for item in inputs], **others), ReadCounts()
    units = plan_units(find_files(data), unit_bytes)
    return [d.text for unit in units for d in read_documents(unit, data, tally)], tally


def mistake(*inputs: object, **others: Any) -> str:
    with pytest.raises(JinguError) as caught:
        read(*inputs, **others)
    return str(caught.value)


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize("unit_bytes", [40, 1 << 20])
def test_formats_and_packings(tmp_path: Path, packing: str, unit_bytes: int) -> None:
    contents = {
        "a.txt": "\n".join(TEXTS).encode(),
        "b.jsonl": jsonl(TEXTS),
        "c.json": json.dumps([{"text": text} for text in TEXTS]).encode(),
        "d.json": json.dumps({"text": "alone"}).encode(),
    }
    for name, content in contents.items():
        (tmp_path / (name + packing)).write_bytes(PACKED[packing](content))
    texts, tally = read(tmp_path, unit_bytes=unit_bytes, suffixes=[".txt", ".jsonl", ".json"])
    assert texts == ["\n".join(TEXTS), *TEXTS, *TEXTS, "alone"]
    assert tally == ReadCounts(documents=10)
    lines = read(tmp_path / ("a.txt" + packing), unit_bytes=unit_bytes, documents="line")[0]
    assert lines == ["one", "春眠不觉晓", "line two", "x" * 3000, "last 🙂"]


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(["a", "bc ", "", " ", "春", "\t", "x<n>y"]), max_size=12),
    st.integers(1, 30),
    st.booleans(),
)
def test_lines_and_blocks_do_not_depend_on_units(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], unit_bytes: int, end: bool
) -> None:
    path = tmp_path_factory.mktemp("text") / "x.txt"
    path.write_text("\n".join(lines) + ("\n" if end else ""), encoding="utf-8")
    assert read(path, unit_bytes=unit_bytes, documents="line")[0] == [line for line in lines if line.strip()]
    blocks: list[list[str]] = [[]]
    for line in lines:
        blocks[-1].append(line) if line.strip() else blocks.append([])
    expected = ["\n".join(block) for block in blocks if block]
    assert read(path, unit_bytes=unit_bytes, documents="block")[0] == expected
    escaped = [text.replace("<n>", "\n") for text in expected]
    assert read(path, unit_bytes=unit_bytes, documents="block", escaped_newlines=True)[0] == escaped


@pytest.mark.parametrize("unit_bytes", [60, 1 << 20])
def test_parquet_by_row_groups(tmp_path: Path, unit_bytes: int) -> None:
    texts = [f"row {number}" for number in range(50)]
    table = pa.table({"id": list(range(50)), "body": texts})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", row_group_size=7, compression="zstd")
    assert read(tmp_path / "x.parquet", unit_bytes=unit_bytes, text_field="body")[0] == texts
    assert mistake(tmp_path / "x.parquet") == (
        f'{tmp_path}/x.parquet: there is no column "text"; there are: "id", "body". Set data.text_field to one of them.'
    )
    assert mistake(tmp_path / "x.parquet", text_field="id") == (
        f'{tmp_path}/x.parquet:row 1: the field "id" is a number, not a string. '
        "Set data.text_field to the field that holds the document."
    )


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    """Its own files, as written by that library where it is installed, else of the same shape."""
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    (tmp_path / "all" / "train").mkdir(parents=True)
    for name, part in zip(names, (TEXTS[:1], TEXTS[1:]), strict=True):
        table = pa.table({"text": part})
        with pa.ipc.new_stream(str(tmp_path / "all" / "train" / name), table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (tmp_path / "all" / "train" / "state.json").write_text(json.dumps(state))
    (tmp_path / "all" / "train" / "dataset_info.json").write_text("{}")
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert read(tmp_path / "all" / "train")[0] == TEXTS
    assert mistake(tmp_path / "all") == (
        f"{tmp_path}/all: `datasets` saved several splits here: train. Name the folder of one of them."
    )
    for content, problem in (("{", r"the file is damaged \(Expecting .+\)"), ("{}", "the file lacks the names of")):
        (tmp_path / "all" / "train" / "state.json").write_text(content)
        assert re.search(rf"state\.json: {problem}.+ Save the dataset again", mistake(tmp_path / "all" / "train"))
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "theirs"), num_shards=2)
    assert read(tmp_path / "theirs")[0] == TEXTS


def test_addresses(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe({"/corpus/a.jsonl": jsonl(TEXTS), "/corpus/b.jsonl.gz": gzip.compress(jsonl(["packed"]))})
    assert read("memory://corpus/*", unit_bytes=50)[0] == [*TEXTS, "packed"]
    assert read("memory://corpus/a.jsonl", unit_bytes=50)[0] == TEXTS
    assert mistake("memory://corpus/none") == (
        'data.input: no file has the URL "memory://corpus/none". Check its spelling and your access.'
    )
    assert mistake("nosuch://x").startswith("nosuch://x: the URL cannot be opened (Protocol not known: nosuch")


def test_mixed_inputs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.jsonl.xz").write_bytes(lzma.compress(jsonl(["line"])))
    pyarrow.parquet.write_table(pa.table({"text": ["row"]}), tmp_path / "c.parquet")
    assert read(tmp_path / "c.parquet", tmp_path)[0] == ["row", "text", "line"]


@pytest.mark.parametrize("packing", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("harm", ["cut", "changed"])
def test_a_damaged_archive_is_named_or_read_as_far_as_it_goes(tmp_path: Path, packing: str, harm: str) -> None:
    path = tmp_path / f"x.jsonl{packing}"
    # Text that cannot be packed, so that the first lines are whole before the damage.
    texts = [format(pow(7, 9999 * number, 1 << 4000), "x") for number in range(1, 60)]
    whole = bytearray(PACKED[packing](jsonl(texts)))
    path.write_bytes(whole[: len(whole) // 2] if harm == "cut" else bytes(10) + whole[10:])
    if packing == ".zst" and harm == "cut":
        path.write_bytes(whole[:-5000])
    assert mistake(path).startswith(f"{path}: the file is damaged, or was truncated while it was written or copied (")
    found, tally = read(path, on_error="skip")
    assert found == texts[: len(found)]
    assert len(tally.skipped) >= 1 and str(path) in tally.skipped[-1]
    assert harm == "changed" or packing == ".zst" or found  # zstd gives nothing of a block that is not whole


def test_mistakes_are_skipped_counted_and_listed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = [b'{"text": "good"}', b"{", b'{"body": 1}', b'{"text": 2}', b'["x"]', b'{"text": "\xff"}', b'{"text": ""}']
    path.write_bytes(b"\n".join([*lines, b'{"text": "\\ud800"}', b'{"text": "also"}']) + b"\n")
    found, tally = read(path, on_error="skip", unit_bytes=20)
    assert found == ["good", "also"]
    assert (tally.documents, tally.empty) == (2, 1)
    assert [words.split(":")[1] for words in tally.skipped] == ["2", "3", "4", "5", "6", "8"]
    assert tally.skipped[1] == f'{path}:3: this line has no field "text"; its fields: "body".'


def test_a_document_longer_than_allowed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 101)
    (tmp_path / "b.jsonl").write_bytes(jsonl(["y" * 200, "short"]))
    assert mistake(tmp_path / "a.txt", max_document_bytes=100) == (
        f"{tmp_path}/a.txt: a document here is longer than 100 bytes (data.max_document_bytes). Split it "
        f"(data.documents "
        "takes lines or blocks of a text file), or raise the limit if memory allows."
    )
    assert mistake(tmp_path / "b.jsonl", max_document_bytes=100).startswith(
        f"{tmp_path}/b.jsonl:1: a document here is lon"
    )
    found, tally = read(tmp_path, max_document_bytes=100, on_error="skip", unit_bytes=30)
    assert found == ["short"] and len(tally.skipped) == 2
    (tmp_path / "c.txt").write_text("a\nb\n\n" + "z\n" * 60 + "\nc\n")
    found, tally = read(tmp_path / "c.txt", max_document_bytes=100, on_error="skip", documents="block", unit_bytes=7)
    assert found == ["a\nb", "c"] and len(tally.skipped) == 1


def test_json_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(jsonl(["a", "b"]))
    assert mistake(path) == (
        f"{path}: the file is not JSON (Extra data at column 1). A .json file holds a list of objects; one object a "
        "line is .jsonl."
    )
    path.write_text('[{"text": "a"}, 3]')
    assert mistake(path) == (
        f'{path}:row 2: this row is JSON but not an object: it is a number. Each row must look like {{"text": "…"}}.'
    )


def test_a_package_that_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jingu.text.corpus_file as storage

    real = storage.import_module

    def missing(name: str) -> Any:
        if name == "zstandard":
            raise ImportError(name)
        return real(name)

    (tmp_path / "x.txt.zst").write_bytes(zstandard.compress(b"x"))
    monkeypatch.setattr(storage, "import_module", missing)
    assert mistake(tmp_path / "x.txt.zst") == (
        f"{tmp_path}/x.txt.zst: reading zstd needs the package zstandard. Install it: `pip install zstandard`."
    )


def test_a_sample_of_packed_files(tmp_path: Path) -> None:
    for number in range(4):
        content = jsonl([f"{number} {line} " + "x" * 90 for line in range(100)])
        (tmp_path / f"{number}.jsonl.gz").write_bytes(gzip.compress(content))
    data = DataSettings(input=str(tmp_path))
    texts = [text for text, _ in sample_texts(find_files(data), data, 4000)]
    assert {text[0] for text in texts} == {"0", "1", "2", "3"}
    assert 4000 <= sum(map(len, texts)) < 4400


NESTED = {"meta": {"a.b": "exact"}, "paragraphs": ["one", "two"], "pages": [{"text": "x"}, {"text": "y"}]}


@pytest.mark.parametrize(
    ("field", "text"),
    [("paragraphs[*]", "one\ntwo"), ("pages[*].text", "x\ny"), ("meta.title", "t"), ("dotted.name", "d")],
)
def test_nested_fields(tmp_path: Path, field: str, text: str) -> None:
    row = {**NESTED, "meta": {"title": "t"}, "dotted.name": "d"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (tmp_path / "b.json").write_text(json.dumps([row]))
    pyarrow.parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "c.parquet")
    assert read(tmp_path, text_field=field, suffixes=[".jsonl", ".json", ".parquet"])[0] == [text] * 3


def test_a_path_that_leads_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(NESTED))
    fields = '"meta", "paragraphs", "pages"'
    for field in ("paragraphs.x", "pages[*].title", "meta[*]x", "none[*]"):
        assert mistake(path, text_field=field).startswith(
            f'{path}:1: this line has no field "{field}"; its fields: {fields}.'
        )
    assert f'{path}:1: the field "pages[*]" is an object, not a string.' in mistake(path, text_field="pages[*]")


def test_pipes_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    assert mistake(tmp_path).startswith(f"{tmp_path / 'pipe.txt'}: this is a pipe, a socket or a device")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
def test_utf_16_without_a_byte_order_mark_is_noticed(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("plain ASCII".encode(encoding))
    assert "is a NUL: the text is UTF-16 or UTF-32, or it is not text." in mistake(path)
    assert read(path, invalid_utf8="skip")[1].invalid == 1
    path.write_bytes(b"a\0b")
    found, counts = read(path, invalid_utf8="replace")
    assert (found, counts.replaced) == (["a\ufffdb"], 1)
    path = tmp_path / "b.jsonl"
    path.write_bytes(jsonl(["fine"]) + b'{"text": "a\0b"}\n')
    assert mistake(path).startswith(f"{path}:2: byte 37 is a NUL")


def test_a_truncated_archive_is_named_although_errors_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(TEXTS * 50))[:-9])
    data = DataSettings(input=str(tmp_path), on_error="skip")
    assert list(sample_texts(find_files(data), data, 10**6))
    assert f"{tmp_path / 'a.jsonl.gz'} is damaged or was truncated" in caplog.text


# Files that are sound, but cannot be read as they are


def test_frames_with_a_large_window_are_read(tmp_path: Path) -> None:
    """As `zstd --long=28` writes them; the library's default limit is 2 ** 27."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()  # of unknown size
    content = compressor.compress(jsonl(["one", "two"])) + compressor.flush()
    assert zstandard.get_frame_parameters(content).window_size == 1 << 28
    (tmp_path / "x.jsonl.zst").write_bytes(content)
    assert read(tmp_path / "x.jsonl.zst")[0] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.txt.gz", b"a plain text\n"),
        ("x.jsonl.zst", gzip.compress(b'{"text": "a"}\n', mtime=0)),
        ("x.txt.xz", zstandard.compress(b"text")),
        ("x.jsonl.bz2", b'{"text": "a"}\n'),
        ("x.parquet", b'{"text": "a"}\n'),
    ],
    ids=["gzip", "zstd", "xz", "bzip2", "parquet"],
)
def test_a_misnamed_file_is_not_called_damaged(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    message = mistake(tmp_path / name)
    assert "is not of the format that its suffix names" in message and "damaged" not in message


def test_a_frame_with_a_dictionary_is_not_called_damaged(tmp_path: Path) -> None:
    dictionary = zstandard.train_dictionary(1024, [f"text {number} ".encode() * 20 for number in range(200)])
    compressor = zstandard.ZstdCompressor(dict_data=dictionary)
    (tmp_path / "x.txt.zst").write_bytes(compressor.compress(b"text 5 " * 20))
    message = mistake(tmp_path / "x.txt.zst")
    assert "it was compressed with a dictionary, which is missing" in message and "damaged" not in message


@pytest.mark.parametrize("name", ["x.zip", "x.tar.gz", "x.7z"])
def test_archives_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"content")
    assert "is an archive or a compression that is not read as text" in mistake(tmp_path / name)
