"""What a run is trained to predict of its rows: a batch of text made into another, a pure function of the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from jingu.config.schema import RunConfig
from jingu.config.sections.data import ContinuationSettings, PrefixSettings, SpanCorruptionSettings, TargetFilesSettings
from jingu.data.batch import IGNORED, Batch, Source, written
from jingu.data.batches import BatchSource
from jingu.data.order import Numbers, Permutation, drawn
from jingu.data.target_files import plan_restoring
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer, sentinels


class Objective(Protocol):
    """How rows of text are trained on."""

    @property
    def source_length(self) -> int:
        """Tokens that an encoder reads of a row; 0: there is none."""

    @property
    def target_length(self) -> int:
        """Tokens of a row for the decoder."""

    def of(self, batch: Batch, first: int) -> Batch:
        """What becomes of rows that are the samples `first`, `first` + 1 and so on. Where they have no label, none is
        trained."""


def batches(source: BatchSource, objective: Objective | None) -> Callable[[int, int, int], Batch]:
    """`BatchSource.batch`, and what becomes of it."""
    if objective is None:
        return source.batch
    return lambda step, first, count: objective.of(source.batch(step, first, count), step * source.global_size + first)


@dataclass(frozen=True)
class Cut:
    """Where a text is cut in two: evenly distributed between two shares of it, both parts not empty."""

    shortest: float
    longest: float
    seed: int

    def bounds(self, tokens: int) -> tuple[int, int]:
        """The shortest and the longest beginning of a text of so many tokens."""
        low, high = (min(max(round(tokens * share), 1), tokens - 1) for share in (self.shortest, self.longest))
        return low, high

    def at(self, tokens: int, sample: int, part: int = 0) -> int:
        """Tokens of the beginning of a sample's n-th part."""
        low, high = self.bounds(tokens)
        return low + int(drawn("prefix", 1, self.seed, sample, part)[0]) % (high - low + 1)


@dataclass(frozen=True)
class Prefix:
    """The beginning of each row, or of each document in it, is seen by all its own tokens; the rest is predicted."""

    cut: Cut
    target_length: int
    source_length: int = 0

    def of(self, batch: Batch, first: int) -> Batch:
        labels, reach = batch.labels.clone(), torch.zeros_like(batch.tokens)
        for row in range(len(labels)):
            for part, (start, tokens) in enumerate(_documents(batch, row)):
                if tokens > 1:
                    end = start + self.cut.at(tokens, first + row, part)
                    labels[row, start : end - 1] = IGNORED
                    reach[row, start:end] = end
        return replace(batch, labels=labels, reach=reach)


def _documents(batch: Batch, row: int) -> Iterator[tuple[int, int]]:
    """First token, and tokens, of each document of a row; all of it where they are not kept apart."""
    if batch.documents is None:
        yield 0, batch.tokens.shape[1]
        return
    numbers = batch.documents[row].numpy()
    starts = np.flatnonzero(np.diff(numbers, prepend=-2) != 0).tolist()
    for start, end in zip(starts, [*starts[1:], len(numbers)], strict=True):
        if numbers[start] >= 0:
            yield start, end - start


@dataclass(frozen=True)
class Continuation:
    """An encoder reads the beginning of each row, and the end token; the decoder writes the rest. Both are filled up to
    their longest."""

    cut: Cut
    length: int
    start_id: int
    end_id: int

    @property
    def source_length(self) -> int:
        return self.cut.bounds(self.length)[1] + 1

    @property
    def target_length(self) -> int:
        return self.length - self.cut.bounds(self.length)[0]

    def of(self, batch: Batch, first: int) -> Batch:
        rows = len(batch.tokens)
        source_BS = torch.full((rows, self.source_length), self.end_id)
        documents_BS = torch.full_like(source_BS, -1)
        labels_BT = torch.full((rows, self.target_length), IGNORED)
        for row, text_L in enumerate(batch.tokens):
            cut = self.cut.at(self.length, first + row)
            source_BS[row, :cut] = text_L[:cut]
            documents_BS[row, : cut + 1] = 0
            if not (batch.labels[row] < 0).any():
                labels_BT[row, : self.length - cut] = text_L[cut:]
        low, high = self.cut.bounds(self.length)
        return written(Source(source_BS, None if low == high else documents_BS), labels_BT, self.start_id)


