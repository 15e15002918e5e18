"""Generation: text in whole characters, stop strings, ends, limits, the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jingu.checkpoint.export import export_hf
from jingu.config.schema import ModelSettings
from jingu.errors import JinguError
from jingu.infer import verbs
from jingu.infer.generate import Piece, generate
from jingu.infer.sampling import Sampling
from jingu.infer.text import TextStream
from jingu.model.build import spec_from_settings
from jingu.model.decoder import Decoder
from jingu.model.initialise import initialise
from jingu.text.tokenizer import Tokenizer
from jingu.text.training import train_tokenizer

SPECIAL = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(iter(["the stop is near, the end is far. " * 3, "的数据 🙂 naïve"]), 280, [SPECIAL])


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Decoder:
    settings = ModelSettings(width=24, heads=3, layers=2, initial_std=0.4)
    spec = spec_from_settings(settings, tokenizer.vocabulary, 64)
    decoder = Decoder(spec)
    initialise(decoder, spec, 1)
    return decoder


def streamed(tokenizer: Tokenizer, ids: list[int], stop: list[str]) -> tuple[list[str], bool]:
    stream = TextStream(tokenizer.decode, stop)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces, True
    pieces.append(stream.finish())
    return pieces, stream.stopped


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_pieces_make_the_text_and_break_no_character(tokenizer: Tokenizer, text: str) -> None:
    pieces, stopped = streamed(tokenizer, tokenizer.encode(text), [])
    assert "".join(pieces) == text
    assert not stopped
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(1, 256), max_size=25))
def test_any_bytes_make_the_text_of_all_ids(tokenizer: Tokenizer, ids: list[int]) -> None:
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


def test_end_token_finishes_and_is_not_shown(model: Decoder, tokenizer: Tokenizer) -> None:
    free = list(generate(model, [5, 6], Sampling(), 12, [], tokenizer, end_ids=()))
    assert len(free) == 12 and free[-1].finish == "length"
    end = free[3].id
    first = next(n for n, piece in enumerate(free) if piece.id == end)
    ended = list(generate(model, [5, 6], Sampling(), 12, [], tokenizer, end_ids=(end,)))
    assert [piece.id for piece in ended] == [piece.id for piece in free[: first + 1]]
    assert ended[-1] == Piece(end, ended[-1].text, "end")
    assert "".join(p.text for p in ended) == tokenizer.decode([p.id for p in free[:first]])


def test_stop_string_finishes(model: Decoder, tokenizer: Tokenizer) -> None:
    free = list(generate(model, [9], Sampling(temperature=1.0, seed=4), 30, [], tokenizer, end_ids=()))
    text = "".join(piece.text for piece in free)
    stop = text[5:8]
    pieces = list(generate(model, [9], Sampling(temperature=1.0, seed=4), 30, [stop], tokenizer, end_ids=()))
    assert "".join(piece.text for piece in pieces) == text[: text.index(stop)]
    assert [piece.finish for piece in pieces if piece.finish] == ["stop"]


def test_same_seed_same_text(model: Decoder, tokenizer: Tokenizer) -> None:
    def run(seed: int) -> list[Piece]:
        torch.manual_seed(seed + 100)  # of no consequence
        return list(generate(model, [], Sampling(temperature=1.3, top_k=50, seed=seed), 20, [], tokenizer))

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_empty_prompt_begins_a_document(model: Decoder, tokenizer: Tokenizer) -> None:
    empty = list(generate(model, [], Sampling(), 5, [], tokenizer))
    assert empty == list(generate(model, [tokenizer.end_id], Sampling(), 5, [], tokenizer))


@pytest.mark.parametrize(
    ("prompt", "tokens", "words"),
    [
        (
            [1] * 60,
            5,
            "prompt: the prompt has 60 tokens and 5 more were asked for, but the model's context is 64 tokens. Ask "
            "for at most 4 tokens or shorten the prompt.",
        ),
        (
            [1] * 64,
            1,
            "prompt: the prompt has 64 tokens and 1 more were asked for, but the model's context is 64 tokens. "
            "Shorten the prompt.",
        ),
        ([1], 0, "max_tokens: 0 tokens were asked for. Ask for 1 or more."),
        (
            [9999],
            1,
            "prompt: the prompt has token ids beyond the model's vocabulary of 280. Use the tokenizer that the "
            "model was trained with.",
        ),
    ],
)
def test_what_does_not_fit(model: Decoder, tokenizer: Tokenizer, prompt: list[int], tokens: int, words: str) -> None:
    assert model.spec.vocabulary == 280
    with pytest.raises(JinguError) as error:
        generate(model, prompt, Sampling(), tokens, [], tokenizer)
    assert str(error.value) == words


def test_context_can_be_filled(model: Decoder, tokenizer: Tokenizer) -> None:
    assert len(list(generate(model, [1] * 60, Sampling(), 4, [], tokenizer, end_ids=()))) == 4


def test_verb_prints_prompt_and_continuation(
    model: Decoder, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer.save(tmp_path / "tokenizer")
    export_hf(model.spec, model.state_dict().__getitem__, tmp_path / "tokenizer", tmp_path / "out")
    verbs.generate(tmp_path / "out", "the end", max_tokens=9, precision="fp32")
    printed = capsys.readouterr()
    pieces = generate(model, tokenizer.encode("the end"), Sampling(), 9, [], tokenizer)
    assert printed.out == "the end" + "".join(piece.text for piece in pieces) + "\n"
    assert "tokens" in printed.err
