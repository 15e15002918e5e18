"""Incremental detokenization: complete characters, stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jingu.infer.sequence import IncrementalDetokenizer
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(iter(["the stop is near, the end is far. " * 3, "的数据 🙂 naïve"]), 280, ["<|endoftext|>"])


def streamed(tokenizer: Tokenizer, ids: list[int], stop: list[str]) -> tuple[list[str], bool]:
    stream = IncrementalDetokenizer(tokenizer.decode, stop)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces, True
    pieces.append(stream.finish())
    return pieces, stream.stopped


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_pieces_join_to_the_text_and_split_no_character(tokenizer: Tokenizer, text: str) -> None:
    pieces, stopped = streamed(tokenizer, tokenizer.encode(text), [])
    assert "".join(pieces) == text
    assert not stopped
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(1, 256), max_size=25))
def test_pieces_of_any_bytes_join_to_the_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    pieces, _ = streamed(tokenizer, ids, [])
    assert "".join(pieces) == tokenizer.decode(ids)


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="ab c的", max_size=25),
    stop=st.lists(st.text(alphabet="ab c的", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_string(tokenizer: Tokenizer, text: str, stop: list[str]) -> None:
    # One byte a token: every stop string goes over several.
    single = {tokenizer.decode([i]): i for i in range(1, 257)}
    ids = [
        i for character in text for i in ([single[character]] if character in single else tokenizer.encode(character))
    ]
    pieces, stopped = streamed(tokenizer, ids, stop)
    # The first to be complete wins; of those complete together, the one that begins first.
    ends = sorted((text.find(s) + len(s), text.find(s)) for s in stop if s in text)
    assert stopped == bool(ends)
    assert "".join(pieces) == (text[: min(begin for end, begin in ends if end == ends[0][0])] if ends else text)
