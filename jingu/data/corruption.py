"""Span corruption (Raffel et al., 2020, section 3.1.4): an encoder reads a text in which spans are replaced, each by a
sentinel of its own, and the decoder says what they were.

Of a text of L tokens a share is removed, in spans of a mean length; as many tokens and spans of every text, so that
sources and targets all have the same length and nothing is padded or lost. Where the spans lie is a pure function of
the seed and the sample's number.

Shapes: B rows, L tokens of text, S tokens of a source, T tokens of a target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from jingu.config.sections.data import SpanCorruptionSettings
from jingu.data.batch import IGNORED, Batch, Source, written
from jingu.data.order import Permutation
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer, sentinels

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SpanCorruption:
    """How texts of one length become sources and targets.

    Attributes:
        length: tokens of a text (L).
        removed: of these, how many are in spans.
        sentinel_ids: one a span, in the order of the text.
        start_id: the decoder's first token.
        end_id: ends sources and targets.
    """

    length: int
    removed: int
    sentinel_ids: tuple[int, ...]
    start_id: int
    end_id: int
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

    def corrupted(self, text_L: Ids, sample: int) -> tuple[Ids, Ids]:
        """Source [S] and target [T] of one text."""
        spans, gaps = self._lengths(self.removed, sample, 0), self._lengths(self.length - self.removed, sample, 1)
        # A gap, a span, a gap, a span: the text begins with what stays and ends with what goes.
        starts = np.cumsum(gaps + spans) - spans
        inside_L = np.zeros(self.length, dtype=bool)
        for start, size in zip(starts.tolist(), spans.tolist(), strict=True):
            inside_L[start : start + size] = True
        marks = np.array(self.sentinel_ids)
        source = np.insert(text_L[~inside_L], np.cumsum(gaps), marks)
        target = np.insert(text_L[inside_L], np.cumsum(spans) - spans, marks)
        return np.append(source, self.end_id), np.append(target, self.end_id)

    def _lengths(self, tokens: int, sample: int, which: int) -> Ids:
        """Lengths of as many pieces as there are sentinels, 1 or more each, that make so many tokens: every such cut
        is equally likely."""
        pieces = len(self.sentinel_ids)
        if pieces == 1:
            return np.array([tokens])
        # Numbers below zero, so that no epoch's order is cut with its own key.
        cut = Permutation(tokens - 1, self.seed, -1 - 2 * sample - which)
        places = np.sort(cut(np.arange(pieces - 1, dtype=np.int64))) + 1
        return np.diff(places, prepend=0, append=tokens)


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
