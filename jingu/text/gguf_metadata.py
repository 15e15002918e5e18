"""The metadata with which a GGUF file describes a tokenizer, from tokenizer.json (the inverse of `gguf_tokenizer`)."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import models

from jingu.errors import JinguError
from jingu.text.gguf_tokenizer import NORMALIZER, equal_pre_tokenizers
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_formats import GPT2_SPLIT_PATTERN

# Types of tokens, as in sentencepiece.
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
# Patterns of steps of pre-tokenizers that have none in tokenizer.json: `Digits`, individual or not, and `Punctuation`.
_DIGITS = {True: r"\p{N}", False: r"\p{N}+"}
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
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
    normalizer = None
    if model["type"] != "BPE":
        raise _unsupported(f"llama.cpp reads no tokenizer of the kind {model['type']} for decoders")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if tokenizer.spelling == "bytes":
        pre_tokenizer, normalizer = _pre_tokenizer(content)
        metadata |= {"model": "gpt2", "pre": pre_tokenizer, "merges": merges}
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
    if normalizer is not None:
        prefixed_metadata[NORMALIZER] = normalizer
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


def _pre_tokenizer(content: dict[str, Any]) -> tuple[str, str | None]:
    """Return llama.cpp's name of the pre-tokenizer of a byte-level tokenizer, and the tokenizer's normalizer (NFC or
    none) if models with this pre-tokenizer usually have another one."""
    if content.get("normalizer") not in (None, {"type": "NFC"}):
        raise _unsupported("llama.cpp does not normalize text as this tokenizer does")
    normalizer = "none" if content.get("normalizer") is None else "NFC"
    splits = _split_patterns(content)
    entries = [] if splits is None else equal_pre_tokenizers(splits)
    keeps_words = bool(content["model"].get("ignore_merges"))
    matches = [entry for entry in entries if entry.get("whole_words", False) == keeps_words]
    if entries and not matches and _merges_reach_tokens(content):
        # Whether words that are tokens are kept whole makes no difference.
        matches = entries
    if not matches:
        raise _unsupported("llama.cpp has no pre-tokenizer that splits text as this one does")
    usual = matches[0].get("normalizer", "none")
    return matches[0]["names"][0], None if normalizer == usual else normalizer


def _split_patterns(content: dict[str, Any]) -> list[str] | None:
    """Return the patterns by which a byte-level tokenizer splits text; None: it does more than that."""
    step = content["pre_tokenizer"] or {"type": "none"}
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    if any(step.get("add_prefix_space") for step in steps):
        raise _unsupported("llama.cpp adds no space before a text that this kind of tokenizer encodes")
    patterns: list[str | None] = []
    for step in steps:
        if step["type"] == "Digits":
            patterns.append(_DIGITS[step["individual_digits"]])
        elif step["type"] == "Punctuation" and step.get("behavior") == "Contiguous":
            patterns.append(_PUNCTUATION)
        elif step["type"] == "ByteLevel":
            patterns += [GPT2_SPLIT_PATTERN] if step.get("use_regex", True) else []
        else:
            patterns.append(_split_pattern(step))
    # Falcon's tokenizer divides letters from digits once more, across which it has no merges.
    falcon = [_PUNCTUATION, GPT2_SPLIT_PATTERN, _DIGITS[False], "[0-9][0-9][0-9]"]
    patterns = [_PUNCTUATION, GPT2_SPLIT_PATTERN, "[0-9][0-9][0-9]"] if patterns == falcon else patterns
    return None if None in patterns else [pattern for pattern in patterns if pattern is not None]


def _split_pattern(step: dict[str, Any]) -> str | None:
    """Return the pattern of a step that splits text, whose matches are words; None: it is another step."""
    pattern = step.get("pattern", {}).get("Regex") if step["type"] == "Split" else None
    behavior = (step.get("behavior"), bool(step.get("invert")))
    # Text between matches is removed. There is none if the pattern matches spaces, too.
    covers_text = pattern is not None and pattern.endswith(r"|\s+") and behavior == ("Removed", True)
    return pattern if behavior == ("Isolated", False) or covers_text else None


def _merges_reach_tokens(content: dict[str, Any]) -> bool:
    """Return whether merges lead to every token of a byte-level vocabulary."""
    model = content["model"]
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    pairs = [(str(first), str(second)) for first, second in merges]
    added = {token["content"] for token in content.get("added_tokens", [])}
    bpe = models.BPE(model["vocab"], pairs)
    return all(len(bpe.tokenize(token)) == 1 for token in model["vocab"] if token not in added)


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
