"""Documents of Megatron's files: their borders come from the index, whatever tokens they end with."""

from __future__ import annotations

import struct
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jingu.data.dataset import open_dataset
from jingu.data.fill_in_the_middle import FillInTheMiddle
from jingu.data.indexed_dataset import IndexedReader
from jingu.data.inspection import documents_at
from jingu.data.mixture import Mixture, MixtureDataset, Segment
from jingu.data.row_sources import PackedDataset, WindowDataset, validation_batch
from jingu.errors import JinguError

EOS = 7
# Documents, which consist of sequences, which consist of ids.
Documents = list[list[list[int]]]
DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=3), min_size=1, max_size=9)


def write(prefix: Path, documents: Documents, *, legacy: bool = False) -> None:
    """Write files in Megatron's format, or its older one, as described."""
    sequences = [ids for document in documents for ids in document]
    sizes = [len(ids) for ids in sequences]
    firsts = [0, *accumulate(len(document) for document in documents)]
    starts = [0, *accumulate(sizes)]
    count = len(sequences)
    if legacy:
        index = b"TNTIDX\x00\x00" + struct.pack("<6Q", 1, 8, 2, count, count, len(firsts))
        for numbers in (range(count + 1), starts, sizes, firsts):
            index += struct.pack(f"<{len(numbers)}q", *numbers)
    else:
        index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, len(firsts))
        index += struct.pack(f"<{count}i", *sizes) + struct.pack(f"<{count}q", *(2 * start for start in starts[:-1]))
        index += struct.pack(f"<{len(firsts)}q", *firsts)
    prefix.with_name(f"{prefix.name}.idx").write_bytes(index)
    prefix.with_name(f"{prefix.name}.bin").write_bytes(np.array([*chain(*sequences)], "uint16").tobytes())


def numbers_of(documents: Documents) -> list[int]:
    """Return the number of the document of each token."""
    return [number for number, document in enumerate(documents) for ids in document for _ in ids]


