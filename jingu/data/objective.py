"""Training objectives: prefix LM, span corruption and other transformations of batches of text.

An objective transforms a batch as a pure function of the samples' indices.

Shape legend: B rows, T tokens of the decoder, S tokens of the encoder, L tokens of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from jingu.config.schema import RunConfig
from jingu.config.sections.data import (
    ContinuationSettings,
    PrefixLmSettings,
    SpanCorruptionSettings,
    SupervisedSettings,
    TargetFilesSettings,
)
from jingu.data.batch import IGNORE_INDEX, Batch, EncoderInputs, make_seq2seq_batch
from jingu.data.mixture import MixtureDataset
from jingu.data.permutation import Int64Array, Permutation, random_uint64
from jingu.data.target_files import build_target_files_objective
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer, sentinel_tokens


class Objective(Protocol):
    """Transforms rows of text to training samples."""

    @property
    def source_length(self) -> int:
        """Number of tokens of a row in the encoder; 0 without an encoder."""

    @property
    def target_length(self) -> int:
        """Number of tokens of a row in the decoder."""

    def apply(self, batch: Batch, first: int) -> Batch:
        """Transform rows that are the samples `first`, `first` + 1 and so on. Ignored labels stay ignored."""


def batch_function(source: MixtureDataset, objective: Objective | None) -> Callable[[int, int, int], Batch]:
    """Return `MixtureDataset.batch` with the objective applied."""
    if objective is None:
        return source.batch
    return lambda step, first, count: objective.apply(
        source.batch(step, first, count), step * source.global_batch_size + first
    )


@dataclass(frozen=True)
class SplitPoint:
    """Where a text is split in two: uniformly random between two shares of its length; neither part is empty."""

    min_prefix: float
    max_prefix: float
    seed: int

    def bounds(self, length: int) -> tuple[int, int]:
        """Return the smallest and the largest prefix, in tokens, of a text of `length` tokens."""
        low, high = (min(max(round(length * share), 1), length - 1) for share in (self.min_prefix, self.max_prefix))
        return low, high

    def draw(self, length: int, sample: int, document: int = 0) -> int:
        """Return the tokens of the prefix of the sample's n-th document."""
        low, high = self.bounds(length)
        return low + int(random_uint64("prefix", 1, self.seed, sample, document)[0]) % (high - low + 1)


@dataclass(frozen=True)
class PrefixLM:
    """Attention is bidirectional within a prefix of each row, or of each document in it; the rest is predicted."""

    split_point: SplitPoint
    target_length: int
    source_length: int = 0

    def apply(self, batch: Batch, first: int) -> Batch:
        labels_BT = batch.labels.clone()
        prefix_lengths_BT = torch.zeros_like(batch.tokens)
        for row in range(len(labels_BT)):
            for number, (start, length) in enumerate(_row_documents(batch, row)):
                if length > 1:
                    end = start + self.split_point.draw(length, first + row, number)
                    # The last token of the prefix predicts the first token after it.
                    labels_BT[row, start : end - 1] = IGNORE_INDEX
                    prefix_lengths_BT[row, start:end] = end
        return replace(batch, labels=labels_BT, prefix_lengths=prefix_lengths_BT)


def _row_documents(batch: Batch, row: int) -> Iterator[tuple[int, int]]:
    """Yield the first column and the length of each document of a row; the whole row without document ids."""
    if batch.documents is None:
        yield 0, batch.tokens.shape[1]
        return
    ids_T = batch.documents[row].numpy()
    starts = np.flatnonzero(np.diff(ids_T, prepend=-2) != 0).tolist()
    for start, end in zip(starts, [*starts[1:], len(ids_T)], strict=True):
        if ids_T[start] >= 0:
            yield start, end - start


@dataclass(frozen=True)
class Continuation:
    """The encoder reads the beginning of each row and the EOS token; the decoder predicts the rest.

    Both sides are padded to their longest possible length.
    """

    split_point: SplitPoint
    length: int
    start_id: int
    eos_token_id: int

    @property
    def source_length(self) -> int:
        return self.split_point.bounds(self.length)[1] + 1

    @property
    def target_length(self) -> int:
        return self.length - self.split_point.bounds(self.length)[0]

    def apply(self, batch: Batch, first: int) -> Batch:
        rows = len(batch.tokens)
        source_BS = torch.full((rows, self.source_length), self.eos_token_id)
        documents_BS = torch.full_like(source_BS, -1)
        labels_BT = torch.full((rows, self.target_length), IGNORE_INDEX)
        for row, text_L in enumerate(batch.tokens):
            prefix = self.split_point.draw(self.length, first + row)
            source_BS[row, :prefix] = text_L[:prefix]
            documents_BS[row, : prefix + 1] = 0
            # A row with a dropped document keeps only ignored labels.
            if not (batch.labels[row] < 0).any():
                labels_BT[row, : self.length - prefix] = text_L[prefix:]
        low, high = self.split_point.bounds(self.length)
        # If all prefixes have one length, nothing is padded and no mask is needed.
        source = EncoderInputs(source_BS, None if low == high else documents_BS)
        return make_seq2seq_batch(source, labels_BT, self.start_id)


