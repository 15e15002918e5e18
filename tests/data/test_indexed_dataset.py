"""Megatron's format: a reader and writer from its description alone, compared with jingu's."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from jingu.data.array_reader import ReaderType
from jingu.data.dataset_manifest import ShardEntry
from jingu.data.indexed_dataset import IndexedReader, IndexedWriter, best_dtype
from jingu.errors import JinguError

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def described_write(prefix: Path, documents: list[list[int]], dtype: str) -> None:
    """Write the format as described: header, lengths, byte offsets, document index."""
    body = b"".join(np.array(ids, dtype).tobytes() for ids in documents)
    size = np.dtype(dtype).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype])
    index += struct.pack("<QQ", len(documents), len(documents) + 1)
    index += b"".join(struct.pack("<i", len(ids)) for ids in documents)
    place = 0
    for ids in documents:
        index += struct.pack("<q", place)
        place += len(ids) * size
    index += b"".join(struct.pack("<q", number) for number in range(len(documents) + 1))
    Path(f"{prefix}.bin").write_bytes(body)
    Path(f"{prefix}.idx").write_bytes(index)


def described_read(prefix: Path) -> tuple[str, list[list[int]]]:
    index, body = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, count, marks = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    dtype = {code: name for name, code in CODES.items()}[code]
    lengths = struct.unpack_from(f"<{count}i", index, 34)
    places = struct.unpack_from(f"<{count}q", index, 34 + 4 * count)
    assert struct.unpack_from(f"<{marks}q", index, 34 + 12 * count) == tuple(range(count + 1))
    assert len(index) == 34 + 12 * count + 8 * marks
    pairs = zip(lengths, places, strict=True)
    return dtype, [np.frombuffer(body, dtype, length, place).tolist() for length, place in pairs]


def write(prefix: Path, documents: list[list[int]], dtype: str, at_once: int = 3) -> ShardEntry:
    writer = IndexedWriter(prefix, dtype)
    for start in range(0, len(documents), at_once):
        some = documents[start : start + at_once]
        lengths = np.array([len(ids) for ids in some], dtype=np.int64)
        writer.add(np.array([id_ for ids in some for id_ in ids], dtype=dtype), lengths)
    return writer.close()


DOCUMENTS = st.lists(st.lists(st.integers(0, 65_499), max_size=7), max_size=9)


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
@given(documents=DOCUMENTS)
def test_an_independent_reader_reads_our_files(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, documents: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("ours")
    written = write(folder / "x", documents, dtype)
    assert described_read(folder / "x") == (dtype, documents)
    assert sorted(item.name for item in folder.iterdir()) == ["x.bin", "x.idx"]
    described_write(folder / "y", documents, dtype)
    for kind, size, digest in (
        ("bin", written.bin_bytes, written.bin_xxh3),
        ("idx", written.idx_bytes, written.idx_xxh3),
    ):
        content = (folder / f"x.{kind}").read_bytes()
        assert content == (folder / f"y.{kind}").read_bytes()
        assert size == len(content)
        assert digest == xxhash.xxh3_128_hexdigest(content)
    assert (written.documents, written.tokens) == (len(documents), sum(map(len, documents)))


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
@given(documents=DOCUMENTS)
def test_we_read_files_of_an_independent_writer(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, documents: list[list[int]]
) -> None:
    prefix = tmp_path_factory.mktemp("theirs") / "x"
    described_write(prefix, documents, dtype)
    reader = IndexedReader(prefix)
    assert reader.dtype == dtype
    assert [reader[index].tolist() for index in range(len(reader))] == documents
    assert reader.ids.tolist() == [id_ for ids in documents for id_ in ids]
    assert not reader.ids.flags.writeable
    for index in (len(documents), -1):
        with pytest.raises(
            IndexError, match=rf"x\.idx has {len(documents)} sequences, numbered from 0, but no {index}"
        ):
            reader[index]


def legacy_write(prefix: Path, documents: list[list[int]], dtype: str, marks: list[int] | None) -> None:
    """Write the older format as described: 8 bytes for each number of the index; `marks` are Megatron's documents."""
    body = b"".join(np.array(ids, dtype).tobytes() for ids in documents)
    sizes, count = [len(ids) for ids in documents], len(documents)
    index = b"TNTIDX\x00\x00" + struct.pack("<QQQ", 1, CODES[dtype], np.dtype(dtype).itemsize)
    index += struct.pack("<QQ", count, count) + (b"" if marks is None else struct.pack("<Q", len(marks)))
    for numbers in (range(count + 1), np.cumsum([0, *sizes]).tolist(), sizes, marks or []):
        index += b"".join(struct.pack("<q", number) for number in numbers)
    Path(f"{prefix}.bin").write_bytes(body)
    Path(f"{prefix}.idx").write_bytes(index)


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("reading", ["mmap", "lazy", "cached"])
@settings(max_examples=25)
@given(documents=DOCUMENTS)
def test_the_older_format_is_read(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, marked: bool, reading: ReaderType, documents: list[list[int]]
) -> None:
    prefix = tmp_path_factory.mktemp("legacy") / "x"
    marks = [0, *range(2, len(documents), 2), len(documents)] if marked else None
    legacy_write(prefix, documents, dtype, marks)
    reader = IndexedReader(prefix, reading)
    assert reader.dtype == dtype
    assert [reader[index].tolist() for index in range(len(reader))] == documents
    assert reader.ids.tolist() == [id_ for ids in documents for id_ in ids]
    assert reader.lengths.tolist() == [len(ids) for ids in documents]


