"""Batches are deterministic, cover every window once per epoch, and validation text exactly once."""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jingu.data.batch import IGNORE_INDEX
from jingu.data.dataset import TokenDataset, check_tokenizer, open_dataset
from jingu.data.dataset_manifest import MANIFEST_NAME, sample_checksum
from jingu.data.indexed_dataset import IndexedReader
from jingu.data.mixture import MixtureDataset, plan_mixture
from jingu.data.permutation import window_offset
from jingu.data.row_sources import WindowDataset, count_validation_windows, validation_batch
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer


def one_source(dataset: TokenDataset, sequence: int, size: int, seed: int) -> MixtureDataset:
    return MixtureDataset((WindowDataset(dataset, sequence, seed),), plan_mixture([(0, [1.0])], [None]), size)


@pytest.fixture(scope="session")
def train_data(built_folder: Path) -> TokenDataset:
    return open_dataset(built_folder, "train")


@pytest.fixture(scope="session")
def held_out_data(built_folder: Path) -> TokenDataset:
    return open_dataset(built_folder, "validation")


@pytest.fixture(scope="session")
def all_ids(built_folder: Path, train_data: TokenDataset) -> np.ndarray:
    """Read the train split without the dataset's code."""
    names = [shard.name for shard in train_data.manifest.train.shards]
    return np.concatenate([IndexedReader(built_folder / name).ids for name in names]).astype(np.int64)


@given(st.lists(st.integers(0, 10**9), max_size=6), st.integers(1, 1500))
def test_gathered_rows_run_over_shards(
    train_data: TokenDataset, all_ids: np.ndarray, places: list[int], length: int
) -> None:
    assert len(train_data.shards) > 3
    assert train_data.tokens == len(all_ids)
    starts = np.array([place % (len(all_ids) - length + 1) for place in places], dtype=np.int64)
    rows = train_data.gather(starts, length)
    assert rows.shape == (len(places), length)
    for start, row in zip(starts.tolist(), rows, strict=True):
        assert np.array_equal(row, all_ids[start : start + length])


@given(st.integers(0, 500), st.integers(1, 12), st.integers(1, 40), st.data())
def test_any_division_gives_the_same_rows(
    train_data: TokenDataset, step: int, size: int, sequence: int, data: st.DataObject
) -> None:
    whole = one_source(train_data, sequence, size, 5).batch(step, 0, size)
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=4))})
    source = one_source(train_data, sequence, size, 5)
    source.batch(data.draw(st.integers(0, 99)), 0, size)  # no history
    parts = [source.batch(step, first, end - first) for first, end in pairwise(cuts)]
    for name in ("tokens", "labels"):
        together = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(together, getattr(whole, name))
        assert together.dtype == torch.int64
        assert together.shape == (size, sequence)
    assert whole.positions is None and whole.documents is None


