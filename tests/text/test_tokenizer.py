"""The tokenizer against transformers, against the bytes of the text, and against damaged folders."""

from __future__ import annotations

import heapq
import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

import jingu.text.tokenizer as tokenizer_module
import jingu.text.tokenizer_training as tokenizer_training
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_formats import BYTE_TO_LETTER, DIGIT_SPLIT_PATTERN, SPLIT_PATTERN, build_byte_level_bpe
from jingu.text.tokenizer_training import train_tokenizer
from tests.text.conftest import TRAINING_TEXTS

SAMPLES = [
    "",
    " ",
    "def f(x):\n\treturn  x**2  # 种子，hello 12345\r\n\n   élan 🙂",
    "<|endoftext|> and <|user|> are only letters here",
    "\x00\x7f\u200b\ufffd",
]
MIXED = st.text(st.sampled_from(list("ab 1_.\n\t\r'<|>é春🙂")) | st.characters(exclude_categories=["Cs"]))


@pytest.mark.parametrize("model_type", [None, "llama", "gpt2"])
def test_transformers_gives_the_same_ids(
    seed_tokenizer: Tokenizer, tmp_path: Path, model_type: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    seed_tokenizer.save(tmp_path)
    if model_type is not None:  # as in an exported model, where transformers may choose a class of its own
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token == "<|endoftext|>"
    assert theirs.eos_token_id == seed_tokenizer.eos_token_id == 0
    assert len(theirs) == seed_tokenizer.vocab_size == 390
    for text in SAMPLES:
        ids = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ids == seed_tokenizer.encode(text)
        assert theirs.decode(ids) == text
    assert theirs("<|user|>a")["input_ids"] == [1, *seed_tokenizer.encode("a")]


@given(MIXED)
def test_text_comes_back_and_its_bytes_are_counted(seed_tokenizer: Tokenizer, text: str) -> None:
    ids = seed_tokenizer.encode(text)
    assert seed_tokenizer.decode(ids) == text
    assert int(seed_tokenizer.byte_lengths()[ids].sum()) == len(text.encode())
    assert not {0, 1} & set(ids)


def test_special_tokens_in_text_are_text(seed_tokenizer: Tokenizer) -> None:
    text = "a<|endoftext|>b<|user|>"
    assert not {0, 1} & set(seed_tokenizer.encode(text))
    assert seed_tokenizer.decode(seed_tokenizer.encode(text)) == text
    assert seed_tokenizer.byte_lengths()[[0, 1]].tolist() == [0, 0]
    assert seed_tokenizer.decode([0, *seed_tokenizer.encode("x")]) == "x"


@given(st.lists(st.sampled_from(["\n", "\n\n", "\r\n", " ", "x", "春", "_y", "7", "'s", "\t", ").", "\u3000"])))
def test_a_long_text_is_cut_where_it_changes_nothing(seed_tokenizer: Tokenizer, pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = seed_tokenizer.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "MAX_CHUNK_CHARS", 2)
        assert seed_tokenizer.encode(text) == whole


def test_a_long_text_is_really_cut(seed_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_CHUNK_CHARS", 4)
    assert seed_tokenizer._divide_text("abcd\nefgh\n  ij\nkl") == ["abcd", "\nefgh", "\n  ij", "\nkl"]


def _with_pattern(pattern: str) -> Tokenizer:
    """Return a tokenizer that splits by a pattern and merges any two and any four bytes of whitespace."""
    spaces = [BYTE_TO_LETTER[byte] for byte in b" \t\r\n"]
    pairs = [(first, second) for first in spaces for second in spaces]
    twos = [first + second for first, second in pairs]
    merges = pairs + [(first, second) for first in twos for second in twos]
    entries = [*BYTE_TO_LETTER.values(), *map("".join, merges), "<end>"]
    inner = build_byte_level_bpe({entry: id_ for id_, entry in enumerate(entries)}, merges, pattern)
    inner.add_special_tokens(["<end>"])
    return Tokenizer(inner.to_str(), {})


PATTERNS = {
    name: _with_pattern(pattern)
    for name, pattern in {"gpt2": "", "digits": DIGIT_SPLIT_PATTERN, "default": SPLIT_PATTERN}.items()
}
LINE_PIECES = [
    "\n",
    "\n\n",
    "\r\n",
    "\r",
    " ",
    "  \n",
    "\t",
    "x",
    "Ab",
    "春",
    "é",
    "e\u0301",
    "_",
    "7",
    "1234",
    "½",
    "٣",
]
LINE_PIECES += ["'s", "'LL", "'", ").", "--", "\u3000", "\x85", "🙂", "𝒳"]


@pytest.mark.parametrize("name", PATTERNS)
@settings(max_examples=200)
@given(st.lists(st.sampled_from(LINE_PIECES), max_size=30).map("".join) | MIXED)
def test_a_cut_changes_nothing_with_any_pattern(name: str, text: str) -> None:
    """The text is cut at every place where a long text can be cut."""
    tokenizer = PATTERNS[name]
    whole = tokenizer.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "MAX_CHUNK_CHARS", 1)
        assert tokenizer.encode(text) == whole


def test_code_and_chinese_split_sensibly(seed_tokenizer: Tokenizer) -> None:
    def split(text: str) -> list[str]:
        inner = tokenizers.Tokenizer.from_str(seed_tokenizer.content)
        return [text[start:end] for _, (start, end) in inner.pre_tokenizer.pre_tokenize_str(text)]

    assert split("x = 123456\n        return y") == ["x", " =", " ", "123", "456", "\n", "       ", " return", " y"]
    assert split("春眠，不觉晓。") == ["春眠", "，不觉晓", "。"]
    assert split("it's foo_bar") == ["it", "'s", " foo", "_bar"]


def test_training_is_deterministic_and_its_fingerprint_tells_content(seed_tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = [f"{word} {word[::-1]} 花{word}\n" for word in ("alpha", "beta", "gamma", "delta") for _ in range(9)]
    first = train_tokenizer(iter(texts), 280, ["<end>"])
    second = train_tokenizer(iter(texts), 280, ["<end>"])
    first.save(tmp_path / "one")
    second.save(tmp_path / "two")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert first.fingerprint() == second.fingerprint() == Tokenizer.load(tmp_path / "one").fingerprint()
    assert first.fingerprint() != seed_tokenizer.fingerprint()
    assert first.fingerprint() != train_tokenizer(iter(texts), 279, ["<end>"]).fingerprint()


def test_a_small_sample_gives_fewer_entries() -> None:
    assert train_tokenizer(iter(["ab"]), 300, ["<end>"]).vocab_size == 258  # the end, 256 bytes, and "ab"


def test_saving_keeps_what_was_read(seed_tokenizer: Tokenizer, tmp_path: Path) -> None:
    seed_tokenizer.save(tmp_path / "a")
    config = json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())
    config |= {"chat_template": "{{ messages }}", "eos_token": {"content": "<|user|>", "special": True}}
    (tmp_path / "a" / "tokenizer_config.json").write_text(json.dumps(config))
    again = Tokenizer.load(tmp_path / "a")
    again.save(tmp_path / "b")
    assert again.eos_token_id == 1
    assert json.loads((tmp_path / "b" / "tokenizer_config.json").read_text()) == config
    assert again.fingerprint() != seed_tokenizer.fingerprint()


def sentencepiece_like(folder: Path) -> Tokenizer:
    inner: Any = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=specials, show_progress=False)
    inner.train_from_iterator(["a ros é by any name is a ros é"] * 9, trainer)
    spec = json.loads(inner.to_str())
    start = len(spec["model"]["vocab"])
    spec["model"]["vocab"] |= {f"<0x{byte:02X}>": start + byte for byte in range(256)}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return Tokenizer.load(folder)


