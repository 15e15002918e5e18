"""Extend a tokenizer with entries learned from new text. The ids of existing entries do not change."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer

# Characters without an entry get one, the most frequent first, until they cover this share of their occurrences.
COVERAGE = 0.9995
# For the library's trainer, each symbol (a piece or character) is written as one character, from this code point on.
_FIRST_CODE = 0x10000
# Maximum number of copies of a word in a line of training text. Each word is written as often as it occurs.
_MAX_COPIES = 1000


def extend_tokenizer(base: Tokenizer, texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Return a tokenizer of at most `vocab_size` entries that begins with the entries of `base`.

    BPE training continues where the base stopped: the base tokenizes the texts, and the most frequent pairs of pieces
    within a word (see `Tokenizer.split_words`) become new merges, after all merges of the base. Before that, characters
    that the base encodes as bytes, or cannot encode, get an entry.

    Raises:
        JinguError: the base is not a BPE tokenizer, or has `vocab_size` entries already.
    """
    if base.algorithm != "BPE":
        what = f"only BPE can be extended, and this tokenizer is {base.algorithm}."
        fix = "Train a new one; `jingu model grow --tokenizer` keeps the embedding rows of shared pieces."
        raise JinguError(what, where="tokenizer.base", fix=fix)
    room = vocab_size - base.vocab_size
    if room < 1:
        what = f"the tokenizer has {base.vocab_size:,} entries already."
        raise JinguError(what, where="tokenizer.vocab_size", fix=f"Give more than {base.vocab_size:,}.")
    words: Counter[tuple[str, ...]] = Counter()
    for text in texts:
        words.update(base.split_words(text))
    vocab = base.vocab()
    characters = _new_characters(words, vocab)[:room]
    known_symbols = {symbol for word in words for symbol in word} & (vocab.keys() | set(characters))
    symbols = {symbol: chr(_FIRST_CODE + index) for index, symbol in enumerate(sorted(known_symbols))}
    merges = _learn_merges(words, symbols, room - len(characters))
    return base.add_entries(characters, merges, vocab_size)


def _new_characters(words: Counter[tuple[str, ...]], vocab: dict[str, int]) -> list[str]:
    """Return the characters that have no entry, most frequent first, until `COVERAGE` is reached."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for symbol in word:
            # Skip single bytes, which have entries.
            if symbol not in vocab and len(symbol.encode()) > 1:
                counts[symbol] += count
    target = COVERAGE * sum(counts.values())
    covered_count = 0
    characters = []
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if covered_count >= target:
            break
        characters.append(character)
        covered_count += count
    return characters


def _learn_merges(words: Counter[tuple[str, ...]], symbols: dict[str, str], number: int) -> list[tuple[str, str]]:
    """Return up to `number` new merges, as pairs of pieces, in order.

    The library's trainer starts from characters, so each symbol is written as the character that `symbols` gives it.
    """
    inner: Any = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=len(symbols) + number, min_frequency=2, show_progress=False)
    inner.train_from_iterator(_training_lines(words, symbols), trainer)
    symbol_by_letter = {letter: symbol for symbol, letter in symbols.items()}
    pairs = json.loads(inner.to_str())["model"]["merges"]
    return [
        ("".join(symbol_by_letter[x] for x in first), "".join(symbol_by_letter[x] for x in second))
        for first, second in pairs
    ]


def _training_lines(words: Counter[tuple[str, ...]], symbols: dict[str, str]) -> Iterator[str]:
    """Yield each word as often as it occurs, with symbols written as characters. Other symbols become spaces."""
    for word, count in words.items():
        line = "".join(symbols.get(symbol, " ") for symbol in word) + " "
        while count > 0:
            yield line * min(count, _MAX_COPIES)
            count -= _MAX_COPIES
