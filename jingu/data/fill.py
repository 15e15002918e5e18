"""Fill-in-the-middle (Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", 2022): a decoder
learns to write what stands between two texts, from ordinary text in another order.

Of the documents in a sequence a share is cut at two places and written as prefix, suffix, middle, each after a token
that names it; the sequence then ends that much earlier. Which and where is a pure function of the seed and the sample.

Shapes: B rows, S tokens and the one after them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jingu.config.sections.data import FillInTheMiddleSettings
from jingu.data.batch import IGNORED
from jingu.data.order import Numbers, drawn
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class FillInTheMiddle:
    """How rows are written anew."""

    rate: float
    """Share of the documents."""
    prefix_id: int
    suffix_id: int
    middle_id: int
    end_id: int
    seed: int
    beginning: tuple[int, ...] = ()
    """What a document may begin with, which stays before all parts."""

    def batch(self, tokens: Numbers, labels: Numbers, samples: Numbers) -> tuple[Numbers, Numbers]:
        """Tokens and labels of rows that are these samples of the run."""
        rows_BS = self.rows(np.concatenate([tokens, labels[:, -1:].clip(min=0)], axis=1), samples)
        tokens, labels = rows_BS[:, :-1], rows_BS[:, 1:]
        # An end after an end is what is left of a document that was dropped.
        return tokens, np.where((tokens == self.end_id) & (labels == self.end_id), IGNORED, labels)

    def rows(self, rows_BS: Numbers, samples: Numbers) -> Numbers:
        """The rows, which are these samples of the run."""
        return np.stack([self._row(row, sample) for row, sample in zip(rows_BS, samples.tolist(), strict=True)])

    def _row(self, row_S: Numbers, sample: int) -> Numbers:
        documents = np.split(row_S, np.flatnonzero(row_S == self.end_id) + 1)
        parts = [self._document(ids, sample, number) for number, ids in enumerate(documents) if len(ids)]
        return np.concatenate(parts)[: len(row_S)]

    def _document(self, ids: Numbers, sample: int, number: int) -> Numbers:
        text, end = (ids[:-1], ids[-1:]) if ids[-1] == self.end_id else (ids, ids[:0])
        begins = len(self.beginning) if tuple(text[: len(self.beginning)].tolist()) == self.beginning else 0
        before, text = text[:begins], text[begins:]
        chance, first, second = drawn("fill", 3, self.seed, sample, number).tolist()
        if not len(text) or chance >= self.rate * 2**64:
            return ids
        low, high = sorted((first % (len(text) + 1), second % (len(text) + 1)))
        marks = [np.array([mark]) for mark in (self.prefix_id, self.suffix_id, self.middle_id)]
        return np.concatenate([before, marks[0], text[:low], marks[1], text[high:], marks[2], text[low:high], end])


def plan_fill(settings: FillInTheMiddleSettings, tokenizer: Tokenizer, seed: int) -> FillInTheMiddle:
    """Raises JinguError where the tokenizer lacks the tokens that name the parts."""
    known = tokenizer.special_tokens
    names = settings.prefix_token, settings.suffix_token, settings.middle_token
    if missing := [name for name in names if name not in known]:
        raise JinguError(
            f"the tokenizer has no special token {missing[0]}, which fill-in-the-middle needs.",
            where="data.objective",
            fix="Train one with it (tokenizer.special_tokens), or name those that it has.",
        )
    prefix_id, suffix_id, middle_id = (known[name] for name in names)
    return FillInTheMiddle(
        settings.rate, prefix_id, suffix_id, middle_id, tokenizer.end_id, seed, tuple(tokenizer.beginning)
    )
