"""CPM-2's data sets for encoder-decoders, whose spans were removed when they were built (Zhang et al., 2021).

Three of Megatron's indexed data sets with a sequence a document, as TsinghuaAI/CPM-2-Pretrain writes and reads them
(src/tools/preprocess_data_enc_dec.py, src/data/enc_dec_dataset.py): PREFIX_context, the text with the n-th removed span
of the document replaced by the id V + n; PREFIX_target, the removed spans, each after its V + n; PREFIX_target_offset,
two numbers a span, its first place in the document's targets and its length there, V + n included. V is the size of the
tokenizer. A sample is a window of contexts; its sentinels are numbered anew, and one more ends the target.

Shapes: B rows, S tokens of a source, T tokens of a target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from jingu.config.sections.data import TargetFilesSettings
from jingu.data.batch import IGNORED, Batch, Source, written
from jingu.data.batches import BatchSource, Windows
from jingu.data.dataset import TokenDataset, open_dataset
from jingu.data.indexed import IndexedReader
from jingu.data.manifest import damaged
from jingu.data.packing import Numbers
from jingu.data.reading import Reading, inferred
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer

CONTEXT, TARGET, OFFSET = "_context", "_target", "_target_offset"


@dataclass(frozen=True, kw_only=True)
class TargetFiles(Windows):
    """Windows of contexts, and the spans that were removed from them."""

    target: IndexedReader
    offset: IndexedReader
    first_sentinel: int
    """V."""

    def pairs(self, starts: Numbers) -> list[tuple[Numbers, list[Numbers]]]:
        """Of each window its ids, with V + n as they are, and the removed spans without them."""
        return [self._pair(ids, int(start)) for ids, start in zip(self.read(starts).tokens, starts, strict=True)]

    def _pair(self, ids_S: Numbers, start: int) -> tuple[Numbers, list[Numbers]]:
        spans: list[Numbers] = []
        at = 0
        while at < len(ids_S):
            shard, number = self.dataset.find((start + at) % self.dataset.tokens)
            first, length = self.dataset.document(shard, number)
            end = min(at + first + length - (start + at) % self.dataset.tokens, len(ids_S))
            marks = ids_S[at:end]
            spans += self._spans(number, marks[marks >= self.first_sentinel])
            at = end
        return ids_S, spans

    def _spans(self, document: int, marks: Numbers) -> list[Numbers]:
        """The spans of a document that these ids stand for."""
        lengths = self.offset[document].reshape(-1, 2)[:, 1].astype(np.int64)
        # Offsets are stored in 16 bits: in a long document they are too large for that, the lengths never are.
        starts, targets, found = np.cumsum(lengths) - lengths, self.target[document].astype(np.int64), []
        for mark in marks.tolist():
            number = mark - self.first_sentinel
            there = number < len(lengths) and starts[number] < len(targets)
            if not there or targets[starts[number]] != mark:
                raise damaged(self.target.path, f"document {document:,} has no target for its id {mark:,}.")
            found.append(targets[starts[number] + 1 : starts[number] + lengths[number]])
        return found


@dataclass(frozen=True)
class TargetFilesSource(BatchSource):
    """Batches of such data sets."""

    target_length: int = 0
    """T; what is longer is cut."""
    sentinel_ids: tuple[int, ...] = ()
    start_id: int = 0

    def batch(self, step: int, first: int, count: int) -> Batch:
        which, _, starts = (part[first : first + count] for part in self.locate(step))
        sources_BS = torch.empty((count, self.sources[0].sequence_length), dtype=torch.int64)
        labels_BT = torch.full((count, self.target_length), IGNORED)
        for row, (number, start) in enumerate(zip(which.tolist(), starts, strict=True)):
            windows = self.sources[number]
            assert isinstance(windows, TargetFiles)
            [(ids_S, spans)] = windows.pairs(start[None])
            if len(spans) >= len(self.sentinel_ids):
                raise _too_few(len(spans) + 1, len(self.sentinel_ids))
            marks = np.array(self.sentinel_ids[: len(spans) + 1])
            source, removed = ids_S.copy(), ids_S >= windows.first_sentinel
            source[removed] = marks[:-1]
            sources_BS[row] = torch.from_numpy(source)
            parts = [part for mark, span in zip(marks, spans, strict=False) for part in ([mark], span)]
            target = np.concatenate([*parts, marks[-1:]])[: self.target_length]
            if self.dropped is None or step not in self.dropped or not self._drops(number, start):
                labels_BT[row, : len(target)] = torch.from_numpy(target)
        return written(Source(sources_BS), labels_BT, self.start_id)

    def _drops(self, number: int, start: Numbers) -> bool:
        """Whether a part of a window is left out: then none of it is trained."""
        assert self.dropped is not None
        return bool(self.dropped.has(number, self.sources[number].places(start[None])).any())


def open_target_files(
    prefix: Path,
    sequence_length: int,
    seed: int,
    reading: Reading | Literal["infer"],
    settings: TargetFilesSettings,
    tokenizer: Tokenizer,
) -> TargetFiles:
    """Open the three data sets of a prefix. Raises JinguError where they are not of the same documents."""
    context, target, offset = (prefix.with_name(prefix.name + kind) for kind in (CONTEXT, TARGET, OFFSET))
    way = inferred(prefix.parent) if reading == "infer" else reading
    dataset: TokenDataset = open_dataset(context, "train", way)
    known = dataset.manifest.model_copy(update={"end_id": tokenizer.end_id})
    readers = IndexedReader(target, way), IndexedReader(offset, way)
    for reader in readers:
        if len(reader) != len(dataset.readers[0]):
            what = f"it has {len(reader):,} documents, and {context.name} has {len(dataset.readers[0]):,}."
            raise damaged(reader.path, what)
    first = tokenizer.vocabulary if settings.first_sentinel is None else settings.first_sentinel
    made = replace(dataset, manifest=known)
    return TargetFiles(made, sequence_length, seed, target=readers[0], offset=readers[1], first_sentinel=first)


def target_files_source(source: BatchSource, settings: TargetFilesSettings, tokenizer: Tokenizer) -> TargetFilesSource:
    """The source of pairs, with the tokenizer's sentinels. JinguError where it has none."""
    known, found = tokenizer.special_tokens, list[int]()
    while (name := settings.sentinel.replace("N", str(len(found)))) in known:
        found.append(known[name])
    if not found:
        raise _too_few(1, 0)
    return TargetFilesSource(
        source.sources,
        source.mixture,
        source.global_size,
        dropped=source.dropped,
        target_length=settings.target_length,
        sentinel_ids=tuple(found),
        start_id=tokenizer.start_id,
    )


def _too_few(needed: int, there: int) -> JinguError:
    return JinguError(
        f"a sample needs {needed:,} sentinels, and the tokenizer has {there:,} by that name.",
        where="data.objective.sentinel",
        fix="Take shorter sequences, or name the sentinels as the tokenizer does, with N for the number.",
    )
