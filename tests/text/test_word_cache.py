"""Ids by way of words are the library's own."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jingu.text.word_cache as words_module
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_formats import DIGIT_SPLIT_PATTERN, GPT2_SPLIT_PATTERN, SPLIT_PATTERN, build_byte_level_bpe
from jingu.text.tokenizer_training import train_tokenizer

PIECES = [" ", "  ", "\t", "\n", "\r\n", "\u3000", "\x1c", "\x85", "\u2028", "a", "Ab", "é", "春眠", "ß", "ſ", "İ", "ª"]
PIECES += [
    "7",
    "1234",
    "²",
    "½",
    "Ⅷ",
    "٣",
    "'s",
    "'S",
    "'ſ",
    "'LL",
    "'re",
    "'",
    "_",
    "…",
    "(",
    "--",
    "\u0301",
    "\u200b",
    "\ue000",
]
PIECES += ["\ufeff", "\x00", "क्", "𝒳", "🙂"]
TEXTS = st.one_of(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.text(max_size=40))


def made(pattern: str) -> Tokenizer:
    inner: Any = build_byte_level_bpe({}, [], "" if pattern == GPT2_SPLIT_PATTERN else pattern)
    trained = train_tokenizer(iter(["the theory of 春眠 it's 1234 ... \n\n  x"] * 3), 280, ["<|endoftext|>"])
    inner.model = trained._inner.model
    inner.add_special_tokens(["<|endoftext|>"])
    return Tokenizer(inner.to_str(), {})


TOKENIZERS = {pattern: made(pattern) for pattern in (SPLIT_PATTERN, DIGIT_SPLIT_PATTERN, GPT2_SPLIT_PATTERN)}


def together(tokenizer: Tokenizer, text: str) -> list[int]:
    return [id_ for part in tokenizer.encode_parts(text, "int32") for id_ in part.tolist()]


@pytest.mark.parametrize("pattern", TOKENIZERS)
@settings(max_examples=150)
@given(text=TEXTS)
def test_ids_are_those_of_the_library(pattern: str, text: str) -> None:
    tokenizer = TOKENIZERS[pattern]
    assert tokenizer._word_encoder is not None
    assert together(tokenizer, text) == tokenizer.encode(text)


@pytest.mark.parametrize("size", [1, 33])
@pytest.mark.parametrize("pattern", TOKENIZERS)
@settings(max_examples=100)
@given(text=TEXTS)
def test_slices_and_forgetting_change_nothing(pattern: str, size: int, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words_module, "SLICE_CHARS", size)
        patch.setattr(words_module, "MAX_CACHED_WORDS", 9)
        patch.setattr(words_module, "WARMUP_WORDS", 4)
        patch.setattr(words_module, "MAX_WORD_CHARS", 3)
        assert together(TOKENIZERS[pattern], text * 3) == TOKENIZERS[pattern].encode(text * 3)


def test_classes_are_the_librarys_for_every_letter() -> None:
    tokenizer = TOKENIZERS[SPLIT_PATTERN]
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10000)]))
    for spread in (every, " ".join(every), "a".join(every), "7.".join(every)):
        assert together(tokenizer, spread) == tokenizer.encode(spread)


def test_where_words_are_not_known_the_library_encodes(seed_tokenizer: Tokenizer) -> None:
    spec = seed_tokenizer._spec
    for changed in (
        {"normalizer": {"type": "NFC"}},
        {
            "added_tokens": [
                *spec["added_tokens"],
                {**spec["added_tokens"][0], "id": 5, "special": False, "content": "x"},
            ]
        },
    ):
        other = Tokenizer(json.dumps(spec | changed), {})
        assert other._word_encoder is None
        text = "e\u0301x the 春眠 🙂\n" * 3
        assert together(other, text) == other.encode(text)
    assert [part.dtype for part in seed_tokenizer.encode_parts("some text", "uint16")] == [np.dtype("uint16")]
