"""Every reader returns the same ids and opens each file once, and a local copy is only read if it is valid."""

from __future__ import annotations

import errno
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jingu.data.array_reader as reading_module
import jingu.data.local_cache as local_cache_module
from jingu.data.array_reader import CachedReader, MmapReader, ReaderType, infer_reader, open_array
from jingu.data.batch import Batch
from jingu.data.batch_prefetch import BatchPrefetcher
from jingu.data.dataset import TokenDataset, check_tokenizer, open_dataset
from jingu.data.local_cache import copy_shards_in_background
from jingu.data.mixture import MixtureDataset, plan_mixture
from jingu.data.row_sources import WindowDataset
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer

READINGS = get_args(ReaderType)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_module, "CACHE_BLOCK_BYTES", 64)
    monkeypatch.setattr(reading_module, "MAX_CACHED_BLOCKS", 3)


@pytest.mark.parametrize("reading", READINGS)
@settings(max_examples=30)
@given(
    count=st.integers(0, 300),
    places=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 310)), max_size=8),
)
def test_reading_any_range(
    tmp_path_factory: pytest.TempPathFactory, reading: ReaderType, count: int, places: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("numbers") / "x"
    expected = np.arange(count, dtype="<i4") * 7
    path.write_bytes(expected.tobytes() + b"more")
    numbers = open_array(path, "int32", count, reading)
    assert len(numbers) == count
    for start, stop in places:
        start = min(start, count)
        assert numbers.read(start, stop).tolist() == expected[start:stop].tolist()
    assert not numbers.read(0, count).flags.writeable or not count or reading == "cached"


def source_of(path: Path, reading: ReaderType) -> MixtureDataset:
    windows = WindowDataset(open_dataset(path, "train", reading), 24, 1)
    return MixtureDataset((windows,), plan_mixture([(0, [1.0])], [None]), 4)


OPENED: list[str] = []
sys.addaudithook(lambda event, arguments: OPENED.append(str(arguments[0])) if event == "open" else None)


@pytest.mark.parametrize("reading", READINGS)
def test_batches_are_the_same_and_no_file_is_opened_twice(built_folder: Path, reading: ReaderType) -> None:
    expected = source_of(built_folder, "mmap")
    OPENED.clear()
    source = source_of(built_folder, reading)
    for step in range(1000):
        batch = source.batch(step, 0, 4)
        if step % 50 == 0:
            assert torch.equal(batch.tokens, expected.batch(step, 0, 4).tokens)
    opened = Counter(name for name in OPENED if name.startswith(str(built_folder)) and name.endswith(".bin"))
    shards = source.sources[0].dataset.shards
    # Opening a data set samples the content of every file, sidecars included; a reader opens its shard once.
    counts = [count for name, count in opened.items() if "origins" not in name]
    assert len(counts) == len(shards) > 3 and set(counts) == {2}


def test_the_reader_is_inferred_from_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    rows = [("/", "ext4"), ("/shared", "nfs4"), ("/shared/fast", "xfs"), ("/scratch", "lustre"), ("/a\\040b", "fuse.x")]
    table.write_text("".join(f"36 35 98:0 / {at} rw,noatime master:1 - {kind} /dev/x rw\n" for at, kind in rows))
    monkeypatch.setattr(reading_module, "MOUNTINFO", table)
    ways = {
        "/home/x": MmapReader,
        "/shared/x": CachedReader,
        "/shared/fast/x": MmapReader,
        "/scratch": CachedReader,
        "/a b/x": CachedReader,
    }
    assert {path: infer_reader(Path(path)) for path in ways} == ways
    monkeypatch.setattr(reading_module, "MOUNTINFO", tmp_path / "none")
    assert infer_reader(Path("/shared/x")) is MmapReader


def test_a_file_truncated_while_reading_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(100))
    numbers = open_array(path, "uint16", 50, "lazy")
    os.truncate(path, 60)
    with pytest.raises(OSError, match="ends at byte 60; it was truncated while it was read"):
        numbers.read(20, 40)