@dataclass(frozen=True)
class SpanCorruption:
    """An encoder reads a text in which spans are replaced, each by a sentinel of its own; the decoder says what they
    were (Raffel et al., 2020, section 3.1.4).

    As many tokens and spans of every text are removed, so that sources and targets all have the same length and nothing
    is padded or lost.
    """

    length: int
    """Tokens of a text (L)."""
    removed: int
    """Of these, how many are in spans."""
    sentinel_ids: tuple[int, ...]
    """One a span, in the order of the text."""
    start_id: int
    """The decoder's first token."""
    end_id: int
    """Ends sources and targets."""
    seed: int

    @property
    def source_length(self) -> int:
        """What is left of the text, the sentinels, and the end (S)."""
        return self.length - self.removed + len(self.sentinel_ids) + 1

    @property
    def target_length(self) -> int:
        """What was removed, each span after its sentinel, and the end (T)."""
        return self.removed + len(self.sentinel_ids) + 1

    def of(self, batch: Batch, first: int) -> Batch:
        rows = [self.corrupted(text, first + number) for number, text in enumerate(batch.tokens.numpy())]
        sources_BS, labels_BT = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        made = written(Source(sources_BS), labels_BT, self.start_id)
        made.labels[(batch.labels < 0).any(1)] = IGNORED  # a part of the text is left out
        return made

    def corrupted(self, text_L: Numbers, sample: int) -> tuple[Numbers, Numbers]:
        """Source [S] and target [T] of one text."""
        spans, gaps = self._lengths(self.removed, sample, 0), self._lengths(self.length - self.removed, sample, 1)
        # A gap, a span, a gap, a span: the text begins with what stays and ends with what goes.
        inside_L = np.repeat(np.tile([False, True], len(spans)), np.stack([gaps, spans], axis=1).ravel())
        marks = np.array(self.sentinel_ids)
        source = np.insert(text_L[~inside_L], np.cumsum(gaps), marks)
        target = np.insert(text_L[inside_L], np.cumsum(spans) - spans, marks)
        return np.append(source, self.end_id), np.append(target, self.end_id)

    def _lengths(self, tokens: int, sample: int, which: int) -> Numbers:
        """Lengths of as many pieces as there are sentinels, 1 or more each, that make so many tokens: every such cut
        is equally likely."""
        pieces = len(self.sentinel_ids)
        if pieces == 1:
            return np.array([tokens])
        # Numbers below zero, so that no epoch's order is cut with its own key.
        cut = Permutation(tokens - 1, self.seed, -1 - 2 * sample - which)
        places = np.sort(cut(np.arange(pieces - 1, dtype=np.int64))) + 1
        return np.diff(places, prepend=0, append=tokens)


def plan_objective(config: RunConfig, source: BatchSource, tokenizer: Tokenizer) -> Objective | None:
    """How the rows of the run's source are trained on; None: as they come.

    Raises:
        JinguError: the objective does not fit the rows, the packing or the tokenizer.
    """
    settings, length = config.data.objective, config.batch.sequence_length
    if isinstance(settings, TargetFilesSettings):
        return plan_restoring(settings, source, tokenizer)
    if not isinstance(settings, PrefixSettings | ContinuationSettings | SpanCorruptionSettings):
        return None
    if length < 2:
        what = "a text of one token cannot be divided."
        raise JinguError(what, where="batch.sequence_length", fix="Take 2 or more; 512 is usual.")
    if isinstance(settings, SpanCorruptionSettings):
        return plan_corruption(settings, length, tokenizer, config.seed)
    if settings.shortest > settings.longest:
        what = f"the shortest beginning ({settings.shortest}) is longer than the longest ({settings.longest})."
        raise JinguError(what, where="data.objective", fix="Exchange the two.")
    cut = Cut(settings.shortest, settings.longest, config.seed)
    if isinstance(settings, PrefixSettings):
        return Prefix(cut, length)
    return Continuation(cut, length, tokenizer.start_id, tokenizer.end_id)


def plan_corruption(settings: SpanCorruptionSettings, length: int, tokenizer: Tokenizer, seed: int) -> SpanCorruption:
    """How texts of `length` tokens are corrupted.

    Raises:
        JinguError: the texts need more sentinels than there are.
    """
    removed = min(max(round(length * settings.rate), 1), length - 1)
    spans = min(max(round(removed / settings.mean_length), 1), removed, length - removed)
    if spans > settings.sentinels:
        raise JinguError(
            f"a text of {length:,} tokens has {spans:,} spans, which need a sentinel each, and there are "
            f"{settings.sentinels:,}.",
            where="data.objective.sentinels",
            fix=f"Take {spans:,}, shorter sequences, a lower rate or a larger mean_length.",
        )
    known, names = tokenizer.special_tokens, sentinels(spans)
    if missing := [name for name in names if name not in known]:
        raise JinguError(
            f"the tokenizer lacks {len(missing):,} of the {spans:,} sentinels that span corruption needs, such as "
            f"{missing[0]}.",
            where="tokenizer.path",
            fix="Train one with this file (`jingu tokenizer train` adds data.objective.sentinels of them), or take "
            "one of a T5.",
        )
    return SpanCorruption(
        length, removed, tuple(known[name] for name in names), tokenizer.start_id, tokenizer.end_id, seed
    )
