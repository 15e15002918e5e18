"""Documents left out from a step on; the data set stays. So a run can go back to a checkpoint and on without them.

Rows stay what they were; where they had a token of such a document they have the end token, and no label asks for it.
Steps before it are what they were, so the receipt of an earlier checkpoint still holds.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jingu.config.sections.data import DropSettings
from jingu.data.dataset import TokenDataset
from jingu.data.order import Numbers
from jingu.errors import JinguError, counted
from jingu.runtime.files import unreadable


@dataclass(frozen=True)
class Dropped:
    """Documents to leave out, as places in each source."""

    from_step: int
    ranges: tuple[Numbers, ...]
    """For each source [documents, 2], first token and the one after the last, in order."""

    def __contains__(self, step: int) -> bool:
        return step >= self.from_step

    def has(self, source: int, places: Numbers) -> npt.NDArray[np.bool_]:
        """Which of the places of a source lie in such a document."""
        ranges = self.ranges[source]
        if not len(ranges):
            return np.zeros(places.shape, dtype=np.bool_)
        number = np.searchsorted(ranges[:, 0], places, side="right") - 1
        return (number >= 0) & (places < ranges[number, 1])

    def digest(self) -> bytes:
        """What tells this list from another."""
        return hashlib.blake2b(b"".join(ranges.tobytes() for ranges in self.ranges), digest_size=16).digest()


def read_drop(settings: DropSettings, datasets: list[TokenDataset]) -> Dropped | None:
    """The list in a file of lines such as `zh/train-00003:1207`: source, shard, document, as the preview prints them.

    Raises JinguError for a line that names no document of the run.
    """
    if settings.file is None:
        return None
    path = Path(settings.file)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise unreadable(path, error) from error
    found: list[list[tuple[int, int]]] = [[] for _ in datasets]
    for number, line in enumerate(lines, start=1):
        name = line.partition("#")[0].strip()
        if name:
            source, start, end = _range(name, datasets, f"{path}:{number}")
            found[source].append((start, end))
    ranges = tuple(np.array(sorted(set(each)), dtype=np.int64).reshape(-1, 2) for each in found)
    return Dropped(settings.from_step, ranges)


def _range(name: str, datasets: list[TokenDataset], where: str) -> tuple[int, int, int]:
    shard_name, _, document = name.rpartition(":")
    for source, dataset in enumerate(datasets):
        for shard, record in enumerate(dataset.manifest.split(dataset.split).shards):
            if f"{dataset.path.name}/{record.name}" == shard_name and document.isdecimal():
                if int(document) >= record.documents:
                    what = (
                        f"{shard_name} has {counted(record.documents, 'document')}, numbered from 0, and no {document}."
                    )
                    raise JinguError(what, where=where)
                start, length = dataset.document(shard, int(document))
                return source, start, start + length
    what = f'"{name}" names no document of the run.'
    fix = "A line looks like data/train-00003:1207, as `jingu data preview` prints it."
    raise JinguError(what, where=where, fix=fix)
