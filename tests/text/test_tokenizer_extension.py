"""Extending a tokenizer: ids keep their meaning, new text gets shorter, nothing is lost."""

from __future__ import annotations

import heapq
import io
import json
import textwrap
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers

from jingu.config.schema import RunConfig
from jingu.config.sections.data import DataSettings, TokenizerSettings
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_commands import extend, train
from jingu.text.tokenizer_extension import extend_tokenizer
from jingu.text.tokenizer_training import train_tokenizer
from jingu.text.vocab_mapping import map_vocab

CODE = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in (heapq, textwrap)]
CHINESE = """北方的天气很冷，南方的天气很暖。春眠不觉晓，处处闻啼鸟。夜来风雨声，花落知多少。
床前明月光，疑是地上霜。举头望明月，低头思故乡。明月几时有？把酒问青天。今天的天气，明天的天气，2026 年的天气。
"""


def sentencepiece_base(folder: Path) -> Tokenizer:
    out = io.BytesIO()
    lines = [line for text in CODE for line in text.split("\n")]
    options = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=out,
        vocab_size=600,
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(out.getvalue())
    return Tokenizer.load(folder)


@pytest.fixture(params=["bytes", "sentencepiece", "special-last"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "sentencepiece":
        return sentencepiece_base(tmp_path / "base")
    tokenizer = train_tokenizer(iter(CODE), 500, ["<|endoftext|>"])
    if request.param == "bytes":
        return tokenizer
    spec = json.loads(tokenizer.content)  # with tokens added after the vocabulary, as most published ones have
    for place, name in enumerate(("<|im_start|>", "<|im_end|>")):
        spec["added_tokens"].append({**spec["added_tokens"][0], "id": 500 + place, "content": name})
    return Tokenizer(json.dumps(spec), {**tokenizer._config, "chat_template": "{{ messages }}"})


def test_old_ids_keep_their_meaning_and_new_text_gets_shorter(base: Tokenizer, tmp_path: Path) -> None:
    grown = extend_tokenizer(base, iter([CHINESE] * 5), base.vocab_size + 80)
    assert grown.vocab_size == base.vocab_size + 80
    assert {piece: grown.vocab()[piece] for piece in base.vocab()} == base.vocab()
    assert grown.special_tokens == base.special_tokens and grown.eos_token_id == base.eos_token_id
    assert len(grown.encode(CHINESE)) < 0.75 * len(base.encode(CHINESE))
    for text in (*CODE, CHINESE, CHINESE + CODE[0], "未知的字 🙂 <|im_end|>"):
        assert grown.decode(grown.encode(text)) == base.decode(base.encode(text)) == text
    assert int(grown.byte_lengths()[grown.encode(CHINESE)].sum()) == int(
        base.byte_lengths()[base.encode(CHINESE)].sum()
    )
    # Merges of the base come first: text without new pieces in it is split as ever.
    assert [grown.encode(line) for line in CODE[0].split("\n")] == [base.encode(line) for line in CODE[0].split("\n")]
    grown.save(tmp_path / "grown")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "grown")
    assert theirs(CHINESE, add_special_tokens=False)["input_ids"] == grown.encode(CHINESE)
    assert grown._config.get("chat_template") == base._config.get("chat_template")


def test_new_rows_come_of_the_pieces_that_a_new_piece_was(base: Tokenizer) -> None:
    grown = extend_tokenizer(base, iter([CHINESE] * 5), base.vocab_size + 80)
    found = map_vocab(grown, base)
    assert found[: base.vocab_size] == [[id_] for id_ in range(base.vocab_size)]
    names = {id_: piece for piece, id_ in grown.vocab().items()}
    for id_ in range(base.vocab_size, grown.vocab_size):
        assert len(found[id_]) > 1
        text, expected = base.decode(found[id_]), grown.piece_bytes(names[id_]).decode(errors="ignore")
        assert text.strip() == expected.strip() or "\ufffd" in text


def test_the_most_frequent_pair_is_merged_next(base: Tokenizer) -> None:
    """Counted here anew before each merge, over all words."""
    grown = extend_tokenizer(base, iter([CHINESE] * 5), base.vocab_size + 150)
    kept, merges = (len(json.loads(each._inner.to_str())["model"]["merges"]) for each in (base, grown))
    words = Counter(word for word in base.split_words(CHINESE))
    learned = [tuple(pair) for pair in json.loads(grown._inner.to_str())["model"]["merges"][kept:]]
    assert len(learned) == merges - kept > 20
    known = grown.vocab()
    for pair in learned:
        counts: Counter[tuple[str, ...]] = Counter()
        for word, count in words.items():
            for both in pairwise(word):
                counts[both] += count if set(both) <= known.keys() else 0
        assert counts[pair] == max(counts.values())
        words = Counter({_merged(word, pair): count for word, count in words.items()})


def _merged(word: tuple[str, ...], pair: tuple[str, ...]) -> tuple[str, ...]:
    merged: list[str] = []
    rest = list(word)
    while rest:
        size = 2 if tuple(rest[:2]) == pair else 1
        merged.append("".join(rest[:size]))
        rest = rest[size:]
    return tuple(merged)


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("en", CODE[0]), ("zh", CHINESE * 9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(text)
    inputs = [str(tmp_path / "en"), str(tmp_path / "zh")]

    def config(path: str, inputs: Any, **settings: Any) -> RunConfig:
        tokenizer = TokenizerSettings(path=str(tmp_path / path), **settings)
        return RunConfig(tokenizer=tokenizer, data=DataSettings(input=inputs))

    train(config("base", inputs[0], vocab_size=400))
    extend(config("both", inputs, vocab_size=450, base=str(tmp_path / "base")))
    said = capsys.readouterr().out.splitlines()
    before, after = (Tokenizer.load(tmp_path / name) for name in ("base", "both"))
    assert (before.vocab_size, after.vocab_size) == (400, 450)
    assert said[-3] == f"  The first 400 are those of {tmp_path / 'base'}; bytes per token before and after:"
    for line, name, text in zip(said[-2:], inputs, (CODE[0], CHINESE * 9), strict=True):
        old, new = (len(text.encode()) / len(tokenizer.encode(text)) for tokenizer in (before, after))
        assert line == f"  {old:.2f} → {new:.2f}  {name}"
        assert new >= old
    extend(config("both", inputs, vocab_size=450, base=str(tmp_path / "base")))
    assert "already trained" in capsys.readouterr().out

    for settings, verb, words in (
        ({}, extend, "tokenizer.base: there is nothing to extend. Set it to the folder of a tokenizer"),
        (
            {"base": str(tmp_path / "base")},
            train,
            "tokenizer.base: a tokenizer with a base is extended, not trained. Run `jin",
        ),
        (
            {"base": str(tmp_path / "base"), "vocab_size": 400},
            extend,
            "the tokenizer has 400 entries already. Give more",
        ),
    ):
        with pytest.raises(JinguError) as caught:
            verb(config("more", inputs, **settings))
        assert words in str(caught.value)


def test_what_is_no_bpe_is_refused() -> None:
    with pytest.raises(JinguError, match="only BPE can be extended, and this tokenizer is WordPiece"):
        extend_tokenizer(train_tokenizer(iter(CODE), 600, ["<end>"], "wordpiece"), iter(CODE), 700)
