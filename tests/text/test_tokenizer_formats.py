"""Tokenizers of other formats, against the libraries that define them: sentencepiece, tiktoken, transformers."""

from __future__ import annotations

import base64
import heapq
import io
import json
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import transformers
from hypothesis import given
from hypothesis import strategies as st

from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_formats import BYTE_TO_LETTER, DIGIT_SPLIT_PATTERN, SPLIT_PATTERN
from jingu.text.tokenizer_training import train_tokenizer

CHINESE = """北方的天气很冷，南方的天气很暖。春眠不觉晓，处处闻啼鸟。夜来风雨声，花落知多少。
床前明月光，疑是地上霜。举头望明月，低头思故乡。明月几时有？把酒问青天。不知天上宫阙，今夕是何年。
"""
CODE = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in (heapq, shlex, textwrap)]
TEXTS = [
    *CODE,
    *CODE[0].split("\n")[:60],
    CHINESE,
    "",
    " ",
    "   ",
    " a",
    "a ",
    "a  b\n\n  c   \t d\r\n",
    "</s> and <s> and <sep> are letters; <0x41> is not A",
    "ﬁ Ａ①㍿ é é 🙂🙂 \u3000 中文 mixed with English，和 123456 个数。",
    "x" * 300,
]


def trained(kind: str, *, fallback: bool, normal: bool, **options: Any) -> bytes:
    """A sentencepiece model, made by its own library out of code and Chinese."""
    out = io.BytesIO()
    lines = [line for text in CODE for line in text.split("\n")] + CHINESE.split("\n") * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=out,
        vocab_size=650,
        model_type=kind,
        byte_fallback=fallback,
        normalization_rule_name="nmt_nfkc" if normal else "identity",
        remove_extra_whitespaces=normal,
        minloglevel=2,
        **options,
    )
    return out.getvalue()


MODELS: dict[str, dict[str, Any]] = {
    "bpe": {"kind": "bpe", "fallback": True, "normal": False},
    "bpe-no-prefix": {"kind": "bpe", "fallback": True, "normal": False, "add_dummy_prefix": False, "pad_id": 3},
    "bpe-normal": {"kind": "bpe", "fallback": False, "normal": True},
    "unigram": {"kind": "unigram", "fallback": False, "normal": True},
    "unigram-bytes": {"kind": "unigram", "fallback": True, "normal": False},
    "unigram-over-spaces": {"kind": "unigram", "fallback": True, "normal": False, "split_by_whitespace": False},
    "bpe-over-spaces": {"kind": "bpe", "fallback": True, "normal": False, "split_by_whitespace": False},
}


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_sentencepiece(name: str, tmp_path: Path) -> None:
    data = trained(**MODELS[name])
    theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
    (tmp_path / "tokenizer.model").write_bytes(data)
    ours = Tokenizer.load(tmp_path)
    assert ours.vocab_size == theirs.vocab_size() == 650
    assert ours.eos_token_id == theirs.eos_id()
    assert ours.special_tokens["</s>"] == theirs.eos_id()
    for text in TEXTS:
        # Its characters are not in these models, which sentencepiece then calls unknown and we the control piece.
        if "</s>" in text and name == "unigram":
            continue
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids)
    ours.save(tmp_path / "saved")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").fingerprint() == ours.fingerprint()
    assert again(CHINESE, add_special_tokens=False)["input_ids"] == theirs.encode(CHINESE)
    assert (again.eos_token, again.bos_token) == ("</s>", "<s>")


@pytest.fixture(scope="module")
def mistral(pytestconfig: pytest.Config) -> Path:
    """Mistral's tokenizers; their package is unpacked, once, into pytest's cache folder (6 MB), and nowhere else."""
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("mistral")
    if not (folder / "mistral_common").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, "mistral-common==1.13.1"], check=True)
    return folder / "mistral_common" / "data"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_the_tokenizers_of_mistral(name: str, mistral: Path) -> None:
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(mistral / name))
    ours = Tokenizer.load(mistral / name)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


def test_a_llama_folder_that_has_only_its_model(tmp_path: Path) -> None:
    """With tokens added in its configuration; transformers' own converter is the reference."""
    (tmp_path / "tokenizer.model").write_bytes(trained("bpe", fallback=True, normal=False))
    added = {"650": {"content": "<|im_start|>", "special": True}, "651": {"content": "<|im_end|>", "special": True}}
    config = {"tokenizer_class": "LlamaTokenizer", "eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": added}))
    ours = Tokenizer.load(tmp_path)
    assert (ours.vocab_size, ours.eos_token_id) == (652, 651)
    ours.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs("<|im_start|>")["input_ids"][-1] == 650
    assert Tokenizer.load(tmp_path / "saved").fingerprint() == ours.fingerprint()
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in TEXTS:
        assert ours.encode(text) == reference.encode(text)