def test_a_damaged_older_index_is_named(tmp_path: Path) -> None:
    legacy_write(tmp_path / "x", [[1, 2], [3]], "uint16", [0, 2])
    path = tmp_path / "x.idx"
    whole = path.read_bytes()
    for content, words in (
        (whole[:30], "the index ends at byte 30, inside its header."),
        (whole[:-8], "the index has 128 bytes, but its header announces 136."),
        (whole[:16] + b"\7" + whole[17:], "the index has type code 7; ids can be 1 (uint8), 2 (int8), 3 (int16), 4"),
        (whole[:24] + b"\4" + whole[25:], "the index is of multi-dimensional arrays, not of sequences of ids."),
    ):
        path.write_bytes(content)
        with pytest.raises(JinguError) as caught:
            IndexedReader(tmp_path / "x")
        assert str(caught.value).startswith(f"{path}: {words}")


def test_the_type_follows_the_vocabulary() -> None:
    assert [best_dtype(size) for size in (257, 65_499, 65_500, 200_000)] == ["uint16", "uint16", "int32", "int32"]


FIX = " Copy the file again, or delete the folder and build the data set again."


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda idx: b"OTHERS" + idx[6:], "this is not a Megatron index (its first bytes are not MM"),
        (lambda idx: b"", "this is not a Megatron index (its first bytes are not MMIDIDX)."),
        (lambda idx: idx[:20], "the index ends at byte 20, inside its header."),
        (lambda idx: idx[:9] + b"\2" + idx[10:], "the index has version 2; only version 1 is supported."),
        (lambda idx: idx[:17] + b"\7" + idx[18:], "the index has type code 7; ids can be 1 (uint8), 2 (int8), 3 ("),
        (lambda idx: idx[:-1], "the index ends at byte 81, but its header announces 82."),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, damage: object, words: str) -> None:
    described_write(tmp_path / "x", [[1, 2], [3]], "uint16")
    path = tmp_path / "x.idx"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(JinguError) as caught:
        IndexedReader(tmp_path / "x")
    assert str(caught.value).startswith(f"{path}: {words}")
    assert str(caught.value).endswith(FIX)


def test_a_short_or_missing_bin_is_named(tmp_path: Path) -> None:
    described_write(tmp_path / "x", [[1, 2], [3]], "int32")
    path = tmp_path / "x.bin"
    for content, size in ((path.read_bytes()[:-1], 11), (b"", 0)):
        path.write_bytes(content)
        with pytest.raises(JinguError) as caught:
            IndexedReader(tmp_path / "x")
        assert str(caught.value) == f"{path}: the file has {size} bytes, but its .idx refers to 12.{FIX}"
    path.unlink()
    with pytest.raises(JinguError) as caught:
        IndexedReader(tmp_path / "x")
    assert str(caught.value) == f"{path}: the file cannot be read (No such file or directory).{FIX}"


def test_lengths_must_fit_the_ids(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lengths add up to 3, but there are 2 ids"):
        IndexedWriter(tmp_path / "y", "uint16").add(np.array([1, 2], np.uint16), np.array([3]))
