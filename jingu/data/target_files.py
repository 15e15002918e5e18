"""CPM-2's data sets for encoder-decoders, whose spans were removed when they were built (Zhang et al., 2021).

Three of Megatron's indexed data sets with a sequence a document, as TsinghuaAI/CPM-2-Pretrain writes and reads them
(src/tools/preprocess_data_enc_dec.py, src/data/enc_dec_dataset.py): PREFIX_context, the text with the n-th removed span
of the document replaced by the id V + n; PREFIX_target, the removed spans, each after its V + n; PREFIX_target_offset,
two numbers a span, its first place in the document's targets and its length there, V + n included. V is the size of the
tokenizer. A sample is a window of contexts; its sentinels are numbered anew, and one more ends the target.

Shapes: B rows, S tokens of a source, T tokens of a target.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from jingu.config.sections.data import TargetFilesSettings
from jingu.data.batch import IGNORED, Batch, Source, written
from jingu.data.batches import BatchSource, Windows
from jingu.data.dataset import open_dataset
from jingu.data.indexed import IndexedReader
from jingu.data.manifest import damaged
from jingu.data.order import Numbers
from jingu.data.reading import Reading
from jingu.errors import JinguError, counted
from jingu.text.tokenizer import Tokenizer

CONTEXT, TARGET, OFFSET = "_context", "_target", "_target_offset"


@dataclass(frozen=True, kw_only=True)
class TargetFiles(Windows):
    """Windows of contexts, and the spans that were removed from them."""

    target: IndexedReader
    offset: IndexedReader
    first_sentinel: int
    """V."""

    def spans(self, ids_S: Numbers, start: int) -> list[Numbers]:
        """What was removed from the window of these ids that begins at a place, without the V + n."""
        found: list[Numbers] = []
        at = 0
        while at < len(ids_S):
            place = (start + at) % self.dataset.tokens
            shard, number = self.dataset.find(place)
            first, length = self.dataset.document(shard, number)
            end = min(at + first + length - place, len(ids_S))
            marks = ids_S[at:end]
            found += self._spans(number, marks[marks >= self.first_sentinel])
            at = end
        return found

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
class Restoring:
    """An encoder reads windows of contexts, and the decoder writes what was removed from them."""

    source: BatchSource
    target_length: int
    """T; what is longer is cut."""
    sentinel_ids: tuple[int, ...]
    start_id: int

    @property
    def source_length(self) -> int:
        return self.source.sources[0].sequence_length

    def of(self, batch: Batch, first: int) -> Batch:
        which, _, starts = self.source.locate_samples(np.arange(first, first + len(batch.tokens)))
        sources_BS = batch.tokens.numpy().copy()
        labels_BT = np.full((len(sources_BS), self.target_length), IGNORED)
        for row, (number, start) in enumerate(zip(which.tolist(), starts.tolist(), strict=True)):
            windows, ids_S = self.source.sources[number], batch.tokens[row].numpy()
            assert isinstance(windows, TargetFiles)
            removed_S = ids_S >= windows.first_sentinel
            count = int(removed_S.sum())
            if count >= len(self.sentinel_ids):
                raise _too_few(count + 1, len(self.sentinel_ids))
            marks = np.array(self.sentinel_ids[: count + 1])
            sources_BS[row, removed_S] = marks[:-1]
            if not (batch.labels[row] < 0).any():  # else a part is left out
                spans = zip(marks, windows.spans(ids_S, start), strict=False)
                target = np.concatenate([*(part for mark, span in spans for part in ([mark], span)), marks[-1:]])
                labels_BT[row, : len(target)] = target[: self.target_length]
        return written(Source(torch.from_numpy(sources_BS)), torch.from_numpy(labels_BT), self.start_id)


def open_target_files(
    prefix: Path,
    sequence_length: int,
    seed: int,
    reading: Reading,
    settings: TargetFilesSettings,
    tokenizer: Tokenizer,
) -> TargetFiles:
    """Open the three data sets of a prefix. Raises JinguError where they are not of the same documents."""
    context, target, offset = (prefix.with_name(prefix.name + kind) for kind in (CONTEXT, TARGET, OFFSET))
    dataset = open_dataset(context, "train", reading, tokenizer.end_id)
    readers = IndexedReader(target, reading), IndexedReader(offset, reading)
    for reader in readers:
        if len(reader) != len(dataset.readers[0]):
            what = f"it has {counted(len(reader), 'document')}, and {context.name} has {len(dataset.readers[0]):,}."
            raise damaged(reader.path, what)
    first = tokenizer.vocabulary if settings.first_sentinel is None else settings.first_sentinel
    return TargetFiles(dataset, sequence_length, seed, target=readers[0], offset=readers[1], first_sentinel=first)


def plan_restoring(settings: TargetFilesSettings, source: BatchSource, tokenizer: Tokenizer) -> Restoring:
    """With the tokenizer's sentinels. JinguError where it has none."""
    known, found = tokenizer.special_tokens, list[int]()
    while (name := settings.sentinel.replace("N", str(len(found)))) in known:
        found.append(known[name])
    if not found:
        raise _too_few(1, 0)
    return Restoring(source, settings.target_length, tuple(found), tokenizer.start_id)


def _too_few(needed: int, there: int) -> JinguError:
    return JinguError(
        f"a sample needs {needed:,} sentinels, and the tokenizer has {there:,} by that name.",
        where="data.objective.sentinel",
        fix="Take shorter sequences, or name the sentinels as the tokenizer does, with N for the number.",
    )
