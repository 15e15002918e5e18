"""Tokenize word by word, for tokenizers that split text by a pattern before they merge.

The ids of a word are computed once and cached. They are those of the `tokenizers` library, at several times its speed.
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

# More words would take memory for rare ones.
MAX_CACHED_WORDS = 100_000
# Longer words rarely occur again, and are not cached.
MAX_WORD_CHARS = 64
# Once so many words are cached, a text with too many new ones is left to the library.
WARMUP_WORDS = 20_000
MAX_NEW_WORD_SHARE = 0.1
# Characters of a text that are split at a time.
SLICE_CHARS = 1 << 20
# So many characters after a word, at most, can change where it ends.
LOOKAHEAD_CHARS = 16
# The patterns that `translate_pattern` knows.
SUPPORTED_PATTERNS = (SPLIT_PATTERN, DIGIT_SPLIT_PATTERN, GPT2_SPLIT_PATTERN)
_BEYOND_FIRST_PLANE = re.compile("[\U00010000-\U0010ffff]")


class CachedWordEncoder:
    """Splits a text into words, and looks up their ids.

    Args:
        pattern: one of SUPPORTED_PATTERNS.
        model: the tokenizer's model, which merges the bytes of a word, written as letters.
        encode: the library's function from a text to its ids.
    """

    def __init__(self, pattern: str, model: Any, encode: Callable[[str], list[int]]) -> None:
        self._split = re.compile(translate_pattern(pattern)).findall
        self._model = model
        self._encode = encode
        self._ids_by_word: dict[str, list[int]] = {}

    def encode(self, text: str, dtype: npt.DTypeLike) -> Iterator[npt.NDArray[Any]] | None:
        """Return the ids of a text, slice by slice; None for a text with characters beyond the first plane.

        The character classes of the pattern are known for the first plane of Unicode only.
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
            # The last words of a slice may be cut: leave them to the next one. Spaces depend on what follows them.
            deferred = 0
            while end < len(text) and words and (deferred < LOOKAHEAD_CHARS or words[-1][-1].isspace()):
                deferred += len(words.pop())
            if not words:
                # One word fills the slice.
                size *= 2
                continue
            part = text[start : end - deferred]
            start = end - deferred
            size = SLICE_CHARS
            new_words = set(words) - self._ids_by_word.keys()
            # Chinese, for example, has no spaces between words: most "words" would never occur again.
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
    """Translate one of SUPPORTED_PATTERNS for Python's `re`, with the library's classes of the first plane."""
    letter, number, space = map(_class_members, (r"\p{L}", r"\p{N}", r"\s"))
    for old, new in (
        # Python ignores case differently: ſ is an s.
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
    """Return a character class of the library as the inside of a set; Python follows another version of Unicode."""
    plane = "".join(map(chr, chain(range(0xD800), range(0xE000, 0x10000))))
    runs = pre_tokenizers.Split(Regex(f"{name}+"), "removed", invert=True).pre_tokenize_str(plane)
    codes = np.array([ord(letter) for run, _ in runs for letter in run])
    ranges = np.split(codes, np.flatnonzero(np.diff(codes) != 1) + 1)
    return "".join(f"\\u{codes[0]:04x}-\\u{codes[-1]:04x}" for codes in ranges)
