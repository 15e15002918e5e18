"""Convert tokenizers of other formats to tokenizer.json: sentencepiece models, tiktoken's ranks, GPT-2's merges."""

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

# The pattern that divides text into words; no merge crosses their borders. A word of letters includes one character
# before it, such as a space; numbers are divided into groups of up to three digits; indentation is one word. It is the
# pattern of cl100k_base and Llama 3, which other formats (such as GGUF) identify by name.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The same pattern with single digits, as in Qwen2.
DIGIT_SPLIT_PATTERN = SPLIT_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
# GPT-2's pattern, the library's default.
GPT2_SPLIT_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_CASES_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_END = "<|endoftext|>"
# Split pattern and special tokens of tiktoken vocabularies, by the name of the file or the number of ranks. The files
# contain neither. An empty pattern is GPT-2's.
_RANKS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": ("", {_END: 50256}),
    "r50k_base": ("", {_END: 50256}),
    "p50k_base": ("", {_END: 50256}),
    "cl100k_base": (SPLIT_PATTERN, {_END: 100257}),
    "o200k_base": (SPLIT_CASES_PATTERN, {_END: 199999}),
    "qwen": (DIGIT_SPLIT_PATTERN, {_END: 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}),
    "128000": (SPLIT_PATTERN, {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001}),
}
# GPT-2's byte alphabet: a letter for each byte. Bytes without a printable character have letters from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_TO_LETTER = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + place) for place, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))
}
LETTER_TO_BYTE = {letter: byte for byte, letter in BYTE_TO_LETTER.items()}


def find_tokenizer_file(path: Path) -> Path | None:
    """Return the tokenizer's file: `path` if it is a file, else the first format found in the folder; None: none."""
    if path.is_file():
        return path
    for pattern in ("tokenizer.json", "*.model", "*.model.v*", "*.tiktoken", "merges.txt"):
        matches = sorted(path.glob(pattern))
        if matches:
            return matches[0]
    return None


def read_tokenizer(file: Path, config: Mapping[str, Any], eos_names: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Read a tokenizer in any supported format.

    Args:
        config: the configuration beside the file, such as tokenizer_config.json.
        eos_names: common names of EOS tokens. Entries with these names become special tokens.

    Returns:
        The text of a tokenizer.json; and the special tokens that the file itself names, by their configuration key.

    Raises:
        Exception: the content is not a tokenizer's (ValueError, or a library's own exception).
    """
    if file.suffix == ".json":
        return file.read_text(encoding="utf-8"), {}
    named: dict[str, str] = {}
    special: dict[str, int] = {}
    if file.name == "merges.txt":
        content = _from_merges(file, config)
    else:
        data = file.read_bytes()
        ranks = _parse_ranks(data)
        if ranks is None:
            content, named = read_sentencepiece(data, add_bos_token=config.get("add_bos_token") is not False)
        else:
            content, special = _from_ranks(file, ranks)
    spec = json.loads(content)
    # T5's configuration has only the number of sentinels, and the file lacks them. Their ids follow those of the
    # pieces, in reverse order.
    number = config.get("extra_ids") or 0
    special |= {f"<extra_id_{n}>": len(spec["model"]["vocab"]) + number - 1 - n for n in range(number)}
    names = [value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)]
    _add_tokens(spec, special | _added_tokens(file.parent, config), [*names, *special, *eos_names])
    return json.dumps(spec, ensure_ascii=False), named


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens that a Hugging Face folder adds to its tokenizer, and their ids."""
    tokens: dict[str, int] = {}
    if (folder / "added_tokens.json").is_file():
        tokens = json.loads((folder / "added_tokens.json").read_text(encoding="utf-8"))
    decoder: dict[str, Any] = config.get("added_tokens_decoder") or {}
    return tokens | {token["content"]: int(id_) for id_, token in decoder.items()}


