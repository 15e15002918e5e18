"""Whole documents in rows, attention within them, and dropped documents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jingu.config.sections.data import DropSettings
from jingu.data.batch import IGNORE_INDEX
from jingu.data.dataset import TokenDataset, open_dataset
from jingu.data.dropped_documents import load_dropped_documents
from jingu.data.mixture import MixtureDataset, plan_mixture
from jingu.data.row_sources import (
    PackedDataset,
    WindowDataset,
    document_positions,
    pack_best_fit,
    split_long_documents,
    validation_batch,
)
from jingu.data.sample_hash import SampleHash, check_sample_hash, extend_sample_hash
from jingu.errors import JinguError

ONE = plan_mixture([(0, [1.0])], [None])


@pytest.fixture(scope="module")
def dataset(built_folder: Path) -> TokenDataset:
    return open_dataset(built_folder, "train")


def documents_of(dataset: TokenDataset) -> list[list[int]]:
    ends = np.cumsum(dataset.document_lengths())
    whole = dataset.gather(np.array([0]), dataset.tokens)[0]
    return [part.tolist() for part in np.split(whole, ends[:-1])]


@settings(max_examples=50)
@given(st.lists(st.integers(1, 60), max_size=200), st.integers(1, 60))
def test_best_fit_decreasing_follows_its_definition(sizes: list[int], capacity: int) -> None:
    sizes = [min(size, capacity) for size in sizes]
    rows = pack_best_fit(np.array(sizes, dtype=np.int64), capacity)
    rooms: list[int] = []
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
        fitting = [room for room in rooms if room >= sizes[piece]]
        if fitting:
            assert rooms[rows[piece]] == min(fitting)
        else:
            assert rows[piece] == len(rooms)
            rooms.append(capacity)
        rooms[rows[piece]] -= sizes[piece]
    assert all(room >= 0 for room in rooms)


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 20))
def test_long_documents_are_cut_and_no_prediction_is_lost(lengths: list[int], sequence: int) -> None:
    pieces = split_long_documents(np.array(lengths, dtype=np.int64), sequence)
    predicted = [place for start, size in pieces.tolist() for place in range(start + 1, start + size + 1)]
    starts = np.cumsum([0, *lengths])
    expected = [place for start, n in zip(starts, lengths, strict=False) for place in range(start + 1, start + n)]
    assert predicted == expected
    assert all(1 <= size <= sequence for _, size in pieces.tolist())


@pytest.mark.parametrize("sequence", [16, 90])
def test_packed_rows_hold_every_document_whole(dataset: TokenDataset, sequence: int) -> None:
    rows = PackedDataset(dataset, sequence, 3)
    source = MixtureDataset((rows,), ONE, 4, document_mask=True)
    steps = -(-len(rows) // 4)
    batches = [source.batch(step, 0, 4) for step in range(steps)]
    tokens, labels, positions, documents = (
        torch.cat([getattr(batch, name) for batch in batches])[: len(rows)]
        for name in ("tokens", "labels", "positions", "documents")
    )
    result = []
    for row in range(len(rows)):
        for number in sorted(set(documents[row].tolist()) - {-1}):
            inside = documents[row] == number
            result.append([*tokens[row][inside].tolist(), int(labels[row][inside][-1])])
            assert labels[row][inside][:-1].tolist() == tokens[row][inside][1:].tolist()
            assert positions[row][inside].tolist() == list(range(int(inside.sum())))
    short = [ids for ids in documents_of(dataset) if len(ids) <= sequence + 1]
    assert all(result.count(ids) == short.count(ids) for ids in short)
    padded = documents == -1
    assert (labels[padded] == IGNORE_INDEX).all() and (labels[~padded] >= 0).all()
    assert (tokens[padded] == dataset.eos_token_id).all()
    assert int((~padded).sum()) == sum(len(ids) - 1 for ids in documents_of(dataset))
    assert padded.float().mean() < 0.1
    alike = MixtureDataset((rows,), ONE, 4).batch(0, 0, 4)
    assert alike.documents is None and torch.equal(alike.tokens, batches[0].tokens)


def test_attention_stays_within_documents_and_positions_restart(dataset: TokenDataset) -> None:
    plain, apart = (
        MixtureDataset((WindowDataset(dataset, 64, 1),), ONE, 5, document_mask=each) for each in (False, True)
    )
    for step in range(20):
        batch, same = apart.batch(step, 0, 5), plain.batch(step, 0, 5)
        assert torch.equal(batch.tokens, same.tokens) and torch.equal(batch.labels, same.labels)
        assert same.documents is None and same.positions is None
        assert batch.documents is not None and batch.positions is not None
        for row in range(5):
            number = position = 0
            for at, token in enumerate(batch.tokens[row].tolist()):
                assert (int(batch.documents[row, at]), int(batch.positions[row, at])) == (number, position)
                position += 1
                if token == dataset.eos_token_id:
                    number, position = number + 1, 0
    rows_of = validation_batch(dataset, 64, 0, 3, document_mask=True)
    assert rows_of.documents is not None and rows_of.positions is not None
    # jingu's data sets end each document with EOS.
    is_eos = rows_of.tokens.numpy() == dataset.eos_token_id
    assert rows_of.documents.tolist() == (np.cumsum(is_eos, axis=1) - is_eos).tolist()
    assert rows_of.positions.tolist() == document_positions(rows_of.documents.numpy()).tolist()


@pytest.mark.parametrize("kind", ["windows", "packed"])
def test_documents_are_dropped_from_a_step_on(dataset: TokenDataset, tmp_path: Path, kind: str) -> None:
    rows = WindowDataset(dataset, 48, 2) if kind == "windows" else PackedDataset(dataset, 48, 2)
    whole = MixtureDataset((rows,), ONE, 4)
    file = tmp_path / "drop.txt"
    names = [f"{dataset.path.name}/train-00001:0", f"{dataset.path.name}/train-00003:2"]
    file.write_text(f"# spikes\n{names[0]}\n\n{names[1]}  # twice as bad\n{names[1]}\n")
    dropped = load_dropped_documents(DropSettings(file=str(file), start_step=6), [dataset])
    without = replace(whole, dropped=dropped)
    gone = set()
    for shard, number in ((1, 0), (3, 2)):
        start, length = dataset.document_range(shard, number)
        assert dataset.find_document(start) == dataset.find_document(start + length - 1) == (shard, number)
        gone |= set(range(start, start + length))
    changed = 0
    for step in range(len(rows) // 4 + 8):
        before, after = whole.batch(step, 0, 4), without.batch(step, 0, 4)
        _, _, starts = whole.locate(step)
        places = rows.token_offsets(starts)
        out = torch.from_numpy(np.isin(places, list(gone)))
        queries = torch.from_numpy(np.isin((places + 1) % dataset.tokens, list(gone)))
        if step < 6:
            out, queries = torch.zeros_like(out), torch.zeros_like(queries)
        assert torch.equal(after.tokens, torch.where(out, dataset.eos_token_id, before.tokens))
        assert torch.equal(after.labels, torch.where(queries, IGNORE_INDEX, before.labels))
        changed += int(out.sum())
    assert changed > 0
    # A run may go back to before the step, and not go on from after it.
    check_sample_hash(extend_sample_hash(SampleHash(), whole, 6), without, "there")
    with pytest.raises(JinguError, match="the samples of steps 1 to 7 are not those that the run was trained on"):
        check_sample_hash(extend_sample_hash(SampleHash(), whole, 7), without, "there")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "other/train-00000:1",
            '"other/train-00000:1" names no document of the run. A line looks like data/train-00003',
        ),
        ("{}/train-00000:x", "names no document of the run."),
        ("{}/train-00000:99999", "documents, numbered from 0, but no 99999."),
    ],
)
def test_a_line_without_a_document_is_refused(dataset: TokenDataset, tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "drop.txt"
    file.write_text("# a list\n" + line.format(dataset.path.name))
    with pytest.raises(JinguError) as caught:
        load_dropped_documents(DropSettings(file=str(file)), [dataset])
    assert str(caught.value).startswith(f"{file}:2: ") and words in str(caught.value)
    with pytest.raises(JinguError, match=r"none\.txt: the file cannot be read"):
        load_dropped_documents(DropSettings(file=str(tmp_path / "none.txt")), [dataset])
    assert load_dropped_documents(DropSettings(), [dataset]) is None