@dataclass(frozen=True)
class SpanCorruption:
    """Spans of a text are replaced with sentinels, and the decoder predicts them (T5; Raffel et al., 2020, 3.1.4).

    All texts have the same number of removed tokens and of spans. All sources therefore have the same length, and so
    have all targets, without padding or truncation.
    """

    # Tokens of a text (L).
    length: int
    # Tokens of a text that are in spans.
    num_removed: int
    # One sentinel for each span, in the order of the text.
    sentinel_ids: tuple[int, ...]
    # The first token that the decoder reads.
    start_id: int
    # The last token of sources and targets.
    eos_token_id: int
    seed: int

    @property
    def source_length(self) -> int:
        """S: the remaining text, the sentinels and the EOS token."""
        return self.length - self.num_removed + len(self.sentinel_ids) + 1

    @property
    def target_length(self) -> int:
        """T: the spans, each after its sentinel, and the EOS token."""
        return self.num_removed + len(self.sentinel_ids) + 1

    def apply(self, batch: Batch, first: int) -> Batch:
        rows = [self.corrupt(text_L, first + row) for row, text_L in enumerate(batch.tokens.numpy())]
        source_BS, labels_BT = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        result = make_seq2seq_batch(EncoderInputs(source_BS), labels_BT, self.start_id)
        result.labels[(batch.labels < 0).any(1)] = IGNORE_INDEX
        return result

    def corrupt(self, text_L: Int64Array, sample: int) -> tuple[Int64Array, Int64Array]:
        """Return the source [S] and the target [T] of one text."""
        spans = self._draw_lengths(self.num_removed, sample, 0)
        gaps = self._draw_lengths(self.length - self.num_removed, sample, 1)
        # Gaps and spans alternate: a text begins with tokens that stay and ends with a removed span.
        is_span = np.tile([False, True], len(spans))
        is_removed_L = np.repeat(is_span, np.stack([gaps, spans], axis=1).ravel())
        sentinels = np.array(self.sentinel_ids)
        # In the source a sentinel follows each gap, in the target it precedes each span.
        source = np.insert(text_L[~is_removed_L], np.cumsum(gaps), sentinels)
        target = np.insert(text_L[is_removed_L], np.cumsum(spans) - spans, sentinels)
        return np.append(source, self.eos_token_id), np.append(target, self.eos_token_id)

    def _draw_lengths(self, tokens: int, sample: int, purpose: int) -> Int64Array:
        """Draw as many lengths as there are sentinels, 1 or more each, that sum to `tokens`, uniformly."""
        pieces = len(self.sentinel_ids)
        if pieces == 1:
            return np.array([tokens])
        # Negative numbers in place of an epoch keep these keys apart from those of the order of epochs 0, 1 and so on.
        permutation = Permutation(tokens - 1, self.seed, -1 - 2 * sample - purpose)
        cuts = np.sort(permutation(np.arange(pieces - 1, dtype=np.int64))) + 1
        return np.diff(cuts, prepend=0, append=tokens)