@pytest.mark.parametrize("sequence", [7, 64, 1000])
@pytest.mark.parametrize("size", [5])
@pytest.mark.parametrize("blocks", [(None, 1), (4, 3)])
def test_every_window_once_an_epoch(
    train_data: TokenDataset, all_ids: np.ndarray, sequence: int, size: int, blocks: tuple[int | None, int]
) -> None:
    """The first epoch starts at the first token; each later one has its own offset."""
    source = MixtureDataset(
        (WindowDataset(train_data, sequence, 11, *blocks),), plan_mixture([(0, [1.0])], [None]), size
    )
    windows = len(source.sources[0])
    assert windows == (len(all_ids) - 1) // sequence
    steps = -(-3 * windows // size)
    batches = [source.batch(step, 0, size) for step in range(steps)]
    tokens = torch.cat([batch.tokens for batch in batches]).numpy()
    labels = torch.cat([batch.labels for batch in batches]).numpy()
    used = windows * sequence
    offsets = [window_offset(sequence, 11, epoch) for epoch in range(3)]
    assert offsets[0] == 0 and len(set(offsets)) > 1
    for epoch, offset in enumerate(offsets):
        part = slice(epoch * windows, (epoch + 1) * windows)
        moved = np.roll(all_ids, -offset)
        assert sorted(tokens[part].tolist()) == sorted(moved[:used].reshape(windows, sequence).tolist())
        assert sorted(labels[part].tolist()) == sorted(moved[1 : used + 1].reshape(windows, sequence).tolist())
        assert np.array_equal(tokens[part][:, 1:], labels[part][:, :-1])


def test_samples_are_numbered_over_the_run(train_data: TokenDataset) -> None:
    source = one_source(train_data, 16, 6, 0)
    windows = source.sources[0]
    assert source.locate(3)[1].tolist() == [18, 19, 20, 21, 22, 23]
    epoch = windows.locate(np.arange(len(windows)))
    assert sorted(epoch.tolist()) == list(range(0, 16 * len(windows), 16))
    other = WindowDataset(train_data, 16, 1).locate(np.arange(len(windows)))
    assert (epoch == other).mean() < 0.2
    # Another global batch takes the same samples in the same order.
    rows = torch.cat([one_source(train_data, 16, 4, 0).batch(step, 0, 4).tokens for step in range(3)])
    assert torch.equal(rows, torch.cat([source.batch(step, 0, 6).tokens for step in range(2)]))


def test_each_row_comes_from_the_source_of_the_mixture(train_data: TokenDataset, held_out_data: TokenDataset) -> None:
    sources = WindowDataset(train_data, 24, 1), WindowDataset(held_out_data, 24, 2)
    mixed = MixtureDataset(sources, plan_mixture([(0, [2.0, 1.0])], [None, None]), 7)
    alone = [MixtureDataset((each,), plan_mixture([(0, [1.0])], [None]), 1) for each in sources]
    original = [0, 0]
    for step in range(30):
        which, numbers, _ = mixed.locate(step)
        batch = mixed.batch(step, 0, 7)
        for row, (source, number) in enumerate(zip(which.tolist(), numbers.tolist(), strict=True)):
            assert number == original[source]
            assert torch.equal(batch.tokens[row], alone[source].batch(number, 0, 1).tokens[0])
            original[source] += 1
    assert original == [140, 70]


def test_rows_outside_the_batch_are_a_bug(train_data: TokenDataset) -> None:
    for first, count in ((0, 7), (-1, 2), (6, 1)):
        with pytest.raises(ValueError, match="of a global batch of 6"):
            one_source(train_data, 16, 6, 0).batch(0, first, count)
    assert one_source(train_data, 16, 6, 0).batch(0, 6, 0).tokens.shape == (0, 16)


def test_too_little_text_is_explained(train_data: TokenDataset, built_folder: Path) -> None:
    tokens = train_data.tokens
    assert len(one_source(train_data, tokens - 1, 1, 0).sources[0]) == 1
    with pytest.raises(JinguError) as caught:
        one_source(train_data, tokens, 1, 0)
    assert str(caught.value) == (
        f"{built_folder}: the data set has {tokens:,} tokens for training, but one sequence of {tokens:,} needs "
        f"{tokens + 1:,}. Add text, or set batch.sequence_length lower."
    )


@pytest.mark.parametrize("sequence", [1, 7, 64, 100_000])
def test_held_out_text_is_covered_exactly_once(
    held_out_data: TokenDataset, data_tokenizer: Tokenizer, sequence: int
) -> None:
    windows = count_validation_windows(held_out_data, sequence)
    batches = [validation_batch(held_out_data, sequence, first, 3) for first in range(0, windows, 3)]
    labels = torch.cat([batch.labels for batch in batches]).flatten()
    tokens = torch.cat([batch.tokens for batch in batches]).flatten()
    predicted = labels[labels != IGNORE_INDEX].numpy()
    everything = held_out_data.gather(np.array([0]), held_out_data.tokens)[0]
    assert np.array_equal(predicted, everything)
    assert (labels[len(everything) :] == IGNORE_INDEX).all()
    assert tokens[0] == held_out_data.eos_token_id == data_tokenizer.eos_token_id
    assert np.array_equal(tokens[1 : len(everything)].numpy(), everything[:-1])
    assert (tokens[len(everything) :] == held_out_data.eos_token_id).all()
    text_bytes = int(data_tokenizer.byte_lengths()[predicted].sum())
    assert text_bytes == held_out_data.manifest.validation.text_bytes


def test_held_out_windows_past_the_end_are_padding(held_out_data: TokenDataset) -> None:
    windows = count_validation_windows(held_out_data, 64)
    batch = validation_batch(held_out_data, 64, windows, 2)
    assert batch.tokens.shape == batch.labels.shape == (2, 64)
    assert (batch.labels == IGNORE_INDEX).all() and (batch.tokens == held_out_data.eos_token_id).all()
    assert validation_batch(held_out_data, 64, 0, 0).tokens.shape == (0, 64)


def test_opening_a_missing_data_set(tmp_path: Path, built_folder: Path) -> None:
    with pytest.raises(JinguError) as caught:
        open_dataset(tmp_path / "data", "train")
    assert str(caught.value) == f"{tmp_path / 'data'}: there is no data set here. Run `jingu data build` first."
    shutil.copytree(built_folder, tmp_path / "data")
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    (tmp_path / "data" / "manifest.json").write_text(json.dumps(manifest | {"validation": {"shards": []}}))
    with pytest.raises(JinguError) as caught:
        open_dataset(tmp_path / "data", "validation")
    assert str(caught.value) == (
        f"{tmp_path / 'data'}: the data set has no validation split. "
        "Build it with data.validation_fraction above 0, or set evaluation.every to 0."
    )


def test_opening_a_damaged_data_set(tmp_path: Path, built_folder: Path) -> None:
    path = tmp_path / "data"
    shutil.copytree(built_folder, path)
    size = (path / "train-00001.bin").stat().st_size
    with (path / "train-00001.bin").open("r+b") as stream:
        stream.truncate(size - 2)
    fix = "Copy the file again, or delete the folder and build the data set again."
    with pytest.raises(JinguError) as caught:
        open_dataset(path, "train")
    assert str(caught.value) == (
        f"{path / 'train-00001.bin'}: the file has {size - 2:,} bytes; the manifest says {size:,} bytes. {fix}"
    )
    open_dataset(path, "validation")
    shutil.copy(built_folder / "train-00001.bin", path / "train-00001.bin")
    index = bytearray((path / "train-00000.idx").read_bytes())
    index[17] = 1  # uint8
    (path / "train-00000.idx").write_bytes(index)
    with pytest.raises(JinguError) as caught:
        open_dataset(path, "train")
    assert str(caught.value) == (
        f"{path / 'train-00000.idx'}: the content of the file does not match its checksum. {fix}"
    )
    # Data sets of older versions have no checksums of samples.
    manifest = re.sub(
        '"(bin|idx)_sample_xxh3": "[0-9a-f]*"', r'"\1_sample_xxh3": ""', (path / MANIFEST_NAME).read_text()
    )
    (path / MANIFEST_NAME).write_text(manifest)
    with pytest.raises(JinguError) as caught:
        open_dataset(path, "train")
    assert str(caught.value) == (
        f"{path / 'train-00000.idx'}: the index is of another data set than the manifest. {fix}"
    )


@pytest.mark.parametrize("place", [0.0, 0.37, 1.0])
def test_a_flipped_bit_is_noticed_when_a_run_opens_its_data(tmp_path: Path, built_folder: Path, place: float) -> None:
    """Every bit of a small shard is covered; of a large one, evenly spaced blocks."""
    path = tmp_path / "data"
    shutil.copytree(built_folder, path)
    shard = path / "train-00001.bin"
    content = bytearray(shard.read_bytes())
    content[round(place * (len(content) - 1))] ^= 4
    shard.write_bytes(content)
    with pytest.raises(JinguError, match=r"train-00001\.bin: the content of the file does not match"):
        open_dataset(path, "train")
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(50_000_001)
    before = sample_checksum(tmp_path / "large")
    with (tmp_path / "large").open("r+b") as stream:
        stream.seek(50_000_000)
        stream.write(b"\1")
    assert sample_checksum(tmp_path / "large") != before


@pytest.mark.parametrize("id_", [300, 65_535])
def test_an_id_beyond_the_vocabulary_is_named_by_its_shard(tmp_path: Path, built_folder: Path, id_: int) -> None:
    path = tmp_path / "data"
    shutil.copytree(built_folder, path)
    dataset = open_dataset(path, "train")
    shard, number = dataset.find_document(int(dataset.shard_starts[2]) + 7)
    with (path / "train-00002.bin").open("r+b") as stream:
        stream.seek(14)
        stream.write(id_.to_bytes(2, "little"))
    with pytest.raises(JinguError) as caught:
        dataset.gather(np.array([0]), dataset.tokens)
    assert shard == 2 and str(caught.value).startswith(
        f"{path / 'train-00002.bin'}: document {number} has the id {id_:,}, but the vocabulary has 300 entries."
    )
    # Rows without that id can be read.
    dataset.gather(dataset.shard_starts[:2], 5)


def test_another_tokenizer_is_refused(train_data: TokenDataset, data_tokenizer: Tokenizer, built_folder: Path) -> None:
    check_tokenizer(train_data, data_tokenizer)
    other = train_tokenizer(iter(["x y"]), 260, ["<a>"])
    with pytest.raises(JinguError) as caught:
        check_tokenizer(train_data, other)
    assert str(caught.value) == (
        f"{built_folder}: the data set was built with another tokenizer ({data_tokenizer.fingerprint()[:12]}, 300 "
        f"entries) than the run's ({other.fingerprint()[:12]}, {other.vocab_size} entries). "
        "Set tokenizer.path to the tokenizer it was built with, or build a data set with this one."
    )
