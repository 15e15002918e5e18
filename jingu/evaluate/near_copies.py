"""Near copies: texts of which at least half occurs together elsewhere, such as a question with a few other words.

Each text of the rows to search for is a set of 3-grams of normalized words (`jingu.evaluate.ngrams`). A text has a near
copy where a passage of at most twice its length has half of its 3-grams. 3-grams that are in many of the rows, as those
of a template are, do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jingu.data.permutation import Int64Array
from jingu.evaluate.ngrams import MIN_WORDS, HashedWords, NgramTable, Uint64Array, chunk_words, hash_words

_NGRAM = 3
_MIN_SHARE = 0.5
_MIN_COUNT = 3
# A 3-gram that is in more texts than this, and in more than one of a thousand rows, belongs to a template.
_MAX_TEXTS = 3
# Words that two chunks have in common, at most: longer texts are found by their half in one of the chunks.
_MAX_OVERLAP = 1024


@dataclass(frozen=True)
class NearCopyTable:
    """The 3-grams of texts.

    Attributes:
        hashes: [H] sorted 3-grams.
        starts: [H + 1] first owner of each 3-gram.
        owners: texts that have each 3-gram.
        sizes: number of 3-grams of each text.
        lengths: number of words of each text.
        rows: row of each text.
    """

    hashes: Uint64Array
    starts: Int64Array
    owners: Int64Array
    sizes: Int64Array
    lengths: Int64Array
    rows: Int64Array

    @classmethod
    def build(cls, rows: Sequence[Sequence[str]]) -> NearCopyTable:
        """Make the table of the texts of rows. Texts of fewer than `MIN_WORDS` words are left out."""
        words = [(number, hash_words(text)) for number, texts in enumerate(rows) for text in texts]
        words = [(number, each) for number, each in words if len(each) >= MIN_WORDS]
        grams = [np.unique(each.ngrams(_NGRAM)) for _, each in words]
        texts = np.repeat(np.arange(len(grams)), np.array([len(each) for each in grams], np.int64))
        values = np.concatenate([np.zeros(0, np.uint64), *grams])
        hashes, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        is_rare = counts <= max(_MAX_TEXTS, len(rows) // 1000)
        order = np.argsort(inverse, kind="stable")
        order = order[is_rare[inverse[order]]]
        owners = texts[order]
        starts = np.concatenate([[0], np.cumsum(counts[is_rare])])
        return cls(
            hashes[is_rare],
            starts,
            owners,
            np.bincount(owners, minlength=len(grams)),
            np.array([len(each) for _, each in words], np.int64),
            np.array([number for number, _ in words], np.int64),
        )

    @property
    def searched_rows(self) -> set[int]:
        """Rows with a text that has enough 3-grams to be found."""
        return set(self.rows[self.sizes >= _MIN_COUNT].tolist())

    @cached_property
    def _table(self) -> NgramTable:
        return NgramTable(self.hashes, (_NGRAM,))

    def find(self, texts: Iterable[str]) -> set[int]:
        """Return the rows that have a near copy in some texts."""
        matches: set[int] = set()
        for chunk, _ in chunk_words(texts, self.longest):
            matches |= self.match_chunk(chunk)
        return matches

    @property
    def longest(self) -> int:
        """How many words the chunks of a text should have in common: the passage of the longest text."""
        return min(2 * int(self.lengths.max(initial=_NGRAM)), _MAX_OVERLAP)

    def match_chunk(self, words: HashedWords) -> set[int]:
        """Return the rows that have a near copy in a chunk of `chunk_words`."""
        if len(words) < _NGRAM or not len(self.hashes):
            return set()
        # 1. List the texts that have the 3-gram at each position.
        positions, numbers = self._table.find(words.ngrams(_NGRAM))
        counts = self.starts[numbers + 1] - self.starts[numbers]
        if not counts.sum():
            return set()
        ends = np.cumsum(counts)
        offsets = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)
        owners = self.owners[np.repeat(self.starts[numbers], counts) + offsets]
        positions = np.repeat(positions, counts)
        numbers = np.repeat(numbers, counts)
        # 2. Leave out the texts that have too few 3-grams in the whole chunk.
        enough = np.maximum(_MIN_SHARE * self.sizes, _MIN_COUNT)
        is_candidate = (np.bincount(owners, minlength=len(self.sizes)) >= enough)[owners]
        if not is_candidate.any():
            return set()
        owners, positions, numbers = owners[is_candidate], positions[is_candidate], numbers[is_candidate]
        # 3. Count the different 3-grams of a text in each passage; passages overlap by half.
        similar = np.zeros(0, np.int64)
        lengths = self.lengths[owners]
        for shift in (0, 1):
            passages = owners * len(words) + (positions + shift * lengths) // (2 * lengths)
            distinct = np.unique(passages * len(self.hashes) + numbers) // len(self.hashes)
            keys, frequencies = np.unique(distinct, return_counts=True)
            texts = keys // len(words)
            similar = np.union1d(similar, texts[frequencies >= enough[texts]])
        return set(self.rows[similar].tolist())
