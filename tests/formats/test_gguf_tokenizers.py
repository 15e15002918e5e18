"""Pre-tokenizers in GGUF files: each one of llama.cpp is read, written and computed as there."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from jingu.errors import JinguError
from jingu.formats.gguf_check import TEXTS
from jingu.text.gguf_metadata import tokenizer_metadata
from jingu.text.gguf_tokenizer import _PRE_TOKENIZERS, write_gguf_tokenizer
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_formats import GPT2_SPLIT_PATTERN, SPLIT_PATTERN, build_byte_level_bpe

ODD = [
    *TEXTS,
    "Hello, y'all! How are you 😁 ?我想在apple工作1314151天～",
    "\t\t\n\n \n\n\n \t\n\nx  \n  a",
    "3333333 33333 333 33 3 12,345,678.90",
    "Führer größe ÄÖÜ ß camelCase HTTPServer iPhone",
    "កាន់តែពិសេសអាច😁 नमस्ते दुनिया १२३",
    "`` `$ + <=> ^~| #include <x> /path/to\\file",
    "don't DON'T I'LL we'Ve 'tis x'1",
    "ひらがなカタカナ漢字 한국어 ภาษาไทย",
    "x" + " " * 20 + "y" + "\n" * 5 + " z",
]
# Pre-tokenizers of llama.cpp without marks (\\p{M}), or without capitals: jingu has those of the models.
WITHOUT_MARKS = ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "tekken", "kimi-k2")
WITHOUT_CASES = ("kimi-k2", "tiny_aya", "cohere2moe")
# Names of older releases of llama.cpp.
FORMER = ("jina-en",)
NAMES = [name for entry in _PRE_TOKENIZERS for name in entry["names"] if name not in FORMER]
needs_llama_cpp = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama_cpp is not installed")


@pytest.fixture(scope="module")
def crossing() -> dict[str, Any]:
    """A byte-level tokenizer.json whose merges cross spaces, digits and punctuation, so that each split shows."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    inner.train_from_iterator(ODD * 3, trainer)
    content: dict[str, Any] = json.loads(inner.to_str())
    return content


def with_steps(content: dict[str, Any], steps: list[Any], folder: Path, **changes: Any) -> Tokenizer:
    """Return the tokenizer with other steps before its merges."""
    model = content["model"]
    pairs = [(first, second) for first, second in model["merges"]]
    inner = build_byte_level_bpe(model["vocab"], pairs, "", whole_words=changes.get("whole_words", False))
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if changes.get("normalizer") == "NFC":
        inner.normalizer = normalizers.NFC()
    inner.add_special_tokens(["<|endoftext|>"])
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(inner.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return Tokenizer.load(folder)


def split_steps(patterns: list[str]) -> list[Any]:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def read_back(metadata: dict[str, Any], folder: Path) -> Tokenizer:
    folder.mkdir()
    write_gguf_tokenizer(metadata, 128, folder)
    return Tokenizer.load(folder)


@pytest.mark.parametrize("entry", _PRE_TOKENIZERS, ids=lambda entry: entry["names"][0])
def test_each_pre_tokenizer_comes_back(entry: dict[str, Any], crossing: dict[str, Any], tmp_path: Path) -> None:
    whole = {"whole_words": entry.get("whole_words", False)}
    for normalizer in ("none", "NFC"):
        tokenizer = with_steps(crossing, split_steps(entry["splits"]), tmp_path / "a", **whole, normalizer=normalizer)
        metadata = tokenizer_metadata(tokenizer, tokenizer.vocab_size)
        # Some differ in their BOS alone, or match the same words.
        name = {"glm4": "llama-bpe", "bailingmoe": "qwen2"}.get(entry["names"][0], entry["names"][0])
        assert metadata["tokenizer.ggml.pre"] == name
        again = read_back(metadata, tmp_path / normalizer)
        for text in [*ODD, "e\u0301 a\u0308"]:
            assert again.encode(text) == tokenizer.encode(text), text


def steps_of(kind: str) -> list[Any]:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    without = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    short = SPLIT_PATTERN.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)")
    digits = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")
    steps: dict[str, list[Any]] = {
        "dbrx": split_steps([short.replace("]?\\p{L}", "]?+\\p{L}").replace("\\p{N}]+[", "\\p{N}]++[")]),
        "gpt-2": [pre_tokenizers.Split(Regex(GPT2_SPLIT_PATTERN), "removed", invert=True), without],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), plain],
        "falcon": [pre_tokenizers.Punctuation("contiguous"), plain, pre_tokenizers.Digits(), digits],
    }
    return steps[kind]


