"""Tokenize word by word, for tokenizers that split text into words by a pattern before merging.

The ids of a word are computed once and cached. The ids equal those of the `tokenizers` library, and are computed
several times faster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, pre_tokenizers

from jingu.text.tokenizer_formats import BYTE_TO_LETTER, DIGIT_SPLIT_PATTERN, GPT2_SPLIT_PATTERN, SPLIT_PATTERN

# The cache is cleared when it exceeds this size: more words would mostly be rare ones.
MAX_CACHED_WORDS = 100_000
# Longer words are not cached, because they rarely occur again.
MAX_WORD_CHARS = 64
# Once the cache has more than WARMUP_WORDS words, a slice with a larger share of new words is left to the library.
WARMUP_WORDS = 20_000
MAX_NEW_WORD_SHARE = 0.1
# Texts are split into words in slices of this many characters.
SLICE_CHARS = 1 << 20
# Maximum number of characters after a word that can change where the word ends.
LOOKAHEAD_CHARS = 16
# The patterns that `translate_pattern` can translate.
SUPPORTED_PATTERNS = (SPLIT_PATTERN, DIGIT_SPLIT_PATTERN, GPT2_SPLIT_PATTERN)
_BEYOND_FIRST_PLANE = re.compile("[\U00010000-\U0010ffff]")


class CachedWordEncoder:
    """Encodes a text by splitting it into words and looking up the ids of each.

    Args:
        pattern: the split pattern, one of `SUPPORTED_PATTERNS`.
        model: the model of the library's tokenizer. It tokenizes a word whose bytes are spelled in GPT-2's alphabet.
        encode: encodes a text with the library, for texts with too many new words.
    """

    def __init__(self, pattern: str, model: Any, encode: Callable[[str], list[int]]) -> None:
        self._split = re.compile(translate_pattern(pattern)).findall
        self._model = model
        self._encode = encode
        self._ids_by_word: dict[str, list[int]] = {}

    def encode(self, text: str, dtype: npt.DTypeLike) -> Iterator[npt.NDArray[Any]] | None:
        """Return the ids of a text, slice by slice; None if the text has characters beyond Unicode's first plane.

        `translate_pattern` supports only the first plane (up to U+FFFF).
        """
        if _BEYOND_FIRST_PLANE.search(text):
            return None
        return self._encode_slices(text, np.dtype(dtype))

    def _encode_slices(self, text: str, dtype: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
        start = 0
        size = SLICE_CHARS
        while start < len(text):
            end = min(start + size, len(text))
            words = self._split(text[start:end])
            # Defer the last words of a slice to the next one: they may be cut. Spaces also depend on what follows them.
            deferred_bytes = 0
            while end < len(text) and words and (deferred_bytes < LOOKAHEAD_CHARS or words[-1][-1].isspace()):
                deferred_bytes += len(words.pop())
            if not words:
                # One word fills the whole slice: try again with a larger one.
                size *= 2
                continue
            part = text[start : end - deferred_bytes]
            start = end - deferred_bytes
            size = SLICE_CHARS
            new_words = set(words) - self._ids_by_word.keys()
            # Let the library encode text where caching is useless. In Chinese, for example, which has no spaces between
            # words, most "words" never occur again.
            if len(self._ids_by_word) > WARMUP_WORDS and len(new_words) > MAX_NEW_WORD_SHARE * len(words):
                yield np.array(self._encode(part), dtype)
                continue
            for word in new_words:
                letters = word.encode().decode("latin-1").translate(BYTE_TO_LETTER)
                self._ids_by_word[word] = [token.id for token in self._model.tokenize(letters)]
            yield np.fromiter(chain.from_iterable(map(self._ids_by_word.__getitem__, words)), dtype)
            for word in new_words:
                if len(word) > MAX_WORD_CHARS:
                    del self._ids_by_word[word]
            if len(self._ids_by_word) > MAX_CACHED_WORDS:
                self._ids_by_word.clear()


def translate_pattern(pattern: str) -> str:
    """Translate one of `SUPPORTED_PATTERNS` to Python's `re`, for characters of Unicode's first plane."""
    letter, number, space = map(_class_members, (r"\p{L}", r"\p{N}", r"\s"))
    for old, new in (
        # Spell out the letters that are equal if case is ignored; for the library, ſ is an s, too.
        ("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?:[sSſ]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"),
        (r"[^\r\n\p{L}\p{N}]", rf"[^\r\n{letter}{number}]"),
        (r"[^\s\p{L}\p{N}]", f"[^{space}{letter}{number}]"),
        (r"\p{L}", f"[{letter}]"),
        (r"\p{N}", f"[{number}]"),
        (r"\S", f"[^{space}]"),
        (r"\s", f"[{space}]"),
    ):
        pattern = pattern.replace(old, new)
    return pattern


@cache
def _class_members(name: str) -> str:
    """Return the members of a character class of the library (in the first plane) as the inside of a `re` set.

    Python's own classes follow another version of Unicode.
    """
    plane = "".join(map(chr, chain(range(0xD800), range(0xE000, 0x10000))))
    runs = pre_tokenizers.Split(Regex(f"{name}+"), "removed", invert=True).pre_tokenize_str(plane)
    codes = np.array([ord(letter) for run, _ in runs for letter in run])
    ranges = np.split(codes, np.flatnonzero(np.diff(codes) != 1) + 1)
    return "".join(f"\\u{codes[0]:04x}-\\u{codes[-1]:04x}" for codes in ranges)
