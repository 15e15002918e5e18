"""Batches made ahead, off the training thread, and shards copied to a local disk meanwhile."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import xxhash

from jingu.data.batch import Batch, changed
from jingu.data.dataset import UNKNOWN, TokenDataset
from jingu.data.manifest import Shard
from jingu.data.reading import open_numbers
from jingu.runtime.device import threads_beside
from jingu.runtime.log import say

PIECE = 16 << 20
"""Bytes copied at a time."""


class Loader:
    """Makes the micro-batches of the next step while this one trains; what it gives depends on the arguments alone.

    One thread: reading and copying let go of the interpreter. It holds at most one step's rows of this rank.
    """

    def __init__(self, make: Callable[[int, int, int], Batch], *, pinned: bool) -> None:
        """`make(step, first, count)` gives rows of a step; `pinned` puts them where a CUDA device fetches them."""
        self._make, self._pinned = make, pinned
        self._thread = threads_beside(1, "jingu-loader")
        self._ahead: dict[tuple[int, int, int], Future[Batch]] = {}

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Rows [first, first + count) of a step; those of the next step are then begun."""
        self._ahead = {key: future for key, future in self._ahead.items() if key[0] in (step, step + 1)}
        asked = self._ahead.pop((step, first, count), None) or self._begin(step, first, count)
        batch = asked.result()
        self._ahead[step + 1, first, count] = self._begin(step + 1, first, count)
        return batch

    def _begin(self, step: int, first: int, count: int) -> Future[Batch]:
        def made() -> Batch:
            batch = self._make(step, first, count)
            return changed(batch, lambda tensor: tensor.pin_memory()) if self._pinned else batch

        return self._thread.submit(made)


def copy_in_background(datasets: list[TokenDataset], folder: Path) -> threading.Thread:
    """Begin to copy shards into `folder`, under their checksums as names; each is read from there once it is verified.

    Of several processes on a machine one copies a shard, and the others wait for it in threads of their own. Where
    copying fails, the run goes on with the shards as they are.
    """

    def work() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            ours = [each for each in datasets if each.manifest.tokenizer != UNKNOWN]  # others' have no checksum
            for dataset in ours:
                for number, shard in enumerate(dataset.manifest.split(dataset.split).shards):
                    if local := _copied(dataset.path / f"{shard.name}.bin", shard, folder):
                        dtype, count = dataset.manifest.dtype, len(dataset.shards[number])
                        dataset.shards[number] = open_numbers(local, dtype, count, "mmap")
        except OSError as error:
            say(f"Copying shards to {folder} stopped ({error.strerror or error}); the rest is read where it is.")

    thread = threading.Thread(target=work, name="jingu-copy", daemon=True)
    thread.start()
    return thread


def _copied(source: Path, shard: Shard, folder: Path) -> Path | None:
    """The verified copy of a shard; None, told, where the bytes that were read are not those that were built."""
    final, partial = folder / f"{shard.bin_xxh3}.bin", folder / f".{shard.bin_xxh3}.partial"
    with (folder / f".{shard.bin_xxh3}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if final.is_file() and final.stat().st_size == shard.bin_bytes:
            return final
        digest = xxhash.xxh3_128()
        try:
            with source.open("rb") as from_, partial.open("wb") as to:
                while piece := from_.read(PIECE):
                    digest.update(piece)
                    to.write(piece)
                to.flush()
                os.fsync(to.fileno())
            if digest.hexdigest() == shard.bin_xxh3:
                partial.replace(final)
                return final
        finally:
            partial.unlink(missing_ok=True)
    say(f"{source} was not read as it was built (checksum); it is not copied. `jingu data inspect` checks it.")
    return None
