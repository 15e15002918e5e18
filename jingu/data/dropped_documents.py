"""Documents that are dropped from a step on, so that a run can go back to a checkpoint and continue without them.

The data set does not change, and neither do the rows: the tokens of a dropped document are replaced with the EOS token,
and their labels are ignored. Earlier steps do not change, so the sample hash of an earlier checkpoint still matches.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jingu.config.sections.data import DropSettings
from jingu.data.dataset import TokenDataset
from jingu.data.permutation import Int64Array
from jingu.errors import JinguError, pluralize
from jingu.runtime.files import read_text


@dataclass(frozen=True)
class DroppedDocuments:
    """The dropped documents of each source, as ranges of token offsets. `step in dropped` tells whether a step drops
    them."""

    start_step: int
    # For each source [documents, 2], sorted: offset of the first token, and of the token after the last.
    ranges: tuple[Int64Array, ...]

    def __contains__(self, step: int) -> bool:
        return step >= self.start_step

    def contains(self, source_id: int, offsets: Int64Array) -> npt.NDArray[np.bool_]:
        """Return the mask of the token offsets of a source that lie in a dropped document."""
        ranges = self.ranges[source_id]
        if not len(ranges):
            return np.zeros(offsets.shape, dtype=np.bool_)
        # The only range that can contain an offset is the last one that begins at or before it.
        index = np.searchsorted(ranges[:, 0], offsets, side="right") - 1
        return (index >= 0) & (offsets < ranges[index, 1])

    def digest(self) -> bytes:
        """Return a hash of the ranges."""
        return hashlib.blake2b(b"".join(ranges.tobytes() for ranges in self.ranges), digest_size=16).digest()


def load_dropped_documents(settings: DropSettings, datasets: list[TokenDataset]) -> DroppedDocuments | None:
    """Read a list of documents, one per line, such as `zh/train-00003:1207`: source, shard and index in the shard.

    `jingu data preview` prints documents like this. `#` starts a comment.

    Raises:
        JinguError: the file cannot be read, or a line names no document of the run.
    """
    if settings.file is None:
        return None
    path = Path(settings.file)
    ranges: list[set[tuple[int, int]]] = [set() for _ in datasets]
    for line_number, line in enumerate(read_text(path).splitlines(), start=1):
        name = line.partition("#")[0].strip()
        if name:
            source_id, start, end = _find_range(name, datasets, f"{path}:{line_number}")
            ranges[source_id].add((start, end))
    arrays = [np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2) for pairs in ranges]
    return DroppedDocuments(settings.start_step, tuple(arrays))


def _find_range(name: str, datasets: list[TokenDataset], where: str) -> tuple[int, int, int]:
    """Return the source and the range of token offsets of a document by its name; `where` locates the name."""
    shard_name, _, document = name.rpartition(":")
    for source_id, dataset in enumerate(datasets):
        for shard, entry in enumerate(dataset.manifest.split(dataset.split).shards):
            if f"{dataset.path.name}/{entry.name}" != shard_name or not document.isdecimal():
                continue
            if int(document) >= entry.documents:
                what = f"{shard_name} has {pluralize(entry.documents, 'document')}, numbered from 0, but no {document}."
                raise JinguError(what, where=where)
            start, length = dataset.document_range(shard, int(document))
            return source_id, start, start + length
    fix = "A line looks like data/train-00003:1207, as `jingu data preview` prints it."
    raise JinguError(f'"{name}" names no document of the run.', where=where, fix=fix)