@dataclass(frozen=True)
class PromptsToAnswers:
    """The encoder reads the prompt of each row of instruction data and the EOS token. The decoder predicts the rest,
    from the first trained token on. Packed rows attend only to themselves.
    """

    length: int
    start_id: int
    eos_token_id: int

    @property
    def source_length(self) -> int:
        return self.length

    @property
    def target_length(self) -> int:
        return self.length

    def apply(self, batch: Batch, first: int) -> Batch:
        source_BS = torch.full_like(batch.tokens, self.eos_token_id)
        source_documents_BS = torch.full_like(source_BS, -1)
        tokens_BT = torch.full_like(batch.tokens, self.start_id)
        labels_BT = torch.full_like(batch.tokens, IGNORE_INDEX)
        positions_BT = torch.zeros_like(batch.tokens)
        documents_BT = torch.full_like(batch.tokens, -1)
        weights_BT = None if batch.weights is None else torch.zeros_like(batch.weights)
        for row in range(len(source_BS)):
            read_start = write_start = 0
            for number, (start, length) in enumerate(_row_documents(batch, row)):
                target_indices = (batch.labels[row, start : start + length] >= 0).nonzero()
                if not len(target_indices):
                    continue
                # The last token of the prompt predicts the first one of the answer.
                split = start + int(target_indices[0]) + 1
                prompt = torch.cat([batch.tokens[row, start:split], torch.tensor([self.eos_token_id])])
                source = slice(read_start, min(read_start + len(prompt), self.length))
                source_BS[row, source] = prompt[: source.stop - read_start]
                source_documents_BS[row, source] = number
                # The start token takes the place of the prompt.
                old = slice(split - 1, start + length)
                new = slice(write_start, write_start + start + length - split + 1)
                tokens_BT[row, new.start + 1 : new.stop] = batch.tokens[row, split : start + length]
                labels_BT[row, new] = batch.labels[row, old]
                positions_BT[row, new] = torch.arange(new.stop - write_start)
                documents_BT[row, new] = number
                if weights_BT is not None and batch.weights is not None:
                    weights_BT[row, new] = batch.weights[row, old]
                read_start, write_start = source.stop, new.stop
        encoder_inputs = EncoderInputs(source_BS, source_documents_BS)
        return Batch(tokens_BT, labels_BT, positions_BT, documents_BT, weights=weights_BT, source=encoder_inputs)


def build_objective(
    config: RunConfig, source: MixtureDataset, tokenizer: Tokenizer, *, has_encoder: bool = False
) -> Objective | None:
    """Build the objective of a run; None for plain next-token prediction.

    Args:
        has_encoder: whether the model has an encoder, which then reads the prompts of instruction data.

    Raises:
        JinguError: the objective does not fit the sequence length or the tokenizer.
    """
    settings = config.data.objective
    length = config.batch.sequence_length
    if isinstance(settings, TargetFilesSettings):
        return build_target_files_objective(settings, source, tokenizer)
    if isinstance(settings, SupervisedSettings) and has_encoder:
        return PromptsToAnswers(length, tokenizer.decoder_start_token_id, tokenizer.eos_token_id)
    if not isinstance(settings, PrefixLmSettings | ContinuationSettings | SpanCorruptionSettings):
        return None
    if length < 2:
        what = "a text of one token cannot be split."
        raise JinguError(what, where="batch.sequence_length", fix="Set it to 2 or more; 512 is usual.")
    if isinstance(settings, SpanCorruptionSettings):
        return build_span_corruption(settings, length, tokenizer, config.seed)
    if settings.min_prefix > settings.max_prefix:
        what = f"min_prefix ({settings.min_prefix}) is larger than max_prefix ({settings.max_prefix})."
        raise JinguError(what, where="data.objective", fix="Swap the two.")
    split_point = SplitPoint(settings.min_prefix, settings.max_prefix, config.seed)
    if isinstance(settings, PrefixLmSettings):
        return PrefixLM(split_point, length)
    return Continuation(split_point, length, tokenizer.decoder_start_token_id, tokenizer.eos_token_id)


def build_span_corruption(
    settings: SpanCorruptionSettings, length: int, tokenizer: Tokenizer, seed: int
) -> SpanCorruption:
    """Build span corruption of texts of `length` tokens.

    Raises:
        JinguError: the texts need more sentinels than the settings allow or the tokenizer has.
    """
    num_removed = min(max(round(length * settings.noise_density), 1), length - 1)
    num_spans = min(max(round(num_removed / settings.mean_span_length), 1), num_removed, length - num_removed)
    if num_spans > settings.num_sentinels:
        what = (
            f"a text of {length:,} tokens has {num_spans:,} spans, each of which needs a sentinel, and there are "
            f"{settings.num_sentinels:,}."
        )
        fix = f"Set it to {num_spans:,}, or use shorter sequences, a lower noise_density or a larger mean_span_length."
        raise JinguError(what, where="data.objective.num_sentinels", fix=fix)
    special_tokens = tokenizer.special_tokens
    names = sentinel_tokens(num_spans)
    missing = [name for name in names if name not in special_tokens]
    if missing:
        raise JinguError(
            f"the tokenizer lacks {len(missing):,} of the {num_spans:,} sentinels that span corruption needs, such as "
            f"{missing[0]}.",
            where="tokenizer.path",
            fix="Train one with this file (`jingu tokenizer train` adds data.objective.num_sentinels of them), or use "
            "a T5 tokenizer.",
        )
    sentinel_ids = tuple(special_tokens[name] for name in names)
    return SpanCorruption(
        length, num_removed, sentinel_ids, tokenizer.decoder_start_token_id, tokenizer.eos_token_id, seed
    )
