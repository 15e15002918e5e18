"""A small tokenizer, trained once on English, Chinese and code."""

from __future__ import annotations

import pytest

from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer

TRAINING_TEXTS = [
    "def grow(seed):\n    if seed is None:\n        return 0\n    return seed + 1\n" * 5,
    "The quick brown fox jumps over the lazy dog. It's 2026, and the fox doesn't stop.\n" * 5,
    "春眠不觉晓，处处闻啼鸟。夜来风雨声，花落知多少。\n" * 5,
]


@pytest.fixture(scope="session")
def seed_tokenizer() -> Tokenizer:
    return train_tokenizer(iter(TRAINING_TEXTS), 390, ["<|endoftext|>", "<|user|>"])