def _add_tokens(spec: dict[str, Any], tokens: Mapping[str, int], special: list[str]) -> None:
    """Add special tokens to the contents of a tokenizer.json, in place.

    Args:
        tokens: ids of tokens that the vocabulary may lack.
        special: names of entries that become special tokens; names without an entry are ignored.

    Raises:
        ValueError: a token has another id already, or its id leaves a gap in a Unigram vocabulary.
    """
    pieces = spec["model"]["vocab"]
    existing = {token["content"] for token in spec["added_tokens"]}
    # Unigram stores a list of pieces with scores; other models store a table of ids.
    ids = pieces if isinstance(pieces, dict) else {piece: id_ for id_, (piece, _) in enumerate(pieces)}
    added = {**{name: ids[name] for name in special if name in ids}, **tokens}
    for content, id_ in sorted(added.items(), key=lambda item: item[1]):
        if ids.setdefault(content, id_) != id_ or (pieces is not ids and id_ > len(pieces)):
            raise ValueError(f"the added token {content} cannot have the id {id_}")
        if pieces is not ids and id_ == len(pieces):
            pieces.append([content, 0.0])
        if content not in existing:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            spec["added_tokens"].append({"id": id_, "content": content, **flags, "special": True})
    spec["added_tokens"].sort(key=lambda token: token["id"])


def build_byte_level_bpe(vocab: dict[str, int], merges: list[tuple[str, str]], pattern: str, **options: bool) -> Any:
    """Build a byte-level BPE tokenizer of the library.

    Args:
        pattern: pattern that splits text into words; empty: GPT-2's.
        options: `whole_words`: a word in the vocabulary is one token, even if no merges lead to it. `prefix`: add a
            space before the text; with a pattern, before each word that does not begin with one.
    """
    prefix = options.get("prefix", False)
    inner: Any = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=options.get("whole_words", False)))
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        letters = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    else:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    inner.decoder = decoders.ByteLevel()
    return inner


def _from_merges(file: Path, config: Mapping[str, Any]) -> str:
    """Convert vocab.json and merges.txt, which has a pair of pieces per line, to the text of a tokenizer.json."""
    vocab = json.loads((file.parent / "vocab.json").read_text(encoding="utf-8"))
    lines = file.read_text(encoding="utf-8").split("\n")
    pairs = [line.split(" ") for line in lines if line.strip() and not line.startswith("#version")]
    merges = [(first, second) for first, second in pairs]
    qwen = str(config.get("tokenizer_class", "")).startswith("Qwen2")
    prefix = bool(config.get("add_prefix_space", False))
    content: str = build_byte_level_bpe(vocab, merges, DIGIT_SPLIT_PATTERN if qwen else "", prefix=prefix).to_str()
    return content


def _parse_ranks(data: bytes) -> dict[bytes, int] | None:
    """Parse tiktoken's ranks: each line has a piece in base 64 and its rank. None if the bytes are something else."""
    try:
        lines = (line.split() for line in data.decode("ascii").splitlines() if line)
        return {base64.b64decode(piece, validate=True): int(rank) for piece, rank in lines}
    except ValueError:
        return None


def _from_ranks(file: Path, ranks: dict[bytes, int]) -> tuple[str, dict[str, int]]:
    """Convert tiktoken's ranks to the text of a tokenizer.json; also return its special tokens.

    tiktoken stores no merges. The merge of a piece joins the two parts that remain after all merges of lower rank.
    """
    name = file.name.split(".")[0]
    pattern_and_special = _RANKS.get(name, _RANKS.get(str(len(ranks))))
    pattern, special = pattern_and_special or (SPLIT_PATTERN, {_END: max(ranks.values()) + 1})
    letters = {piece: "".join(BYTE_TO_LETTER[byte] for byte in piece) for piece in ranks}
    merges = [
        (letters[first], letters[second])
        for piece in sorted(ranks, key=ranks.__getitem__)
        if len(piece) > 1
        for first, second in _halves(piece, ranks)
    ]
    vocab = {letters[piece]: rank for piece, rank in ranks.items()} | special
    return build_byte_level_bpe(vocab, merges, pattern, whole_words=True).to_str(), special


def _halves(piece: bytes, ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Apply all merges of lower rank to a piece; return the two parts that remain. Empty if more than two remain."""
    parts = [piece[index : index + 1] for index in range(len(piece))]
    while len(parts) > 2:
        merges = [(ranks.get(a + b, ranks[piece]), index) for index, (a, b) in enumerate(pairwise(parts))]
        rank, index = min(merges)
        if rank >= ranks[piece]:
            return []
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return [(parts[0], parts[1])]
