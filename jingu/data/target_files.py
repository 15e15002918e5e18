"""CPM-2's data sets for encoder-decoders, whose spans were removed when they were built (Zhang et al., 2021).

They are three of Megatron's indexed data sets with one sequence per document, as TsinghuaAI/CPM-2-Pretrain writes and
reads them (src/tools/preprocess_data_enc_dec.py, src/data/enc_dec_dataset.py). V is the size of the tokenizer:

- PREFIX_context: the text, with the n-th removed span of the document replaced by the id V + n
- PREFIX_target: the removed spans, each after its V + n
- PREFIX_target_offset: two numbers a span, its start in the document's targets and its length there, V + n included

A sample is a window of contexts. Its sentinels are renumbered from 0, and an additional sentinel ends the target.

Shape legend: B rows, S tokens of a source, T tokens of a target.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from jingu.config.sections.data import TargetFilesSettings
from jingu.data.array_reader import ReaderType
from jingu.data.batch import IGNORE_INDEX, Batch, EncoderInputs, make_seq2seq_batch
from jingu.data.dataset import open_dataset
from jingu.data.dataset_manifest import damaged_dataset_error
from jingu.data.indexed_dataset import IndexedReader
from jingu.data.mixture import MixtureDataset
from jingu.data.permutation import Int64Array
from jingu.data.row_sources import WindowDataset
from jingu.errors import JinguError, pluralize
from jingu.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class TargetFilesDataset(WindowDataset):
    """Windows of contexts, and the spans that were removed from them."""

    target: IndexedReader
    offset: IndexedReader
    # V: ids from here on stand for removed spans.
    first_sentinel: int

    def removed_spans(self, ids_S: Int64Array, start: int) -> list[Int64Array]:
        """Return the spans that were removed from the window with these ids at offset `start`, without their V + n."""
        spans: list[Int64Array] = []
        column = 0
        # A window can run across several documents, and wraps around at the end of the data.
        while column < len(ids_S):
            position = (start + column) % self.dataset.tokens
            shard, number = self.dataset.find_document(position)
            document_start, length = self.dataset.document_range(shard, number)
            end = min(column + document_start + length - position, len(ids_S))
            ids = ids_S[column:end]
            spans += self._read_spans(number, ids[ids >= self.first_sentinel])
            column = end
        return spans

    def _read_spans(self, document: int, sentinels: Int64Array) -> list[Int64Array]:
        """Return the spans of a document that these ids stand for."""
        lengths = self.offset[document].reshape(-1, 2)[:, 1].astype(np.int64)
        # The stored starts have 16 bits and overflow in a long document; the lengths never do.
        starts = np.cumsum(lengths) - lengths
        targets = self.target[document].astype(np.int64)
        spans = []
        for sentinel in sentinels.tolist():
            number = sentinel - self.first_sentinel
            exists = number < len(lengths) and starts[number] < len(targets)
            if not exists or targets[starts[number]] != sentinel:
                what = f"document {document:,} has no target for its id {sentinel:,}."
                raise damaged_dataset_error(self.target.path, what)
            spans.append(targets[starts[number] + 1 : starts[number] + lengths[number]])
        return spans


@dataclass(frozen=True)
class TargetFilesObjective:
    """The encoder reads windows of contexts, and the decoder predicts what was removed from them."""

    source: MixtureDataset
    # T; longer targets are truncated.
    target_length: int
    sentinel_ids: tuple[int, ...]
    start_id: int

    @property
    def source_length(self) -> int:
        return self.source.sources[0].sequence_length

    def apply(self, batch: Batch, first: int) -> Batch:
        source_ids, _, starts = self.source.locate_samples(np.arange(first, first + len(batch.tokens)))
        source_BS = batch.tokens.numpy().copy()
        labels_BT = np.full((len(source_BS), self.target_length), IGNORE_INDEX)
        for row, (source_id, start) in enumerate(zip(source_ids.tolist(), starts.tolist(), strict=True)):
            dataset = self.source.sources[source_id]
            assert isinstance(dataset, TargetFilesDataset)
            ids_S = batch.tokens[row].numpy()
            # Renumber the sentinels of the window from 0.
            is_sentinel_S = ids_S >= dataset.first_sentinel
            count = int(is_sentinel_S.sum())
            if count >= len(self.sentinel_ids):
                raise _missing_sentinels_error(count + 1, len(self.sentinel_ids))
            source_BS[row, is_sentinel_S] = self.sentinel_ids[:count]
            # A row with a dropped document keeps only ignored labels.
            if not (batch.labels[row] < 0).any():
                target: list[int] = []
                for sentinel, span in zip(self.sentinel_ids, dataset.removed_spans(ids_S, start), strict=False):
                    target += [sentinel, *span.tolist()]
                target = [*target, self.sentinel_ids[count]][: self.target_length]
                labels_BT[row, : len(target)] = target
        source = EncoderInputs(torch.from_numpy(source_BS))
        return make_seq2seq_batch(source, torch.from_numpy(labels_BT), self.start_id)


def open_target_files(
    prefix: Path,
    sequence_length: int,
    seed: int,
    reader: ReaderType,
    settings: TargetFilesSettings,
    tokenizer: Tokenizer,
) -> TargetFilesDataset:
    """Open the three data sets of a prefix. Raises JinguError if they do not have the same number of documents."""
    context = prefix.with_name(f"{prefix.name}_context")
    dataset = open_dataset(context, "train", reader, tokenizer.eos_token_id)
    target = IndexedReader(prefix.with_name(f"{prefix.name}_target"), reader)
    offset = IndexedReader(prefix.with_name(f"{prefix.name}_target_offset"), reader)
    documents = len(dataset.readers[0])
    for companion in (target, offset):
        if len(companion) != documents:
            what = f"it has {pluralize(len(companion), 'document')}, but {context.name} has {documents:,}."
            raise damaged_dataset_error(companion.path, what)
    first_sentinel = settings.first_sentinel
    if first_sentinel is None:
        first_sentinel = tokenizer.vocab_size
    return TargetFilesDataset(
        dataset, sequence_length, seed, target=target, offset=offset, first_sentinel=first_sentinel
    )


def build_target_files_objective(
    settings: TargetFilesSettings, source: MixtureDataset, tokenizer: Tokenizer
) -> TargetFilesObjective:
    """Build the objective with the tokenizer's sentinels. Raises JinguError if it has none by that name."""
    sentinel_ids: list[int] = []
    while True:
        name = settings.sentinel.replace("N", str(len(sentinel_ids)))
        if name not in tokenizer.special_tokens:
            break
        sentinel_ids.append(tokenizer.special_tokens[name])
    if not sentinel_ids:
        raise _missing_sentinels_error(1, 0)
    return TargetFilesObjective(source, settings.target_length, tuple(sentinel_ids), tokenizer.decoder_start_token_id)


def _missing_sentinels_error(count: int, existing: int) -> JinguError:
    return JinguError(
        f"a sample needs {pluralize(count, 'sentinel')}, but the tokenizer has {existing:,} by that name.",
        where="data.objective.sentinel",
        fix="Use shorter sequences, or name the sentinels as the tokenizer does, with N for the number.",
    )
