"""Prompts that are too long are refused without the cost of tokenizing them as a whole."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jingu.errors import JinguError
from jingu.serve.service import Service
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer

LIMIT = 512


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Its longest token has 16 characters, so that the size of a text says little."""
    return train_tokenizer(iter(["aaaaaaaaaaaaaaaa " * 50, "the weather is fine " * 50, "北京"]), 300, ["<|end|>"])


class Counting:
    """Counts the characters that are tokenized."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.num_characters = tokenizer, 0

    def min_tokens(self, text: str) -> int:
        return self.tokenizer.min_tokens(text)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.num_characters += len(text)
        return self.tokenizer.encode(text, **options)


def refuses(tokenizer: Tokenizer, text: str) -> tuple[bool, int]:
    """Return whether a text is refused, and how many characters were tokenized."""
    counting = Counting(tokenizer)
    spec = SimpleNamespace(max_position_embeddings=LIMIT)
    service = SimpleNamespace(model=SimpleNamespace(tokenizer=counting, spec=spec))
    try:
        asyncio.run(Service.check_length(cast(Service, service), text))
    except JinguError as error:
        assert "context of 512" in str(error)
        return True, counting.num_characters
    return False, counting.num_characters


@pytest.mark.parametrize("kind", ["a", "x1 ", "naïve 北京 ", "\n", "the weather is fine ", "<|end|>"])
def test_a_long_text_is_refused_by_its_beginning(tokenizer: Tokenizer, kind: str) -> None:
    text = kind * (400_000 // len(kind))
    assert len(tokenizer.encode(text, parse_special_tokens=True)) > LIMIT
    refused, num_characters = refuses(tokenizer, text)
    assert refused and num_characters < len(text) / 10


@pytest.mark.parametrize("kind", ["a", "the weather is fine ", "\n"])
def test_a_text_that_fits_is_not_refused(tokenizer: Tokenizer, kind: str) -> None:
    text = kind * 8 * LIMIT
    while len(tokenizer.encode(text, parse_special_tokens=True)) > LIMIT:
        text = text[: len(text) * 9 // 10]
    assert len(text) > LIMIT // 2
    assert not refuses(tokenizer, text)[0]
