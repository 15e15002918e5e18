"""Extending a tokenizer: entries learned from new text, after those that it has, whose ids stay what they are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer

COVERAGE = 0.9995
"""Of the characters that the tokenizer has no entry for, the most frequent that make up this share get one."""
_FIRST = 0x10000
_REPEATED = 1000


def extend_tokenizer(base: Tokenizer, texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """A tokenizer of at most `vocabulary` entries, of which the first are those of `base`.

    Merging goes on where the base left off: the text is split as it splits it, and the most frequent pairs of its
    pieces are merged next (within its words; of sentencepiece models, within words of letters). All its own merges come
    before new ones. Characters that it could only spell as bytes, or not at all, get an entry first.

    Raises:
        JinguError: the base is no BPE, or has as many entries already.
    """
    if base.algorithm != "BPE":
        raise JinguError(
            f"only BPE can be extended, and this tokenizer is {base.algorithm}.",
            where="tokenizer.base",
            fix="Train a new one; `jingu model grow --tokenizer` takes what rows can be taken from the old one's.",
        )
    room = vocabulary - base.vocabulary
    if room < 1:
        raise JinguError(
            f"the tokenizer has {base.vocabulary:,} entries already.",
            where="tokenizer.vocabulary",
            fix=f"Give more than {base.vocabulary:,}.",
        )
    words: Counter[tuple[str, ...]] = Counter()
    for text in texts:
        words.update(base.words(text))
    pieces = base.pieces()
    characters = _new_characters(words, pieces)[:room]
    found = {symbol for word in words for symbol in word} & (pieces.keys() | set(characters))
    symbols = {symbol: chr(_FIRST + place) for place, symbol in enumerate(sorted(found))}
    merges = _learned(words, symbols, room - len(characters))
    return base.with_entries(characters, merges, vocabulary)


def _new_characters(words: Counter[tuple[str, ...]], pieces: dict[str, int]) -> list[str]:
    """The characters that have no piece and are frequent enough, the most frequent first."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for symbol in word:
            if symbol not in pieces and len(symbol.encode()) > 1:  # A single byte keeps the entry that it has.
                counts[symbol] += count
    wanted, total = COVERAGE * sum(counts.values()), 0
    found = []
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if total >= wanted:
            break
        found.append(character)
        total += count
    return found


def _learned(words: Counter[tuple[str, ...]], symbols: dict[str, str], number: int) -> list[tuple[str, str]]:
    """The next merges: each symbol is written as one letter, and the library's trainer merges letters."""
    inner: Any = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=len(symbols) + number, min_frequency=2, show_progress=False)
    inner.train_from_iterator(_lines(words, symbols), trainer)
    spelled = {letter: symbol for symbol, letter in symbols.items()}
    pairs = json.loads(inner.to_str())["model"]["merges"]
    return [("".join(spelled[x] for x in left), "".join(spelled[x] for x in right)) for left, right in pairs]


def _lines(words: Counter[tuple[str, ...]], symbols: dict[str, str]) -> Iterator[str]:
    """The words in letters, each as often as it occurs; where a symbol has no letter, a word ends."""
    for word, count in words.items():
        line = "".join(symbols.get(symbol, " ") for symbol in word) + " "
        while count > 0:
            yield line * min(count, _REPEATED)
            count -= _REPEATED