@pytest.mark.parametrize("name", ["dbrx", "gpt-2", "smollm", "falcon"])
def test_pre_tokenizers_are_found_however_they_are_written(name: str, crossing: dict[str, Any], tmp_path: Path) -> None:
    """cl100k's pattern, o200k's form, the steps for digits, and Falcon's four."""
    tokenizer = with_steps(crossing, steps_of(name), tmp_path / "a")
    metadata = tokenizer_metadata(tokenizer, tokenizer.vocab_size)
    assert metadata["tokenizer.ggml.pre"] == name
    again = read_back(metadata, tmp_path / "b")
    # Falcon's tokenizer divides letters from digits, and the letters of some bytes are digits: ¹, ². It has no merges
    # across these borders.
    for text in ODD if name != "falcon" else [text for text in ODD if text.isascii() and not re.search("[0-9]", text)]:
        assert again.encode(text) == tokenizer.encode(text), text


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ([r"(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\s+"], "no pre-tokenizer that splits text as this one does"),
        ([r"\p{N}{1,2}", GPT2_SPLIT_PATTERN], "no pre-tokenizer that splits text as this one does"),
    ],
)
def test_other_pre_tokenizers_are_refused(
    splits: list[str], words: str, crossing: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = with_steps(crossing, split_steps(splits), tmp_path / "a")
    with pytest.raises(JinguError, match=words):
        tokenizer_metadata(tokenizer, tokenizer.vocab_size)


def test_whole_words_count_where_merges_do_not_reach_them(crossing: dict[str, Any], tmp_path: Path) -> None:
    """gpt-4o merges all words in llama.cpp. A vocabulary in which each token is merged is the same there."""
    [entry] = [entry for entry in _PRE_TOKENIZERS if "gpt-4o" in entry["names"]]
    steps = split_steps(entry["splits"])
    tokenizer = with_steps(crossing, steps, tmp_path / "a", whole_words=True)
    assert tokenizer_metadata(tokenizer, tokenizer.vocab_size)["tokenizer.ggml.pre"] == "gpt-4o"
    content = json.loads(json.dumps(crossing))
    content["model"]["vocab"]["unmerged"] = len(content["model"]["vocab"])
    tokenizer = with_steps(content, steps, tmp_path / "b", whole_words=True)
    with pytest.raises(JinguError, match="no pre-tokenizer that splits text"):
        tokenizer_metadata(tokenizer, tokenizer.vocab_size)


def test_pieces_with_merges(tmp_path: Path) -> None:
    """Gemma 4's kind: spaces are letters of pieces, bytes stand for what no piece spells."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *bytes_, "▁", *"abc \n", "▁a", "bc", "▁abc", "\n\n"]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 4 + [6] * 256 + [1] * (len(tokens) - 260),
        "tokenizer.ggml.merges": ["▁ a", "b c", "▁a bc", "\n \n"],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
    }
    tokenizer = read_back(metadata, tmp_path / "a")
    pieces = [tokens[number] for number in tokenizer.encode("b abc\n\né")]
    assert pieces == ["b", "▁abc", "\n\n", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("b abc\n\né")) == "b abc\n\né"
    assert tokenizer.prompt_prefix_ids == [2]


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_splits_alike(name: str, crossing: dict[str, Any], tmp_path: Path) -> None:
    import llama_cpp

    entry = next(entry for entry in _PRE_TOKENIZERS if name in entry["names"])
    steps = split_steps(entry["splits"])
    tokenizer = with_steps(crossing, steps, tmp_path / "a", whole_words=entry.get("whole_words", False))
    metadata = {**tokenizer_metadata(tokenizer, tokenizer.vocab_size), "tokenizer.ggml.pre": name}
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    opened = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    metadata["tokenizer.jingu.normalizer"] = "none"
    again = read_back(metadata, tmp_path / "b")
    has_marks = re.compile("[\u0300-\u036f\u0900-\u097f\u1780-\u17ff]")
    for text in ODD:
        if (name in WITHOUT_MARKS and has_marks.search(text)) or (name in WITHOUT_CASES and "camelCase" in text):
            continue
        assert again.encode(text) == opened.tokenize(text.encode(), add_bos=False, special=False), text
    opened.close()
