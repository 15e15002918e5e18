"""Verified copies of shards on a fast local disk, which are made during training."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import xxhash

from jingu.data.array_reader import open_array
from jingu.data.dataset import UNKNOWN_TOKENIZER, TokenDataset
from jingu.data.dataset_manifest import ShardEntry
from jingu.runtime.log import log_info

COPY_CHUNK_BYTES = 16 << 20


def copy_shards_in_background(datasets: list[TokenDataset], folder: Path) -> threading.Thread:
    """Start to copy shards into `folder`. Each shard is read from there as soon as its copy is verified.

    Copies are named by their checksums. Of several processes on a machine one copies a shard, and the others wait for
    it in threads of their own. If copying fails, the run continues with the original shards.
    """

    def copy_all() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for dataset in datasets:
                # Data sets that other tools wrote have no checksums.
                if dataset.manifest.tokenizer != UNKNOWN_TOKENIZER:
                    _copy_dataset(dataset, folder)
        except OSError as error:
            reason = error.strerror or error
            log_info(f"Copying shards to {folder} failed ({reason}); the remaining shards are read from the original.")

    thread = threading.Thread(target=copy_all, name="jingu-copy", daemon=True)
    thread.start()
    return thread


def _copy_dataset(dataset: TokenDataset, folder: Path) -> None:
    """Copy the shards of a data set, and replace their readers."""
    for number, entry in enumerate(dataset.manifest.split(dataset.split).shards):
        copy = _copy_shard(dataset.path / f"{entry.name}.bin", entry, folder)
        if copy is not None:
            dataset.shards[number] = open_array(copy, dataset.manifest.dtype, len(dataset.shards[number]), "mmap")


def _copy_shard(source: Path, entry: ShardEntry, folder: Path) -> Path | None:
    """Return the verified copy of a shard; None, with a log line, if the shard does not match its checksum."""
    final = folder / f"{entry.bin_xxh3}.bin"
    partial = folder / f".{entry.bin_xxh3}.partial"
    with (folder / f".{entry.bin_xxh3}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have finished the copy in the meantime.
        if final.is_file() and final.stat().st_size == entry.bin_bytes:
            return final
        digest = xxhash.xxh3_128()
        try:
            with source.open("rb") as reader, partial.open("wb") as writer:
                while chunk := reader.read(COPY_CHUNK_BYTES):
                    digest.update(chunk)
                    writer.write(chunk)
                writer.flush()
                os.fsync(writer.fileno())
            if digest.hexdigest() == entry.bin_xxh3:
                partial.replace(final)
                return final
        finally:
            partial.unlink(missing_ok=True)
    log_info(f"{source} does not match its checksum and is not copied. `jingu data inspect` checks it.")
    return None
