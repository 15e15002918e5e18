"""Tokenizers of other formats, as the text of a tokenizer.json: sentencepiece models, tiktoken's ranks, and the
vocabulary and merges of GPT-2."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from jingu.text.sentencepiece import read_sentencepiece

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where merges stop: words take the one character before them, digits go by threes, indentation is one run.

It is the pattern of Llama 3 and of cl100k, which readers of other formats know by name.
"""
SPLIT_DIGITS = SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
"""The same with digits one by one, as in Qwen2."""
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The library's own, of GPT-2."""
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_SPLIT_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_END = "<|endoftext|>"
# Files of ranks say neither how text is split nor the special tokens: both are known by the name of the file, or by
# the number of ranks. An empty pattern is GPT-2's.
_RANKS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": ("", {_END: 50256}),
    "r50k_base": ("", {_END: 50256}),
    "p50k_base": ("", {_END: 50256}),
    "cl100k_base": (SPLIT, {_END: 100257}),
    "o200k_base": (_SPLIT_CASES, {_END: 199999}),
    "qwen": (SPLIT_DIGITS, {_END: 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}),
    "128000": (SPLIT, {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001}),
}
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
LETTERS = {byte: chr(byte) for byte in _PRINTED} | {
    byte: chr(0x100 + place) for place, byte in enumerate(sorted({*range(256)} - {*_PRINTED}))
}
"""The byte alphabet of GPT-2: a letter for each byte; bytes that cannot be seen have letters beyond 255."""
BYTES = {letter: byte for byte, letter in LETTERS.items()}


def tokenizer_file(path: Path) -> Path | None:
    """The file that a tokenizer is read from: `path` itself, or in the folder the first kind that is there."""
    if path.is_file():
        return path
    for pattern in ("tokenizer.json", "*.model", "*.model.v*", "*.tiktoken", "merges.txt"):
        found = sorted(path.glob(pattern))
        if found:
            return found[0]
    return None


def read_tokenizer(file: Path, config: Mapping[str, Any], ends: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """The text of a tokenizer.json, and the names of special tokens that the file itself says.

    Args:
        config: what lies beside the file in tokenizer_config.json and its like.
        ends: names of tokens that end a text, which need no configuration to be special.

    Raises ValueError, or a library's own exception, for content that is not a tokenizer's.
    """
    if file.suffix == ".json":
        return file.read_text(encoding="utf-8"), {}
    named: dict[str, str] = {}
    special: dict[str, int] = {}
    if file.name == "merges.txt":
        content = _from_merges(file, config)
    elif _ranks(data := file.read_bytes()) is None:
        content, named = read_sentencepiece(data, begins=config.get("add_bos_token") is not False)
    else:
        content, special = _from_ranks(file, _ranks(data) or {})
    spec = json.loads(content)
    # Sentinels that T5's configuration counts and its file lacks: after the pieces, the first one last.
    number = config.get("extra_ids") or 0
    special |= {f"<extra_id_{n}>": len(spec["model"]["vocab"]) + number - 1 - n for n in range(number)}
    names = [value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)]
    _add_tokens(spec, special | _added(file.parent, config), [*names, *special, *ends])
    return json.dumps(spec, ensure_ascii=False), named


def _added(folder: Path, config: Mapping[str, Any]) -> dict[str, int]:
    """Tokens that were added to a tokenizer of a Hugging Face folder, and their ids."""
    found: dict[str, int] = {}
    if (folder / "added_tokens.json").is_file():
        found = json.loads((folder / "added_tokens.json").read_text(encoding="utf-8"))
    decoder: dict[str, Any] = config.get("added_tokens_decoder") or {}
    return found | {token["content"]: int(id_) for id_, token in decoder.items()}


def _add_tokens(spec: dict[str, Any], tokens: Mapping[str, int], special: list[str]) -> None:
    """Put tokens into a tokenizer.json where it has not got them; those that it knows by name become special."""
    model, there = spec["model"], {token["content"] for token in spec["added_tokens"]}
    pieces = model["vocab"]
    ids = pieces if isinstance(pieces, dict) else {piece: id_ for id_, (piece, _) in enumerate(pieces)}
    wanted = {**{name: ids[name] for name in special if name in ids}, **tokens}
    for content, id_ in sorted(wanted.items(), key=lambda item: item[1]):
        if ids.setdefault(content, id_) != id_ or (pieces is not ids and id_ > len(pieces)):
            raise ValueError(f"the added token {content} cannot have the id {id_}")
        if pieces is not ids and id_ == len(pieces):
            pieces.append([content, 0.0])
        if content not in there:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            spec["added_tokens"].append({"id": id_, "content": content, **flags, "special": True})
    spec["added_tokens"].sort(key=lambda token: token["id"])


def byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]], pattern: str, **options: bool) -> Any:
    """A tokenizer that merges bytes within what the pattern splits off; without one, within GPT-2's words."""
    inner: Any = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=options.get("whole_words", False)))
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    else:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=options.get("prefix", False))
    inner.decoder = decoders.ByteLevel()
    return inner


def _from_merges(file: Path, config: Mapping[str, Any]) -> str:
    """vocab.json and merges.txt, a pair of pieces a line."""
    vocabulary = json.loads((file.parent / "vocab.json").read_text(encoding="utf-8"))
    lines = file.read_text(encoding="utf-8").split("\n")
    pairs = [line.split(" ") for line in lines if line.strip() and not line.startswith("#version")]
    merges = [(left, right) for left, right in pairs]
    qwen = str(config.get("tokenizer_class", "")).startswith("Qwen2")
    prefix = bool(config.get("add_prefix_space", False))
    content: str = byte_level(vocabulary, merges, SPLIT_DIGITS if qwen else "", prefix=prefix).to_str()
    return content


def _ranks(data: bytes) -> dict[bytes, int] | None:
    """Pieces and their ranks, each line a piece in base 64 and its rank; None where the bytes are something else."""
    try:
        lines = (line.split() for line in data.decode("ascii").splitlines() if line)
        return {base64.b64decode(piece, validate=True): int(rank) for piece, rank in lines}
    except ValueError:
        return None


def _from_ranks(file: Path, ranks: dict[bytes, int]) -> tuple[str, dict[str, int]]:
    name = file.name.split(".")[0]
    known = _RANKS.get(name, _RANKS.get(str(len(ranks))))
    pattern, special = known or (SPLIT, {_END: max(ranks.values()) + 1})
    spelled = {piece: "".join(LETTERS[byte] for byte in piece) for piece in ranks}
    merges = [
        (spelled[left], spelled[right])
        for piece in sorted(ranks, key=ranks.__getitem__)
        if len(piece) > 1
        for left, right in _halves(piece, ranks)
    ]
    vocabulary = {spelled[piece]: rank for piece, rank in ranks.items()} | special
    return byte_level(vocabulary, merges, pattern, whole_words=True).to_str(), special


def _halves(piece: bytes, ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The two pieces whose merge gives this one, after all merges of lower rank; nothing where none does."""
    parts = [piece[place : place + 1] for place in range(len(piece))]
    while len(parts) > 2:
        found = [(ranks.get(a + b, ranks[piece]), place) for place, (a, b) in enumerate(pairwise(parts))]
        rank, place = min(found)
        if rank >= ranks[piece]:
            return []
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [(parts[0], parts[1])]
