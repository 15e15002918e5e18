"""The metadata with which a GGUF file describes a tokenizer, from tokenizer.json (the inverse of `gguf_tokenizer`)."""

from __future__ import annotations

import json
from typing import Any

from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_formats import DIGIT_SPLIT_PATTERN, GPT2_SPLIT_PATTERN, SPLIT_CASES_PATTERN, SPLIT_PATTERN

# Types of tokens, as in sentencepiece.
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
# llama.cpp's name of the rules that split text, by the pattern; the second name if words that are tokens are not kept
# whole (`ignore_merges`). Patterns differ in how they are written, so equal ones are listed more than once.
_PATTERNS = {
    SPLIT_PATTERN: ("llama-bpe", "dbrx"),
    SPLIT_PATTERN.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?i:[sdmt]|ll|ve|re)"): ("llama-bpe", "dbrx"),
    DIGIT_SPLIT_PATTERN: (None, "qwen2"),
    GPT2_SPLIT_PATTERN: (None, "gpt-2"),
    SPLIT_CASES_PATTERN: (None, "gpt-4o"),
}
# Kinds of named tokens whose GGUF keys differ from those of Hugging Face.
_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_metadata(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Return GGUF's metadata of a tokenizer.

    Args:
        vocab_size: rows of the model's embedding. Ids beyond the tokenizer's own are written as unused tokens.

    Raises:
        JinguError: llama.cpp has no such tokenizer.
    """
    content = json.loads(tokenizer.content)
    model = content["model"]
    tokens, types = _tokens(tokenizer, vocab_size)
    metadata: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if model["type"] != "BPE":
        raise _unsupported(f"llama.cpp reads no tokenizer of the kind {model['type']} for decoders")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if tokenizer.spelling == "bytes":
        metadata |= {"model": "gpt2", "pre": _pre_tokenizer(content), "merges": merges}
    elif tokenizer.spelling == "metaspace":
        metadata |= {"model": "llama", "pre": "default", "scores": _scores(tokens, merges)}
        metadata["add_space_prefix"] = _adds_prefix(content)
        for number, token in enumerate(tokens):
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                types[number] = _BYTE
    else:
        raise _unsupported("llama.cpp reads no tokenizer with this vocabulary")
    ids = {name: tokenizer.special_tokens.get(token) for name, token in tokenizer.special_names.items()}
    for name, key in _KEYS.items():
        if ids.get(name) is not None:
            metadata[f"{key}_token_id"] = ids[name]
    unknown = ids.get("unk_token")
    if unknown is not None:
        types[unknown] = _UNKNOWN
    metadata["eos_token_id"] = tokenizer.eos_token_id
    metadata["add_bos_token"] = bool(tokenizer.prompt_prefix_ids)
    if tokenizer.prompt_prefix_ids:
        metadata["bos_token_id"] = tokenizer.prompt_prefix_ids[0]
    metadata["add_eos_token"] = False
    prefixed_metadata = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    if tokenizer.chat_template is not None:
        prefixed_metadata["tokenizer.chat_template"] = tokenizer.chat_template
    return prefixed_metadata


def _tokens(tokenizer: Tokenizer, vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the text and type of each token, in the order of the ids."""
    texts = {number: text for text, number in tokenizer.vocab().items()}
    added_tokens = {**tokenizer.added_tokens}
    texts |= {number: text for text, number in added_tokens.items()}
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(max(vocab_size, len(texts)))]
    types = [_NORMAL if number in texts else _UNUSED for number in range(len(tokens))]
    for text, number in added_tokens.items():
        types[number] = _CONTROL if text in tokenizer.special_tokens else _USER
    return tokens, types


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Return a score for each token; llama.cpp merges the pair whose result has the highest score first."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _pre_tokenizer(content: dict[str, Any]) -> str:
    """Return llama.cpp's name of the rules by which a byte-level tokenizer splits text before it merges."""
    if content.get("normalizer") not in (None, {"type": "NFC"}):
        raise _unsupported("llama.cpp does not normalize text as this tokenizer does")
    step = content["pre_tokenizer"] or {"type": "none"}
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    kinds = [step["type"] for step in steps]
    keeps_words = bool(content["model"].get("ignore_merges"))
    if any(step.get("add_prefix_space") for step in steps):
        raise _unsupported("llama.cpp adds no space before a text that this kind of tokenizer encodes")
    name: str | None = None
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True) and not keeps_words:
        name = "gpt-2"
    elif kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[1].get("use_regex", True):
        name = "smollm"
    elif kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        pattern = steps[0]["pattern"].get("Regex")
        word_name, merged = _PATTERNS.get(pattern, (None, None))
        name = word_name if keeps_words else merged
    if name is None:
        raise _unsupported("llama.cpp does not split text as this tokenizer does")
    return name


def _adds_prefix(content: dict[str, Any]) -> bool:
    """Return whether a tokenizer with ▁ for spaces begins a text with one."""
    text = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    return '"Prepend"' in text or '"prepend_scheme": "first"' in text or '"prepend_scheme": "always"' in text


def _unsupported(problem: str) -> JinguError:
    return JinguError(
        f"the tokenizer cannot be written: {problem}.",
        where="--to",
        fix="Export the model as a Hugging Face folder (--to FOLDER).",
    )
