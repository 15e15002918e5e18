"""Convert the tokenizer in a GGUF file to a folder that jingu and transformers read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, pre_tokenizers, processors

from jingu.errors import JinguError
from jingu.runtime.log import log_warning
from jingu.text.sentencepiece import SentencePieceModel, build_sentencepiece, prepend_token
from jingu.text.tokenizer_formats import (
    DIGIT_SPLIT_PATTERN,
    GPT2_SPLIT_PATTERN,
    SPLIT_CASES_PATTERN,
    SPLIT_PATTERN,
    build_byte_level_bpe,
)

# llama.cpp's names for pre-tokenizers, the rules that split text into words before merging, grouped by equal rules.
_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "jina-en", "jina-es", "jina-de", "jina-v2-code", "roberta-bpe")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
# llama.cpp begins prompts with BOS unless the file says otherwise, and keeps words whole that are tokens.
_LLAMA3 = ("llama-bpe", "llama-v3", "llama3", "falcon3")
# The same pattern without both.
_DBRX = ("smaug-bpe", "dbrx")
_CASES = ("gpt-4o", "llama4", "kanana2")
_QWEN2 = ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2")
# llama.cpp's rules for files that name none: each divides what the one before it left whole.
_DEFAULT = "default"
_DEFAULT_RULES = (r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT_PATTERN, r"\p{N}+", r"[0-9][0-9][0-9]")
# Types of tokens, as in sentencepiece.
_CONTROL, _USER = 3, 4
_TOKENS = ("bos", "eos", "unknown", "padding")
_HF_NAMES = {"unknown": "unk", "padding": "pad"}


def write_gguf_tokenizer(metadata: Mapping[str, Any], max_length: int, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) from the metadata of a GGUF file.

    Args:
        max_length: `model_max_length`, the maximum number of tokens of the model.
        folder: the folder to write to.

    Raises:
        JinguError: the file has no tokenizer, or one that is unsupported or damaged.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "t5"):
        raise JinguError(
            f"the file's tokenizer is of the kind {kind}; jingu supports byte-level BPE (gpt2) and sentencepiece "
            "(llama, t5) in GGUF."
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    try:
        if not isinstance(tokens, list):
            raise ValueError("it has no tokens")
        inner = _byte_level(metadata, tokens) if kind == "gpt2" else _sentencepiece(metadata, tokens, kind)
    except JinguError:
        raise
    except Exception as error:  # the library raises bare Exception for bad content
        raise JinguError(f"the file's tokenizer is damaged ({error}).") from error
    named = {}
    for name in _TOKENS:
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            named[f"{_HF_NAMES.get(name, name)}_token"] = tokens[number]
    has_bos = kind == "llama" or (kind == "gpt2" and metadata.get("tokenizer.ggml.pre") in _LLAMA3)
    if metadata.get("tokenizer.ggml.add_bos_token", has_bos) and "bos_token" in named:
        prepend_token(inner, named["bos_token"])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    (folder / "tokenizer.json").write_text(inner.to_str(), encoding="utf-8")
    text = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    """Build a byte-level BPE tokenizer (of the `tokenizers` library) from tokens and merges."""
    pre = str(metadata.get("tokenizer.ggml.pre") or _DEFAULT)
    if "tokenizer.ggml.pre" not in metadata:
        log_warning(
            "The GGUF file does not say how its tokenizer splits text (tokenizer.ggml.pre). jingu uses llama.cpp's "
            "default, and the ids can differ from those that the model was trained on."
        )
    if pre not in (*_GPT2, *_DIGITS, *_LLAMA3, *_DBRX, *_QWEN2, *_CASES, _DEFAULT):
        raise JinguError(f"the file's tokenizer splits text by the rule {pre!r}, which jingu does not support.")
    pairs = [(first, second) for first, second in (merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"])]
    vocab = {token: number for number, token in enumerate(tokens)}
    pattern = ""
    if pre in (*_LLAMA3, *_DBRX):
        pattern = SPLIT_PATTERN
    elif pre in _CASES:
        pattern = SPLIT_CASES_PATTERN
    elif pre in _QWEN2:
        pattern = DIGIT_SPLIT_PATTERN
    inner = build_byte_level_bpe(vocab, pairs, pattern, whole_words=pre in _LLAMA3)
    if pre in _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        inner.pre_tokenizer = pre_tokenizers.Sequence([digits, inner.pre_tokenizer])
    if pre == _DEFAULT:
        splits = [pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in _DEFAULT_RULES]
        inner.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    for token, type_ in zip(tokens, metadata.get("tokenizer.ggml.token_type", []), strict=False):
        if type_ in (_CONTROL, _USER):
            inner.add_tokens([AddedToken(token, special=type_ == _CONTROL, normalized=False)])
    return inner


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], kind: str) -> Any:
    """Build a tokenizer from pieces with scores. The kind `llama` is BPE, and `t5` is Unigram."""
    return build_sentencepiece(
        SentencePieceModel(
            tokens,
            metadata["tokenizer.ggml.scores"],
            metadata["tokenizer.ggml.token_type"],
            unigram=kind == "t5",
            byte_fallback="<0x0A>" in tokens,
            charsmap=bytes(metadata.get("tokenizer.ggml.precompiled_charsmap", [])),
            prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
            collapse=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
        )
    )