def row_of(numbers: list[int], start: int, length: int) -> list[int]:
    """Return the documents of a window that wraps around, counted from 0; the beginning of the data is a border."""
    laps = [(lap, number) for lap in range(length // len(numbers) + 2) for number in numbers]
    window = laps[start : start + length]
    distinct = sorted(set(window))
    return [distinct.index(place) for place in window]


@pytest.mark.parametrize("legacy", [False, True])
@settings(max_examples=60)
@given(documents=DOCUMENTS, data=st.data())
def test_windows_have_the_documents_of_the_index(
    tmp_path_factory: pytest.TempPathFactory, legacy: bool, documents: Documents, data: st.DataObject
) -> None:
    prefix = tmp_path_factory.mktemp("files") / "x"
    write(prefix, documents, legacy=legacy)
    reader = IndexedReader(prefix)
    sizes = [sum(map(len, document)) for document in documents]
    # A file of one entry has no documents.
    assert reader.num_documents == len(documents)
    assert reader.document_lengths.tolist() == sizes
    numbers = numbers_of(documents)
    if not numbers:
        return
    dataset = open_dataset(prefix, "train", eos_token_id=EOS)
    start = data.draw(st.integers(0, len(numbers) - 1))
    length = data.draw(st.integers(1, len(numbers)))
    assert dataset.document_ids(np.array([start, 0]), length).tolist() == [
        row_of(numbers, start, length),
        row_of(numbers, 0, length),
    ]
    found = [document for (_, document), count in documents_at(dataset, np.arange(len(numbers))) for _ in range(count)]
    assert found == numbers


def one_source(source: WindowDataset | PackedDataset, size: int, **more: object) -> MixtureDataset:
    return MixtureDataset((source,), Mixture((Segment(0, (0,), (1,)),), None), size, True, **more)  # type: ignore[arg-type]


SENTENCES: Documents = [
    [[1, 2, EOS], [3, 4]],  # an EOS inside, and none at the end
    [[5]],
    [],
    [[6, 8], [9], [1, 2, 3]],
    [[4, EOS]],
    [[2, 3, 4, 5, 6]],
]


def test_masks_and_positions_of_batches(tmp_path: Path) -> None:
    write(tmp_path / "x", SENTENCES)
    dataset = open_dataset(tmp_path / "x", "train", eos_token_id=EOS)
    numbers = numbers_of(SENTENCES)
    rows = one_source(WindowDataset(dataset, 6, 3), 4)
    for step in range(4):
        batch = rows.batch(step, 0, 4)
        assert batch.documents is not None and batch.positions is not None
        for row, start in enumerate(rows.locate(step)[2].tolist()):
            documents = row_of(numbers, start, 6)
            assert batch.documents[row].tolist() == documents
            assert batch.positions[row].tolist() == [n - documents.index(number) for n, number in enumerate(documents)]
    # Best-fit packing: no document shares an entry with another one, and sentences are not apart.
    packing = PackedDataset(dataset, 8, 3)
    packed = one_source(packing, len(packing)).batch(0, 0, len(packing))
    assert packed.documents is not None
    found = []
    for tokens, labels, documents in zip(packed.tokens, packed.labels, packed.documents, strict=True):
        for number in set(documents.tolist()) - {-1}:
            found.append([*tokens[documents == number].tolist(), labels[documents == number][-1].item()])
    whole = [[*chain(*document)] for document in SENTENCES]
    assert sorted(found) == sorted(ids for ids in whole if len(ids) > 1)
    held_out = validation_batch(dataset, 5, 0, 4, document_mask=True)
    assert held_out.documents is not None
    assert held_out.documents[1].tolist() == row_of(numbers, 4, 5)


def test_several_files_and_fill_in_the_middle(tmp_path: Path) -> None:
    """Each source has its own borders; a transformed document stays apart from its neighbors."""
    write(tmp_path / "x", SENTENCES)
    write(tmp_path / "y", [[[1], [2]], [[3, 4, 5], [6]], [[8, 9, 1, 2]]])
    sources = tuple(
        WindowDataset(open_dataset(tmp_path / name, "train", eos_token_id=EOS), 6, seed)
        for seed, name in enumerate("xy")
    )
    mixture = Mixture((Segment(0, (0, 0), (1, 1)),), None)
    rows = MixtureDataset(sources, mixture, 4, True)
    source_ids, _, starts = rows.locate(0)
    batch = rows.batch(0, 0, 4)
    assert batch.documents is not None
    both = [numbers_of(SENTENCES), [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]]
    for row, (source, start) in enumerate(zip(source_ids.tolist(), starts.tolist(), strict=True)):
        assert batch.documents[row].tolist() == row_of(both[source], start, 6)

    fill = FillInTheMiddle(rate=1.0, prefix_id=20, suffix_id=21, middle_id=22, eos_token_id=EOS, seed=1)
    row, documents = fill.transform_row(np.array([1, 2, 3, 4, 5, 6]), np.array([0, 0, 0, 1, 1, 1]), 0)
    assert documents.tolist() == [0] * 6
    assert row[0] == 20 and sorted(row.tolist()) == [1, 2, 3, 20, 21, 22]
    tokens, _, apart = fill.transform(np.array([[1, 4]]), np.array([[4, 5]]), np.array([[0, 1, 1]]), np.array([0]))
    assert tokens.shape == (1, 2) and apart.tolist() == [[0, 0, 0]]


def test_a_window_over_many_documents(tmp_path: Path) -> None:
    documents: Documents = [[[1] * (n % 3), [2]] for n in range(300)]
    write(tmp_path / "x", documents)
    dataset = open_dataset(tmp_path / "x", "train", eos_token_id=EOS)
    numbers = numbers_of(documents)
    for start, length in ((0, 500), (100, 350), (450, 300)):
        assert dataset.document_ids(np.array([start]), length)[0].tolist() == row_of(numbers, start, length)


def test_a_damaged_document_index_is_named(tmp_path: Path) -> None:
    write(tmp_path / "x", SENTENCES)
    path = tmp_path / "x.idx"
    whole = path.read_bytes()
    path.write_bytes(whole[:-8] + struct.pack("<q", 3))
    with pytest.raises(JinguError, match=r"its documents are the sequences 0 to 3, but it has 8\."):
        IndexedReader(tmp_path / "x")
    path.write_bytes(whole[:-32] + struct.pack("<q", 1) + whole[-24:])
    with pytest.raises(JinguError, match="the first sequences of its documents are not in order"):
        _ = IndexedReader(tmp_path / "x").document_lengths
    # Without documents, each sequence is one.
    path.write_bytes(whole[:26] + struct.pack("<Q", 0) + whole[34:-56])
    assert IndexedReader(tmp_path / "x").num_documents == 8