def test_byte_lengths_of_a_sentencepiece_like_tokenizer(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like(tmp_path / "sp")
    assert tokenizer.eos_token_id == 2
    for text in ("a ros é", "name 春🙂 is", "zzz"):
        ids = tokenizer.encode(text)
        # One more: the space that such tokenizers put before a text.
        assert int(tokenizer.byte_lengths()[ids].sum()) == len(text.encode()) + 1
    assert tokenizer.byte_lengths()[:3].tolist() == [0, 0, 0]
    assert tokenizer.byte_lengths().dtype == np.int32


def test_mistakes_are_explained(seed_tokenizer: Tokenizer, tmp_path: Path) -> None:
    fix = " Run `jingu tokenizer train` (or `jingu import` a model to start from), or set tokenizer.path to one."
    with pytest.raises(JinguError) as caught:
        Tokenizer.load(tmp_path / "none")
    assert str(caught.value) == f"{tmp_path / 'none'}: there is no tokenizer folder here." + fix

    seed_tokenizer.save(tmp_path)
    good = (tmp_path / "tokenizer.json").read_text()
    for bad in (good[: len(good) // 2], "{}", '{"version": "1.0", "model": {"type": "Nonsense"}}', "[]", ""):
        (tmp_path / "tokenizer.json").write_text(bad)
        with pytest.raises(JinguError, match=r"the tokenizer is damaged \(.+\)\. Run `jingu tokenizer train`"):
            Tokenizer.load(tmp_path)
    spec = json.loads(good.replace("<|endoftext|>", "nothing"))
    spec["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(JinguError, match="it has no special token to end documents with"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(good)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(JinguError, match=r"tokenizer_config\.json is not a JSON object"):
        Tokenizer.load(tmp_path)
    for template in ({"default": "x"}, [{"name": "default"}], [{"name": 3, "template": "x"}], ["x"], 3):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        with pytest.raises(JinguError, match=r"chat_template in tokenizer_config\.json is neither text nor a list"):
            Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default", "template": "x"}]}')
    assert Tokenizer.load(tmp_path).chat_template == "x"
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(JinguError) as caught:
        Tokenizer.load(tmp_path)
    assert str(caught.value) == f"{tmp_path}: the tokenizer's folder has no tokenizer.json." + fix


ENDS: list[tuple[dict[str, Any] | None, dict[str, Any] | None, list[str], int]] = [
    (None, None, ["<a>", "<b>"], 0),
    (None, {"eos_token": "<b>"}, ["<a>", "<b>"], 1),
    ({"eos_token": {"__type": "AddedToken", "content": "<b>"}}, {"eos_token": "<a>"}, ["<a>", "<b>"], 1),
    ({"eos_token": None}, {"eos_token": {"content": "<b>"}}, ["<a>", "<b>"], 1),
    ({"bos_token": "<s>"}, None, ["<unk>", "<s>", "</s>"], 2),
    ({"eos_token": "<b>"}, None, ["<a>", "<b>"], 1),
]


@pytest.mark.parametrize(("config", "older", "special", "end"), ENDS)
@pytest.mark.parametrize("marked", [True, False], ids=["special", "plain"])
def test_the_end_token_of_folders_others_wrote(
    config: dict[str, Any] | None,
    older: dict[str, Any] | None,
    special: list[str],
    end: int,
    marked: bool,
    tmp_path: Path,
) -> None:
    """Without a configuration, with one of an older release, with tokens that are added but not marked special."""
    train_tokenizer(iter(["some text"]), 300, special).save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", older)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    if not marked:
        spec = json.loads((tmp_path / "tokenizer.json").read_text())
        for token in spec["added_tokens"]:
            token["special"] = token["id"] == 0
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_token_id == end
    assert tokenizer.decode(tokenizer.encode("some text")) == "some text"
    tokenizer.save(tmp_path / "again")
    again = Tokenizer.load(tmp_path / "again")
    assert again.fingerprint() == tokenizer.fingerprint()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "again")("text")["input_ids"] == again.encode("text")


def test_impossible_training_is_explained() -> None:
    with pytest.raises(JinguError) as caught:
        train_tokenizer(iter(["x"]), 257, ["<a>", "<b>"])
    assert str(caught.value) == "tokenizer.vocab_size: 257 is too small: 256 bytes and 2 special tokens need 258."
    with pytest.raises(
        JinguError, match="511 is too small: 256 bytes at the beginning and inside of words and 1 special"
    ):
        train_tokenizer(iter(["x"]), 511, ["<a>"], "wordpiece")
    with pytest.raises(JinguError, match="END would be recognized in text, because wordpiece takes a known word"):
        train_tokenizer(iter(["x"]), 600, ["END"], "wordpiece")
    for specials in ([], ["<a>", "<a>"], [""]):
        with pytest.raises(
            JinguError, match=r"tokenizer\.special_tokens: there must be at least one special token, each once"
        ):
            train_tokenizer(iter(["x"]), 300, specials)


@pytest.mark.parametrize("algorithm", ["unigram", "wordpiece"])
def test_other_algorithms_write_every_text_as_bytes(algorithm: Any, tmp_path: Path) -> None:
    texts = [*TRAINING_TEXTS, Path(heapq.__file__).read_text(encoding="utf-8")]
    tokenizer = train_tokenizer(iter(texts), 640, ["<|endoftext|>", "<END>"], algorithm)
    again = train_tokenizer(iter(texts), 640, ["<|endoftext|>", "<END>"], algorithm)
    assert tokenizer.fingerprint() == again.fingerprint() or algorithm == "unigram"
    assert (tokenizer.eos_token_id, tokenizer.special_tokens["<END>"]) == (0, 1)
    assert 514 <= tokenizer.vocab_size <= 640
    for text in [*SAMPLES, *TRAINING_TEXTS, "<END> of END", "x" * 3000, "## ▁▁ ##"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert int(tokenizer.byte_lengths()[ids].sum()) == len(text.encode())
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        assert not {0, 1} & set(ids)
    assert len(tokenizer.encode(texts[-1])) < 0.6 * len(texts[-1])
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("fox 春")["input_ids"] == Tokenizer.load(tmp_path).encode("fox 春")


def test_unigram_training_shows_its_progress_and_ends_with_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words of Chinese text rarely repeat: training runs in a process of its own, which an interrupt ends."""
    random = np.random.default_rng(0)
    text = "，".join("".join(map(chr, 0x4E00 + random.zipf(1.3, 12) % 900)) for _ in range(600))
    sizes: list[int] = []
    processes: list[subprocess.Popen[str]] = []

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            sizes.append(int(self.n + (n or 0)))
            if len(sizes) == limit:
                raise KeyboardInterrupt
            return super().update(n)

    class Process(subprocess.Popen):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            processes.append(self)

    monkeypatch.setattr(tokenizer_training, "tqdm", Bar)
    monkeypatch.setattr(tokenizer_training, "Popen", Process)
    limit = 0
    tokenizer = train_tokenizer(iter([text]), 400, ["<|endoftext|>"], "unigram")
    assert len(sizes) > 3 and sizes == sorted(sizes, reverse=True)
    assert len(tokenizer.encode(text)) < 0.8 * len(text.encode())
    limit = len(sizes) + 2
    with pytest.raises(KeyboardInterrupt):
        train_tokenizer(iter([text]), 400, ["<|endoftext|>"], "unigram")
    assert len(sizes) == limit and processes[-1].returncode is not None


def test_wordpiece_takes_the_longest_piece_each_time() -> None:
    tokenizer = train_tokenizer(iter(["unable unaffable ableable"] * 9), 530, ["<end>"], "wordpiece")
    pieces = tokenizer.vocab()
    names = {id_: piece for piece, id_ in pieces.items()}
    for word in ("unaffable", "unable", "ablun"):
        rest, expected = word, []
        while rest:
            prefix = "▁" if expected else ""
            size = max(size for size in range(1, len(rest) + 1) if prefix + rest[:size] in pieces)
            expected.append(prefix + rest[:size])
            rest = rest[size:]
        assert [names[id_] for id_ in tokenizer.encode(word)] == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text(), special=st.booleans())
def test_the_least_number_of_tokens_is_a_bound(text: str, special: bool) -> None:
    tokenizer = _bounded_tokenizer()
    text += "<|endoftext|>  \n" * special
    for parse in (False, True):
        assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text, parse_special_tokens=parse))


@cache
def _bounded_tokenizer() -> Tokenizer:
    return train_tokenizer(iter(["the end is near " * 5, "각각 café"]), 400, ["<|endoftext|>"])


@pytest.mark.parametrize(
    ("change", "is_bounded"),
    [
        ({}, True),
        ({"normalizer": {"type": "NFC"}}, True),
        ({"normalizer": {"type": "NFKC"}}, False),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "a"}}, False),
    ],
)
def test_only_some_tokenizers_have_a_least_number_of_tokens(change: dict[str, Any], is_bounded: bool) -> None:
    tokenizer = _bounded_tokenizer()
    changed = Tokenizer(json.dumps({**json.loads(tokenizer.content), **change}), {"eos_token": "<|endoftext|>"})
    text = "각" * 500  # NFC joins three letters of each
    assert (changed.min_tokens(text) > 0) is is_bounded
    assert changed.min_tokens(text) <= len(changed.encode(text))


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}])
@given(
    text=st.lists(st.sampled_from(["the end", " is", "  ", "\n\n", "é", "e\u0301", "각", "🙂", "<|endoftext|>"])).map(
        "".join
    ),
    cuts=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    special=st.booleans(),
)
@example(text="e\u0301 is", cuts=(0, 2), special=False)
def test_spans_from_bytes_equal_those_from_the_offsets_of_the_library(
    normalizer: dict[str, str] | None, text: str, cuts: tuple[int, int], special: bool
) -> None:
    tokenizer = _bounded_tokenizer()
    tokenizer = Tokenizer(json.dumps({**json.loads(tokenizer.content), "normalizer": normalizer}), tokenizer._config)
    start, end = sorted(min(cut, len(text)) for cut in cuts)
    ids, [span] = tokenizer.encode_spans(text, [(start, end)], parse_special_tokens=special)
    library = tokenizer._parsing if special else tokenizer._inner
    encoding = library.encode(text, add_special_tokens=False)
    assert ids == encoding.ids
    # The tokens that begin in the span, after those of which a part stands before it.
    inside = [index for index, (first, last) in enumerate(encoding.offsets) if last > start and first < end]
    expected = (inside[0], inside[-1] + 1) if inside and start < end else None
    if expected is not None:
        assert span == expected
    else:
        assert span[0] == span[1]