def test_foreign_files_are_read_by_their_prefix(built_folder: Path, data_tokenizer: Tokenizer, tmp_path: Path) -> None:
    dataset = open_dataset(built_folder / "train-00001", "train")
    ours = open_dataset(built_folder, "train")
    count = len(ours.shards[1])
    assert dataset.gather(np.array([0]), count).tolist() == ours.gather(ours.shard_starts[1:2], count).tolist()
    check_tokenizer(dataset, data_tokenizer)
    with pytest.raises(JinguError, match="has no validation split"):
        open_dataset(built_folder / "train-00001", "validation")
    (tmp_path / "x.idx").write_bytes((built_folder / "train-00001.idx").read_bytes())
    (tmp_path / "x.bin").write_bytes(np.full(count, 300, np.uint16).tobytes())
    with pytest.raises(JinguError, match=r"has ids from 300 to 300, but the tokenizer has only 300 entries\."):
        check_tokenizer(open_dataset(tmp_path / "x", "train"), data_tokenizer)


def local_parts(dataset: TokenDataset, folder: Path) -> int:
    """Shards that are read from their local copy."""
    names = {shard.bin_xxh3 for shard in dataset.manifest.train.shards}
    return len(names & {path.stem for path in folder.glob("*.bin")})


def kinds(dataset: TokenDataset) -> int:
    """Shards that differ; copies of a text can make two alike."""
    return len({shard.bin_xxh3 for shard in dataset.manifest.train.shards})


def test_shards_are_copied_and_read_from_the_copy(built_folder: Path, tmp_path: Path) -> None:
    source, expected = source_of(built_folder, "lazy"), source_of(built_folder, "mmap")
    dataset = source.sources[0].dataset
    copies = [copy_shards_in_background([dataset], tmp_path / "fast") for _ in range(2)]  # as of two processes
    for copy in copies:
        copy.join()
    assert local_parts(dataset, tmp_path / "fast") == kinds(dataset)
    assert not any(isinstance(shard, reading_module.PreadReader) for shard in dataset.shards)
    assert list((tmp_path / "fast").glob(".*partial")) == []
    for step in range(20):
        assert torch.equal(source.batch(step, 0, 4).tokens, expected.batch(step, 0, 4).tokens)


@pytest.mark.parametrize("trouble", ["damage", "disk"])
def test_the_original_files_are_read_if_copying_fails(
    built_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    output: list[str] = []
    monkeypatch.setattr(local_cache_module, "log_info", output.append)
    source, expected = source_of(built_folder, "lazy"), source_of(built_folder, "mmap")
    dataset = source.sources[0].dataset
    if trouble == "damage":
        real = local_cache_module.xxhash.xxh3_128
        wrong = iter([real(b"other")])
        monkeypatch.setattr(local_cache_module.xxhash, "xxh3_128", lambda: next(wrong, None) or real())
    else:

        def full(_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(local_cache_module.os, "fsync", full)
    copy_shards_in_background([dataset], tmp_path / "fast").join()
    slow = [isinstance(shard, reading_module.PreadReader) for shard in dataset.shards]
    assert slow == [True] + [trouble == "disk"] * (len(slow) - 1)
    assert trouble == "damage" or local_parts(dataset, tmp_path / "fast") == 0
    assert list((tmp_path / "fast").glob(".*partial")) == []
    (words,) = output
    assert ("does not match its checksum" if trouble == "damage" else "No space left on device") in words
    assert torch.equal(source.batch(3, 0, 4).tokens, expected.batch(3, 0, 4).tokens)


def test_the_prefetcher_returns_each_step_and_buffers_one(built_folder: Path) -> None:
    source = source_of(built_folder, "mmap")
    requested_ranges: list[tuple[int, int, int]] = []

    def make(step: int, first: int, count: int) -> Batch:
        requested_ranges.append((step, first, count))
        return source.batch(step, first, count)

    loader = BatchPrefetcher(make)
    for step, first, count in [(0, 0, 4), *((step, first, 2) for step in range(5, 9) for first in (0, 2)), (2, 1, 3)]:
        batch = loader.batch(step, first, count)
        assert torch.equal(batch.tokens, source.batch(step, first, count).tokens)
        assert len(loader._futures) <= 3
    loader._thread.shutdown()
    # Nothing is made twice, and of each place the next step's rows are made ahead.
    assert len(requested_ranges) == len(set(requested_ranges))
    assert set(requested_ranges) >= {(1, 0, 4), (9, 0, 2), (9, 2, 2), (3, 1, 3)}


def test_an_error_of_the_prefetcher_is_raised_in_training(built_folder: Path) -> None:
    def make(step: int, first: int, count: int) -> Batch:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        BatchPrefetcher(make).batch(0, 0, 1)