def test_a_t5_folder_that_has_only_its_model(tmp_path: Path) -> None:
    """Its sentinels are counted in the configuration, and numbered backwards; transformers' T5Tokenizer does so."""
    data = trained("unigram", fallback=False, normal=True, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    (tmp_path / "spiece.model").write_bytes(data)
    config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 7, "eos_token": "</s>", "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.T5Tokenizer(extra_ids=7).get_vocab()
    ours = Tokenizer.load(tmp_path)
    sentinels = {name: id_ for name, id_ in ours.special_tokens.items() if name.startswith("<extra_id_")}
    assert list(sentinels) == sorted((n for n in theirs if n.startswith("<extra_id_")), key=theirs.__getitem__)
    assert list(sentinels.values()) == list(range(650, 657))
    assert (ours.vocab_size, ours.decoder_start_token_id, ours.eos_token_id) == (657, 0, 1)
    reference = sentencepiece.SentencePieceProcessor(model_proto=data)
    for text in TEXTS:
        assert ours.encode(text) == reference.encode(text)
    parts = [reference.encode("def"), [656], reference.encode("return")]
    assert ours.encode("def <extra_id_0> return", parse_special_tokens=True) == [id_ for part in parts for id_ in part]


def ranks_of(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Those of a byte-level BPE, in the order in which it was learned: bytes, then merges."""
    bytes_of = {letter: byte for byte, letter in BYTE_TO_LETTER.items()}
    pieces = [piece for piece in tokenizer.vocab() if piece not in tokenizer.special_tokens]
    spelled = {bytes(bytes_of[letter] for letter in piece): tokenizer.vocab()[piece] for piece in pieces}
    return {piece: rank for rank, piece in enumerate(sorted(spelled, key=spelled.__getitem__))}


GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize(
    ("name", "pattern"), [("qwen", DIGIT_SPLIT_PATTERN), ("gpt2", GPT2_PATTERN), ("own", SPLIT_PATTERN)]
)
def test_ids_are_those_of_tiktoken(name: str, pattern: str, tmp_path: Path) -> None:
    ranks = ranks_of(train_tokenizer(iter([*CODE, CHINESE * 9]), 900, ["<|endoftext|>"]))
    lines = [f"{base64.b64encode(piece).decode()} {rank}" for piece, rank in ranks.items()]
    (tmp_path / f"{name}.tiktoken").write_text("\n".join(lines) + "\n")
    theirs = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    ours = Tokenizer.load(tmp_path)
    assert (
        ours.special_tokens["<|endoftext|>"] == ours.eos_token_id == {"qwen": 151643, "gpt2": 50256, "own": 899}[name]
    )
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode_ordinary(text)
        assert ours.decode(ours.encode(text)) == text


@given(st.text(max_size=60))
def test_ids_are_those_of_tiktoken_for_any_text(text: str) -> None:
    theirs, ours = _PAIR
    assert ours.encode(text) == theirs.encode_ordinary(text)


def _pair() -> tuple[Any, Tokenizer]:
    import tempfile

    ranks = ranks_of(train_tokenizer(iter([*CODE, CHINESE * 9]), 600, ["<|endoftext|>"]))
    with tempfile.TemporaryDirectory() as folder:
        lines = [f"{base64.b64encode(piece).decode()} {rank}" for piece, rank in ranks.items()]
        (Path(folder) / "o200k_base.tiktoken").write_text("\n".join(lines))
        ours = Tokenizer.load(Path(folder))
    pattern = "|".join(  # as tiktoken has it
        [
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""\p{N}{1,3}""",
            r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
            r"""\s*[\r\n]+""",
            r"""\s+(?!\S)""",
            r"""\s+""",
        ]
    )
    return tiktoken.Encoding("o200k", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}), ours


_PAIR = _pair()


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_vocabulary_and_merges(kind: str, prefix: bool, tmp_path: Path) -> None:
    spec = json.loads(train_tokenizer(iter([*CODE, CHINESE * 9]), 700, ["<|endoftext|>"]).content)
    (tmp_path / "vocab.json").write_text(json.dumps(spec["model"]["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in spec["model"]["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    special = "<|endoftext|>"
    config = {"tokenizer_class": kind, "eos_token": special, "add_prefix_space": prefix}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    assert ours.special_tokens == {special: 0}
    for text in TEXTS:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
        assert prefix or ours.decode(ours.encode(text)) == text


def test_damaged_files_are_told(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    whole = trained("bpe", fallback=True, normal=False)
    for content in (b"", b"\x00\x01", whole[:1000], b"not base64 at all"):
        path.write_bytes(content)
        with pytest.raises(JinguError, match="the tokenizer is damaged"):
            Tokenizer.load(tmp_path)
    words = trained("bpe", fallback=False, normal=False, treat_whitespace_as_suffix=True)
    path.write_bytes(words)
    with pytest.raises(JinguError, match="its pieces do not begin with their space"):
        Tokenizer.load(tmp_path)
