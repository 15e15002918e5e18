"""Text to ids word by word, where a tokenizer splits text by a pattern before it merges: a word's ids are computed once
and remembered. The ids are the library's, at several times its speed.
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

from jingu.text.formats import GPT2_SPLIT, LETTERS, SPLIT, SPLIT_DIGITS

REMEMBERED = 100_000
"""Words; with more, memory would be for rare ones."""
LONGEST = 64
"""Letters of a word that is remembered; longer ones hardly come again."""
FIRST = 20_000
"""Words that are remembered before text of too many others is left to the library."""
RARE = 0.1
"""Share of a text's words that may be new."""
SLICE = 1 << 20
"""Letters of a text that are split at a time."""
REACH = 16
"""Letters behind its end that can change where a word ends, at most."""
_BEYOND = re.compile("[\U00010000-\U0010ffff]")
PATTERNS = (SPLIT, SPLIT_DIGITS, GPT2_SPLIT)
"""Those that `translated` knows."""


class Words:
    """Splits a text, and looks its words up.

    Args:
        pattern: one of PATTERNS.
        model: the tokenizer's, which merges the bytes of a word, written as letters.
        encode: ids of a text, by the library.
    """

    def __init__(self, pattern: str, model: Any, encode: Callable[[str], list[int]]) -> None:
        self._split = re.compile(translated(pattern)).findall
        self._model, self._encode = model, encode
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str, dtype: npt.DTypeLike) -> Iterator[npt.NDArray[Any]] | None:
        """Ids of the text, slice by slice; None for one with letters beyond the first plane, whose class is unknown."""
        return None if _BEYOND.search(text) else self._slices(text, np.dtype(dtype))

    def _slices(self, text: str, dtype: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
        start, size = 0, SLICE
        while start < len(text):
            end = min(start + size, len(text))
            words, left = self._split(text[start:end]), 0
            # How spaces are split depends on what follows them.
            while end < len(text) and words and (left < REACH or words[-1][-1].isspace()):
                left += len(words.pop())
            if not words:  # one word fills the slice
                size *= 2
                continue
            part, start, size = text[start : end - left], end - left, SLICE
            missing = set(words) - self._known.keys()
            if len(self._known) > FIRST and len(missing) > RARE * len(words):  # Chinese, say, has no spaces
                yield np.array(self._encode(part), dtype)
                continue
            for word in missing:
                letters = word.encode().decode("latin-1").translate(LETTERS)
                self._known[word] = [token.id for token in self._model.tokenize(letters)]
            yield np.fromiter(chain.from_iterable(map(self._known.__getitem__, words)), dtype)
            for word in missing:
                if len(word) > LONGEST:
                    del self._known[word]
            if len(self._known) > REMEMBERED:
                self._known.clear()


def translated(pattern: str) -> str:
    """One of PATTERNS for Python's `re`, with the library's own classes, for text of the first plane."""
    letter, number, space = map(_letters, (r"\p{L}", r"\p{N}", r"\s"))
    for old, new in (
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
def _letters(name: str) -> str:
    """What the library takes a class for, as the inside of a set; Python's own are of another version of Unicode."""
    plane = "".join(map(chr, chain(range(0xD800), range(0xE000, 0x10000))))
    runs = pre_tokenizers.Split(Regex(f"{name}+"), "removed", invert=True).pre_tokenize_str(plane)
    codes = np.array([ord(letter) for run, _ in runs for letter in run])
    ranges = np.split(codes, np.flatnonzero(np.diff(codes) != 1) + 1)
    return "".join(f"\\u{each[0]:04x}-\\u{each[-1]:04x}" for each in ranges)
