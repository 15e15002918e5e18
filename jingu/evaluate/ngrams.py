"""Fast vectorized hashes of n-grams of normalized words.

Words are normalized so that copies of a text are recognized: case, accents, punctuation and whitespace do not count,
and each character of a script without spaces (Chinese, Japanese, Thai, ...) is a word. The hash of an n-gram is a
polynomial over its characters modulo 2^64, the difference of two prefix sums (Karp and Rabin, "Efficient Randomized
Pattern-Matching Algorithms", 1987), so that NumPy computes all of a text at once.

Shapes: C characters of a text, K of them in words, W words, G n-grams.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from jingu.data.permutation import Int64Array, mix_bits

Uint64Array = npt.NDArray[np.uint64]

DEFAULT_NGRAM = 13
# A shorter text may occur by chance, so it is not searched for. A text between this length and that of an n-gram is
# searched for as a whole (Brown et al., "Language Models are Few-Shot Learners", 2020, appendix C: 8 to 13 words).
MIN_WORDS = 8
# Separates documents: a word that no text contains, so no n-gram across documents matches. It is ASCII, because ASCII
# text is hashed faster.
BOUNDARY = "\0"
# Characters that are hashed at a time.
CHUNK_CHARACTERS = 1 << 17
# Hashes that enter the filter of a table at a time.
_FILTER_STEP = 1 << 20

_BASE = 0x9E3779B97F4A7C15 | 1
_WORD_START = np.uint64(0xD6E8FEB86659FD93)
_LETTER = 1
_WORD = 2
_LAST_LETTER = 0x32400
# Scripts whose words are not separated by spaces.
_CHARACTER_WORDS = (
    *((0x0E00, 0x0F00), (0x1000, 0x10A0), (0x1780, 0x1800), (0x3040, 0x3100), (0x31F0, 0x3200)),
    *((0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0xFF66, 0xFFA0), (0x20000, _LAST_LETTER)),
)
# Accents, variation selectors and invisible characters, which neither belong to a word nor end it.
_IGNORED = re.compile("[\u0300-\u036f\ufe00-\ufe0f\u00ad\u200b-\u200f\u2060\ufeff]")


@cache
def _character_tables() -> tuple[npt.NDArray[np.uint8], Uint64Array]:
    """Return for each code point its kind (0: separator), and a random number that equivalent characters share."""
    kinds = np.zeros(0x110000, np.uint8)
    folded_codes = np.arange(0x110000, dtype=np.uint64)
    for code in range(_LAST_LETTER):
        character = chr(code)
        if unicodedata.category(character)[0] not in "LMN":
            continue
        kinds[code] = _LETTER
        plain = _IGNORED.sub("", unicodedata.normalize("NFKD", character.casefold()))
        if len(plain) == 1:
            folded_codes[code] = ord(plain)
    for first, end in _CHARACTER_WORDS:
        kinds[first:end][kinds[first:end] > 0] = _WORD
    kinds[ord(BOUNDARY)] = _WORD
    return kinds, mix_bits(folded_codes + np.uint64(1))


@cache
def _ascii_separators() -> bytes:
    return bytes(code for code in range(128) if not _character_tables()[0][code])


@lru_cache(maxsize=4)
def _powers(size: int) -> tuple[Uint64Array, Uint64Array]:
    """Return the powers of the base, and of its inverse modulo 2^64."""
    powers = [np.full(size, base, np.uint64) for base in (_BASE, pow(_BASE, -1, 1 << 64))]
    for array in powers:
        array[0] = 1
        np.cumprod(array, out=array)
    return powers[0], powers[1]


@dataclass(frozen=True)
class HashedWords:
    """The words of a text, ready for the hashes of their n-grams.

    Attributes:
        starts: [W] first character of each word in `text`.
        sums: [W + 1] the sum of all terms before each word, and before the end.
        inverse_powers: [W + 1] the inverse of the power of the base that each word begins with.
    """

    text: str
    starts: Int64Array
    sums: Uint64Array
    inverse_powers: Uint64Array

    def __len__(self) -> int:
        return len(self.starts)

    def ngrams(self, n: int) -> Uint64Array:
        """Return [G] the hashes of all n-grams in their order."""
        return mix_bits((self.sums[n:] - self.sums[:-n]) * self.inverse_powers[:-n])


def hash_words(text: str) -> HashedWords:
    """Divide a text into normalized words, and hash them."""
    return _hash_chunk(text.replace(BOUNDARY, " "))


def _hash_chunk(text: str) -> HashedWords:
    """Hash the words of a chunk of several texts, which BOUNDARY separates."""
    kinds, values = _character_tables()
    if text.isascii():
        raw = text.encode()
        # bytes.translate selects faster than NumPy indexing.
        kinds_C = np.frombuffer(raw.translate(kinds[:256].tobytes()), np.uint8)
        codes_K: npt.NDArray[Any] = np.frombuffer(raw.translate(None, _ascii_separators()), np.uint8)
    else:
        text = _IGNORED.sub("", text)
        codes_C = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        kinds_C = kinds.take(codes_C)
        codes_K = codes_C[kinds_C != 0]
    # A word begins with a letter after something else, and with each character that is a word; it ends likewise.
    is_letter_C = kinds_C == _LETTER
    continues_C = is_letter_C[1:] & is_letter_C[:-1]
    begins_C = kinds_C != 0
    ends_C = begins_C.copy()
    begins_C[1:] &= ~continues_C
    ends_C[:-1] &= ~continues_C
    starts_W = np.flatnonzero(begins_C)
    # The start of each word, counting only characters within words.
    first_W1 = np.zeros(len(starts_W) + 1, np.int64)
    np.cumsum(np.flatnonzero(ends_C) - starts_W + 1, out=first_W1[1:])
    powers, inverse_powers = _powers(1 << max(16, len(codes_K).bit_length()))
    terms_K = values.take(codes_K)
    # Mark word starts: the same letters split into different words must give a different hash.
    terms_K[first_W1[:-1]] += _WORD_START
    terms_K *= powers[: len(terms_K)]
    sums_K1 = np.zeros(len(terms_K) + 1, np.uint64)
    np.cumsum(terms_K, out=sums_K1[1:])
    return HashedWords(text, starts_W, sums_K1.take(first_W1), inverse_powers.take(first_W1))


def text_ngrams(words: HashedWords, n: int) -> tuple[Uint64Array, int]:
    """Return the hashes to search a text by, and how many words each of them has.

    A text of at least n words has the hashes of its n-grams; a shorter one, the hash of the whole text; one of fewer
    than `MIN_WORDS` words, none.
    """
    length = min(n, len(words))
    if length < min(n, MIN_WORDS):
        return np.zeros(0, np.uint64), 0
    return words.ngrams(length), length


class NgramTable:
    """A set of hashes for fast look-ups. 10^7 hashes take 80 MB, and 64 MB for a filter that rejects most others.

    The filter is a Bloom filter whose bits of a hash are in one word of memory (Putze, Sanders and Singler, "Cache-,
    Hash- and Space-Efficient Bloom Filters", 2007).

    Attributes:
        hashes: [N] sorted.
        lengths: the numbers of words that its n-grams have.
        filter: words of 64 bits, of which the first bits of a hash select one.
    """

    def __init__(self, hashes: Uint64Array, lengths: tuple[int, ...], filter_words: Uint64Array | None = None) -> None:
        """
        Args:
            filter_words: the filter of these hashes; None: it is computed.
        """
        self.hashes = hashes
        self.lengths = lengths
        # 1 to 2 words for each hash, at least 2.
        bits = max(len(hashes).bit_length() - 1, 1)
        self._shift = np.uint64(64 - bits)
        self.filter = np.zeros(1 << bits, np.uint64) if filter_words is None else filter_words
        for first in range(0, len(hashes) if filter_words is None else 0, _FILTER_STEP):
            part = hashes[first : first + _FILTER_STEP]
            words = part >> self._shift
            # Hashes are sorted, so those of one word are neighbors.
            starts = np.flatnonzero(np.diff(words, prepend=~words[:1]))
            self.filter[words[starts]] |= np.bitwise_or.reduceat(_filter_bits(part), starts)

    @classmethod
    def build(cls, texts: Iterable[str], n: int) -> NgramTable:
        """Make the table of all n-grams of some texts."""
        parts = [np.zeros(0, np.uint64)]
        lengths = {n}
        for text in texts:
            hashes, length = text_ngrams(hash_words(text), n)
            parts.append(hashes)
            lengths.add(length or n)
        return cls(np.unique(np.concatenate(parts)), tuple(sorted(lengths)))

    def find(self, hashes: Uint64Array) -> tuple[Int64Array, Int64Array]:
        """Return the indices of the hashes that are in the table, and their indices in the table."""
        bits = _filter_bits(hashes)
        candidates = np.flatnonzero(self.filter.take(hashes >> self._shift) & bits == bits)
        numbers = np.minimum(np.searchsorted(self.hashes, hashes[candidates]), len(self.hashes) - 1)
        is_match = self.hashes[numbers] == hashes[candidates] if len(self.hashes) else np.zeros(0, np.bool_)
        return candidates[is_match], numbers[is_match]

    def match_chunk(self, chunk: HashedWords, *, is_last: bool) -> Int64Array:
        """Return the table indices of all n-grams that occur in a chunk of `chunk_words`.

        Of consecutive chunks of texts, all n-grams are matched that are not longer than a chunk.
        """
        matches = []
        for length in self.lengths:
            hashes = chunk.ngrams(length)
            # The last word of a chunk may be incomplete; the next chunk repeats it.
            matches.append(np.unique(self.find(hashes if is_last else hashes[:-1])[1]))
        return np.unique(np.concatenate(matches))


def _filter_bits(hashes: Uint64Array) -> Uint64Array:
    """Return a word with the two bits of each hash, which its last bits select."""
    one = np.uint64(1)
    six_bits = np.uint64(63)
    return (one << (hashes & six_bits)) | (one << (hashes >> np.uint64(6) & six_bits))


def chunk_words(texts: Iterable[str], longest: int) -> Iterator[tuple[HashedWords, bool]]:
    """Yield texts in chunks, and whether each is the last. A chunk begins with the last words of the one before."""
    parts: list[str] = []
    size = 0
    pieces = (
        piece
        for text in (text.replace(BOUNDARY, " ") for text in texts)
        for start in range(0, len(text) + 1, CHUNK_CHARACTERS)
        for piece in (text[start : start + CHUNK_CHARACTERS], BOUNDARY if start + CHUNK_CHARACTERS > len(text) else "")
    )
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size >= CHUNK_CHARACTERS:
            words = _hash_chunk("".join(parts))
            yield words, False
            tail = words.text[words.starts[-longest] :] if len(words) >= longest else words.text
            parts = [tail if len(tail) < CHUNK_CHARACTERS else ""]
            size = len(parts[0])
    yield _hash_chunk("".join(parts)), True
